"""The samplers, a file each: its options, the rows of its steps, and the class that diffusers' users call.

A sampler is data. It says which timesteps a run takes and makes a row of coefficients for each step; `denoise_step`
(`kernels/denoise.py`) runs any row, in a pipeline's loop and in the class's own `step`.

To add one, write `fastdiff/samplers/<x>.py` and `tests/samplers/test_<x>.py`; nothing else names it. The file holds

- `XConfig`, a frozen dataclass of its options, which inherits the groups of `shared/options.py` that it has,
- `x_rows(...)`, which returns the rows (steps, len(COLUMNS)) float32,
- `XScheduler`, named as diffusers' class, on one of three bases:
  `Scheduler` (shared/scheduler.py) looks a step up by its timestep, as DDPM and DDIM do: see ddpm.py;
  `CountedScheduler` (shared/counted.py) counts the steps, and lets them read what earlier ones kept: see pndm.py;
  `SigmaScheduler` (shared/sigma_scheduler.py) counts steps between noise levels sigma: see euler_ancestral.py.
  `set_timesteps` chooses the steps of a run; `_make_table`, or `_make_rows` of a plain `Scheduler`, makes their rows.

`names` of the class says what people call it and which options each name asks for, as a literal:

    names: ClassVar = {"euler": {}, "euler-karras": {"use_karras_sigmas": True}}

`fastdiff.sampler_names` reads that without importing the file, and makes every list of samplers of it: `--scheduler`
and its help, the page's choices, the check of a request, `fastdiff.EulerDiscreteScheduler`, the classes that a model's
scheduler_config.json may ask for. `place` orders these lists; a sampler without one comes last. `a1111_names` says what
AUTOMATIC1111 calls it, for the settings in PNGs.
"""
