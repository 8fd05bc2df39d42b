"""TrajectoryPipeline: plans trajectories from seeds with a one-dimensional model.

Seeds -> noise, schedule and known values -> the denoising loop -> trajectories, the best first.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, overload

import torch
from torch import Tensor

from fastdiff.arguments import as_int, naming, shown
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.checkpoints.registry import VAE, VALUE_FUNCTION
from fastdiff.diffusion.pictures import Subjects
from fastdiff.diffusion.results import Step
from fastdiff.diffusion.trajectories import (
    TrajectoryOutput,
    TrajectoryOutputType,
    decode_trajectories,
    known_rows,
    place_conditions,
    read_conditions,
    sort_trajectories,
    trajectory_shape,
)
from fastdiff.errors import InputError
from fastdiff.execution.cpu_workers import map_pictures
from fastdiff.execution.devices import naming_lost_device
from fastdiff.execution.memory import Portions
from fastdiff.kinds import Horizon
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.model import Model
from fastdiff.pipelines.base import Pipeline
from fastdiff.pipelines.drawing import DrawingOptions, accepted, names_of
from fastdiff.requests.defaults import LIBRARY, Sampling
from fastdiff.samplers.shared.schedule import Begin, Schedule
from fastdiff.samplers.shared.scheduler import Scheduler
from fastdiff.schema import checked

REFUSED = {  # arguments of other pipelines and of diffusers, and why they are refused
    "obs": "observations are not normalised here; give conditions={0: state}, with the normalised state",
    "scale": "guidance by the value's gradient is not supported; leave it out, and give sort_by_value=True",
    "prompt": "this model has no text encoder; leave it out, or give a Stable Diffusion model",
    "class_labels": "this model is unconditional; leave them out",
    "image": "this model plans trajectories; leave it out",
    "height": "this model plans trajectories; give horizon instead",
    "width": "this model plans trajectories; give horizon instead",
}


class TrajectoryPipeline(Pipeline):
    """Trajectories of a UNet1DModel, as diffusers' ValueGuidedRLPipeline plans them without guidance.

    Guidance by the gradient of the value is not supported, but `sort_by_value` puts the best trajectories first. A seed
    gives the same bits whatever the batch size, and wherever in the batch it is.
    """

    optional_parts: ClassVar[tuple[str, ...]] = (VALUE_FUNCTION.name,)

    if TYPE_CHECKING:  # a call returns trajectories, where other pipelines return pictures

        @overload  # type: ignore[override]
        def __call__(self, *args: Any, return_dict: Literal[False], **options: Any) -> tuple[Any, ...]: ...

        @overload
        def __call__(self, *args: Any, **options: Any) -> TrajectoryOutput: ...

        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def __init__(
        self,
        denoiser: Denoiser,
        scheduler: Any,
        info: ModelInfo | None = None,
        name: str = "model",
        value_function: Denoiser | None = None,
    ):
        """Make a pipeline of loaded parts.

        Args:
            denoiser: a UNet1DModel of fastdiff that plans trajectories.
            scheduler: a scheduler of fastdiff or of diffusers, DDIM or DDPM.
            info: the defaults of the model, as in its fastdiff.json.
            name: the model's name.
            value_function: a UNet1DModel of fastdiff that rates trajectories.

        Raises InputError if the models do not match.
        """
        super().__init__(denoiser, scheduler, info, name, None)
        _check_parts(denoiser, value_function)
        self._value_function = value_function

    @classmethod
    def _of_card(cls, card: ModelCard, parts: Mapping[str, Any], scheduler: Scheduler) -> "TrajectoryPipeline":
        denoiser, value_function = parts[card.denoiser.name], parts.get(VALUE_FUNCTION.name)
        return cls(denoiser, scheduler, card.info, card.name, value_function)

    def _usual_class(self) -> str:
        return "DDPMPipeline" if self._value_function is None else "ValueGuidedRLPipeline"

    @property
    def components(self) -> dict[str, Any]:
        values = {} if self._value_function is None else {VALUE_FUNCTION.name: self._value_function}
        return values | super().components

    def _arguments(self, parts: dict[str, Any]) -> dict[str, Any]:
        arguments = super()._arguments(parts) | {VALUE_FUNCTION.name: parts.get(VALUE_FUNCTION.name)}
        return {name: value for name, value in arguments.items() if name != VAE.name}

    @property
    def models(self) -> tuple[Model, ...]:
        return (*super().models, *(() if self.value_function is None else (self.value_function,)))

    def stream(
        self,
        *,
        horizon: int | None = None,
        planning_horizon: int | None = None,
        conditions: Mapping[int, Any] | None = None,
        sort_by_value: bool = False,
        n_guide_steps: int = 0,
        num_images: int = LIBRARY.pictures,
        **options: Any,
    ) -> Iterator[Step]:
        """Plan trajectories and yield a `Step` after each step. The last step has the finished `trajectories`.

        `num_images` is the number of trajectories. `batch_size`, a list of generators, latents, or conditions with one
        row for each trajectory set the number instead. Each trajectory has its own seed.

        Args:
            horizon: the number of positions in a trajectory. Default: the model's sample_size, unless that is
                diffusers' default of 65,536.
            planning_horizon: diffusers' name of `horizon`.
            conditions: position -> the known values at that position, such as `{0: state}`. Positions count from 0.
                The values, (k,) or (N, k), are those of the last k channels, and are set in the starting noise and
                after every step. The caller normalises them, as the model's training data was.
            sort_by_value: return the best trajectories first, by the pipeline's value_function.
            n_guide_steps: must be 0. In diffusers it asks for guidance by the gradient of the value, which is not
                supported.
            num_images: the number of trajectories. Trajectory i has seed `seed + i`. A list of seeds replaces it.
            options: the arguments of `Pipeline.stream` except `height` and `width`. A generator draws in the order
                (N, C, L), as a loop over diffusers' UNet1DModel does; `latents` are (N, C, L); `output_type` is
                `"np"` (the default) or `"pt"`.

        Raises as `Pipeline.stream`.
        """
        known = names_of(DrawingOptions) - {"height", "width"}
        asked = accepted(options, known, REFUSED, "pipelines of trajectories")
        _check_unguided(n_guide_steps)
        if horizon is not None and planning_horizon is not None:
            raise InputError("planning_horizon: horizon is also given; leave out one of the two")
        checked("planning_horizon", planning_horizon, Horizon | None)
        horizon = planning_horizon if horizon is None else horizon
        positions = read_conditions(conditions)
        subjects = Subjects("trajectories", [None], "num_images", num_images)
        drawing = self._begin(DrawingOptions(horizon=horizon, **asked), subjects, conditions=known_rows(positions))
        channels, _, length = drawing.shape
        placed = place_conditions(positions, length, channels, self.device)
        ranking = self._ranking(sort_by_value, length)
        steps = drawing.denoise(self.denoiser, self._conditions(drawing), known=placed)
        return self._planned(self._run(drawing, steps), drawing.portions, ranking)

    def _planned(self, steps: Iterator[Step], portions: Portions, ranking: Denoiser | None) -> Iterator[Step]:
        """Yield the steps. The last one has the finished trajectories, the best first if there is a `ranking`."""
        for step in steps:
            if step.finish is None:
                yield step
                continue
            with naming_lost_device():
                trajectories = self._sort(step.x_t, step.images, portions, ranking)
            yield replace(step, finish=None, trajectories=trajectories)

    def _sort(self, x: Tensor, trajectories: Any, portions: Portions, ranking: Denoiser | None) -> TrajectoryOutput:
        """Return the decoded `trajectories` of x (N, 1, L, C), the best first if there is a `ranking`."""
        if ranking is None:
            return TrajectoryOutput(trajectories)
        with self._working(ranking):
            values = portions.map(lambda part: _values(ranking, x[part]), len(x))
        return sort_trajectories(trajectories, torch.cat(values))

    def _ranking(self, sort_by_value: bool, horizon: int) -> Denoiser | None:
        """Return the model that rates trajectories for sorting, or None. Raises InputError if there is none to use."""
        if not checked("sort_by_value", sort_by_value, bool):
            return None
        if self.value_function is None:
            raise InputError("sort_by_value: this pipeline has no value_function; leave it out")
        with naming("sort_by_value: the value_function"):
            self.value_function.config.check_size(1, horizon)
        return self.value_function

    def _begin_decode(self, x: Tensor, output_type: str) -> Callable[[], Any]:
        """As in `Parts`, for trajectories: x (N, 1, L, C) is returned as (N, C, L). See `decode_trajectories`."""
        return partial(decode_trajectories, x, output_type)

    def _output_type(self, output_type: Any) -> str:
        default, *_ = get_args(TrajectoryOutputType)
        return checked("output_type", default if output_type is None else output_type, TrajectoryOutputType)

    def _shape(self, options: DrawingOptions) -> tuple[int, int, int]:
        """Return the shape (C, 1, L) of the denoiser's output."""
        return trajectory_shape(self.denoiser.config, options.horizon, options.latents)

    def _schedule(
        self,
        sampling: Sampling,
        timesteps: Any = None,
        sigmas: Any = None,
        begin: Begin | None = None,
        shape: tuple[int, int, int] | None = None,
    ) -> Schedule:
        schedule = super()._schedule(sampling, timesteps, sigmas, begin, shape)
        if schedule.scales_input or schedule.multistep:
            raise InputError(f"scheduler {self.scheduler_name}: trajectories need ddim or ddpm; choose one of them")
        return schedule


def _check_parts(denoiser: Denoiser, value_function: Any) -> None:
    """Raise InputError if the denoiser is a value function, or the value function does not match the denoiser."""
    if denoiser.config.is_value_function:
        raise InputError("denoiser: this model is a value function; give the model that plans trajectories")
    if value_function is None:
        if not denoiser.config.of_trajectories:
            raise InputError(f"denoiser: a {type(denoiser).__name__} draws pictures; use it in a LabelPipeline")
        return
    if not isinstance(value_function, Denoiser) or not value_function.config.is_value_function:
        raise InputError(f"value_function: {type(value_function).__name__} is no value function; give one")
    channels, known = denoiser.config.sample_channels, value_function.config.sample_channels
    if not denoiser.config.of_trajectories or channels != known:
        raise InputError(
            f"value_function: it takes trajectories of {known} channels, and the denoiser does not make them; "
            "give the value function that was trained with it"
        )


def _check_unguided(n_guide_steps: Any) -> None:
    """Raise InputError if guidance by the gradient of the value is asked for: our kernels have no backward pass."""
    if as_int(n_guide_steps) != 0:
        raise InputError(
            f"n_guide_steps: {shown(n_guide_steps)} asks for guidance by the value's gradient, which is not supported; "
            "leave it out, and sort the trajectories with sort_by_value=True"
        )


def _values(value_function: Denoiser, x: Tensor) -> Tensor:
    """Return the values (N,) float32 of x_0 (N, 1, L, C), at timestep 0, where every run ends."""

    def values(each: Tensor) -> Tensor:
        return value_function(each.to(value_function.dtype), 0).sample.float()

    trajectories = x[:, 0].transpose(1, 2)
    if x.device.type == "cpu":  # one at a time, as in the loop, so that the bits do not depend on the batch
        return torch.cat(tuple(map_pictures(values, trajectories)))[:, 0]
    return values(trajectories)[:, 0]
