"""DDPMScheduler and DDIMScheduler over the coefficient table, with diffusers' interface: its loops run unchanged."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from fastdiff.checkpoints.json_files import read_json
from fastdiff.diffusion.schedule import (
    DDIMConfig,
    DDPMConfig,
    DiffusionConfig,
    Schedule,
    custom_timesteps,
    ddim_following,
    ddim_rows,
    ddim_schedule,
    ddpm_following,
    ddpm_rows,
    ddpm_schedule,
    make_alpha_bar,
    make_betas,
    spaced_timesteps,
    step_options,
)
from fastdiff.errors import InputError
from fastdiff.kernels.denoise import denoise_step

CONFIG_NAME = "scheduler_config.json"


class SchedulerOutput(NamedTuple):
    """What a step gives, as diffusers' DDPMSchedulerOutput and DDIMSchedulerOutput."""

    prev_sample: Tensor  # x_{t-1}
    pred_original_sample: Tensor  # the x0 that the step saw


class FrozenDict(dict):
    """A scheduler's options, by item and by attribute; as diffusers' FrozenDict it cannot be changed."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the scheduler has no option {name!r}") from None

    def _refuse(self, *args, **kwargs):
        raise TypeError("a scheduler's config is frozen; make another with from_config(config, option=value)")

    __setattr__ = __setitem__ = __delitem__ = __ior__ = update = pop = popitem = setdefault = clear = _refuse

    def __reduce__(self):  # copies and pickles would set the items one by one
        return FrozenDict, (dict(self),)


class Scheduler:
    """What the two samplers share. Options are diffusers', by keyword; see DDPMConfig and DDIMConfig."""

    order = 1  # model calls a step
    init_noise_sigma = 1.0
    config_class: ClassVar[type[DiffusionConfig]]

    def __init__(self, num_train_timesteps: int = 1000, **options):
        """Raises InputError naming an unknown option or a wrong value."""
        self._build({"num_train_timesteps": num_train_timesteps, **options})

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **overrides):
        """From a scheduler's `.config` (ours or diffusers', of either kind) or a dict; keywords replace its options."""
        scheduler = cls.__new__(cls)
        defaults = [name for name in config.get("_use_default_values", ()) if name not in overrides]
        scheduler._build({**config, **overrides, "_use_default_values": defaults})
        return scheduler

    @classmethod
    def from_pretrained(cls, folder: str | Path, subfolder: str | None = None):
        """From the scheduler_config.json of a local folder."""
        return cls.from_config(read_json(Path(folder, subfolder or "", CONFIG_NAME)))

    def _build(self, mapping: Mapping[str, Any]) -> None:
        self._options = self.config_class.from_mapping(mapping, type(self).__name__)
        values = {field.name: getattr(self._options, field.name) for field in fields(self._options)}
        # another scheduler's options stay in the config, so that it can be made from this one
        kept = {key: value for key, value in mapping.items() if not key.startswith("_") and key not in values}
        self.config = FrozenDict({**values, **kept, "_class_name": type(self).__name__})
        self.betas = make_betas(self._options)
        self.alphas = 1.0 - self.betas
        self.alphas_cumprod = make_alpha_bar(self.betas)
        self.num_inference_steps: int | None = None
        self.timesteps = torch.arange(len(self) - 1, -1, -1)
        self._step_options = step_options(self._options)
        self._rows: dict[tuple, Tensor] = {}
        self._rows_of: Tensor | None = None  # the timesteps that the rows were made for
        self._alpha_bar: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return self._options.num_train_timesteps

    def scale_model_input(self, sample: Tensor, timestep: int | Tensor | None = None) -> Tensor:
        """The sample as it is: these samplers do not scale it."""
        return sample

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t of x0 and noise (Ho et al. 2020, eq. 4). Samples (N, ...), timesteps (N,) or a scalar."""
        signal_share, noise_share = self._shares(timesteps, original_samples)
        return signal_share * original_samples + noise_share * noise

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """v of x0 and noise (Salimans & Ho 2022, section 4). Samples (N, ...), timesteps (N,) or a scalar."""
        signal_share, noise_share = self._shares(timesteps, sample)
        return signal_share * noise - noise_share * sample

    def _shares(self, timesteps: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        if like.device not in self._alpha_bar:
            self._alpha_bar[like.device] = self.alphas_cumprod.to(like.device)
        # the roots are taken in float32 or more: diffusers' half-precision 1 - alpha_bar is 0 at small timesteps
        alpha_bar = self._alpha_bar[like.device].to(torch.promote_types(like.dtype, torch.float32))
        alpha_bar = alpha_bar[timesteps.to(like.device)].reshape(-1, *[1] * (like.ndim - 1))
        return alpha_bar.sqrt().to(like.dtype), (1 - alpha_bar).sqrt().to(like.dtype)

    def _row(self, timestep: int, device: torch.device, *options) -> Tensor:
        """The row of a step on the device; made with the rows of all `timesteps`, or alone where it is not of them."""
        if not 0 <= timestep < len(self):
            raise InputError(f"timestep is {timestep}; it is from 0 to {len(self) - 1}")
        if self._rows_of is not self.timesteps:
            self._rows, self._rows_of = {}, self.timesteps
        key = (timestep, device, *options)
        if key not in self._rows:
            chain, rows = self._make_rows(timestep, *options)
            self._rows.update(
                ((t, device, *options), row) for t, row in zip(chain.tolist(), rows.to(device), strict=True)
            )
        return self._rows[key]

    def _make_rows(self, timestep: int, *options) -> tuple[Tensor, Tensor]:
        """Timesteps (steps,), `timestep` among them, and their rows (steps, len(COLUMNS)), on the CPU."""
        raise NotImplementedError

    def _advance(
        self, model_output: Tensor, sample: Tensor, row: Tensor, noise: Tensor | None, return_dict: bool
    ) -> SchedulerOutput | tuple[Tensor, Tensor]:
        dtype = torch.promote_types(sample.dtype, model_output.dtype)
        x_t = sample.to(torch.promote_types(sample.dtype, torch.float32))
        arguments = [_channels_last(tensor) for tensor in (model_output, x_t)]
        noise = None if noise is None else _channels_last(noise)
        x_prev, x0 = denoise_step(*arguments, row, self._step_options, noise=noise)
        output = SchedulerOutput(_channels_first(x_prev).to(dtype), _channels_first(x0).to(dtype))
        return output if return_dict else tuple(output)


class DDPMScheduler(Scheduler):
    """Ancestral sampling (Ho et al. 2020), called as diffusers' DDPMScheduler."""

    config_class = DDPMConfig

    def _build(self, mapping: Mapping[str, Any]) -> None:
        super()._build(mapping)
        self._spaced = False  # whether set_timesteps made the timesteps

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        """Choose the steps of a run: their number, or custom `timesteps` in descending order."""
        if (num_inference_steps is None) == (timesteps is None):
            raise InputError("give either num_inference_steps or timesteps")
        if timesteps is not None:
            self.timesteps = custom_timesteps(self._options, timesteps).to(device)
        else:
            self.timesteps = spaced_timesteps(self._options, num_inference_steps).to(device)
            self.num_inference_steps = num_inference_steps
        self._spaced = True

    def schedule(
        self, num_inference_steps: int, *, eta: float | None = None, use_clipped_model_output: bool | None = None
    ) -> Schedule:
        """The table of a whole run. Raises InputError for the two options that only DDIM has."""
        if eta or use_clipped_model_output:
            name = "eta" if eta else "use_clipped_model_output"
            raise InputError(f"{name} is an option of ddim, and the scheduler is ddpm; leave it out or choose ddim")
        return ddpm_schedule(self._options, num_inference_steps)

    def previous_timestep(self, timestep: int | Tensor) -> int:
        """The timestep that a step goes to: the next of `timesteps` once they are set, -1 after the last."""
        chain, following = self._chain(int(timestep))
        return int(following[chain == int(timestep)])

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        generator: Generator | list[Generator] | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, Tensor]:
        """x_{t-1} and x0 of x_t (N, C, ...) and the model output, (N, C, ...) or with a learned variance (N, 2C, ...).

        Any float dtype; the arithmetic is float32 or more. Without a prior `set_timesteps` it goes to timestep - 1.
        Raises InputError where a timestep cannot be stepped from, ValueError naming a tensor of a wrong shape or dtype.
        """
        t = int(timestep)
        row = self._row(t, sample.device)
        noise = None if t == 0 else randn_tensor(sample.shape, generator, sample.device, model_output.dtype)
        return self._advance(model_output, sample, row, noise, return_dict)

    def _chain(self, timestep: int) -> tuple[Tensor, Tensor]:
        """The timesteps of the run that `timestep` is in and where each step goes to."""
        if not self._spaced:
            return torch.tensor([timestep]), torch.tensor([timestep - 1])
        chain = self.timesteps.cpu()
        if not (chain == timestep).any():
            raise InputError(f"timestep {timestep} is not one of the scheduler's timesteps; call set_timesteps for it")
        return chain, ddpm_following(chain)

    def _make_rows(self, timestep: int) -> tuple[Tensor, Tensor]:
        chain, following = self._chain(timestep)
        return chain, ddpm_rows(self._options, self.alphas_cumprod, chain, following)


class DDIMScheduler(Scheduler):
    """Song et al. 2021, called as diffusers' DDIMScheduler."""

    config_class = DDIMConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose the number of steps of a run."""
        self.timesteps = spaced_timesteps(self._options, num_inference_steps).to(device)
        self.num_inference_steps = num_inference_steps

    def schedule(
        self, num_inference_steps: int, *, eta: float | None = None, use_clipped_model_output: bool | None = None
    ) -> Schedule:
        """The table of a whole run; None is diffusers' default, 0 and False."""
        clipped = bool(use_clipped_model_output)
        return ddim_schedule(self._options, num_inference_steps, eta=eta or 0.0, use_clipped_model_output=clipped)

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        eta: float = 0.0,
        use_clipped_model_output: bool | None = False,
        generator: Generator | list[Generator] | None = None,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, Tensor]:
        """x_{t-1} and x0 of x_t and the model output, both (N, C, ...) of any float dtype.

        The arithmetic is float32 or more. `variance_noise` (N, C, ...) replaces the noise that eta > 0 draws.
        Raises InputError where a timestep cannot be stepped from, ValueError naming a tensor of a wrong shape or dtype.
        """
        if self.num_inference_steps is None:
            raise InputError("the number of steps is not set; call set_timesteps before step")
        if eta > 0 and variance_noise is not None and generator is not None:
            raise InputError("generator and variance_noise both say what the noise is; give one of them")
        row = self._row(int(timestep), sample.device, eta, bool(use_clipped_model_output))
        noise = variance_noise if eta > 0 else None
        if eta > 0 and noise is None:
            noise = randn_tensor(sample.shape, generator, sample.device, model_output.dtype)
        return self._advance(model_output, sample, row, noise, return_dict)

    def _make_rows(self, timestep: int, eta: float, use_clipped_model_output: bool) -> tuple[Tensor, Tensor]:
        chain = self.timesteps.cpu()
        if not (chain == timestep).any():  # diffusers steps from any timestep
            chain = torch.tensor([timestep])
        following = ddim_following(self._options, chain, self.num_inference_steps)
        return chain, ddim_rows(self._options, self.alphas_cumprod, chain, following, eta, use_clipped_model_output)


SCHEDULERS = {"ddpm": DDPMScheduler, "ddim": DDIMScheduler}


def scheduler_from_config(config: Mapping[str, Any], name: str | None = None) -> Scheduler:
    """The scheduler that a config's `_class_name` says, or `name` ("ddpm", "ddim") made from that config.

    Raises InputError for a scheduler that we do not have.
    """
    if name is not None:
        if name not in SCHEDULERS:
            raise InputError(f"scheduler {name!r} is unknown; use {' or '.join(SCHEDULERS)}")
        return SCHEDULERS[name].from_config(config)
    by_class = {scheduler.__name__: scheduler for scheduler in SCHEDULERS.values()}
    if config.get("_class_name") not in by_class:
        said = config.get("_class_name", "without a _class_name")
        raise InputError(f"the model's scheduler is {said}; choose the scheduler {' or '.join(SCHEDULERS)} instead")
    return by_class[config["_class_name"]].from_config(config)


def randn_tensor(
    shape: Sequence[int],
    generator: Generator | list[Generator] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Unit normal noise of `shape` (N, ...), drawn in the order of diffusers' function of this name.

    One generator draws the whole batch, a list one picture each; CPU generators draw on the CPU for any device.
    Raises InputError where a list has not one generator a picture.
    """
    generators = generator if isinstance(generator, list) else [generator]
    if len(generators) == 1:
        return _randn(shape, generators[0], device, dtype)
    if len(generators) != shape[0]:
        raise InputError(f"generator lists {len(generators)} generators for {shape[0]} pictures; give one for each")
    return torch.cat([_randn((1, *shape[1:]), each, device, dtype) for each in generators])


def _randn(shape: Sequence[int], generator: Generator | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    drawn_on = device if generator is None else generator.device
    if drawn_on.type not in ("cpu", device.type):
        raise InputError(f"the generator is on {drawn_on} and the pictures are on {device}; use a CPU generator")
    return torch.randn(tuple(shape), generator=generator, device=drawn_on, dtype=dtype).to(device)


def _channels_last(tensor: Tensor) -> Tensor:
    """A view with the channels, dimension 1, at the end, as the step function has them."""
    return tensor.movedim(1, -1) if tensor.ndim > 1 else tensor


def _channels_first(tensor: Tensor) -> Tensor:
    return tensor.movedim(-1, 1) if tensor.ndim > 1 else tensor
