"""`fastdiff serve` with diffusers as its drawer: the same HTTP, queue and files, and one picture at a time.

    python -m benchmarks.serve.diffusers_server --model MODEL [--eager]

MODEL is a bundled name or the folder of a text-to-image pipeline. It has the dtype and the scheduler that fastdiff
would use. U-Net and VAE are compiled as in `pictures_alone.py`, or not with `--eager`. PNGs are written in threads,
while the next picture is drawn.
"""

import argparse
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.pictures.pictures_alone import compiled_pipeline, eager_pipeline
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.loading import Load
from fastdiff.hosting.models import Models
from fastdiff.requests.completion import Cell
from fastdiff.requests.defaults import PRECISION
from fastdiff.runs.drawing import Run
from fastdiff.serve.drawing.engine_drawer import ENCODERS, partial_steps
from fastdiff.serve.drawing.offers import Offers
from fastdiff.serve.keys import Keys
from fastdiff.serve.orders.encoding import encode, encode_preview
from fastdiff.serve.orders.jobs import Counts, Job, Made
from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.server import serving
from fastdiff.serve.studio import Studio

if TYPE_CHECKING:
    from PIL.Image import Image

WARM = 3  # pictures: the first compiles, the second captures, the third replays


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    stop = threading.Event()

    def end_if_failed(loaded: Future[list[str]]) -> None:
        if loaded.exception() is not None:
            stop.set()

    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with serving(studio_of(options.model, eager=options.eager)) as server:
        print(f"diffusers serves {options.model} at {server.address}/v1", flush=True)
        server.studio.load()
        server.studio.loaded.add_done_callback(end_if_failed)
        stop.wait()
    server.studio.loaded.result()  # raises the error of loading


def studio_of(model: str, *, eager: bool) -> Studio:
    """Return what a server of a model draws with."""
    torch.backends.cudnn.benchmark = True
    offers = Offers([model], Models(most=1), PRECISION)
    return Studio(offers, Limits(batch=1), Keys(), DiffusersDrawer(offers, model, eager=eager))


class DiffusersDrawer:
    """Draws jobs one after the other, in the order of their arrival, with a pipeline of diffusers."""

    def __init__(self, offers: Offers, model: str, *, eager: bool) -> None:
        self.lost: Future[BaseException] = Future()
        self._folder, self._device = hub.bundled_models().get(model, Path(model)), offers.models.device
        self._eager, self._pictures = eager, 0
        self._pipe: Any = None
        self._drawing = ThreadPoolExecutor(1, thread_name_prefix="draw")  # CUDA graphs belong to the thread
        self._files = ThreadPoolExecutor(ENCODERS, thread_name_prefix="files")

    def load(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Load the pipeline, and draw some pictures of its own size."""
        self._drawing.submit(self._load).result()
        return []

    def begin(self, job: Job) -> None:
        """Queue the drawing of a job."""
        job.follow(self._drawing.submit(self._draw, job))

    def counts(self) -> Counts:
        """Return how many pictures were drawn."""
        return Counts(pictures=self._pictures)

    def close(self, seconds: float) -> bool:
        """End all jobs but the current one, and wait for it and for the files."""
        self._drawing.shutdown(cancel_futures=True)
        self._files.shutdown()
        return True

    def _load(self) -> None:
        load = eager_pipeline if self._eager else compiled_pipeline
        self._pipe = load(self._folder, Load.of(device=self._device).dtype)
        for _ in range(1 if self._eager else WARM):
            self._decode(self._pipe("", num_inference_steps=2, output_type="latent").images)

    def _draw(self, job: Job) -> None:
        job.begun()
        for place, cell in enumerate(job.order.run.cells):
            image = self._picture(job, place, cell)
            job.add(self._files.submit(_made, job, place, cell, image))
            self._pictures += 1

    def _picture(self, job: Job, place: int, cell: Cell) -> "Image":
        run = job.order.run
        steps = partial_steps(job.order.partial, run.request.num_inference_steps or 1)

        def after(pipe: Any, index: int, _: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            if index + 1 in steps:
                image = self._decode(tensors["latents"])
                job.add(self._files.submit(_partial, job, place, steps.index(index + 1), cell, image))
            return {}

        options = {} if not steps else {"callback_on_step_end": after}
        return self._decode(self._pipe(**self._call_of(run, cell), **options).images)

    def _call_of(self, run: Run, cell: Cell) -> dict[str, Any]:
        """Return the arguments of diffusers' pipeline for a picture."""
        request, pipe, device = run.request, self._pipe, self._device
        noise = torch.Generator(device).manual_seed(cell.seed)
        size = [side // pipe.vae_scale_factor for side in (request.height or 0, request.width or 0)]
        shape = (1, pipe.unet.config.in_channels, *size)
        return {
            "prompt": cell.prompt,
            "negative_prompt": request.negative_prompt,
            "num_inference_steps": request.num_inference_steps,
            "guidance_scale": request.guidance_scale,
            "latents": torch.randn(shape, generator=noise, device=device, dtype=pipe.unet.dtype),
            "output_type": "latent",
        }

    @torch.no_grad()
    def _decode(self, latents: Tensor) -> "Image":
        """Return the picture of latents (1, C, h, w), as the pipeline makes it."""
        vae = self._pipe.vae
        pixels = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]
        return self._pipe.image_processor.postprocess(pixels, output_type="pil")[0]


def _made(job: Job, place: int, cell: Cell, image: "Image") -> Made:
    record = _record_of(job.order.run, cell)
    return Made(place, None, encode(image, job.order.form, record), cell.seed, record)


def _partial(job: Job, place: int, number: int, cell: Cell, image: "Image") -> Made:
    return Made(place, number, encode_preview(image, job.order.size, job.order.form), cell.seed, {})


def _record_of(run: Run, cell: Cell) -> Mapping[str, Any]:
    return run.request.as_record() | {"seed": cell.seed, "prompt": cell.prompt}


if __name__ == "__main__":
    main()
