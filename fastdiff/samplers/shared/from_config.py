"""Build schedulers from the configs of model folders and from live diffusers schedulers."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fastdiff.arguments import mapping, shown
from fastdiff.errors import InputError
from fastdiff.sampler_names import SAMPLERS, SCHEDULER_OPTIONS, SCHEDULERS, scheduler_name
from fastdiff.samplers.shared.options import marked_defaults
from fastdiff.samplers.shared.scheduler import Scheduler


def scheduler_from_config(config: Mapping[str, Any], name: str | None = None) -> Scheduler:
    """Return the scheduler that a config's `_class_name` names.

    With `name` ("ddpm", "euler"), return that scheduler with the config's options instead. Raises InputError for a
    scheduler that fastdiff does not have.
    """
    config = mapping("config", config)
    if name is not None:
        if not isinstance(name, str) or name not in SCHEDULERS:
            raise InputError(f"scheduler {shown(name)} is unknown; use {_choices()}")
        return _load(SCHEDULERS[name]).from_config(config, **SCHEDULER_OPTIONS[name])
    said = config.get("_class_name", "without a _class_name")
    if not isinstance(said, str) or said not in SAMPLERS:
        raise InputError(f"the model's scheduler {said} is not supported; choose the scheduler {_choices()} instead")
    return _load(said).from_config(config)


def folder_scheduler(
    config: Mapping[str, Any], name: str | None, own_name: str | None, changes: Mapping[str, Any]
) -> Scheduler:
    """Return the scheduler of a pipeline's folder, or the scheduler `name` with the folder's options.

    A scheduler other than the folder's is built as by `X.from_config(pipe.scheduler.config)`, after the pipeline class
    made its changes. Options that the file leaves out are not passed on.

    Args:
        config: The folder's scheduler_config.json.
        name: The name of the scheduler to return; None: the folder's own.
        own_name: The name of the scheduler that the config names.
        changes: Options that diffusers' pipeline class sets on the scheduler when it builds the pipeline.

    Raises the errors of `scheduler_from_config`.
    """
    if name not in (None, own_name):
        handed = {option: value for option, value in changes.items() if option in config}
        return scheduler_from_config({**config, **handed}, name)
    unsaid = {*marked_defaults(config), *(changes.keys() - config.keys())}
    own = scheduler_from_config({**config, **changes, "_use_default_values": sorted(unsaid - changes.keys())}, name)
    own.mark_defaults(unsaid)
    return own


def scheduler_like(live: Any) -> Scheduler:
    """Return our scheduler for a live diffusers scheduler. Raises the errors of `scheduler_from_config`."""
    config = getattr(live, "config", None)
    if not isinstance(config, Mapping):
        raise InputError(f"scheduler: {type(live).__name__} is not a scheduler; give one, such as DDIMScheduler")
    ours = scheduler_from_config({**config, "_class_name": type(live).__name__, "_use_default_values": ()})
    ours.mark_defaults(marked_defaults(config))
    return ours


def name_of(scheduler: Scheduler) -> str:
    """Return the name of a scheduler in requests, such as ddim, ddpm or euler-karras."""
    name = scheduler_name(type(scheduler).__name__, scheduler.config)
    if name is None:
        raise InputError(f"scheduler: {type(scheduler).__name__} is not one of {_choices()}")
    return name


def _load(class_name: str) -> type[Scheduler]:
    return getattr(import_module(SAMPLERS[class_name].module), class_name)


def _choices() -> str:
    *names, last = SCHEDULERS
    return f"{', '.join(names)} or {last}"
