"""Heun's second-order method (Karras et al. 2022, arXiv 2206.00364, algorithm 1), as in diffusers' scheduler.

A step calls the model twice. The first call follows the tangent d = (x - x0) / sigma to the next sigma. The second call
computes the tangent d' there and repeats the step along the mean of both tangents. The step to sigma zero makes only
the first call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.kinds import Fraction
from fastdiff.samplers.shared.counted import NoiselessScheduler
from fastdiff.samplers.shared.options import ClippingConfig, DiffusionConfig, SpacedSigmaConfig
from fastdiff.samplers.shared.schedule import clip_range, stack_sigma_columns
from fastdiff.samplers.shared.sigma_scheduler import ScaledScheduler, check_chosen
from fastdiff.samplers.shared.sigmas import Array, float_sigmas, float_timesteps, sigma_x0_columns, tangent_columns
from fastdiff.samplers.shared.timesteps import checked_steps, custom_numbers


@dataclass(frozen=True, kw_only=True)
class HeunConfig(SpacedSigmaConfig, ClippingConfig):
    """The options of diffusers' HeunDiscreteScheduler."""

    beta_start: Fraction = 0.00085
    beta_end: Fraction = 0.012
    clip_sample: bool = False

    BETA_SCHEDULES: ClassVar[tuple[str, ...]] = (*DiffusionConfig.BETA_SCHEDULES, "exp")


def heun_sigmas(config: HeunConfig, alpha_bar: Tensor, timesteps: Array) -> tuple[Tensor, Tensor]:
    """Return the timesteps (2 * steps - 1,) and sigmas (2 * steps,) of a run's calls over `timesteps`, both float32.

    Each call has its sigma. All sigmas but the first and the last come twice: at the end of a step, and at the start of
    the next.
    """
    of_steps, sigmas = float_sigmas(config, alpha_bar, timesteps)
    calls = torch.cat([of_steps[:1], of_steps[1:].repeat_interleave(2)])
    return calls, torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])


def heun_rows(config: HeunConfig, sigmas: Tensor, begin: int = 0) -> Tensor:
    """Return a row for each call over sigmas (calls + 1,) float32, for a loop that begins with call `begin`.

    (calls, len(COLUMNS)) float32. Raises InputError that names a call without a solution.
    """
    sigma, following = sigmas[:-1].double(), sigmas[1:].double()
    before = sigma.roll(1)  # where a second call's step began; unused for first calls
    again = (torch.arange(len(sigma)) - begin) % 2 == 1
    way = torch.where(again, (sigma - before) / 2, following - sigma)  # along this call's tangent
    tangent = tangent_columns(config.prediction_type, sigma, config.clip_sample)
    columns = sigma_x0_columns(config.prediction_type, sigma) | tangent
    columns |= {
        "prev_x": (~again).double() + way * tangent["keep_x"],
        "prev_x0": way * tangent["keep_x0"],
        "prev_m": way * tangent["keep_m"],
        "prev_y": again.double(),
        "prev_h1": way * again,
        "y_x": (~again).double(),
        "y_s": again.double(),
        "clip_range": torch.full_like(sigma, clip_range(config)),
    }
    return stack_sigma_columns(columns, sigma)


class HeunDiscreteScheduler(ScaledScheduler, NoiselessScheduler):
    """Heun's second-order method (Karras et al. 2022), with the interface of diffusers' `HeunDiscreteScheduler`.

    `HeunConfig` lists its options, which have diffusers' names and defaults. Each step but the last calls the model
    twice, so a run of n steps has 2n - 1 `timesteps`.
    """

    names: ClassVar = {
        "heun": {},
        "heun-karras": {"use_karras_sigmas": True, "use_exponential_sigmas": False, "use_beta_sigmas": False},
    }
    a1111_names: ClassVar = {"heun": "Heun"}
    place: ClassVar = 6
    order = 2
    config_class = HeunConfig
    multistep = True
    rounds_to_output = False
    _options: HeunConfig

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        num_train_timesteps: int | None = None,
        timesteps: Sequence[float] | None = None,
    ) -> None:
        """Set the steps of a run: their number, or custom `timesteps`. Each step but the last makes two calls.

        Raises InputError unless exactly one of the two is given, for custom timesteps if the config spaces the sigmas
        in another way (such as use_karras_sigmas), and for a `num_train_timesteps` that differs from the config's.
        """
        check_chosen(self._options, num_inference_steps=num_inference_steps, timesteps=timesteps)
        if num_train_timesteps not in (None, len(self)):
            raise InputError(f"num_train_timesteps: the config has {len(self)}; leave it out, or change the config")
        if timesteps is None:
            chosen = float_timesteps(self._options, checked_steps(self._options, num_inference_steps))
        else:
            chosen = custom_numbers("timesteps", timesteps, len(self) - 1).astype("float32")
        self._choose(*heun_sigmas(self._options, self.alphas_cumprod, chosen), device)
        self.num_inference_steps = len(chosen)

    def _make_table(self, begin: int) -> Tensor:
        return heun_rows(self._options, self.sigmas, begin)
