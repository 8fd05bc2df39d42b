"""Drawing: one call of a pipeline, from its arguments to the steps of the denoising loop."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from fastdiff.diffusion.conditions import Conditions
from fastdiff.diffusion.known_pixels import KnownPixels
from fastdiff.diffusion.loop import AfterStep, Control, Known, denoise
from fastdiff.errors import InputError
from fastdiff.execution.devices import naming_lost_device
from fastdiff.execution.memory import Portions, or_explain
from fastdiff.models.blocks.protocols import DenoiserLike
from fastdiff.requests.defaults import SEED, Sampling
from fastdiff.samplers.shared.noise import Generators, Noise
from fastdiff.samplers.shared.schedule import Schedule

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AnyOptions = TypeVar("AnyOptions", bound="DataclassInstance")


@dataclass(frozen=True)
class DrawingOptions:
    """The arguments that every pipeline's `stream` takes, unchecked. `Pipeline.stream` describes them."""

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    eta: float | None = None
    use_clipped_model_output: bool | None = None
    seed: int | Sequence[int] = SEED
    batch_size: int | None = None
    height: int | None = None
    width: int | None = None
    horizon: int | None = None  # of trajectories, instead of height and width
    timesteps: Any = None
    sigmas: Any = None
    generator: Generators | None = None
    latents: Tensor | None = None
    output_type: str | None = None
    wait: bool = True

    @property
    def counts(self) -> dict[str, int | None]:
        """Argument name -> the number of pictures that it asks for, or None if it leaves the number open."""
        return {
            "batch_size": self.batch_size,
            "generator": len(self.generator) if isinstance(self.generator, list) else None,
            "latents": len(self.latents) if self.latents is not None else None,
        }


class Started(NamedTuple):
    """Holds what `diffusion.loop.denoise` starts from."""

    x_t: Tensor  # (N, H, W, C) float32
    known: KnownPixels | None = None
    inputs: Tensor | None = None

    def of_rows(self, rows: list[int]) -> "Started":
        """Return what some pictures of the batch start from."""
        known = None if self.known is None else self.known.of_rows(rows)
        return Started(self.x_t[rows], known, None if self.inputs is None else self.inputs[rows])


class Start(Protocol):
    """Starts a run from more than noise."""

    @property
    def masked(self) -> bool:
        """Whether a mask says what to paint anew."""
        ...

    def begin(self, timesteps: Tensor, steps: int, order: int) -> int:
        """Return the index of the first model call; see `samplers.shared.schedule.Begin`."""
        ...

    def check_count(self, pictures: int) -> None:
        """Raise InputError unless it can start so many pictures."""
        ...

    def prepare(self, noise: Noise, schedule: Schedule, latents: Tensor | None) -> Started:
        """Draw the noise in diffusers' order, or take `latents` (N, C, H, W), and return what the loop starts from."""
        ...


@dataclass(frozen=True)
class Drawing:
    """The pictures of a call, with all arguments checked and all defaults set."""

    subjects: Sequence[Any]  # for each picture: its label, or the index of its prompt
    shape: tuple[int, int, int]  # (C, H, W) of the denoiser's output
    sampling: Sampling
    schedule: Schedule  # its rows are on the device
    noise: Noise
    latents: Tensor | None  # the starting noise, if the caller gave it
    portions: Portions
    output_type: str
    wait: bool  # whether to keep only a few steps in the GPU's queue, and wait for the pictures of the last step
    starts_from: Start | None = None  # None: noise alone

    @property
    def seeds(self) -> Sequence[int]:
        """The seed of each picture."""
        return self.noise.seeds

    def start(self) -> Started:
        """Return what the loop starts from, such as x_T, the input of the first step. Raises OutOfMemoryError."""
        latents = None if self.latents is None else self.latents.reshape(-1, *self.shape)
        with naming_lost_device():
            if self.starts_from is not None:
                draw = partial(self.starts_from.prepare, self.noise, self.schedule, latents)
                return or_explain(draw, self.portions.problem)
            x_t = or_explain(partial(self.noise.start, latents), self.portions.problem)
            x_t = x_t if self.schedule.init_noise_sigma == 1 else x_t * self.schedule.init_noise_sigma
            return Started(x_t)

    def denoise(
        self,
        denoiser: DenoiserLike,
        conditions: Conditions,
        *,
        known: Known | None = None,
        control: Control | None = None,
        after_step: AfterStep | None = None,
        begun: Callable[[Started], None] | None = None,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Draw the starting noise, and return an iterator over the steps of `diffusion.loop.denoise`.

        `begun` is called with what the loop starts from. It may change its masks in place during the run.
        """
        started = self.start()
        if begun is not None:
            begun(started)
        with naming_lost_device():
            noise = self.noise.of_steps(self.schedule.noise_dtype)
        return denoise(
            denoiser,
            started.x_t,
            self.schedule,
            conditions,
            noise=noise,
            portions=self.portions,
            known=started.known if known is None else known,
            inputs=started.inputs,
            control=control,
            after_step=after_step,
        )


def accepted(
    options: Mapping[str, Any], known: Collection[str], refused: Mapping[str, str], whose: str
) -> dict[str, Any]:
    """Return the options of a call that a pipeline takes.

    Args:
        options: argument name -> value.
        known: the names that the pipeline takes.
        refused: the arguments of other pipelines and of diffusers that it does not take, and why. None and False ask
            for nothing.
        whose: what kind of pipeline it is, for errors.

    Raises InputError for an argument that is refused, and for an unknown one.
    """
    for name in sorted(options.keys() - known):
        if name not in refused:
            raise InputError(f"{name}: {whose} have no such argument; leave it out")
        if options[name] is not None and options[name] is not False:
            raise InputError(f"{name}: {refused[name]}")
    return {name: value for name, value in options.items() if name in known}


def options_of(kind: type[AnyOptions], options: Mapping[str, Any]) -> AnyOptions:
    """Make a `kind` of those `options` that are its fields."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in options.items() if name in names})


def names_of(*kinds: type) -> set[str]:
    """Return the names of the fields of dataclasses."""
    return {field.name for kind in kinds for field in fields(kind)}
