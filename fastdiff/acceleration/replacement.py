"""Run a live diffusers model's methods on our model, until `restore`."""

import sys
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fastdiff.acceleration.changes import Watch, check_changes
from fastdiff.acceleration.controlnets import ControlReader
from fastdiff.acceleration.ip_adapters import ImageReader, image_reader
from fastdiff.acceleration.layers import adapted_layers, plain_name, plain_parameters
from fastdiff.acceleration.merging import Merging
from fastdiff.acceleration.recall import Loop, Recall
from fastdiff.acceleration.sharing import empty_like, give_back, our_class, share_parameters
from fastdiff.arguments import as_float, shown
from fastdiff.errors import InputError
from fastdiff.kinds import Precision
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.model import Model
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.requests.defaults import PRECISION

TILING = ("use_tiling", "tile_sample_min_size", "tile_latent_min_size", "tile_overlap_factor")
ATTENTION_KWARGS = ("cross_attention_kwargs", "joint_attention_kwargs")  # the second is of Z-Image


class Replacement:
    """Our model, which shares the parameters of a live diffusers model, and the methods that call our model."""

    METHODS: ClassVar[tuple[str, ...]]  # the live model's methods that the methods of the same name here replace

    def __init__(self, model: nn.Module, precision: Precision):
        self.model, self.precision = model, precision
        # by name and shape, as a layer may be replaced by another later
        self._strides = {(name, each.shape): each.stride() for name, each in plain_parameters(model).items()}
        self._current: tuple[Model, Watch, Merging] | None = None
        self._guard: RemovableHandle | None = None  # refuses `state_dict` while the parameters have no memory

    def check(self) -> None:
        """Raise InputError if our model cannot replace the live one."""
        for name in self.METHODS:
            owner = _owner(self.model, name)
            if owner is not self.model and owner is not self:
                raise InputError(f"accelerate: the model's {name} was replaced; undo that first")
        self.ours()

    def check_precision(self, wanted: Precision) -> None:
        """Raise InputError if our model has another precision."""
        if self.precision != wanted:
            raise InputError(f"precision: the model already runs with {self.precision}; restore it first")

    def install(self) -> None:
        """Replace the live model's methods."""
        for name in self.METHODS:
            setattr(self.model, _slot(self.model, name), getattr(self, name))
        if self._guard is None and self.precision != PRECISION:
            self._guard = self.model.register_state_dict_pre_hook(lambda *args: self._refuse("saved"))

    def _refuse(self, done: str) -> NoReturn:
        raise InputError(f"accelerate: a model in 8 bits cannot be {done}; call fastdiff.restore on it first")

    def remove(self) -> None:
        """Restore the model's own methods, and give its parameters their own memory with the old strides.

        Raises InputError if something else has replaced the methods since.
        """
        if any(_owner(self.model, name) is not self for name in self.METHODS):
            raise InputError("restore: a method of the model was replaced since it was accelerated; undo that first")
        for name in self.METHODS:
            slot = _slot(self.model, name)
            delattr(self.model, slot)
            if slot != name:  # an accelerate hook calls this attribute
                setattr(self.model, slot, getattr(type(self.model), name).__get__(self.model))
        if self._guard is not None and self._current is not None:
            self._guard.remove()
            give_back(self.model, self._current[0])
        self._release()
        for name, parameter in self.model.named_parameters():
            own = torch.empty_strided(
                parameter.shape,
                self._strides.get((plain_name(name), parameter.shape), parameter.stride()),
                dtype=parameter.dtype,
                device=parameter.device,
            )
            parameter.data = own.copy_(parameter.data)

    def ours(self, scale: float = 1.0, *, contents: bool = True) -> Model:
        """Return our model, with the live model's adapters merged. Build it again if other layers have changed.

        Args:
            scale: multiplies the scaling of each adapter.
            contents: whether to look for changes of the adapters' values that torch does not count.

        Raises:
            InputError: for unsupported changes.
        """
        is_new = self._current is None
        if self._current is None or self._current[1].sees_a_change():
            if self._guard is not None:
                check_changes(self.model, self.precision)
                self._refuse("changed")
            self._follow()
        assert self._current is not None
        ours, _, merging = self._current
        if merging.update(scale, contents) or is_new:
            self._weights_changed(ours)
        return ours

    def _follow(self) -> None:
        """Look for the live model's adapters again, or build our model if it has other layers or memory now."""
        try:
            check_changes(self.model, self.precision)
            if self._current is not None and self._current[2].fits():
                ours, _, merging = self._current
                merging.follow()
            else:
                self._release()
                ours = self._built()
                merging = Merging(self.model, ours)
            self._followed(ours)
        except InputError:
            self._release()
            raise
        self._current = ours, Watch(self.model), merging

    def _followed(self, ours: Model) -> None:
        """Tell our model of changes of the live one besides its weights."""

    def _weights_changed(self, ours: Model) -> None:
        """Forget what was computed from weights of ours before they changed."""

    def _built(self) -> Model:
        return share_parameters(self.model, self.precision)

    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Move the model, as `to()` does. Drop our model first, so that the old memory is freed."""
        if self._guard is not None:
            self._refuse("moved")
        self._release()
        return type(self.model)._apply(self.model, *args, **kwargs)

    def _release(self) -> None:
        if self._current is not None:
            self._current[0].release_graphs()
        self._current = None

    def __getstate__(self) -> dict[str, Any]:
        if self._guard is not None:
            self._refuse("copied")
        return vars(self) | {"_current": None}  # a copy of the live model builds its own copy of ours

    def _in_their_words(self, output: Any) -> Any:
        """Convert our output to the diffusers class of the same name. A plain tuple is returned as it is."""
        if not hasattr(output, "_asdict"):
            return output
        outputs = sys.modules[type(self.model).forward.__module__]
        return getattr(outputs, type(output).__name__)(**output._asdict())


class DenoiserReplacement(Replacement):
    """Replaces the forward of a denoiser or of a ControlNet."""

    METHODS = ("forward", "_apply")

    def __init__(self, model: nn.Module, precision: Precision):
        super().__init__(model, precision)
        self._loop = Loop()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the denoiser. Arguments and output match diffusers' model.

        Our model runs first, and changes of the live one are looked for while the GPU works. If there are any, the
        output and any error are dropped, and our model runs again.
        """
        scale, kwargs = _lora_scale(kwargs)
        begins = self._loop.begins(args[1] if len(args) > 1 else kwargs.get("timestep"))
        if begins and (reader := self._reader()) is not None:
            reader.begin()
        output, failure = None, None
        try:
            output = self._latest(scale, begins)(*args, **kwargs)
        except InputError as error:
            failure = error
        if self._has_changed(scale):
            output = self.ours(scale, contents=begins)(*args, **kwargs)
        elif failure is not None:
            raise failure
        if scale == 0:
            _reset_scales(self.model)
        return self._in_their_words(output)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_loop": Loop()}  # it refers to the timesteps of a run

    def _latest(self, scale: float, begins: bool) -> Model:
        """Return our model as it was at the last call, or a new one. With adapters, a run begins with a full check."""
        if self._current is None or (self._current[2].has_adapters and begins):
            return self.ours(scale)
        return self._current[0]

    def _has_changed(self, scale: float) -> bool:
        """Whether the live model has changed since our model was made, or its weights since a run's products were."""
        if self._current is None:  # the live model is refused as it is
            return False
        ours, watch, merging = self._current
        assert isinstance(ours, Denoiser) and isinstance(ours.recall, Recall)
        return watch.sees_a_change() or merging.has_changed(scale) or ours.recall.forget_changes()

    def _reader(self) -> ImageReader | ControlReader | None:
        """Return what reads the pictures of a call beside the sample, if there are any."""
        ours = None if self._current is None else self._current[0]
        reader: Any = None
        if isinstance(ours, UNet2DConditionModel):
            reader = ours.image_reader
        elif isinstance(ours, ControlNetModel):
            reader = ours.control_reader
        assert isinstance(reader, ImageReader | ControlReader | None)
        return reader

    def _followed(self, ours: Model) -> None:
        if isinstance(ours, UNet2DConditionModel):
            ours.image_reader = image_reader(self.model, ours)

    def _weights_changed(self, ours: Model) -> None:
        assert isinstance(ours, Denoiser) and isinstance(ours.recall, Recall)
        ours.recall.forget()
        if isinstance(ours, ControlNetModel) and isinstance(ours.control_reader, ControlReader):
            ours.control_reader.forget()

    def _built(self) -> Model:
        ours = super()._built()
        assert isinstance(ours, Denoiser)
        ours.recall = Recall(self.model, ours)
        if isinstance(ours, ControlNetModel):
            ours.control_reader = ControlReader(self.model, ours)
        return ours

    def _release(self) -> None:
        if self._current is not None and isinstance(self._current[0], Denoiser):
            self._current[0].recall = None  # it refers to the model, whose memory must be freed at once
        if self._current is not None and isinstance(self._current[0], UNet2DConditionModel):
            self._current[0].image_reader = None
        if self._current is not None and isinstance(self._current[0], ControlNetModel):
            self._current[0].control_reader = None
        super()._release()


class AutoencoderReplacement(Replacement):
    """Replaces `_encode` and `_decode` of a VAE.

    diffusers' own `encode`, `decode` and `forward` call them, so slicing, offload and the outputs stay as they are.
    """

    METHODS = ("_encode", "_decode", "_apply")

    def _encode(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, 2 C, h, w): means and log variances."""
        (distribution,) = self._autoencoder().encode(x, return_dict=False)
        return distribution.parameters

    def _decode(self, z: Tensor, return_dict: bool = True) -> Any:
        """(N, C, h, w) -> (N, C_out, H, W), in diffusers' output class."""
        return self._in_their_words(self._autoencoder().decode(z, return_dict))

    def _autoencoder(self) -> AutoencoderKL:
        """Return our model with the live model's tiling options."""
        ours = self.ours()
        assert isinstance(ours, AutoencoderKL)
        for name in TILING:
            setattr(ours, name, getattr(self.model, name))
        return ours


def check_replaceable(model: nn.Module, precision: Precision) -> None:
    """Raise InputError, before anything is changed, if `replacement_for` would."""
    replacement = replacement_of(model)
    if replacement is None:
        check_changes(model, precision)
        empty_like(model, precision)
    else:
        replacement.check_precision(precision)


def replacement_for(model: nn.Module, precision: Precision) -> Replacement:
    """Return a live model's replacement, or a new one. Raises InputError if we cannot run the model this way."""
    kind = our_class(model)
    assert kind is not None
    new = AutoencoderReplacement if issubclass(kind, AutoencoderKL) else DenoiserReplacement
    replacement = replacement_of(model) or new(model, precision)
    replacement.check_precision(precision)
    replacement.check()
    return replacement


def replacement_of(model: nn.Module) -> Replacement | None:
    """Return a live model's replacement; None if it runs on diffusers."""
    owner = _owner(model, "_apply")
    return owner if isinstance(owner, Replacement) else None


def _lora_scale(kwargs: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return `scale` of the attention kwargs of a call, as diffusers' `apply_lora_scale`, and other arguments.

    Raises InputError for a scale that is not a number.
    """
    for name in ATTENTION_KWARGS:
        given = kwargs.get(name)
        if isinstance(given, dict) and "scale" in given:
            scale = as_float(given["scale"])
            if scale is None:
                raise InputError(f"{name}: scale {shown(given['scale'])} is not a finite number")
            return scale, kwargs | {name: {key: each for key, each in given.items() if key != "scale"}}
    return 1.0, kwargs


def _reset_scales(model: nn.Module) -> None:
    """Give all active adapters the weight 1, as diffusers does after a call with the scale 0."""
    for layer in adapted_layers(model).values():
        for adapter in layer.active_adapters:
            layer.set_scale(adapter, 1.0)


def _slot(model: nn.Module, name: str) -> str:
    """Return the attribute that holds a method. A hook of the accelerate library moves `forward` to `_old_forward`."""
    is_hooked = name == "forward" and "_hf_hook" in vars(model) and "_old_forward" in vars(model)
    return "_old_forward" if is_hooked else name


def _owner(model: nn.Module, name: str) -> Any:
    """Return the object that a method of the model is bound to: the model, a replacement, or None for a function."""
    return getattr(getattr(model, _slot(model, name)), "__self__", None)
