"""PNDM (Liu et al. 2022, arXiv 2202.09778), as in diffusers' PNDMScheduler.

A step is DDIM's (eq. 9) with a mean of several outputs. The linear multistep method takes the last four (eq. 12), and
has two ways to begin. Stable Diffusion's is skip_prk_steps: the second call repeats the first step with the mean of
both outputs, so a run makes one call more than it has steps. The paper's is three pseudo Runge-Kutta steps of four
calls each (eq. 13), so a run makes nine calls more.
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
RUNGE_KUTTA = ((1.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0), (1 / 6, 1 / 6, 0.0, 0.0))  # its calls
RUNGE_KUTTA_CALLS = 12  # of the run's first three steps


@dataclass(frozen=True, kw_only=True)
class PNDMConfig(DiffusionConfig):
    """The options of diffusers' PNDMScheduler."""

    prediction_type: Literal["epsilon", "v_prediction"] = "epsilon"
    skip_prk_steps: bool = False  # begin without Runge-Kutta steps
    set_alpha_to_one: bool = False  # alpha_bar after the last step: 1, or the one at timestep 0


def pndm_timesteps(config: PNDMConfig, num_inference_steps: int) -> Tensor:
    """Return the timesteps of a run's calls, descending, int64.

    With skip_prk_steps they are (steps + 1,), and the second one comes twice; a run of one step has one call, (1,).
    Otherwise they are (steps + 9,), with the timesteps halfway between the first four.

    Raises InputError for a number of steps that is not from 1 to the number of training steps, for fewer than 4 steps
    with Runge-Kutta steps, and for an offset that moves a timestep outside the training steps.
    """
    steps, total = checked_steps(config, num_inference_steps), config.num_train_timesteps
    if config.timestep_spacing == "linspace":
        timesteps = np.linspace(0, total - 1, steps).round().astype(np.int64)
    elif config.timestep_spacing == "leading":
        timesteps = np.arange(0, steps) * (total // steps) + config.steps_offset
    else:
        timesteps = np.round(np.arange(total, 0, -total / steps))[:steps][::-1].astype(np.int64) - 1
    check_within(config, timesteps)
    if config.skip_prk_steps:
        calls = np.concatenate([timesteps[:-1], timesteps[-2:-1], timesteps[-1:]])[::-1]
    elif steps < 4:
        raise InputError(f"num_inference_steps is {steps}; Runge-Kutta steps need 4 or more, or set skip_prk_steps")
    else:
        noisiest = timesteps[:-5:-1]
        halfway = noisiest[1:] + total // steps // 2
        of_steps = np.stack([noisiest[:-1], halfway, halfway, noisiest[1:]], axis=1)
        calls = np.concatenate([of_steps.flatten(), timesteps[-4::-1]])
    return torch.from_numpy(calls.astype(np.int64))


def pndm_rows(
    config: PNDMConfig, alpha_bar: Tensor, timesteps: Tensor, num_inference_steps: int, begin: int = 0
) -> Tensor:
    """Return a row for each call, for a loop that begins with call `begin`. (calls, len(COLUMNS)) float32.

    Raises InputError that names the option that leaves a step undefined.
    """
    call = torch.arange(len(timesteps)) - begin
    start, end, means = _ways(config, timesteps, config.num_train_timesteps // num_inference_steps, call)
    final = 1.0 if config.set_alpha_to_one else alpha_bar[0].item()
    a = alpha_bar[start.clamp(max=len(alpha_bar) - 1)]  # rounded to float32 as in diffusers
    a_end = torch.where(end >= 0, alpha_bar[end.clamp(min=0)], final)
    scale = (a_end / a).double().sqrt()
    divisor = (a * (1 - a_end) ** 0.5 + (a * (1 - a) * a_end) ** 0.5).double()
    of_output = -(a_end - a).double() / divisor
    velocity = config.prediction_type == "v_prediction"
    of_sample = scale + of_output * (1 - a).double().sqrt() if velocity else scale
    of_output = of_output * a.double().sqrt() if velocity else of_output
    one, zero = torch.ones_like(scale), torch.zeros_like(scale)
    signal, noise = alpha_bar[timesteps].double().sqrt(), (1 - alpha_bar[timesteps]).double().sqrt()
    begins = _begins_a_step(config, call)
    columns = {
        "x0_x": signal if velocity else one,
        "x0_m": -noise,
        "x0_div": one if velocity else signal,
        "prev_y": of_sample,
        "y_x": torch.where(begins, one, zero),
        "y_s": torch.where(begins, zero, one),
        "keep_m": one,
        "prev_m": of_output * means[:, 0],
        **{f"prev_h{i}": of_output * means[:, i] for i in (1, 2, 3)},
    }
    if not config.skip_prk_steps:
        _collect_outputs(
            columns, of_sample, of_output, third=(call >= 0) & (call < RUNGE_KUTTA_CALLS) & (call % 4 == 2)
        )
    return stack_columns(columns, config, timesteps, a)


def _begins_a_step(config: PNDMConfig, call: Tensor) -> Tensor:
    """Return whether a step begins with each call (calls,). Other calls go on from the sample that was kept."""
    return call != 1 if config.skip_prk_steps else (call >= RUNGE_KUTTA_CALLS) | (call % 4 == 0)


def _ways(config: PNDMConfig, timesteps: Tensor, stride: int, call: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each call steps from and to, (calls,) int64, and its mean of outputs, (calls, 4) float64."""
    if config.skip_prk_steps:
        start = torch.where(call == 1, timesteps + stride, timesteps)
        means = [_mean(each) for each in call.tolist()]
        return start, start - stride, torch.tensor(means, dtype=torch.float64)
    early = call < RUNGE_KUTTA_CALLS
    firsts = timesteps[(call.clamp(0, RUNGE_KUTTA_CALLS - 1) // 4 * 4)]  # as diffusers, wherever a loop begins
    half = torch.where(call % 2 == 0, stride // 2, 0)
    means = [RUNGE_KUTTA[each % 4] if each < RUNGE_KUTTA_CALLS else LAST_MEAN for each in call.tolist()]
    start = torch.where(early, firsts, timesteps)
    return start, timesteps - torch.where(early, half, stride), torch.tensor(means, dtype=torch.float64)


def _collect_outputs(columns: dict[str, Tensor], of_sample: Tensor, of_output: Tensor, third: Tensor) -> None:
    """Make the third call of a Runge-Kutta step keep s + share (m_2 + m_3) for the fourth call.

    s is the sample at the start of the step, and m_2 and m_3 are the outputs of the second and third call. m_2 comes
    from x_t, which is the second call's result, and m_3 from x0.
    """
    share = (of_output / of_sample).roll(-1) / 3
    before = share / of_output.roll(1)  # m_2 = (x_t - of_sample s) / of_output, with the second call's coefficients
    of_s = 1 - before * of_sample.roll(1)
    noise = -columns["x0_m"]
    changes = {
        "y_s": of_s,
        "y_x": before + share * columns["x0_x"] / noise,
        "y_x0": -share * columns["x0_div"] / noise,
        "prev_y": of_sample / of_s,
        "prev_x": -of_sample * before / of_s,
        "prev_m": of_output - of_sample * share / of_s,
    }
    for name, values in changes.items():
        columns[name] = torch.where(third, values, columns.get(name, torch.zeros_like(values)))


def _mean(call: int) -> tuple[float, ...]:
    if call == 1:
        return SECOND_CALL
    steps = max(call - 1, 0)
    return MEANS[steps] if steps < len(MEANS) else LAST_MEAN


class PNDMScheduler(NoiselessScheduler):
    """The linear multistep method of PNDM (Liu et al. 2022), with the interface of diffusers' `PNDMScheduler`.

    `PNDMConfig` lists its options, which have diffusers' names and defaults. With `skip_prk_steps` a run of two or more
    steps makes one model call more than it has steps. Otherwise it makes nine more, has at least 4 steps, and gives the
    result of each call of a Runge-Kutta step to the next call unchanged.
    """

    names: ClassVar = {"pndm": {"skip_prk_steps": True}, "pndm-rk": {"skip_prk_steps": False}}
    a1111_names: ClassVar = {"pndm": "PLMS"}
    place: ClassVar = 8
    config_class = PNDMConfig
    multistep = True
    returns_x0 = False
    _options: PNDMConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Set the number of steps of a run, and make `timesteps` on `device`. `timesteps` has one for each call.

        Raises InputError unless the number is from 1 to the number of training timesteps, for fewer than 4 steps with
        Runge-Kutta steps, and if `steps_offset` moves a timestep outside the training timesteps.
        """
        timesteps = pndm_timesteps(self._options, num_inference_steps)
        self._begin_run(timesteps, device)
        self.num_inference_steps = checked("num_inference_steps", num_inference_steps, int)

    def _make_table(self, begin: int) -> Tensor:
        steps = self.num_inference_steps or len(self.timesteps)
        return pndm_rows(self._options, self.alphas_cumprod, self.timesteps.cpu(), steps, begin)

    def _keeps(self, step: int) -> bool:
        return bool(_begins_a_step(self._options, torch.tensor(step)))
