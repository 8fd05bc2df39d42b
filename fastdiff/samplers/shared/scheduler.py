"""Scheduler, the base of every sampler: diffusers' interface over a sampler's rows.

`schedule` returns the whole loop as a table, for a pipeline. `step` takes one row at a time, for loops written as in
diffusers. Both use the same rows and run them with `denoise_step`.
"""

import copy
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastdiff.arguments import as_int, by_name, mapping, renamed, shown
from fastdiff.checkpoints.loading import ACCEPTED, REFUSED, check_foreign
from fastdiff.checkpoints.saving import Configured, FrozenDict, divided
from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, REAL, WHOLE, beside, tensor, within
from fastdiff.kernels.denoise import denoise_step
from fastdiff.kinds import NotNegative
from fastdiff.outputs import read_by_name
from fastdiff.refused import OF_SCHEDULERS
from fastdiff.sampler_names import ETAS, SAMPLERS
from fastdiff.samplers.shared.betas import make_alpha_bar, make_betas
from fastdiff.samplers.shared.noise import Generators, check_generators
from fastdiff.samplers.shared.options import FOREIGN_OPTIONS, DiffusionConfig, marked_defaults
from fastdiff.samplers.shared.schedule import Begin, Schedule, step_options
from fastdiff.schema import checked, signature

CONFIG_NAME = "scheduler_config.json"

AnyScheduler = TypeVar("AnyScheduler", bound="Scheduler")


@read_by_name
class SchedulerOutput(NamedTuple):
    """The result of a step, as in diffusers' DDPMSchedulerOutput and DDIMSchedulerOutput. Both are (N, C, ...)."""

    prev_sample: Tensor  # x_{t-1}
    pred_original_sample: Tensor  # x0 as predicted at this step, after clipping


class Scheduler(Configured):
    """The base of all samplers, with the interface of diffusers' schedulers.

    Options are keyword arguments with diffusers' names and defaults. Each scheduler's `config_class` lists them.
    """

    refused = OF_SCHEDULERS
    config_name = CONFIG_NAME
    names: ClassVar[dict[str, dict[str, Any]]] = {}  # user-facing names, and the options that each sets
    a1111_names: ClassVar[dict[str, str]] = {}  # AUTOMATIC1111's names, where they are not `names` in capitals
    place: ClassVar[float] = math.inf  # the position in lists of names
    default_eta: ClassVar[float | None] = None  # of `step`; None: its steps take no eta
    follows_flow: ClassVar[bool] = False  # whether it only runs models that predict the velocity of a flow
    order = 1  # model calls per step
    init_noise_sigma: float | Tensor = 1.0
    config_class: ClassVar[type[DiffusionConfig]] = DiffusionConfig
    # The options that the constructor takes by position
    positions: ClassVar = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas")
    has_compatibles = True

    _options: DiffusionConfig

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__signature__ = signature(cls.config_class, cls.positions)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **options: Any):
        """Build a scheduler from diffusers' options.

        Args:
            args: the options that `positions` names, in this order.
            options: Options by keyword. `config_class` lists them.

        Raises InputError that names an option that this scheduler does not have, or a wrong value.
        """
        options = by_name(self.positions, args, options, type(self).__name__)
        self._check_own(options)
        self._build(options)

    @classmethod
    def from_config(
        cls: type[AnyScheduler], config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any
    ) -> AnyScheduler:
        """Build a scheduler from the `.config` of any fastdiff or diffusers scheduler, or from a dict.

        Args:
            config: The options by name.
            return_unused_kwargs: Return a tuple of the scheduler and the kwargs that are not options of it.
            kwargs: Options that override the config.

        Raises InputError that names a keyword that is not an option of this scheduler, an unknown option, or a wrong
        value.
        """
        if checked("return_unused_kwargs", return_unused_kwargs, bool):
            own, unused = divided(kwargs, cls.config_class.names())
            return cls.from_config(config, **own), unused  # type: ignore[return-value]  # as in diffusers
        config = mapping("config", config)
        cls._check_own(kwargs)
        scheduler = cls.__new__(cls)
        defaults = [name for name in marked_defaults(config) if name not in kwargs]
        scheduler._build({**config, **kwargs, "_use_default_values": defaults})
        return scheduler

    @classmethod
    def from_pretrained(
        cls: type[AnyScheduler],
        pretrained_model_name_or_path: str | Path | None = None,
        subfolder: str | None = None,
        return_unused_kwargs: bool = False,
        **kwargs: Any,
    ) -> AnyScheduler:
        """Build a scheduler from a saved scheduler_config.json.

        Args:
            pretrained_model_name_or_path: A folder, the name of a bundled model, or a hub id.
            subfolder: The part of a pipeline's folder, such as "scheduler".
            return_unused_kwargs: Return a tuple of the scheduler and the kwargs without use.
            kwargs: Options of the hub (`cache_dir`, `force_download`, `local_files_only`, `revision`, `token`), and
                options that override the file.

        Raises InputError if the file cannot be used, and as `from_config`.
        """
        name = renamed("pretrained_model_name_or_path", pretrained_model_name_or_path, "folder", kwargs)
        config, changes = cls.load_config(name, True, subfolder=subfolder, **kwargs)
        if not return_unused_kwargs:
            foreign, changes = divided(changes, (*REFUSED, *ACCEPTED))
            check_foreign(foreign)
        return cls.from_config(config, return_unused_kwargs, **changes)

    @property
    def compatibles(self) -> list[type["Scheduler"]]:
        """Every scheduler of fastdiff, as `from_config` of each takes this scheduler's config."""
        return [getattr(import_module(sampler.module), name) for name, sampler in SAMPLERS.items()]

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the config as a folder's scheduler_config.json, which diffusers reads back.

        As in diffusers, the file does not say which options were left at their defaults. Raises InputError for a place
        that cannot be written, and for `push_to_hub`.
        """
        self.save_config(save_directory, push_to_hub, **kwargs)

    @classmethod
    def _check_own(cls, asked: Mapping[str, Any]) -> None:
        """Raise InputError for options of other schedulers. A config may hold them, but a caller must not pass them."""
        others = sorted(FOREIGN_OPTIONS.difference(cls.config_class.names()).intersection(asked))
        if others:
            raise InputError(f"{cls.__name__} has no {', '.join(others)}; leave it out, or choose another scheduler")

    def _build(self, mapping: Mapping[str, Any]) -> None:
        self._options = self.config_class.from_mapping(mapping, type(self).__name__)
        values = {name: getattr(self._options, name) for name in self._options.names()}
        defaults = {*marked_defaults(mapping)}
        # keep other schedulers' options in the config, so that those schedulers can be built from it
        foreign = (key for key in mapping if not key.startswith("_") and key not in values and key not in defaults)
        kept = {key: mapping[key] for key in foreign}
        marked = {*(values.keys() - mapping.keys()), *(values.keys() & defaults)}
        own = {"_class_name": type(self).__name__, "_use_default_values": sorted(marked)}
        self.config = FrozenDict({**values, **kept, **own})
        self.num_inference_steps: int | None = None
        self.timesteps = torch.arange(len(self) - 1, -1, -1)
        self._make_process()
        self._step_options = step_options(self._options)
        self._rows: dict[tuple, Tensor] = {}
        self._rows_of: Tensor | None = None  # the timesteps of `_rows`
        self._alpha_bar: dict[torch.device, Tensor] = {}

    def _make_process(self) -> None:
        """Compute the noise levels of the forward process."""
        self.betas = make_betas(self._options)
        self.alphas = 1.0 - self.betas
        self.alphas_cumprod = make_alpha_bar(self.betas)

    def mark_defaults(self, options: Iterable[str]) -> None:
        """Mark options as defaults, whatever their values. Schedulers built from `config` use their own defaults."""
        marked = {*marked_defaults(self.config), *(self.config.keys() & {*options})}
        self.config = FrozenDict({**self.config, "_use_default_values": sorted(marked)})

    def __len__(self) -> int:
        return self._options.num_train_timesteps

    def scale_model_input(self, sample: Tensor, timestep: int | Tensor | None = None) -> Tensor:
        """Return the sample unchanged. Schedulers that scale the model's input override this method."""
        if isinstance(timestep, Tensor):
            tensor("timestep", timestep, REAL)
        else:
            checked("timestep", timestep, NotNegative | None)
        return tensor("sample", sample, FLOATS)

    def schedule(
        self,
        num_inference_steps: int | None = None,
        *,
        eta: float | None = None,
        use_clipped_model_output: bool | None = None,
        timesteps: Sequence[float] | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
        begin: Begin | None = None,
    ) -> Schedule:
        """Return the schedule of a run. This scheduler does not change.

        Args:
            num_inference_steps: The number of steps.
            eta: The amount of noise in a step, only for a sampler whose `step` takes it. None: the default of `step`.
            use_clipped_model_output: Only for DDIM.
            timesteps: Custom timesteps instead of a number, for a sampler whose `set_timesteps` takes them.
            sigmas: Custom sigmas instead of a number, for a sampler whose `set_timesteps` takes them.
            mu: The amount of a dynamic shift, for a sampler whose `set_timesteps` takes it.
            begin: Chooses the model call that the run begins with. Earlier calls are left out, as after diffusers'
                `set_begin_index`: no step reads what they would have kept. The schedule then has `shares`.

        Raises InputError unless exactly one of `num_inference_steps`, `timesteps` and `sigmas` is given, and an
        InputError that names an option that cannot be used.
        """
        eta = checked("eta", eta, NotNegative | None)
        clipped = checked("use_clipped_model_output", use_clipped_model_output, bool | None)
        loop = self._loop(mu, num_inference_steps=num_inference_steps, timesteps=timesteps, sigmas=sigmas)
        if begin is None:
            return loop._schedule(eta, bool(clipped))
        steps = len(loop.timesteps) if num_inference_steps is None else int(num_inference_steps)  # as in diffusers
        first = begin(loop.timesteps, steps, self.order)
        loop._begin_at(first)
        return loop._schedule(eta, bool(clipped)).since(first, loop._shares_of_run())

    def _schedule(self, eta: float | None, use_clipped_model_output: bool) -> Schedule:
        """Return the schedule of the current `timesteps` for checked options."""
        if eta or use_clipped_model_output:
            name, owners = ("eta", " and ".join(ETAS)) if eta else ("use_clipped_model_output", "ddim")
            raise InputError(f"{name} is an option of {owners}, not of {type(self).__name__}; leave it out")
        return self._table_of_loop()

    def _loop(self: AnyScheduler, mu: float | None, **choices: Any) -> AnyScheduler:
        """Return a copy of the scheduler with a run of chosen steps. This scheduler does not change."""
        chosen = {name: value for name, value in choices.items() if value is not None}
        if len(chosen) != 1:
            raise InputError("give one of num_inference_steps, timesteps and sigmas")
        if mu is not None:
            chosen["mu"] = mu
        for name in chosen:
            if not self.takes(name):
                what = name if name == "mu" else f"custom {name}"
                raise InputError(f"{name}: {type(self).__name__} does not support {what}; use {_which_take(name)}")
        loop = copy.copy(self)
        loop.set_timesteps(**chosen)
        return loop

    @classmethod
    def takes(cls, name: str) -> bool:
        """Return whether `set_timesteps` takes an argument of this name, such as "timesteps" or "sigmas"."""
        return name in inspect.signature(cls.set_timesteps).parameters

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Set the number of steps of a run, and make `timesteps` on `device`.

        Raises InputError unless the number is from 1 to the number of training timesteps, and if `steps_offset` moves a
        timestep outside them.
        """
        raise NotImplementedError

    def _table_of_loop(self) -> Schedule:
        """Return the schedule of the current `timesteps`."""
        raise NotImplementedError

    def _begin_at(self, index: int) -> None:
        """Make the run begin with a model call. Samplers whose rows do not depend on it do nothing."""

    def _shares_of_run(self) -> Tensor:
        """Return the shares of x_0 and noise in each call's x_t, (calls, 2) float32."""
        like = torch.ones(len(self.timesteps))
        return torch.stack(self._shares(self.timesteps, like, original_samples=like), dim=1)

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return `x_t` from x0 and noise (Ho et al. 2020, eq. 4). Samples are (N, ...), timesteps (N,) or a scalar."""
        signal_share, noise_share = self._shares(timesteps, noise, original_samples=original_samples)
        return signal_share * original_samples + noise_share * noise

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return v from x0 and noise (Salimans and Ho 2022, section 4).

        Samples are (N, ...), timesteps (N,) or a scalar.
        """
        signal_share, noise_share = self._shares(timesteps, noise, sample=sample)
        return signal_share * noise - noise_share * sample

    def _shares(self, timesteps: Tensor, noise: Tensor, **samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares of signal and noise at timesteps, in a shape that broadcasts with the tensor in `samples`.

        Raises InputError that names the tensor that does not fit.
        """
        ((name, like),) = samples.items()
        tensor(name, like, FLOATS)
        beside("noise", tensor("noise", noise, FLOATS), like.device)
        within("timesteps", tensor("timesteps", timesteps, WHOLE), 0, len(self) - 1)
        try:
            torch.broadcast_shapes(like.shape, noise.shape, (timesteps.numel() or -1, *[1] * (like.ndim - 1)))
        except RuntimeError:
            shapes = f"{tuple(noise.shape)}, timesteps {tuple(timesteps.shape)} and {name} {tuple(like.shape)}"
            raise InputError(f"noise {shapes} do not fit together; give a noise and a timestep for each") from None
        if like.device not in self._alpha_bar:
            self._alpha_bar[like.device] = self.alphas_cumprod.to(like.device)
        # take the roots in float32 or more: diffusers' half-precision 1 - alpha_bar is 0 at small timesteps
        alpha_bar = self._alpha_bar[like.device].to(torch.promote_types(like.dtype, torch.float32))
        alpha_bar = alpha_bar[timesteps.to(like.device, torch.int64)].reshape(-1, *[1] * (like.ndim - 1))
        return alpha_bar.sqrt().to(like.dtype), (1 - alpha_bar).sqrt().to(like.dtype)

    def _checked_step(
        self,
        timestep: int | Tensor,
        sample: Tensor,
        generator: Generators | None,
        return_dict: bool,
        **others: Tensor,
    ) -> int:
        """Check the arguments that all samplers' steps share, and return the timestep as an int."""
        self._check_tensors(sample, generator, return_dict, **others)
        found = as_int(timestep)
        if found is None or not 0 <= found < len(self):
            raise InputError(f"timestep is {shown(timestep)}; it must be from 0 to {len(self) - 1}")
        return found

    def _check_tensors(self, sample: Tensor, generator: Generators | None, return_dict: bool, **others: Tensor) -> None:
        tensor("sample", sample, FLOATS)
        if not sample.ndim or not sample.numel():
            raise InputError(f"sample: its shape is {tuple(sample.shape)}; give (N, C, ...)")
        for name, value in others.items():
            beside(name, tensor(name, value, FLOATS), sample.device)
        check_generators(generator, sample.device)
        checked("return_dict", return_dict, bool)

    def _row(self, timestep: int, device: torch.device, *options: float) -> Tensor:
        """Return a step's row on the device. The rows of all `timesteps` are computed together, any other row alone."""
        if self._rows_of is not self.timesteps:
            self._rows, self._rows_of = {}, self.timesteps
        key = (timestep, device, *options)
        if key not in self._rows:
            chain, rows = self._make_rows(timestep, *options)
            self._rows.update(
                ((t, device, *options), row) for t, row in zip(chain.tolist(), rows.to(device), strict=True)
            )
        return self._rows[key]

    def _make_rows(self, timestep: int, *options: float) -> tuple[Tensor, Tensor]:
        """Return timesteps (steps,), which include `timestep`, and their rows (steps, len(COLUMNS)), on the CPU."""
        raise NotImplementedError

    def _advance(
        self, model_output: Tensor, sample: Tensor, row: Tensor, noise: Tensor | None, return_dict: bool
    ) -> SchedulerOutput | tuple[Tensor, Tensor]:
        dtype = torch.promote_types(sample.dtype, model_output.dtype)
        x_prev, x0 = self._stepped(model_output, sample, row, noise)
        result = SchedulerOutput(x_prev.to(dtype), x0.to(dtype))
        return result if return_dict else (result.prev_sample, result.pred_original_sample)

    def _stepped(
        self,
        model_output: Tensor,
        sample: Tensor,
        row: Tensor,
        noise: Tensor | None,
        earlier: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Run the step function on samples (N, C, ...).

        Return x_{t-1} and x0, (N, C, ...) in the dtype of the arithmetic, and with `earlier` the next step's.
        """
        x_t = sample.to(torch.promote_types(sample.dtype, torch.float32))
        output, x_t = channels_last(model_output), channels_last(x_t)
        noise = None if noise is None else channels_last(noise)
        try:
            x_prev, x0, *kept = denoise_step(output, x_t, row, self._step_options, noise=noise, earlier=earlier)
        except ValueError as error:  # names the tensor with the wrong shape
            raise InputError(f"step: {error}") from None
        return _channels_first(x_prev), _channels_first(x0), *kept


def _which_take(name: str) -> str:
    """Return the samplers whose `set_timesteps` takes an argument, each by its first name."""
    classes = [getattr(import_module(sampler.module), class_name) for class_name, sampler in SAMPLERS.items()]
    *names, last = (next(iter(each.names)) for each in classes if each.takes(name))
    return f"{', '.join(names)} or {last}" if names else last


def channels_last(tensor: Tensor) -> Tensor:
    """Return a view with the channels, dimension 1, last, as the step function expects."""
    return tensor.movedim(1, -1) if tensor.ndim > 1 else tensor


def _channels_first(tensor: Tensor) -> Tensor:
    return tensor.movedim(-1, 1) if tensor.ndim > 1 else tensor
