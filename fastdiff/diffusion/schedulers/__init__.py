"""diffusers' schedulers over the rows of our samplers: the loops of diffusers' users run unchanged."""

from collections.abc import Mapping
from typing import Any

from fastdiff.arguments import mapping, shown
from fastdiff.checkpoints import registry
from fastdiff.diffusion.configs import marked_defaults
from fastdiff.diffusion.schedulers.base import Scheduler, SchedulerOutput
from fastdiff.diffusion.schedulers.ddim import DDIMScheduler
from fastdiff.diffusion.schedulers.ddpm import DDPMScheduler
from fastdiff.diffusion.schedulers.dpm_solver import DPMSolverMultistepScheduler
from fastdiff.diffusion.schedulers.euler import EulerAncestralDiscreteScheduler, EulerDiscreteScheduler
from fastdiff.diffusion.schedulers.heun import HeunDiscreteScheduler
from fastdiff.diffusion.schedulers.lcm import LCMScheduler
from fastdiff.diffusion.schedulers.lms import LMSDiscreteScheduler
from fastdiff.diffusion.schedulers.pndm import PNDMScheduler
from fastdiff.diffusion.schedulers.unipc import UniPCMultistepScheduler
from fastdiff.errors import InputError

__all__ = [
    "SCHEDULERS",
    "DDIMScheduler",
    "DDPMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "Scheduler",
    "SchedulerOutput",
    "UniPCMultistepScheduler",
    "folder_scheduler",
    "name_of",
    "scheduler_from_config",
    "scheduler_like",
]

_KINDS = (
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
    EulerAncestralDiscreteScheduler,
    DPMSolverMultistepScheduler,
    HeunDiscreteScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
    LCMScheduler,
)
_CLASSES: dict[str, type[Scheduler]] = {kind.__name__: kind for kind in _KINDS}
SCHEDULERS = {name: _CLASSES[class_name] for name, class_name in registry.SCHEDULERS.items()}  # by people's names


def scheduler_from_config(config: Mapping[str, Any], name: str | None = None) -> Scheduler:
    """Return the scheduler that a config's `_class_name` says, or `name` ("ddpm", "euler") made from that config.

    Raises InputError for a scheduler that we do not have.
    """
    config = mapping("config", config)
    if name is not None:
        if not isinstance(name, str) or name not in SCHEDULERS:
            raise InputError(f"scheduler {shown(name)} is unknown; use {_choices()}")
        return SCHEDULERS[name].from_config(config, **registry.SCHEDULER_OPTIONS.get(name, {}))
    said = config.get("_class_name", "without a _class_name")
    if not isinstance(said, str) or said not in _CLASSES:
        raise InputError(f"the model's scheduler is {said}; choose the scheduler {_choices()} instead")
    return _CLASSES[said].from_config(config)


def folder_scheduler(
    config: Mapping[str, Any], name: str | None, own_name: str | None, changes: Mapping[str, Any]
) -> Scheduler:
    """Return the scheduler `name` of a pipeline's folder, whose scheduler_config.json is `config`.

    own_name: of the scheduler that the config says. changes: options that diffusers' pipeline class sets in it when
    the pipeline is made. Any other scheduler is made of the changed one, as X.from_config(pipe.scheduler.config):
    an option that the file leaves out is not handed on. Raises as `scheduler_from_config`.
    """
    if name not in (None, own_name):
        handed = {option: value for option, value in changes.items() if option in config}
        return scheduler_from_config({**config, **handed}, name)
    unsaid = {*marked_defaults(config), *(changes.keys() - config.keys())}
    own = scheduler_from_config({**config, **changes, "_use_default_values": sorted(unsaid - changes.keys())}, name)
    own.mark_defaults(unsaid)
    return own


def scheduler_like(live: Any) -> Scheduler:
    """Return ours of a live scheduler of diffusers, its options as they are. Raises as `scheduler_from_config`."""
    config = getattr(live, "config", None)
    if not isinstance(config, Mapping):
        raise InputError(f"scheduler: {type(live).__name__} is none; give one of fastdiff's, such as a DDIMScheduler")
    ours = scheduler_from_config({**config, "_class_name": type(live).__name__, "_use_default_values": ()})
    ours.mark_defaults(marked_defaults(config))
    return ours


def name_of(scheduler: Scheduler) -> str:
    """Return the name of a scheduler in requests: ddim, ddpm, euler-karras."""
    name = registry.scheduler_name(type(scheduler).__name__, scheduler.config)
    if name is None:
        raise InputError(f"scheduler: {type(scheduler).__name__} is none of {_choices()}")
    return name


def _choices() -> str:
    *names, last = SCHEDULERS
    return f"{', '.join(names)} or {last}"
