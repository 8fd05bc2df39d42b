"""CountedScheduler, the base of samplers that count their steps instead of looking them up by timestep."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.execution.devices import resolve_device
from fastdiff.execution.tensors import REAL, tensor
from fastdiff.kernels.denoise import COLUMNS, EARLIER
from fastdiff.kinds import Fraction
from fastdiff.samplers.shared.noise import Generators
from fastdiff.samplers.shared.options import DistilledConfig
from fastdiff.samplers.shared.schedule import Schedule
from fastdiff.samplers.shared.scheduler import Scheduler, SchedulerOutput, channels_last
from fastdiff.samplers.shared.timesteps import checked_steps, custom_timesteps, distilled_timesteps
from fastdiff.schema import checked, whole

INPUT_DIV, READS_EARLIER, KEEPS_OUTPUT = map(COLUMNS.index, ("input_div", "reads_earlier", "keeps_output"))


class CountedScheduler(Scheduler):
    """A sampler that takes its steps in order. A step can read what earlier steps kept.

    A loop begins at the first timestep that `step` gets, or at the index given to `set_begin_index`. Each call of
    `step` then moves on by one.
    """

    scales_input = False  # whether the model sees x_t / sqrt(sigma^2 + 1)
    multistep = False  # whether a step reads what earlier steps kept
    returns_x0 = True  # whether the tuple of `step` has x0 beside x_{t-1}
    rounds_to_output = True  # x_{t-1} has the model output's dtype, not the wider of it and the sample's
    noise_dtype: torch.dtype | None = None  # in which a generator draws; None: the model output's

    def _build(self, mapping: Mapping[str, Any]) -> None:
        super()._build(mapping)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._step_index: int | None = None
        self._begin_index: int | None = None
        self._begun = 0  # the loop's first step
        self._table: Tensor | None = None  # the loop's rows, on the samples' device
        self._earlier: Tensor | None = None

    def _begin_run(self, timesteps: Tensor, device: torch.device | str | None) -> None:
        """Start a new run over timesteps (calls,)."""
        self.timesteps = timesteps.to(None if device is None else resolve_device(device))
        self.num_inference_steps = len(timesteps)
        self._begin_anew()

    @property
    def step_index(self) -> int | None:
        """The index of the next step; None before the first step."""
        return self._step_index

    @property
    def begin_index(self) -> int | None:
        """The index of the step that a loop begins with; None unless `set_begin_index` was called."""
        return self._begin_index

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Set the index of the step that a loop begins with. Raises InputError for an index outside the run."""
        self._begin_index = checked("begin_index", begin_index, whole(0, len(self.timesteps) - 1))

    def index_for_timestep(self, timestep: float | Tensor, schedule_timesteps: Tensor | None = None) -> int:
        """Return the index of a timestep in the run.

        If the timestep occurs more than once, return the second index, as diffusers does. Raises InputError for a
        timestep outside the run.
        """
        timesteps = self.timesteps if schedule_timesteps is None else schedule_timesteps
        found = (timesteps == torch.as_tensor(timestep, device=timesteps.device)).nonzero()
        if not len(found):
            raise InputError(
                f"timestep {shown(_number(timestep))} is not one of the scheduler's timesteps; call set_timesteps"
            )
        return int(found[1 if len(found) > 1 else 0])

    def _first_index(self, timestep: float | Tensor) -> int:
        if self._begin_index is not None:
            return self._begin_index
        if _number(timestep) == self.timesteps[0].item():  # if it occurs twice, diffusers skips a step and fails
            return 0
        return self.index_for_timestep(timestep)

    def _index(self, timestep: float | Tensor) -> int:
        """Return the index of the step to take. Raises InputError before `set_timesteps`, and after the last step."""
        if self.num_inference_steps is None:
            raise InputError("the number of steps is not set; call set_timesteps before step")
        if self._step_index is None:
            self._step_index = self._first_index(timestep)
        if self._step_index >= len(self.timesteps):
            raise InputError(f"all {len(self.timesteps)} steps are taken; call set_timesteps for another loop")
        return self._step_index

    def _make_table(self, begin: int) -> Tensor:
        """Return the rows of the run (steps, len(COLUMNS)), for a loop that begins with step `begin`."""
        raise NotImplementedError

    def _complete_table(self, begin: int) -> Tensor:
        return self._completed(self._make_table(begin)[: len(self.timesteps)], begin)

    def _completed(self, rows: Tensor, begin: int) -> Tensor:
        """Set the columns that the class determines, what steps keep and the model's input, in the rows of a run."""
        if self.multistep:
            keeps = [self._keeps(index - begin) for index in range(len(rows))]
            rows[:, READS_EARLIER], rows[:, KEEPS_OUTPUT] = 1, torch.tensor(keeps).to(rows)
        if not self.scales_input:
            rows[:, INPUT_DIV] = 1
        return rows

    def _begin_at(self, index: int) -> None:
        self.set_begin_index(index)

    def _keeps(self, step: int) -> bool:
        """Whether later steps can read the output of this step of the loop."""
        return True

    def _draws(self, index: int) -> bool:
        """Whether a step of the run adds noise."""
        return False

    def _table_of_loop(self) -> Schedule:
        steps = range(len(self.timesteps))
        return Schedule(
            self.timesteps,
            self._complete_table(begin=self._begin_index or 0),
            self._step_options,
            draws_noise=tuple(self._draws(index) for index in steps),
            init_noise_sigma=float(self.init_noise_sigma),
            scales_input=self.scales_input,
            multistep=self.multistep,
            noise_dtype=self.noise_dtype,
        )

    def _checked_index(
        self, timestep: float | Tensor, sample: Tensor, generator: Generators | None, return_dict: bool, output: Tensor
    ) -> int:
        """Check the arguments that all samplers' steps share, and return the index of the step to take."""
        self._check_tensors(sample, generator, return_dict, model_output=output)
        return self._index(_checked_timestep(timestep))

    def _take(
        self, model_output: Tensor, sample: Tensor, noise: Tensor | None, return_dict: bool, row: Tensor | None = None
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Take the step that `_index` returned. `row` (len(COLUMNS),) replaces the table's row."""
        index = self._step_index or 0
        if self._table is None or self._table.device != sample.device:
            self._begun = index if self._table is None else self._begun
            self._table = self._complete_table(self._begun).to(sample.device)
        x_prev, x0, *kept = self._stepped(
            model_output, sample, self._table[index] if row is None else row, noise, self._earlier_of(sample)
        )
        self._earlier = kept[0] if kept else None
        self._step_index = index + 1
        dtype = model_output.dtype
        dtype = dtype if self.rounds_to_output else torch.promote_types(dtype, sample.dtype)
        result = SchedulerOutput(x_prev.to(dtype), x0)
        return result if return_dict else tuple(result[: 2 if self.returns_x0 else 1])

    def _earlier_of(self, sample: Tensor) -> Tensor | None:
        """Return s, h1, h2 and h3, (N, EARLIER, ..., C) and zero before the first step; None unless `multistep`."""
        if not self.multistep or self._earlier is not None:
            return self._earlier
        n, *shape = channels_last(sample).shape
        dtype = torch.promote_types(sample.dtype, torch.float32)
        return torch.zeros(n, EARLIER, *shape, dtype=dtype, device=sample.device)


class NoiselessScheduler(CountedScheduler):
    """A counted sampler that adds no noise."""

    def step(
        self, model_output: Tensor, timestep: float | Tensor, sample: Tensor, return_dict: bool = True
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Take one step: return `x_{t-1}` and the predicted `x0`, both (N, C, ...).

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            return_dict: Return a `SchedulerOutput`. If False, return a tuple, which holds `x0` only where diffusers'
                does.

        Raises InputError that names a timestep outside the run, or a tensor of a wrong type, shape or dtype.
        """
        self._checked_index(timestep, sample, None, return_dict, model_output)
        return self._take(model_output, sample, None, return_dict)


class DistilledScheduler(CountedScheduler):
    """A sampler of consistency models. All its steps but the last can add noise."""

    rounds_to_output = False
    _options: DistilledConfig

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        original_inference_steps: int | None = None,
        timesteps: Sequence[int] | None = None,
        strength: float = 1.0,
    ) -> None:
        """Set the steps of a run: their number, or custom `timesteps` in descending order.

        Args:
            num_inference_steps: The number of steps.
            device: The device of `timesteps`.
            original_inference_steps: Replaces the config's original_inference_steps.
            timesteps: Custom timesteps instead of a number.
            strength: 0 to 1. Below 1 the run leaves out the noisiest timesteps, as image-to-image pipelines do.

        Raises InputError unless exactly one of `num_inference_steps` and `timesteps` is given, and for more steps than
        there are distilled timesteps.
        """
        strength = checked("strength", strength, Fraction)
        original = checked("original_inference_steps", original_inference_steps, whole(1, len(self)) | None)
        if (num_inference_steps is None) == (timesteps is None):
            raise InputError("give one of num_inference_steps and timesteps")
        if timesteps is None:
            steps = checked_steps(self._options, num_inference_steps)
            chosen = self._spread(steps, original, strength)
        else:
            chosen = custom_timesteps(self._options, timesteps)
            steps = len(chosen)
            chosen = chosen[steps - int(steps * strength) :]
            if not len(chosen):
                raise InputError(f"strength {strength:g} leaves none of {steps} timesteps; increase either")
        self._begin_run(chosen, device)
        self.num_inference_steps = steps

    def _distilled(self, original_steps: int | None, strength: float) -> np.ndarray:
        """Return the timesteps that a run chooses from, ascending, (timesteps,) int64."""
        return distilled_timesteps(self._options, original_steps, strength)

    def _spread(self, steps: int, original_steps: int | None, strength: float) -> Tensor:
        """Return a run's timesteps, descending, evenly spaced over those it chooses from: (steps,) int64."""
        distilled = self._distilled(original_steps, strength)
        original = self._options.original_inference_steps if original_steps is None else original_steps
        most = min(len(distilled), original)
        if steps > most:
            raise InputError(
                f"num_inference_steps is {steps}; {original} original_inference_steps at strength {strength:g} allow"
                f" {most}; use fewer steps"
            )
        places = np.floor(np.linspace(0, len(distilled), num=steps, endpoint=False)).astype(np.int64)
        return torch.from_numpy(distilled[::-1][places].astype(np.int64))

    @property
    def _last(self) -> int:
        """The step that adds no noise: the run's last. It is not taken if `strength` cut custom timesteps."""
        return (self.num_inference_steps or len(self.timesteps)) - 1

    def _draws(self, index: int) -> bool:
        return index != self._last


def _number(timestep: float | Tensor) -> Any:
    return timestep.item() if isinstance(timestep, Tensor) and timestep.numel() == 1 else timestep


def _checked_timestep(timestep: Any) -> Any:
    if isinstance(timestep, Tensor):
        tensor("timestep", timestep, REAL)
        if timestep.numel() != 1:
            raise InputError(f"timestep has shape {tuple(timestep.shape)}; give one of the scheduler's timesteps")
        return timestep
    return checked("timestep", timestep, float)
