"""Surface: the methods of diffusers' ModelMixin that a model has beside its forward, and how it is saved."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fastdiff.arguments import shown
from fastdiff.checkpoints import weights
from fastdiff.checkpoints.configs.model import ModelConfig
from fastdiff.checkpoints.quantisation import FORMATS
from fastdiff.checkpoints.saving import Configured, check_not_uploading, into_folder, plan_weights
from fastdiff.errors import InputError
from fastdiff.execution.devices import check_move, dtype_name
from fastdiff.kernels.host.weights import Quantised
from fastdiff.refused import OF_MODELS
from fastdiff.schema import checked

AnySurface = TypeVar("AnySurface", bound="Surface")

_log = logging.getLogger(__name__)

# diffusers' processors that compute the plain attention, each in another way
_PLAIN_PROCESSORS = ("AttnProcessor", "AttnProcessor2_0", "XFormersAttnProcessor", "SlicedAttnProcessor")


def _without_effect(name: str, why: str) -> Callable[..., None]:
    """Return a method that takes any arguments, and only logs why it changes nothing."""

    def method(self: "Surface", *args: Any, **kwargs: Any) -> None:
        _log.debug(f"{name}: without effect, because {why}")

    method.__name__ = name
    method.__doc__ = f"Change nothing, because {why}."
    return method


class Surface(Configured, nn.Module):
    """The methods of diffusers' ModelMixin and of its attention mixins, but the ones that load a model."""

    refused = OF_MODELS
    config_name = "config.json"
    config: ModelConfig

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            config = self.__dict__.get("config", {})
            if name in config:  # an option of the config, as in diffusers
                return config[name]
            raise

    def saved_config(self) -> dict[str, Any]:
        """Return the content of config.json, as the library that defines the class writes it."""
        if self.config.LIBRARY == "diffusers":
            return super().saved_config()
        fixed = self.config.SWITCHED_OFF
        kind = {"architectures": [type(self).__name__], "model_type": fixed["model_type"]}
        return {**kind, "dtype": dtype_name(self.dtype), **self.config}

    def saved_key(self, key: str) -> str:
        """Return the key of a tensor in a weight file, for its key in the state dict of diffusers' model."""
        return key

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        save_function: None = None,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str = "10GB",
        push_to_hub: bool = False,
        use_flashpack: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save the config and the weights in a folder, which diffusers or transformers reads back, equal in bits.

        Args:
            save_directory: the folder. Weight files of an earlier model of this variant are replaced.
            is_main_process: False writes nothing, as another process does.
            save_function: not supported: it must be None.
            safe_serialization: must be True: fastdiff writes safetensors only.
            variant: the part of the weight files' names, such as `fp16`. It does not change their dtype.
            max_shard_size: in bytes, or a text such as "5GB". A larger model has several files and an index.
            push_to_hub: not supported: it must be False.
            use_flashpack: not supported: it must be False.
            kwargs: options of `push_to_hub`, which have no effect.

        Raises:
            InputError: for an argument that is not supported, a place that cannot be written, and a model with 8-bit
                weights.
        """
        if save_function is not None or use_flashpack is not False or safe_serialization is not True:
            raise InputError(
                "save_function, safe_serialization, use_flashpack: only safetensors are written; leave out"
            )
        check_not_uploading(push_to_hub, kwargs)
        if any(isinstance(module, Quantised) for module in self.modules()):
            raise InputError(
                f"save_pretrained: the weights are in 8 bits; load the model without precision {' or '.join(FORMATS)}"
            )
        if not checked("is_main_process", is_main_process, bool):
            return
        state = {self.saved_key(key): tensor for key, tensor in weights.diffusers_state(self).items()}
        sizes = {key: tensor.nbytes for key, tensor in state.items()}
        files = plan_weights(sizes, max_shard_size, variant, self.config.LIBRARY)
        with into_folder(save_directory) as folder:
            for name, keys in files.keys.items():
                weights.save_tensors({key: state[key] for key in keys}, folder / name)
            kept = set(files.keys)
            if files.shards is not None:
                kept.add(files.index_name)
                (folder / files.index_name).write_text(json.dumps(files.shards, indent=2, sort_keys=True) + "\n")
            for stale in {path for pattern in files.stale for path in folder.glob(pattern)}:
                if stale.name not in kept:
                    stale.unlink()
            self.save_config(folder)

    def to(self: AnySurface, *args: Any, **kwargs: Any) -> AnySurface:
        """Move the model to a device or dtype, as `torch.nn.Module.to` does, and return the model itself.

        Raises InputError for a device or dtype that the model cannot have.
        """
        check_move(*args, **kwargs)
        return super().to(*args, **kwargs)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters that diffusers' model has. Trainable ones are those that require grad."""
        if checked("only_trainable", only_trainable, bool):
            return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        total = sum(shape.numel() for key, shape in weights.diffusers_shapes(self).items() if not _is_factor(key))
        tables = [module for module in self.modules() if isinstance(module, nn.Embedding)]
        left_out = tables if checked("exclude_embeddings", exclude_embeddings, bool) else []
        return total - sum(table.weight.numel() for table in left_out)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Return the bytes of the parameters, and of the buffers if wanted."""
        buffers = list(self.buffers()) if checked("return_buffers", return_buffers, bool) else []
        return sum(tensor.nbytes for tensor in (*self.parameters(), *buffers))

    @property
    def is_gradient_checkpointing(self) -> bool:
        """False: the model is for inference only."""
        return False

    def set_attn_processor(self, processor: Any) -> None:
        """Accept diffusers' processors of plain attention, which fastdiff computes anyway.

        `processor` is a processor, or a dict of them by name. Raises InputError for any other processor.
        """
        given = processor.values() if isinstance(processor, Mapping) else [processor]
        for each in given:
            if type(each).__name__ not in _PLAIN_PROCESSORS:
                raise InputError(f"set_attn_processor: {shown(each)}: {OF_MODELS['attn_processors']}; leave it out")
        _log.debug("set_attn_processor: without effect, because fastdiff computes plain attention itself")


def _is_factor(key: str) -> bool:
    """Whether a key names the factors of 8-bit weights, which diffusers' model does not have."""
    return key.endswith(".weight.scale")


_ATTENTION = "fastdiff chooses the fastest attention itself"
_WITHOUT_EFFECT = {
    **dict.fromkeys(
        (
            *("enable_xformers_memory_efficient_attention", "disable_xformers_memory_efficient_attention"),
            *("set_use_memory_efficient_attention_xformers", "set_attention_slice", "set_default_attn_processor"),
            *("set_attention_backend", "reset_attention_backend", "set_attn_implementation"),
            *("enable_npu_flash_attention", "disable_npu_flash_attention", "set_use_npu_flash_attention"),
            *("enable_xla_flash_attention", "disable_xla_flash_attention", "set_use_xla_flash_attention"),
        ),
        _ATTENTION,
    ),
    "fuse_qkv_projections": "the projections are always fused",
    "unfuse_qkv_projections": "the projections are always fused",
    "compile_repeated_blocks": "the model runs compiled kernels already",
    "disable_gradient_checkpointing": "the model is for inference only",
    "gradient_checkpointing_disable": "the model is for inference only",
    "disable_freeu": "FreeU is never on",
}
for _name, _why in _WITHOUT_EFFECT.items():
    setattr(Surface, _name, _without_effect(_name, _why))
