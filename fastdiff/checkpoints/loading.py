"""Load: the options of loading a model folder, checked once and passed on as one value."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fastdiff.arguments import naming, shown
from fastdiff.checkpoints.names import extensions_of
from fastdiff.checkpoints.registry import part_names
from fastdiff.errors import InputError
from fastdiff.execution.devices import check_precision, resolve_device, resolve_dtype
from fastdiff.kinds import Precision
from fastdiff.sampler_names import SchedulerName
from fastdiff.schema import checked

DEFAULT = "default"  # the key of all other parts in a mapping of dtypes
ACCEPTED = (  # options of diffusers' from_pretrained that change nothing here, and may be true or false
    "low_cpu_mem_usage",
    "disable_mmap",
)
REFUSED = {  # options of diffusers' from_pretrained that fastdiff does not have, and what to do instead
    "custom_pipeline": "fastdiff runs no code from a model folder; leave it out",
    "custom_revision": "fastdiff runs no code from a model folder; leave it out",
    "trust_remote_code": "fastdiff runs no code from a model folder; leave it out",
    "load_connected_pipeline": "a pipeline is loaded alone; load the other one with a call of its own",
    "mirror": "set the environment variable HF_ENDPOINT instead",
    "proxies": "set the environment variables HTTP_PROXY and HTTPS_PROXY instead",
    "max_memory": "parts are not spread over devices; give offload=True if memory is short",
    "offload_folder": "nothing is offloaded to disk; give offload=True if memory is short",
    "offload_state_dict": "nothing is offloaded to disk; weights are read one file at a time",
    "quantization_config": 'give precision="int8" or precision="fp8" instead',
    "output_loading_info": "weights with missing or unexpected keys are always an error; leave it out",
    "use_onnx": "fastdiff reads weights of PyTorch only",
    "use_flashpack": "fastdiff reads safetensors and .bin only",
    "provider": "it is for ONNX, which fastdiff does not read",
    "provider_options": "it is for ONNX, which fastdiff does not read",
    "sess_options": "it is for ONNX, which fastdiff does not read",
}


@dataclass(frozen=True)
class Load:
    """The options of loading a model folder. Make one with `Load.of`, which checks them."""

    device: torch.device  # where the models run
    dtype: torch.dtype
    variant: str | None = None  # of the weight files
    precision: Precision = "full"  # of the weights of the denoiser and the text encoders
    offload: bool = False  # whether each part is on the GPU only while it runs
    scheduler: str | None = None  # None: the folder's
    extensions: tuple[str, ...] = extensions_of(None)  # of the weight files, the preferred one first
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # part name -> its dtype, if it is not `dtype`

    @classmethod
    def of(
        cls,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | Mapping[str, str | torch.dtype] = "auto",
        variant: str | None = None,
        precision: Precision = "full",
        offload: bool = False,
        scheduler: str | None = None,
        use_safetensors: bool | None = None,
    ) -> "Load":
        """Check the options and return them as one value.

        Device auto is a GPU if the machine has one; dtype auto is the one that suits the device. A mapping of part
        names to dtypes sets the dtype of each part, as in diffusers; its key "default" is for all other parts, which
        otherwise are float32. The variant is checked later, when the files are looked for. Raises InputError that names
        the bad option.
        """
        device = resolve_device(device)
        each = {DEFAULT: "float32", **dtype} if isinstance(dtype, Mapping) else {DEFAULT: dtype}
        unknown = sorted(str(name) for name in each if name not in (DEFAULT, *part_names()))
        if unknown:
            raise InputError(f"dtype: {unknown[0]} is not a part; use {DEFAULT}, {', '.join(part_names())}")
        dtypes = {name: resolve_dtype(value, device) for name, value in each.items()}
        checked("scheduler", scheduler, SchedulerName | None)
        checked("precision", precision, Precision)
        check_precision(precision, device)
        if checked("offload", offload, bool) and device.type == "cpu":
            raise InputError("offload: it saves GPU memory, but the device is the CPU; leave it out")
        extensions = extensions_of(use_safetensors)
        return cls(device, dtypes.pop(DEFAULT), variant, precision, offload, scheduler, extensions, dtypes)

    @property
    def home(self) -> torch.device:
        """Where the weights stay."""
        return torch.device("cpu") if self.offload else self.device

    def of_part(self, name: str, *, in_8_bits: bool) -> "Load":
        """Return the options of loading one part. in_8_bits: whether `precision` is for it."""
        precision: Precision = self.precision if in_8_bits else "full"
        return replace(self, dtype=self.dtypes.get(name, self.dtype), precision=precision)


def chosen_dtype(dtype: Any, torch_dtype: Any) -> Any:
    """Return the dtype of a call that takes diffusers' `dtype` and its older name. None is "auto"."""
    is_open = dtype is None or (isinstance(dtype, str) and dtype == "auto")
    if torch_dtype is None:
        return "auto" if is_open else dtype
    kinds = str | torch.dtype  # other values, such as arrays, cannot be compared
    is_same = isinstance(dtype, kinds) and isinstance(torch_dtype, kinds) and dtype == torch_dtype
    if not is_open and not is_same:
        raise InputError("torch_dtype: it is the older name of dtype, which is also given; leave out one of the two")
    return torch_dtype


def chosen_device(device: Any, device_map: Any) -> Any:
    """Return the device of a call that takes diffusers' `device_map`: "balanced", "auto" or a device for all parts."""
    if device_map is None:
        return device
    if isinstance(device_map, Mapping):
        raise InputError(f"device_map: {shown(device_map)} spreads parts over devices; give one device such as cuda")
    if device not in (None, "auto"):
        raise InputError("device_map: device is also given; leave out one of the two")
    with naming("device_map"):
        return resolve_device("auto" if isinstance(device_map, str) and device_map == "balanced" else device_map)


def check_foreign(options: Mapping[str, Any], refused: Mapping[str, str] = REFUSED) -> None:
    """Raise InputError for an option of diffusers' `from_pretrained` that cannot be honoured, and for an unknown one.

    refused: the names that are refused, and why. None and False ask for nothing.
    """
    for name, value in options.items():
        if name in ACCEPTED:
            checked(name, value, bool | None)
        elif name not in refused:
            raise InputError(f"{name}: from_pretrained has no such argument; leave it out")
        elif value is not None and value is not False:
            raise InputError(f"{name}: {refused[name]}")
