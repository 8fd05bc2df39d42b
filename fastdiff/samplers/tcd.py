"""TCD: steps of a trajectory consistency model (Zheng et al. 2024, arXiv 2402.19159), as in diffusers' TCDScheduler.

Each call predicts x_s, the picture at a timestep s below the step's target t' (strategic stochastic sampling,
algorithm 4). eta is the paper's gamma: s = floor((1 - eta) t'). The step then adds noise from s to t'::

    x_s     = sqrt(alpha_bar_s) x0 + sqrt(1 - alpha_bar_s) eps
    x_{t'}  = sqrt(alpha_bar' / alpha_bar_s) x_s + sqrt(1 - alpha_bar' / alpha_bar_s) z

With eta 0, s is t' and the step adds no noise. The last step goes to timestep 0 without noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from fastdiff.kinds import Fraction, NotNegative, PositiveNumber
from fastdiff.samplers.shared.counted import DistilledScheduler
from fastdiff.samplers.shared.marginals import Marginals, x0_columns
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import DistilledConfig
from fastdiff.samplers.shared.schedule import Schedule, stack_columns
from fastdiff.schema import checked


@dataclass(frozen=True, kw_only=True)
class TCDConfig(DistilledConfig):
    """The options of diffusers' TCDScheduler. As there, no step clips x0, whatever the options of clipping say."""

    clip_sample: bool = False
    clip_sample_range: PositiveNumber = 1.0
    thresholding: bool = False
    dynamic_thresholding_ratio: Fraction = 0.995
    sample_max_value: PositiveNumber = 1.0
    set_alpha_to_one: bool = True  # alpha_bar of a timestep below zero; no step goes there
    timestep_scaling: NotNegative = 10.0  # not read


def tcd_rows(
    config: TCDConfig, alpha_bar: Tensor, timesteps: Tensor, last: int, eta: float, noises: bool = True
) -> Tensor:
    """Return a row for each step over timesteps (steps,) int64. (steps, len(COLUMNS)) float32.

    Args:
        config: The scheduler's options.
        alpha_bar: From `make_alpha_bar`.
        timesteps: Descending.
        last: The step that adds no noise.
        eta: From 0, without noise, to 1.
        noises: Whether a step adds noise to x_s. Without it, the rows go to x_s.

    Raises InputError that names the option that leaves a step undefined.
    """
    targets = torch.cat([timesteps[1:], timesteps.new_zeros(1)])
    middles = torch.floor((1 - eta) * targets).long()  # in float32 as in diffusers
    p = Marginals.between(alpha_bar, timesteps, middles, 1.0)
    ratio = alpha_bar[targets] / alpha_bar[middles]
    adds = torch.full_like(timesteps, noises and eta > 0, dtype=torch.bool)
    adds[last : last + 1] = False
    scale = torch.where(adds, ratio**0.5, 1.0).double()
    noise, signal = p.beta_bar_prev.float().sqrt().double(), p.alpha_bar_prev.float().sqrt().double()
    columns = x0_columns(config.prediction_type, p) | {
        "prev_x0": scale * signal,
        "sigma": torch.where(adds, (1 - ratio) ** 0.5, 0.0).double(),
    }
    of_eps = scale * noise
    if config.prediction_type == "epsilon":
        columns["prev_m"] = of_eps
    elif config.prediction_type == "sample":  # eps = (x_t - signal * x0) / noise
        columns["prev_x"], columns["prev_m"] = of_eps / p.noise, -of_eps * p.signal / p.noise
    else:  # eps = signal * v + noise * x_t
        columns["prev_x"], columns["prev_m"] = of_eps * p.noise, of_eps * p.signal
    return stack_columns(columns, config, timesteps, p.alpha_bar)


class TCDSchedulerOutput(NamedTuple):
    """The result of a step, as in diffusers' class of this name. Both tensors are (N, C, ...)."""

    prev_sample: Tensor  # x_{t-1}
    pred_noised_sample: Tensor  # x_s, before the step's noise


class TCDScheduler(DistilledScheduler):
    """The sampler of trajectory consistency models (Zheng et al. 2024).

    It has the interface of diffusers' `TCDScheduler`. `TCDConfig` lists its options, which have diffusers' names and
    defaults. The model must be distilled for TCD.
    """

    names: ClassVar = {"tcd": {}}
    place: ClassVar = 11
    default_eta: ClassVar = 0.3
    config_class = TCDConfig
    _options: TCDConfig

    def _build(self, mapping: Mapping[str, Any]) -> None:
        super()._build(mapping)
        self._eta = self.default_eta  # of the rows

    def _distilled(self, original_steps: int | None, strength: float) -> np.ndarray:
        if original_steps is None:
            return super()._distilled(None, strength)
        return np.arange(int(len(self) * strength))  # as in diffusers: any training timestep

    def _schedule(self, eta: float | None, use_clipped_model_output: bool) -> Schedule:
        if use_clipped_model_output:
            return super()._schedule(None, use_clipped_model_output)  # refuses it
        self._eta = self.default_eta if eta is None else checked("eta", eta, Fraction)
        return self._table_of_loop()

    def _make_table(self, begin: int) -> Tensor:
        return tcd_rows(self._options, self.alphas_cumprod, self.timesteps.cpu(), self._last, self._eta)

    def _draws(self, index: int) -> bool:
        return self._eta > 0 and super()._draws(index)

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        eta: float = default_eta,
        generator: Generator | list[Generator] | None = None,
        return_dict: bool = True,
    ) -> TCDSchedulerOutput | tuple[Tensor, ...]:
        """Take one step: return `x_{t-1}` and x_s, the picture before the step's noise, both (N, C, ...).

        Both have the wider dtype of `model_output` and `sample`.

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            eta: The amount of noise, from 0 (deterministic) to 1; the paper's gamma.
            generator: Draws the noise: one generator for the batch, or a list with one for each picture.
            return_dict: Return a `TCDSchedulerOutput` instead of a plain tuple.

        Raises InputError that names an `eta` out of range, a timestep outside the run, or a tensor of a wrong type,
        shape or dtype.
        """
        index = self._checked_index(timestep, sample, generator, return_dict, model_output)
        eta = checked("eta", eta, Fraction)
        if eta != self._eta:
            self._eta, self._table = eta, None
        dtype = torch.promote_types(model_output.dtype, sample.dtype)
        noise = None
        if self._draws(index):
            noise = randn_tensor(model_output.shape, generator, sample.device, dtype)
        x_prev, *_ = self._take(model_output, sample, noise, return_dict=False)
        result = TCDSchedulerOutput(x_prev, x_prev if noise is None else self._noised(model_output, sample, index))
        return result if return_dict else tuple(result)

    def _noised(self, model_output: Tensor, sample: Tensor, index: int) -> Tensor:
        """Return x_s of a step, (N, C, ...)."""
        rows = tcd_rows(self._options, self.alphas_cumprod, self.timesteps.cpu(), self._last, self._eta, noises=False)
        x_s, *_ = self._stepped(model_output, sample, rows[index].to(sample.device), None)
        return x_s.to(torch.promote_types(model_output.dtype, sample.dtype))
