"""Adapting: the LoRA methods of diffusers' pipelines, as in its StableDiffusionXLLoraLoaderMixin.

Nothing is compiled, captured or built again when an adapter or its weight changes: `adapters.merging` writes into the
weights that the models already compute with.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from fastdiff.adapters.factors import ONE, Factor, factor
from fastdiff.adapters.files import read_adapter
from fastdiff.adapters.merging import Merging
from fastdiff.adapters.names import PARTS, UNET
from fastdiff.arguments import as_float, did_you_mean, optional, shown, text
from fastdiff.checkpoints import hub, weights
from fastdiff.errors import InputError
from fastdiff.models.model import Model
from fastdiff.pipelines.base import Pipeline
from fastdiff.requests.syntax import Tag
from fastdiff.schema import checked

AnyStep = TypeVar("AnyStep")

_UNUSED = {  # arguments of diffusers' load_lora_weights that change nothing here
    *("low_cpu_mem_usage", "use_safetensors", "unet_config", "return_lora_metadata", "proxies"),
}
_OF_HUB = {"cache_dir", "force_download", "local_files_only", "token", "revision"}


class Adapting(Pipeline):
    """A pipeline whose U-Net and text encoders take LoRA adapters, or its transformer alone."""

    lora_parts: ClassVar[tuple[str, ...]] = PARTS
    _lora_scale = 1.0

    def _adaptable(self) -> dict[str, Model]:
        """Return the models that adapters may change, by their part."""
        parts = self.components
        return {name: parts[name] for name in self.lora_parts if parts.get(name) is not None}

    def _mergings(self) -> dict[str, Merging]:
        return {part: model.merging for part, model in self._adaptable().items() if isinstance(model.merging, Merging)}

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict: str | Path | Mapping[str, Tensor],
        adapter_name: str | None = None,
        hotswap: bool = False,
        *,
        weight_name: str | None = None,
        subfolder: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Load a LoRA, LoHa or LoKr file, and make it the only active adapter, with the weight 1.

        Args:
            pretrained_model_name_or_path_or_dict: a safetensors file of diffusers, peft, kohya, ai-toolkit or LyCORIS;
                a folder with one; a hub id, which downloads one file; or its tensors by name.
            adapter_name: default: `default_0`, then `default_1` and so on.
            hotswap: replace the loaded adapter `adapter_name`. The ranks may differ.
            weight_name: the name of the file in a folder or on the hub, there by default
                `pytorch_lora_weights.safetensors`, or else the only safetensors file.
            subfolder: of the folder or on the hub.
            kwargs: the hub's `revision`, `token`, `cache_dir`, `local_files_only` and `force_download`; arguments of
                diffusers that have no effect here, such as `low_cpu_mem_usage`.

        Raises:
            InputError: for a file that is no LoRA of this model, and with weights in 8 bits if the model's files have
                changed or gone. Nothing has changed then.
            NonFiniteWeightsError: for NaN or infinity in the file, and for a sum that is beyond the range of the dtype.
        """
        unknown = sorted(kwargs.keys() - _UNUSED - _OF_HUB)
        if unknown:
            raise InputError(f"{unknown[0]}: load_lora_weights has no such argument; leave it out")
        name = self._free_name(adapter_name, hotswap=checked("hotswap", hotswap, bool))
        given = pretrained_model_name_or_path_or_dict
        optional(text, "weight_name", weight_name)
        if isinstance(given, str | Path):
            client = {name: value for name, value in kwargs.items() if name in _OF_HUB}
            given, weight_name = _local(given, optional(text, "subfolder", subfolder), weight_name, client)
        models = self._adaptable()
        shapes = {part: _weights_of(model) for part, model in models.items()}
        adapter = read_adapter(given, weight_name, shapes, self.denoiser.config)
        before = {part: merging.snapshot() for part, merging in self._mergings().items()}
        try:
            for part, updates in adapter.parts.items():
                merging = self._mergings().get(part) or Merging(models[part])
                models[part].merging = merging
                merging.add(name, updates, keeps_active=hotswap)
            if not hotswap:
                for merging in self._mergings().values():
                    merging.active = {name: ONE} if name in merging.adapters else {}
            self._write()
        except Exception:
            for part, merging in self._mergings().items():
                merging.go_back_to(before.get(part))
            raise

    def _free_name(self, name: str | None, *, hotswap: bool) -> str:
        there = self._every_adapter()
        if name is None:
            if hotswap:
                raise InputError("adapter_name: hotswap needs the name of a loaded adapter; give it")
            return next(each for each in (f"default_{i}" for i in range(len(there) + 1)) if each not in there)
        text("adapter_name", name)
        if hotswap and name not in there:
            raise InputError(f"adapter_name: no adapter {shown(name)} is loaded; leave out hotswap, or {_use(there)}")
        if not hotswap and name in there:
            raise InputError(f"adapter_name: an adapter {shown(name)} is loaded already; give another name")
        return name

    def _every_adapter(self) -> list[str]:
        return [*dict.fromkeys(name for merging in self._mergings().values() for name in merging.adapters)]

    def set_adapters(
        self,
        adapter_names: str | Sequence[str],
        adapter_weights: float | Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> None:
        """Make these adapters the active ones.

        Args:
            adapter_names: one or several.
            adapter_weights: a number for all, or a list with one entry for each. An entry is a number, None for 1, or a
                dict with numbers for `unet`, `text_encoder` and `text_encoder_2`, or for `transformer`. The U-Net's may
                be a dict of blocks:
                `{"unet": {"down": 0.5, "mid": 1, "up": {"block_0": [0.2, 0.4, 0.6]}}}`. What a dict leaves out gets 1.

        Raises InputError for unknown names and for weights that do not match, and NonFiniteWeightsError as
        `load_lora_weights`. Nothing has changed then.
        """
        names = self._known("adapter_names", adapter_names)
        given = adapter_weights if isinstance(adapter_weights, list | tuple) else [adapter_weights] * len(names)
        if len(given) != len(names):
            raise InputError(f"adapter_weights: {len(given)} given for {len(names)} adapters; give one for each")
        active: dict[str, dict[str, Factor]] = {part: {} for part in self._mergings()}
        for name, each in zip(names, given, strict=True):
            for part, factors in active.items():
                factors[name] = self._factor(f"adapter_weights of {shown(name)}", each, part)
        with self._changing():
            for part, merging in self._mergings().items():
                merging.active = {name: each for name, each in active[part].items() if name in merging.adapters}

    def _factor(self, name: str, given: Any, part: str) -> Factor:
        if isinstance(given, Mapping):
            unknown = [key for key in given if key not in self.lora_parts]
            if unknown:
                parts = ", ".join(self.lora_parts)
                raise InputError(f"{name}: {shown(unknown[0])} is no part of the pipeline; give {parts}")
            given = given.get(part)
        return factor(name, given, self.denoiser if part == UNET else None)

    def _known(self, argument: str, names: str | Sequence[str]) -> list[str]:
        there = self._every_adapter()
        asked = [names] if isinstance(names, str) else list(names)
        missing = [name for name in asked if name not in there]
        if missing:
            raise InputError(f"{argument}: no adapter {shown(missing[0])} is loaded; {_use(there)}")
        return asked

    def get_active_adapters(self) -> list[str]:
        """Return the names of the active adapters."""
        return [*dict.fromkeys(name for merging in self._mergings().values() for name in merging.active)]

    def get_list_adapters(self) -> dict[str, list[str]]:
        """Return the names of the loaded adapters for each part that has any."""
        return {part: list(merging.adapters) for part, merging in self._mergings().items() if merging.adapters}

    def disable_lora(self) -> None:
        """Draw without adapters, with the bits of the plain model. They stay loaded. What is fused is taken out too."""
        with self._changing():
            for merging in self._mergings().values():
                merging.is_enabled = False
                merging.fused = {}

    def enable_lora(self) -> None:
        """Draw with the active adapters again."""
        with self._changing():
            for merging in self._mergings().values():
                merging.is_enabled = True

    def delete_adapters(self, adapter_names: str | Sequence[str]) -> None:
        """Forget adapters. The other active ones stay active; peft activates another one if none is left.

        Raises InputError for unknown names.
        """
        names = self._known("adapter_names", adapter_names)
        with self._changing():
            for merging in self._mergings().values():
                merging.remove(names)

    def unload_lora_weights(self) -> None:
        """Forget all adapters. What `fuse_lora` has fused becomes part of the weights for good, as in diffusers."""
        with self._changing():
            for merging in self._mergings().values():
                merging.remove(list(merging.adapters))
                merging.is_enabled = True
        for merging in self._mergings().values():
            merging.keep_fused()

    def fuse_lora(
        self,
        components: Sequence[str] | None = None,
        lora_scale: float = 1.0,
        safe_fusing: bool = False,
        adapter_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Fix adapters in the weights, with their current weights. Later changes of weights do not reach them.

        Fusing makes nothing faster here, as adapters are always merged.

        Args:
            components: any of `unet`, `text_encoder`, `text_encoder_2` and `transformer`. Default: all that the
                pipeline has.
            lora_scale: multiplies the adapters' weights.
            safe_fusing: has no effect: sums beyond the range of the dtype are always refused.
            adapter_names: default: the active ones.

        Raises InputError for unknown names.
        """
        scale = as_float(lora_scale)
        if scale is None:
            raise InputError(f"lora_scale: {shown(lora_scale)} is not a finite number; give one, such as 1.0")
        names = None if adapter_names is None else self._known("adapter_names", adapter_names)
        parts = self._fusable(components)
        with self._changing():
            for part, merging in self._mergings().items():
                if part in parts:
                    merging.fuse(list(merging.active) if names is None else names, scale)

    def unfuse_lora(self, components: Sequence[str] | None = None, **kwargs: Any) -> None:
        """Undo `fuse_lora`, with the bits from before. The adapters are active again.

        diffusers subtracts the rounded change instead, so its bits differ from before.
        """
        parts = self._fusable(components)
        with self._changing():
            for part, merging in self._mergings().items():
                if part in parts:
                    merging.fused = {}

    def _fusable(self, components: Sequence[str] | None) -> list[str]:
        there = list(self._adaptable())
        if components is None:
            return there
        asked = [components] if isinstance(components, str) else list(components)
        odd = [part for part in asked if part not in there]
        if odd or not asked:
            what = f"{shown(odd[0])} takes no LoRA" if odd else "none given"
            raise InputError(f"components: {what}; give some of {', '.join(there)}")
        return asked

    @property
    def num_fused_loras(self) -> int:
        """The number of fused adapters."""
        return len(self.fused_loras)

    @property
    def fused_loras(self) -> set[str]:
        """The names of the fused adapters."""
        return {name for merging in self._mergings().values() for name in merging.fused}

    @property
    def lora_scale(self) -> float:
        """The `scale` of the last call's `cross_attention_kwargs`, or of `joint_attention_kwargs`."""
        return self._lora_scale

    def set_lora_device(self, adapter_names: Sequence[str], device: Any) -> None:
        """Accepted and not needed: only merged weights are read in a step. Raises InputError for unknown names."""
        self._known("adapter_names", adapter_names)

    def enable_lora_hotswap(self, **kwargs: Any) -> None:
        """Accepted and not needed: adapters of any rank replace one another."""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Write the weights after the block. If that fails, go back to the adapters from before."""
        before = {part: merging.snapshot() for part, merging in self._mergings().items()}
        try:
            yield
            self._write()
        except Exception:
            for part, merging in self._mergings().items():
                merging.go_back_to(before[part])
            raise

    def _write(self) -> None:
        for merging in self._mergings().values():
            merging.write()

    def _call_of(self, scale: float, tags: Sequence[Tag]) -> "LoraCall":
        """Return how a call uses the adapters. Raises InputError for tags of a prompt that name no usable adapter."""
        there = self._every_adapter()
        for tag in tags:
            if tag.name not in there:
                hint = did_you_mean(tag.name, there) or _use(there)
                raise InputError(f"prompt: <lora:{tag.name}>: no adapter of this name is loaded; {hint}")
            if any(not merging.is_enabled for merging in self._mergings().values()):
                raise InputError(f"prompt: <lora:{tag.name}>: the adapters are disabled; call enable_lora first")
            if tag.name in self.fused_loras:
                raise InputError(f"prompt: <lora:{tag.name}>: the adapter is fused; call unfuse_lora first")
        return LoraCall(scale, tuple(tags))

    @contextmanager
    def _encoding(self, call: "LoraCall") -> Iterator[None]:
        """Keep the text encoders ready, with the adapters of a call, during the block."""
        models = [model for model in self._adaptable().values() if model is not self.denoiser]
        with self._working(*models):
            try:
                call.use(models)
                yield
            finally:
                LoraCall().use(models)

    def _scaled_steps(self, steps: Iterator[AnyStep], call: "LoraCall") -> Generator[AnyStep]:
        """Yield the steps, each taken with the denoiser's adapters of a call."""
        try:
            while True:
                call.use([self.denoiser], of_unet=True)  # another run of this pipeline may have set its own
                step = next(steps, None)
                if step is None:
                    return
                yield step
        finally:
            LoraCall().use([self.denoiser])


class LoraCall(NamedTuple):
    """How a call uses the adapters."""

    scale: float = 1.0  # multiplies the weights of all active adapters
    tags: tuple[Tag, ...] = ()  # the adapters that its prompt names

    def use(self, models: Sequence[Model], *, of_unet: bool = False) -> None:
        """Write the weights of the models for this call."""
        for model in models:
            if isinstance(model.merging, Merging):
                there = model.merging.adapters
                weights = {tag.name: tag.weight if of_unet or tag.of_text is None else tag.of_text for tag in self.tags}
                model.merging.scaled(
                    self.scale, {name: Factor(weight) for name, weight in weights.items() if name in there}
                )


def scale_of(given: Any, name: str = "cross_attention_kwargs") -> float:
    """Return the LoRA scale of a call, from the argument `name`.

    Raises InputError for anything but None and `{"scale": number}`.
    """
    if given is None:
        return 1.0
    if not isinstance(given, Mapping):
        raise InputError(f"{name}: {shown(given)} is not a dict; give one")
    others = [key for key in given if key != "scale"]
    if others:
        raise InputError(f"{name}: {shown(others[0])} is not supported; give scale alone")
    scale = as_float(given.get("scale", 1.0))
    if scale is None:
        raise InputError(f"{name}: its scale is not a finite number; give one, such as 0.8")
    return scale


def _local(
    given: str | Path, subfolder: str | None, weight_name: str | None, client: Mapping[str, Any]
) -> tuple[Path, str | None]:
    """Return the local path of a LoRA, and the name of the file in it. A file on the hub is downloaded."""
    if hub.names_hub_file(str(given)):
        if weight_name is None:
            return hub.lora_file(str(given), subfolder, **client), None
        return hub.hub_file(str(given), "/".join(filter(None, [subfolder, weight_name])), **client), None
    return (Path(given) / subfolder if subfolder else Path(given)), weight_name


def _weights_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that adapters may change, by diffusers' keys."""
    shapes = weights.diffusers_shapes(model)
    named = {key.removesuffix(".values"): tuple(shape) for key, shape in shapes.items()}  # `Quantised` has values
    return {key: shape for key, shape in named.items() if key.endswith(".weight") and len(shape) > 1}


def _use(there: Sequence[str]) -> str:
    return f"use one of {', '.join(there)}" if there else "load one with load_lora_weights first"
