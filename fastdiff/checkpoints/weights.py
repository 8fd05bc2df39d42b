"""Load the weights of a diffusers model folder into a model: find the file, check every key, rename, fuse, lay out.

A state dict has diffusers' names until `fuse`. Parameters of our models differ from diffusers' in two ways:

- One parameter stacks several. An attention has one projection `to_qkv` (q, k and v in this order) instead of `to_q`,
  `to_k` and `to_v`. A model lists other stacks in `stacked`: our prefix -> {diffusers' prefix: its share of the rows}.
- A parameter has another form than diffusers' parameter of the same name. A model's `conversions` say how to make it.
"""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastdiff.checkpoints import weight_files
from fastdiff.checkpoints.configs.model import Library
from fastdiff.checkpoints.quantisation import hold_in_8_bits, quantised_tensors
from fastdiff.errors import InputError, NonFiniteWeightsError
from fastdiff.execution.transfers import upload
from fastdiff.kernels.host.weights import k_first

QKV = ("to_q", "to_k", "to_v")
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
MOST_PINNED = 2**25  # bytes of a tensor that reaches a GPU through pinned memory, which the host holds meanwhile
_OF_IP_ADAPTERS = re.compile(r"\.processor\.to_[kv]_ip\.|^encoder_hid_proj\.image_projection_layers\.")
IGNORED = "position_ids"  # a buffer in old checkpoints, which transformers ignores too


class Conversion(NamedTuple):
    """How to make a parameter of ours from diffusers' parameter of the same name, and back."""

    shape: tuple[int, ...]  # of diffusers' parameter
    convert: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor], Tensor]  # the inverse, equal in bits


def load_state_dict(
    folder: str | Path,
    variant: str | None = None,
    library: Library = "diffusers",
    extensions: Sequence[str] = weight_files.EXTENSIONS,
) -> dict[str, Tensor]:
    """Return the tensors of a component folder, on the CPU, by the names of its `library`.

    `weight_files.find` finds the files. Raises InputError for weights that are missing, damaged, or cannot be
    read without running code.
    """
    state: dict[str, Tensor] = {}
    for path, index, keys in weight_files.find(folder, variant, library, extensions):
        tensors = _read_tensors(path)
        if keys is not None and tensors.keys() != keys:
            raise InputError(
                f"{index} lists other keys for {path.name} than the file has; download or save the model again"
            )
        state |= tensors
    return state


def without_ip_adapters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a model without IP-Adapters that were loaded when diffusers saved it.

    diffusers leaves them out too when it loads the file.
    """
    return {key: tensor for key, tensor in state.items() if not _OF_IP_ADAPTERS.search(key)}


def load_weights(
    model: nn.Module,
    state: dict[str, Tensor],
    *,
    source: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    layout: torch.memory_format = torch.channels_last,
    in_8_bits: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Load weights into a model on the meta device, and freeze them.

    Every tensor is copied, so the model does not depend on the file. The model is only changed if all checks pass. It
    must not have buffers outside its state dict, because they would stay on the meta device.

    Args:
        model: a model on the meta device.
        state: tensors by diffusers' names. They are removed one by one, so that memory never holds two whole copies.
        source: the name of `state` in errors.
        dtype: of the activations, and of all weights except `in_8_bits`.
        device: of the weights.
        layout: of convolution weights.
        in_8_bits: the model's parameters to hold in 8 bits, from `quantisation.formats`.

    Raises:
        InputError: names every key that is missing, unexpected, of another shape or not floating point; also for
            values beyond the range of `dtype`.
        NonFiniteWeightsError: for NaN or infinity.
    """
    shapes = diffusers_shapes(model)
    drop_ignored_keys(state, shapes)
    rename_old_attention_keys(state, shapes)
    check_keys(state, shapes, f"{source} does not fit {type(model).__name__}")
    keys = {key: dtype for name, dtype in in_8_bits.items() for key in diffusers_keys(model, name)}
    convert(state, source, dtype, device, layout, keys)
    hold_in_8_bits(model, in_8_bits)
    fuse(state, model)
    _assign(state, model)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"{type(model).__name__} made {left} on the meta device and keeps it out of its state dict"


def diffusers_keys(model: nn.Module, name: str) -> dict[str, int]:
    """Return the keys of diffusers' state dict that make up our parameter `name`, in order, with their shares of it."""
    if ".to_qkv." in name:
        return {name.replace(".to_qkv.", f".{part}."): 1 for part in QKV}
    for ours, theirs in getattr(model, "stacked", {}).items():
        if name.startswith(ours):
            return {prefix + name.removeprefix(ours): share for prefix, share in theirs.items()}
    return {name: 1}


def split_stacked(tensor: Tensor, shares: dict[str, int]) -> dict[str, Tensor]:
    """Split our parameter along its first dimension into a view for each of diffusers' keys."""
    if len(shares) == 1:
        return dict.fromkeys(shares, tensor)
    each = len(tensor) // sum(shares.values())
    return dict(zip(shares, tensor.split([share * each for share in shares.values()]), strict=True))


def diffusers_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the keys and shapes that diffusers' model saves with the same config."""
    shapes = {
        key: each.shape
        for name, tensor in nn.Module.state_dict(model).items()  # `Model` would copy weights that adapters changed
        for key, each in split_stacked(tensor, diffusers_keys(model, name)).items()
    }
    return shapes | {name: torch.Size(conversion.shape) for name, conversion in conversions_of(model).items()}


def conversions_of(model: nn.Module) -> Mapping[str, Conversion]:
    """Return the model's parameters whose form differs from diffusers', by our names."""
    return getattr(model, "conversions", {})


def drop_ignored_keys(state: dict[str, Tensor], shapes: dict[str, torch.Size]) -> None:
    """Drop keys that the model does not have and that do not affect the picture."""
    for key in list(state):
        if key.rpartition(".")[2] == IGNORED and key not in shapes:
            del state[key]


def rename_old_attention_keys(state: dict[str, Tensor], shapes: dict[str, torch.Size]) -> None:
    """Rename old attention keys that the model has by a new name (ModelMixin._fix_state_dict_keys_on_load)."""
    for key in list(state):
        module, _, kind = key.rpartition(".")
        path, _, old = module.rpartition(".")
        new = f"{path}.{OLD_ATTENTION.get(old, old)}.{kind}"
        if new in shapes and new not in state:
            state[new] = state.pop(key)


def check_keys(state: dict[str, Tensor], shapes: dict[str, torch.Size], problem: str) -> None:
    """Raise one InputError that begins with `problem` and lists every key where `state` does not match `shapes`."""
    shared = [key for key in shapes if key in state]
    complaints = {
        "missing": [key for key in shapes if key not in state],
        "unexpected": [key for key in state if key not in shapes],
        "wrong shape": [
            f"{key} {tuple(state[key].shape)} for {tuple(shapes[key])}"
            for key in shared
            if state[key].shape != shapes[key]
        ],
        "not floating point": [f"{key} ({state[key].dtype})" for key in shared if not _is_real(state[key].dtype)],
    }
    listed = "; ".join(f"{what}: {', '.join(keys)}" for what, keys in complaints.items() if keys)
    if listed:
        raise InputError(f"{problem}: {listed}; use the weights that were saved with its config.json")


def convert(
    state: dict[str, Tensor],
    source: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    layout: torch.memory_format,
    in_8_bits: Mapping[str, torch.dtype],
) -> None:
    """Replace each tensor by a copy on `device`, with filters in `layout`. Raise for values that are not finite there.

    `dtype` is that of activations and of all weights except the keys in `in_8_bits`, which are quantised one by one. No
    other function decides this.
    """
    checks: dict[str, tuple[Tensor, Tensor]] = {}  # whether a tensor is finite, as given and as made
    for key in list(state):
        given = state.pop(key)
        tensor = upload(given, torch.device(device)) if given.nbytes <= MOST_PINNED else given.to(device)
        if key in in_8_bits:
            parts = quantised_tensors(key, tensor, in_8_bits[key])
            made = {name: laid_out(part, layout) for name, part in parts.items()}
        else:
            made = {key: laid_out(tensor, layout, dtype=dtype, copy=tensor is given)}
        state |= made
        *_, last = made.values()  # of 8-bit weights the factors, which are finite if the weight was
        after = _is_finite(last)
        is_wider = torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max and key not in in_8_bits
        checks[key] = after if is_wider else _is_finite(tensor), after
    found = torch.stack([torch.stack(each) for each in checks.values()]).tolist() if checks else []  # waits once
    broken = [key for key, (before, _) in zip(checks, found, strict=True) if not before]
    beyond = [key for key, (before, after) in zip(checks, found, strict=True) if before and not after]
    if broken:
        reason = f"{source}: NaN or infinity in {_some(broken)}"
        raise NonFiniteWeightsError(f"{reason}; use weights from before training diverged")
    if beyond:
        raise InputError(f"{source}: values beyond the range of {dtype} in {_some(beyond)}; use bfloat16 or float32")


def laid_out(tensor: Tensor, layout: torch.memory_format, **options: Any) -> Tensor:
    """Return `tensor.to(**options)`, with 2-D and 1-D filters in `layout`. A 1-D filter is (C_out, C_in, K).

    A 1-D filter in float32 on a GPU gets the layout of `k_first` instead.
    """
    if tensor.ndim == 3:
        filters = tensor[:, :, None].to(**options)
        turned = filters.is_cuda and filters.dtype == torch.float32
        return (k_first(filters) if turned else filters.to(memory_format=layout))[:, :, 0]
    return tensor.to(memory_format=layout if tensor.ndim == 4 else torch.contiguous_format, **options)


def fuse(state: dict[str, Tensor], model: nn.Module) -> None:
    """Make our parameters from diffusers' tensors: stack tensors of one parameter, convert those of another form."""
    for name in model.state_dict():
        keys = diffusers_keys(model, name)
        if name not in keys:
            state[name] = torch.cat([state.pop(key) for key in keys])
    for name, conversion in conversions_of(model).items():
        state[name] = laid_out(conversion.convert(state[name]), torch.channels_last)


def _assign(state: dict[str, Tensor], model: nn.Module) -> None:
    """Move all tensors into the model, frozen. As `load_state_dict` with `assign`, in one pass."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(state.pop(prefix + name), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = state.pop(prefix + name)
    assert not state, f"{type(model).__name__} has no {list(state)}"


def diffusers_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of diffusers' model with these weights, as views where possible: the inverse of `fuse`."""
    conversions = conversions_of(model)
    return {
        key: conversions[name].restore(each) if name in conversions else each
        for name, tensor in model.state_dict().items()
        for key, each in split_stacked(tensor, diffusers_keys(model, name)).items()
    }


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as a safetensors file, in torch's default layout. A file of this name is replaced as a whole."""
    part = path.with_name(f"{path.name}.part")
    copies = {
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()
    }
    try:
        save_file(copies, part, metadata={"format": "pt"})
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _is_real(dtype: torch.dtype) -> bool:
    """Return whether each element of such a tensor is one real number, which torch can convert."""
    return dtype.is_floating_point and not str(dtype).startswith("torch.float4")  # float4 packs two numbers per element


def _is_finite(tensor: Tensor) -> Tensor:
    """Return whether all elements are finite, as a tensor on the same device: to read it would wait for a GPU."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    if tensor.element_size() == 1:
        tensor = tensor.float()  # aminmax does not take float8
    # The extremes propagate NaN, at a thirtieth of the cost of isfinite over every element.
    return torch.stack(tensor.aminmax()).isfinite().all()


def _some(keys: list[str]) -> str:
    first = ", ".join(keys[:3])
    return first if len(keys) <= 3 else f"{first} and {len(keys) - 3} more"


def _read_tensors(path: Path) -> dict[str, Tensor]:
    read = load_file if path.suffix == ".safetensors" else _read_pickle
    try:
        return read(path)
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} is damaged or not a safetensors file ({reason}); download or save it again") from None


def load_pickle(path: Path, remedy: str, *, is_mapped: bool = False) -> Any:
    """Return what a pickle of tensors holds, on the CPU. None of its code runs.

    is_mapped: whether the tensors are views of the file, not copies. Pickles from before torch 1.6 have no views.
    Raises InputError, which ends with `remedy`, for a damaged file and for one that needs its code.
    """
    try:
        with warnings.catch_warnings():  # torch warns about what raises below
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # a damaged pickle raises almost anything
        raise InputError(
            f"{path} cannot be read without running its code, or is damaged ({type(error).__name__}); {remedy}"
        ) from None


def _read_pickle(path: Path) -> dict[str, Tensor]:
    state = load_pickle(path, "save the model as safetensors")
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise InputError(f"{path} does not hold a dictionary of tensors; save the model as safetensors")
    odd = [str(key) for key, tensor in state.items() if not isinstance(key, str) or not is_plain(tensor)]
    if odd:
        raise InputError(
            f"{path} holds entries other than named plain tensors: {_some(odd)}; save the model as safetensors"
        )
    return state


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` is dense: not sparse, nested, quantised or on the meta device."""
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    return is_dense and not (tensor.is_quantized or tensor.is_meta)
