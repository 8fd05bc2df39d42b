"""Gives a shared model the LoRAs, embeddings and IP-Adapter of a request. Loaded files are not read again."""

import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fastdiff.checkpoints.model_hash import state_of
from fastdiff.checkpoints.single_files.ip_adapters import find_image_encoder, find_ip_adapter, image_encoder_weights
from fastdiff.errors import InputError, NonFiniteError
from fastdiff.hosting.catalogue.offered import OptionFiles
from fastdiff.models.clip_vision import CLIPVisionModelWithProjection
from fastdiff.models.model import Model
from fastdiff.pipelines import Pipeline
from fastdiff.pipelines.adapting import Adapting
from fastdiff.requests.file_option import FileOption, lora_names, weight_of
from fastdiff.requests.request import Request

KEPT = 4  # LoRAs that stay in memory although the last run did not use them
_State = tuple[tuple[object, ...], ...]


class Applier:
    """The LoRAs and embeddings that the last run has put into each model. The next run takes them out.

    The bits are the command's, which makes the same LoRAs part of the weights: both compute a weight and its changes in
    float32 and round once. Runs with other LoRAs wait for each other, so the model needs no copy.
    """

    def __init__(self, files: OptionFiles) -> None:
        self._files = files
        self._embeddings: WeakKeyDictionary[Model, _State] = WeakKeyDictionary()  # by the denoiser
        # by the denoiser and the name: the state of the file
        self._loras: WeakKeyDictionary[Model, dict[str, tuple[object, ...]]] = WeakKeyDictionary()

    def apply(self, pipe: Any, request: Request) -> None:
        """Give a pipeline the LoRAs and embeddings of a request alone.

        Raises InputError for a file that does not fit, and NonFiniteError for NaN. The model then has none.
        """
        try:
            self._use_embeddings(pipe, [FileOption.parse(text) for text in request.embedding])
            if isinstance(pipe, Adapting):
                self._use_loras(pipe, [FileOption.parse(text) for text in request.lora])
        except (InputError, NonFiniteError) as error:
            raise type(error)(self._files.without_paths(str(error), request)) from None

    def _use_embeddings(self, pipe: Any, options: Sequence[FileOption]) -> None:
        wanted = tuple((_state(option), option.value) for option in options)
        if self._embeddings.get(pipe.denoiser, ()) == wanted:
            return
        pipe.unload_textual_inversion()
        self._embeddings[pipe.denoiser] = ()
        if options:
            pipe.load_textual_inversion(
                [option.path for option in options], token=[str(option.value) for option in options]
            )
        self._embeddings[pipe.denoiser] = wanted

    def _use_loras(self, pipe: Adapting, options: Sequence[FileOption]) -> None:
        """Make these the active LoRAs, by their names in prompts. Loaded files are not read again."""
        names, states = lora_names(options), [_state(option) for option in options]
        known = self._loras.setdefault(pipe.denoiser, {})
        try:
            for name, state, option in zip(names, states, options, strict=True):
                if name in _loaded(pipe) and known.get(name) != state:
                    pipe.delete_adapters([name])
                if name not in _loaded(pipe):
                    pipe.load_lora_weights(option.path, adapter_name=name)
                    known[name] = state
            pipe.set_adapters(names, [weight_of(option) for option in options])
        except Exception:
            pipe.set_adapters([], [])
            raise
        unused = [name for name in _loaded(pipe) if name not in names]  # the first was loaded longest ago
        pipe.delete_adapters(unused[: max(0, len(unused) - KEPT)])


class Prompter:
    """Keeps the IP-Adapter and the image encoder of each model's last run in the model's shared pipeline."""

    def __init__(self) -> None:
        # by the denoiser: the states of the files of the image encoder, and of the IP-Adapter
        self._there: WeakKeyDictionary[Model, tuple[_State, _State]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def apply(self, shared: Any, request: Request) -> Any:
        """Return a copy of a shared pipeline with the IP-Adapter of a request. Loaded files are not read again.

        Raises InputError for a file that does not fit, and NonFiniteError for NaN. The shared pipeline then has none.
        """
        folder = find_image_encoder(request.ip_adapter[0], request.image_encoder)
        encoder = tuple(map(state_of, [*image_encoder_weights(folder), folder / "config.json"]))
        files = [find_ip_adapter(name) for name in request.ip_adapter]
        with self._lock:
            self._load(shared, folder, files, (encoder, tuple(map(state_of, files))))
            pipe = shared.with_scheduler(shared.scheduler)
        pipe.set_ip_adapter_scale([*request.ip_adapter_scale])
        return pipe

    def _load(self, shared: Any, folder: Path, files: Sequence[Path], wanted: tuple[_State, _State]) -> None:
        """Load an image encoder and IP-Adapters into a shared pipeline, unless it has them."""
        there = self._there.pop(shared.denoiser, ((), ()))
        if there != wanted:
            kept = shared.image_encoder if there[0] == wanted[0] else None
            shared.unload_ip_adapter()
            where = {"dtype": shared.denoiser.dtype, "device": shared.denoiser.device}
            shared.image_encoder = kept or CLIPVisionModelWithProjection.from_pretrained(folder, **where)
            shared.load_ip_adapter(files)
        self._there[shared.denoiser] = wanted


def weights_key(request: Request) -> Hashable:
    """Return what is equal for requests that need the same LoRAs and embeddings. Raises OSError if a file is gone."""
    given = [[FileOption.parse(text) for text in texts] for texts in (request.lora, request.embedding)]
    return tuple(tuple((_state(option), option.value) for option in options) for options in given)


def _loaded(pipe: Pipeline) -> list[str]:
    """Return the names of the LoRAs in memory."""
    listed = pipe.get_list_adapters() if isinstance(pipe, Adapting) else {}
    return [*dict.fromkeys(name for names in listed.values() for name in names)]


def _state(option: FileOption) -> tuple[object, ...]:
    """Return what identifies a file until it changes. Raises OSError if it is gone."""
    return state_of(Path(option.path))
