"""Drawing: the pictures of one call, from its arguments to the states of the denoising loop."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fastdiff.diffusion.conditions import Conditions
from fastdiff.diffusion.loop import AfterStep, denoise
from fastdiff.diffusion.trajectories import KnownValues
from fastdiff.errors import InputError
from fastdiff.execution.devices import naming_lost_device
from fastdiff.execution.memory import Portions, or_explain
from fastdiff.models.blocks.protocols import DenoiserLike
from fastdiff.requests.defaults import SEED, Sampling
from fastdiff.samplers.shared.noise import Generators, Noise
from fastdiff.samplers.shared.schedule import Schedule


@dataclass(frozen=True)
class DrawingOptions:
    """The arguments that `stream` takes in every pipeline, as they are given; `Pipeline.stream` describes them."""

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    eta: float | None = None
    use_clipped_model_output: bool | None = None
    seed: int | Sequence[int] = SEED
    batch_size: int | None = None
    height: int | None = None
    width: int | None = None
    horizon: int | None = None  # of trajectories, instead of height and width
    generator: Generators | None = None
    latents: Tensor | None = None
    output_type: str | None = None
    wait: bool = True

    @property
    def counts(self) -> dict[str, int | None]:
        """The number of pictures that each argument speaks of; None of one that says nothing."""
        return {
            "batch_size": self.batch_size,
            "generator": len(self.generator) if isinstance(self.generator, list) else None,
            "latents": len(self.latents) if self.latents is not None else None,
        }


@dataclass(frozen=True)
class Drawing:
    """The pictures of a call: its arguments are checked, and every choice that they leave open is made."""

    subjects: Sequence[Any]  # one a picture: its label, or the index of its prompt
    shape: tuple[int, int, int]  # (C, H, W) of what the denoiser draws
    sampling: Sampling
    schedule: Schedule  # its rows on the device
    noise: Noise
    latents: Tensor | None  # the starting noise, where the call gives it
    portions: Portions
    output_type: str
    wait: bool  # for the GPU, and for the pictures of the last step

    @property
    def seeds(self) -> Sequence[int]:
        """The seed of each picture."""
        return self.noise.seeds

    def start(self) -> Tensor:
        """Return x_T (N, H, W, C) float32, the noise that the first step sees. Raises OutOfMemoryError."""
        latents = None if self.latents is None else self.latents.reshape(-1, *self.shape)
        with naming_lost_device():
            x_t = or_explain(partial(self.noise.start, latents), self.portions.problem)
            return x_t if self.schedule.init_noise_sigma == 1 else x_t * self.schedule.init_noise_sigma

    def denoise(
        self,
        denoiser: DenoiserLike,
        conditions: Conditions,
        *,
        known: KnownValues | None = None,
        after_step: AfterStep | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the steps of `diffusion.loop.denoise`; the starting noise is drawn at once."""
        x_t = self.start()
        with naming_lost_device():
            noise = self.noise.of_steps(self.schedule.noise_dtype)
        return denoise(
            denoiser,
            x_t,
            self.schedule,
            conditions,
            noise=noise,
            portions=self.portions,
            known=known,
            after_step=after_step,
        )


def refuse(options: dict[str, Any], reasons: Mapping[str, str]) -> None:
    """Take arguments of other pipelines out of `options`. Raises InputError for one that asks for something."""
    for name, reason in reasons.items():
        value = options.pop(name, None)
        if value is not None and value is not False:
            raise InputError(f"{name}: {reason}")
