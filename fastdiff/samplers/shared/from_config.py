"""Schedulers made from the configs of model folders, and from diffusers' live schedulers."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fastdiff.arguments import mapping, shown
from fastdiff.errors import InputError
from fastdiff.sampler_names import SAMPLERS, SCHEDULER_OPTIONS, SCHEDULERS, scheduler_name
from fastdiff.samplers.shared.options import marked_defaults
from fastdiff.samplers.shared.scheduler import Scheduler


def scheduler_from_config(config: Mapping[str, Any], name: str | None = None) -> Scheduler:
    """Return the scheduler that a config's `_class_name` says, or `name` ("ddpm", "euler") made from that config.

    Raises InputError for a scheduler that we do not have.
    """
    config = mapping("config", config)
    if name is not None:
        if not isinstance(name, str) or name not in SCHEDULERS:
            raise InputError(f"scheduler {shown(name)} is unknown; use {_choices()}")
        return _load(SCHEDULERS[name]).from_config(config, **SCHEDULER_OPTIONS[name])
    said = config.get("_class_name", "without a _class_name")
    if not isinstance(said, str) or said not in SAMPLERS:
        raise InputError(f"the model's scheduler is {said}; choose the scheduler {_choices()} instead")
    return _load(said).from_config(config)


def folder_scheduler(
    config: Mapping[str, Any], name: str | None, own_name: str | None, changes: Mapping[str, Any]
) -> Scheduler:
    """Return the scheduler `name` of a pipeline's folder, whose scheduler_config.json is `config`.

    own_name  the name of the scheduler that the config says
    changes   options that diffusers' pipeline class sets in it when the pipeline is made

    Another scheduler is made of the changed one, as by X.from_config(pipe.scheduler.config): an option that the file
    leaves out is not handed on. Raises as `scheduler_from_config`.
    """
    if name not in (None, own_name):
        handed = {option: value for option, value in changes.items() if option in config}
        return scheduler_from_config({**config, **handed}, name)
    unsaid = {*marked_defaults(config), *(changes.keys() - config.keys())}
    own = scheduler_from_config({**config, **changes, "_use_default_values": sorted(unsaid - changes.keys())}, name)
    own.mark_defaults(unsaid)
    return own


def scheduler_like(live: Any) -> Scheduler:
    """Return our scheduler with the class and options of a live one of diffusers. Raises as `scheduler_from_config`."""
    config = getattr(live, "config", None)
    if not isinstance(config, Mapping):
        raise InputError(f"scheduler: {type(live).__name__} is none; give one of fastdiff's, such as a DDIMScheduler")
    ours = scheduler_from_config({**config, "_class_name": type(live).__name__, "_use_default_values": ()})
    ours.mark_defaults(marked_defaults(config))
    return ours


def name_of(scheduler: Scheduler) -> str:
    """Return the name of a scheduler in requests: ddim, ddpm, euler-karras."""
    name = scheduler_name(type(scheduler).__name__, scheduler.config)
    if name is None:
        raise InputError(f"scheduler: {type(scheduler).__name__} is none of {_choices()}")
    return name


def _load(class_name: str) -> type[Scheduler]:
    return getattr(import_module(SAMPLERS[class_name].module), class_name)


def _choices() -> str:
    *names, last = SCHEDULERS
    return f"{', '.join(names)} or {last}"
