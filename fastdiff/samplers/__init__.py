"""The samplers. Each file holds one sampler: its options, the rows of its steps, and a scheduler with diffusers' API.

A sampler is data. It chooses the timesteps of a run and computes a row of coefficients for each step. `denoise_step`
(`kernels/denoise.py`) runs the rows, both in a pipeline's loop and in the scheduler's own `step`.

To add a sampler, write `fastdiff/samplers/<x>.py` and `tests/samplers/test_<x>.py`. No other file needs a change. The
sampler's file holds

- `XConfig`, a frozen dataclass of its options. It inherits groups of shared options from `shared/options.py`.
- `x_rows(...)`, which returns the rows (steps, len(COLUMNS)) float32.
- `XScheduler`, which has the name of diffusers' class and one of three bases:

  - `Scheduler` (shared/scheduler.py) looks up a step by its timestep, as DDPM and DDIM do. See ddpm.py.
  - `CountedScheduler` (shared/counted.py) counts the steps, and a step can read outputs of earlier steps. See pndm.py.
  - `SigmaScheduler` (shared/sigma_scheduler.py) counts steps between noise levels sigma. See euler_ancestral.py.

  `set_timesteps` chooses the steps of a run. `_make_table` computes their rows; a plain `Scheduler` has `_make_rows`
  instead.

The class attribute `names` maps each user-facing name of the sampler to the options that the name sets. It must be a
literal::

    names: ClassVar = {"euler": {}, "euler-karras": {"use_karras_sigmas": True}}

`fastdiff.sampler_names` reads `names` without importing the file and derives every list of samplers from it: the
choices and help of `--scheduler`, the page's choices, the validation of requests, `fastdiff.EulerDiscreteScheduler`,
and the classes that a model's scheduler_config.json may name. `place` orders these lists; a sampler without `place`
comes last. `a1111_names` gives AUTOMATIC1111's name of the sampler, for the settings in PNGs. `default_eta` is for a
sampler whose `step` takes `eta`.
"""
