"""The LoRAs of a run: their files and weights. Imports no torch."""

import os
from collections.abc import Iterator
from dataclasses import replace

from fastdiff.arguments import shown
from fastdiff.checkpoints.single_files.listing import last_part
from fastdiff.errors import InputError
from fastdiff.requests.file_option import FileOption, weight_of
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request
from fastdiff.runs.option_files.kinds import LORA


def with_loras_here(request: Request, source: Recorded | None, folder: str | None) -> Request:
    """Return the request with each LoRA as FILE:WEIGHT. A file of the PNG `source` is found where it is now.

    folder: where it may be, as in `Kind.here`.
    Raises InputError that names a file which is nowhere, a weight that is no number, and a file that is given twice.
    """
    found: dict[str, float] = {}
    for option in LORA.here(request, source, folder):
        if option.path in found:
            raise InputError(f"lora {shown(option.path)}: it is given twice; give it once, with the sum of the weights")
        if not os.path.isfile(option.path):
            raise InputError(f"lora {shown(option.path)} does not exist; give a safetensors file, or FILE:WEIGHT")
        found[option.path] = weight_of(option)
    return replace(request, lora=tuple(f"{path}:{weight:g}" for path, weight in found.items()))


def changed_loras(source: Recorded, request: Request) -> Iterator[str]:
    """Yield a line for each LoRA of the PNG whose file has another hash now."""
    digits = {last_part(FileOption.parse(text).path): known for text, known in LORA.recorded(source).items()}
    for path in LORA.files(request):
        yield from LORA.other_hash(str(path), digits.get(path.name), source.path)
