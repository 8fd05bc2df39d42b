"""Short requests before the first one, so that its CUDA graphs are captured already."""

from collections.abc import Iterator, Sequence
from typing import Any

from fastdiff.engine.turns import graph_size
from fastdiff.pipelines.base import Pipeline

GUIDED, UNGUIDED = 5.0, 1.0


def short_requests(
    pipe: Pipeline, sizes: Sequence[tuple[int, int]], most: int, options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of requests of each size, guided and not, with 1, 2, 4, 8 ... pictures up to `most`.

    The first step compiles and the second is captured. The pipeline's models keep all these graphs.
    """
    counts = [1 << i for i in range(graph_size(most).bit_length())]
    for model in pipe.models:
        model.most_graphs = max(model.most_graphs, len(sizes) * len(counts))
    is_guided = pipe.reads_text or pipe.denoiser.config.label_table is not None
    given = {"num_inference_steps": 2, "seed": 0} | ({"prompt": "a cat"} if pipe.reads_text else {})
    for height, width in sizes:
        for scale in (GUIDED, UNGUIDED) if is_guided else (UNGUIDED,):
            for count in counts:
                size = {"height": height, "width": width, "guidance_scale": scale, "batch_size": count}
                yield given | size | options
