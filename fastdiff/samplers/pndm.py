"""PNDM without Runge-Kutta steps (Liu et al. 2022, arXiv 2202.09778), as in diffusers' PNDMScheduler.

This is Stable Diffusion's scheduler. A step is DDIM's (eq. 9), with a weighted mean of the last four
outputs (eq. 12). The second call repeats the first step with the mean of both outputs, so a run makes one call more
than it has steps.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.samplers.shared.counted import NoiselessScheduler
from fastdiff.samplers.shared.options import DiffusionConfig
from fastdiff.samplers.shared.schedule import stack_columns
from fastdiff.samplers.shared.timesteps import check_within, checked_steps
from fastdiff.schema import checked

# Weights of the output and of h1, h2 and h3, indexed by the number of earlier steps. The second call has its own.
MEANS = ((1.0, 0.0, 0.0, 0.0), (3 / 2, -1 / 2, 0.0, 0.0), (23 / 12, -16 / 12, 5 / 12, 0.0))
LAST_MEAN = (55 / 24, -59 / 24, 37 / 24, -9 / 24)
SECOND_CALL = (1 / 2, 1 / 2, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class PNDMConfig(DiffusionConfig):
    """The options of diffusers' PNDMScheduler, without Runge-Kutta steps before the linear multistep ones."""

    prediction_type: Literal["epsilon", "v_prediction"] = "epsilon"
    skip_prk_steps: bool = False
    set_alpha_to_one: bool = False  # alpha_bar after the last step: 1, or the one at timestep 0

    def check(self) -> None:
        super().check()
        if not self.skip_prk_steps:
            raise InputError("skip_prk_steps False is not supported; set skip_prk_steps to True")


def pndm_timesteps(config: PNDMConfig, num_inference_steps: int) -> Tensor:
    """Return the timesteps of a run's calls, descending, (steps + 1,) int64. The second one comes twice.

    A run of one step has one call, (1,). Raises InputError for a number of steps that is not from 1 to the number of
    training steps, and for an offset that moves a timestep outside the training steps.
    """
    steps, total = checked_steps(config, num_inference_steps), config.num_train_timesteps
    if config.timestep_spacing == "linspace":
        timesteps = np.linspace(0, total - 1, steps).round().astype(np.int64)
    elif config.timestep_spacing == "leading":
        timesteps = np.arange(0, steps) * (total // steps) + config.steps_offset
    else:
        timesteps = np.round(np.arange(total, 0, -total / steps))[:steps][::-1].astype(np.int64) - 1
    check_within(config, timesteps)
    calls = np.concatenate([timesteps[:-1], timesteps[-2:-1], timesteps[-1:]])[::-1].copy()
    return torch.from_numpy(calls.astype(np.int64))


def pndm_rows(
    config: PNDMConfig, alpha_bar: Tensor, timesteps: Tensor, num_inference_steps: int, begin: int = 0
) -> Tensor:
    """Return a row for each call, for a loop that begins with call `begin`. (calls, len(COLUMNS)) float32.

    Raises InputError that names the option that leaves a step undefined.
    """
    stride = config.num_train_timesteps // num_inference_steps
    call = torch.arange(len(timesteps)) - begin
    again = call == 1  # repeats the step of the first call, from the same start
    start = torch.where(again, timesteps + stride, timesteps)
    end = start - stride
    final = 1.0 if config.set_alpha_to_one else alpha_bar[0].item()
    a = alpha_bar[start.clamp(max=len(alpha_bar) - 1)]  # rounded to float32 as in diffusers
    a_end = torch.where(end >= 0, alpha_bar[end.clamp(min=0)], final)
    scale = (a_end / a).double().sqrt()
    divisor = (a * (1 - a_end) ** 0.5 + (a * (1 - a) * a_end) ** 0.5).double()
    of_output = -(a_end - a).double() / divisor
    velocity = config.prediction_type == "v_prediction"
    of_sample = scale + of_output * (1 - a).double().sqrt() if velocity else scale
    of_output = of_output * a.double().sqrt() if velocity else of_output
    means = torch.tensor([_mean(int(each)) for each in call], dtype=torch.float64)
    one, zero = torch.ones_like(scale), torch.zeros_like(scale)
    signal, noise = alpha_bar[timesteps].double().sqrt(), (1 - alpha_bar[timesteps]).double().sqrt()
    columns = {
        "x0_x": signal if velocity else one,
        "x0_m": -noise,
        "x0_div": one if velocity else signal,
        "prev_y": of_sample,
        "y_x": torch.where(again, zero, one),
        "y_s": torch.where(again, one, zero),
        "keep_m": one,
        "prev_m": of_output * means[:, 0],
        **{f"prev_h{i}": of_output * means[:, i] for i in (1, 2, 3)},
    }
    return stack_columns(columns, config, timesteps, a)


def _mean(call: int) -> tuple[float, ...]:
    if call == 1:
        return SECOND_CALL
    steps = max(call - 1, 0)
    return MEANS[steps] if steps < len(MEANS) else LAST_MEAN


class PNDMScheduler(NoiselessScheduler):
    """The linear multistep method of PNDM (Liu et al. 2022), with the interface of diffusers' `PNDMScheduler`.

    `PNDMConfig` lists its options, which have diffusers' names and defaults. Runge-Kutta steps are not supported, so
    `skip_prk_steps` must be True. A run of two or more steps makes one model call more than it has steps.
    """

    names: ClassVar = {"pndm": {"skip_prk_steps": True}}
    a1111_names: ClassVar = {"pndm": "PLMS"}
    place: ClassVar = 8
    config_class = PNDMConfig
    multistep = True
    returns_x0 = False
    _options: PNDMConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Set the number of steps of a run, and make `timesteps` on `device`. The run makes one call more.

        Raises InputError unless the number is from 1 to the number of training timesteps, and if `steps_offset` moves a
        timestep outside them.
        """
        timesteps = pndm_timesteps(self._options, num_inference_steps)
        self._begin_run(timesteps, device)
        self.num_inference_steps = checked("num_inference_steps", num_inference_steps, int)

    def _make_table(self, begin: int) -> Tensor:
        steps = self.num_inference_steps or len(self.timesteps)
        return pndm_rows(self._options, self.alphas_cumprod, self.timesteps.cpu(), steps, begin)

    def _keeps(self, step: int) -> bool:
        return step != 1  # the second call repeats the first step
