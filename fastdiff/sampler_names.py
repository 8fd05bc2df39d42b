"""All samplers: their user-facing names, diffusers' class names and their options.

Each file of `fastdiff/samplers` holds a sampler. The command line lists the names before it imports torch, so this
module reads the files without importing them. It parses the head of each class, which ends at the first method.
"""

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

FOLDER = Path(__file__).with_name("samplers")

_HEAD = re.compile(r"^class .*\n(?:(?! {4}(?:def |@))(?: {4}.*)?\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Sampler:
    """The declarations of one file of `fastdiff/samplers`."""

    module: str  # "fastdiff.samplers.euler"
    class_name: str  # of the scheduler in fastdiff and in diffusers: "EulerDiscreteScheduler"
    names: dict[str, dict[str, Any]]  # user-facing names, and the options that each sets
    a1111_names: dict[str, str]  # AUTOMATIC1111's names, where they are not `names` in capitals
    place: float  # the position in lists of names; a sampler without one comes last
    default_eta: float | None  # of `step`; None for a sampler without eta
    defaults: Mapping[str, Any]  # of the options that the file adds; None if the default is not a literal


def read_samplers(folder: Path = FOLDER) -> dict[str, Sampler]:
    """Return the samplers of a folder by class name, in the order of lists."""
    files = (path for path in folder.glob("*.py") if path.name != "__init__.py")
    samplers = sorted(map(_read, files), key=lambda sampler: (sampler.place, sampler.module))
    return {sampler.class_name: sampler for sampler in samplers}


def _read(path: Path) -> Sampler:
    heads = [node for head in _HEAD.findall(path.read_text(encoding="utf-8")) for node in ast.parse(head).body]
    classes = {node.name: _values(node) for node in heads if isinstance(node, ast.ClassDef)}
    configs = [values for name, values in classes.items() if name.endswith("Config")]
    schedulers = [name for name, values in classes.items() if name.endswith("Scheduler") and values.get("names")]
    if len(configs) != 1 or len(schedulers) != 1:
        raise ValueError(f"{path}: a sampler needs one class ...Config and one class ...Scheduler with literal `names`")
    (class_name,), (defaults,) = schedulers, configs
    said: dict[str, Any] = {"a1111_names": {}, "place": math.inf, "default_eta": None, **classes[class_name]}
    module = f"fastdiff.samplers.{path.stem}"
    return Sampler(module, class_name, said["names"], said["a1111_names"], said["place"], said["default_eta"], defaults)


def _values(head: ast.ClassDef) -> dict[str, Any]:
    """Return the class attributes by name, without constants. A value that is not a literal is None."""
    found = {}
    for node in head.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            if name.islower():
                found[name] = _literal(node.value)
    return found


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


SAMPLERS = read_samplers()
SCHEDULERS = {name: sampler.class_name for sampler in SAMPLERS.values() for name in sampler.names}
SCHEDULER_OPTIONS = {name: options for sampler in SAMPLERS.values() for name, options in sampler.names.items()}
A1111_NAMES = {name: other for sampler in SAMPLERS.values() for name, other in sampler.a1111_names.items()}
# The user-facing names whose steps take eta, and the default of each
ETAS = {
    name: sampler.default_eta
    for sampler in SAMPLERS.values()
    if sampler.default_eta is not None
    for name in sampler.names
}

if TYPE_CHECKING:
    SchedulerName = str
else:
    SchedulerName = Literal[tuple(SCHEDULERS)]  # the user-facing names


def scheduler_name(class_name: str, options: Mapping[str, Any]) -> str | None:
    """Return the user-facing name of a scheduler class with these options, or None if fastdiff has no such name."""
    if class_name not in SAMPLERS:
        return None
    sampler = SAMPLERS[class_name]
    said = {**sampler.defaults, **options}
    fitting = [
        name
        for name, asked in sampler.names.items()
        if all((said.get(option) or False) == value for option, value in asked.items())
    ]
    return max(fitting, key=lambda name: len(sampler.names[name]), default=None)
