"""The files that a request names beside its model, as FILE[:VALUE]: embeddings and LoRAs. Imports no torch.

A PNG has the same texts, and the SHA-256 of each file in the same order.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.checkpoints.single_files.embeddings import FIRST_NAME
from fastdiff.checkpoints.single_files.listing import find_file, last_part
from fastdiff.errors import InputError
from fastdiff.requests.file_option import FileOption
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request
from fastdiff.runs.option_files.controlnets import weights_of_controlnets
from fastdiff.runs.option_files.ip_adapters import files_of_ip_adapters


class Kind(NamedTuple):
    """A kind of files, by the setting that names them."""

    setting: str
    word: str  # in messages
    download: Callable[[str], Path]  # returns the file of a hub id

    @property
    def hashes(self) -> str:
        """The setting with the hashes in a PNG."""
        return f"{self.setting}_hashes"

    def files(self, request: Request) -> list[Path]:
        """Return the files of a request, in order."""
        return [Path(FileOption.parse(text).path) for text in getattr(request, self.setting)]

    def here(self, request: Request, source: Recorded | None, folder: str | None) -> Iterator[FileOption]:
        """Yield the files of a request. A file of the PNG `source` is found where it is now.

        A file that a hub id names is downloaded.

        folder: where it may be, by its hash or name. It may also be in the current folder, by its name.
        Raises InputError that names a file which is nowhere.
        """
        if folder is not None and not os.path.isdir(folder):
            raise InputError(f"--{self.setting}-dir: {folder} is not a folder; give the folder of your {self.word}s")
        recorded = self.recorded(source)
        for text in getattr(request, self.setting):
            option = FileOption.parse(text)
            if source is not None and text in recorded and not os.path.exists(option.path):
                option = option._replace(path=self._find(option.path, recorded[text], source.path, folder))
            if hub.names_hub_file(option.path):
                option = option._replace(path=str(self.download(option.path)))
            yield option

    def recorded(self, source: Recorded | None) -> dict[str, str | None]:
        """Return the texts of a PNG, each with the SHA-256 of its file."""
        settings = {} if source is None else source.settings
        names, digits = settings.get(self.setting) or (), settings.get(self.hashes) or ()
        return {name: digits[i] if i < len(digits) and digits[i].isalnum() else None for i, name in enumerate(names)}

    def _find(self, name: str, digits: str | None, source: str, folder: str | None) -> str:
        found = None if folder is None else find_file(name, digits, Path(folder))
        last = last_part(name)
        if found is not None or os.path.isfile(last):
            return last if found is None else str(found)
        places = f"{name} or here, and no folder is given" if folder is None else f"{name}, in {folder} or here"
        raise InputError(
            f"{source} was drawn with the {self.word} {last}, hash {digits[:10] if digits else 'unknown'}: it is not "
            f"at {places}; give the file with --{self.setting}, or its folder with --{self.setting}-dir"
        )

    def other_hash(self, path: str, known: str | None, source: str) -> Iterator[str]:
        """Yield a line if the hash of a file is not the one in the PNG `source`."""
        if known and (now := file_hash(Path(path))) != known:
            yield (
                f"{path} has the {self.word} hash {now[:10]}, and {source} was drawn with {known[:10]}; the picture "
                "will differ"
            )


EMBEDDING = Kind("embedding", "embedding", partial(hub.hub_file, inside=FIRST_NAME))
LORA = Kind("lora", "LoRA", hub.lora_file)
KINDS = (EMBEDDING, LORA)


def files_of(request: Request) -> list[Path]:
    """Return the files of a request's embeddings, LoRAs, ControlNets and IP-Adapters, in order."""
    files = [path for kind in KINDS for path in kind.files(request)]
    files += [path for paths in weights_of_controlnets(request) for path in paths]
    return files + files_of_ip_adapters(request)
