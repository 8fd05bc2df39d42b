"""The plan: the pictures of a run, cut into shards. It depends only on the request. Imports no torch.

A shard is a fixed list of pictures, the unit that workers claim, draw and commit. It depends neither on the number of
workers nor on the batch size, as a picture has the same bits in any batch.
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from fastdiff.bulk.spec import complete_rows, read_rows
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.requests.completion import Cell
from fastdiff.requests.defaults import BULK
from fastdiff.requests.png import canonical_json
from fastdiff.requests.request import BASE, Request
from fastdiff.runs.drawing import Run

FormatName = Literal["png", "webdataset", "npz"]
FORMATS: tuple[str, ...] = get_args(FormatName)
MOST_SHARDS = 100_000
_NUM_SHARDS = 128  # at least this many, if possible, so few GPUs are idle during the last ones
_SHARD_PIXELS, _SHARD_PICTURES = 2**27, 1024  # upper limits of a shard: minutes of work
_BATCH_PIXELS, _BATCH_PICTURES = 2**21, (4, 512)  # enough to keep a large GPU busy


@dataclass(frozen=True)
class Shard:
    """Consecutive pictures of a plan."""

    number: int
    first: int  # index of its first picture in the plan
    cells: Sequence[Cell]

    @property
    def name(self) -> str:
        """The name of the shard's files, without suffix."""
        return f"{self.number:06d}"

    def key(self, place: int) -> str:
        """Return the name of the picture at index `place` of the shard."""
        return f"{self.first + place:06d}"


@dataclass(frozen=True)
class Plan:
    """A run that is drawn shard by shard."""

    run: Run
    shard_size: int
    format: FormatName

    @classmethod
    def make(
        cls,
        request: Request,
        card: ModelCard,
        *,
        spec: str | None = None,
        format: FormatName = "png",
        shard_size: int | None = None,
        batch_size: int | None = None,
        decode: bool = True,
    ) -> "Plan":
        """Make the plan of a request, or of the rows in the file `spec`. InputError if it cannot be drawn.

        shard_size, batch_size: numbers of pictures; the defaults depend on the pictures' size and number.
        decode: whether to read the pixels of the rows' pictures, which finds damage before anything is drawn.
        """
        if card.config.of_trajectories:
            raise InputError(f"model {card.name}: bulk cannot draw trajectories; use fastdiff sample")
        if request.seed == "random":
            raise InputError("seed random: a resumed run would draw other pictures; give --seed a number")
        if spec is None:
            run = Run.prepare(request, card, BULK)
        else:
            completed, cells = complete_rows(request, read_rows(spec), card, pixels=decode)
            run = Run(card, completed, cells, len(cells)).checked()
        pixels = math.prod(run.size or (1,))
        usual = min(max(_BATCH_PIXELS // pixels, _BATCH_PICTURES[0]), _BATCH_PICTURES[1])
        size = shard_size or _usual_shard(len(run.cells), pixels, usual)
        if len(run.cells) > size * MOST_SHARDS:
            raise InputError(f"shard-size {size}: more than {MOST_SHARDS} shards; use a larger size")
        return cls(replace(run, batch_size=batch_size or usual), size, format)

    @functools.cached_property
    def shards(self) -> list[Shard]:
        """All shards, in order. The last may be smaller."""
        cells, size = self.run.cells, self.shard_size
        return [Shard(i, first, cells[first : first + size]) for i, first in enumerate(range(0, len(cells), size))]

    def run_of(self, shard: Shard) -> Run:
        """Return the run that draws a shard."""
        return replace(self.run, cells=shard.cells)

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """Everything that identifies the plan, as JSON values by user-facing names."""
        request, cells = self.run.request, self.run.cells
        seeds = [cell.seed for cell in cells]
        subjects = list(dict.fromkeys(cell.label_name if cell.prompt is None else cell.prompt for cell in cells))
        pictures = [_identity(cell) for cell in cells]
        starts = [cell.start for cell in cells if cell.start]
        controls = [each for cell in cells if cell.control for each in cell.control.pictures]
        prompts = [each for cell in cells if cell.image_prompt for each in cell.image_prompt.pictures]
        inputs = {
            "images": dict.fromkeys(start.picture.sha256 for start in starts),
            "masks": dict.fromkeys(start.mask.picture.sha256 for start in starts if start.mask),
            "control-images": dict.fromkeys(picture.sha256 for picture in controls),
            "ip-adapter-images": dict.fromkeys(picture.sha256 for picture in prompts),
        }
        settings = {Request.SHOWN_AS.get(name, name): value for name, value in request.as_record().items()}
        for name in ("init-image", f"{BASE}height", f"{BASE}width"):  # the picture's hash is in `images`
            settings.pop(name, None)
        return settings | {
            "height": request.height,
            "width": request.width,
            "pictures": len(cells),
            "seeds": f"{min(seeds)} to {max(seeds)}",
            "prompts" if request.prompt else "labels": f"{len(subjects)} of SHA-256 {_digest(subjects)[:16]}",
            **{name: f"{len(each)} of SHA-256 {_digest([*each])[:16]}" for name, each in inputs.items() if each},
            "order": f"SHA-256 {_digest(pictures)[:16]}",
            "shard-size": self.shard_size,
            "format": self.format,
        }


def _usual_shard(count: int, pixels: int, batch: int) -> int:
    """Return the default shard size, a multiple of the batch if there are enough pictures."""
    most = min(max(_SHARD_PIXELS // pixels, batch), _SHARD_PICTURES)
    wanted = min(-(-count // _NUM_SHARDS), most)
    return -(-wanted // batch) * batch if 2 * wanted >= batch else max(wanted, min(8, batch))


def _identity(cell: Cell) -> tuple[Any, ...]:
    given = (each.as_identity() for each in cell.given)
    return cell.seed, cell.label, cell.label_name, cell.prompt, *given


def _digest(values: Any) -> str:
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()
