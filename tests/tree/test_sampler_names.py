"""The list of samplers: it agrees with the sampler classes, and a new file is in every list."""

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import fastdiff
from fastdiff import cli
from fastdiff.errors import InputError
from fastdiff.sampler_names import (
    FOLDER,
    SAMPLERS,
    SCHEDULER_OPTIONS,
    SCHEDULERS,
    SchedulerName,
    read_samplers,
    scheduler_name,
)
from fastdiff.schema import checked
from tests.support.waiting import TIMEOUT

PACKAGE = Path(fastdiff.__file__).parent


def test_every_file_is_a_sampler():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert files == {sampler.module.rpartition(".")[2] for sampler in SAMPLERS.values()}


@pytest.mark.parametrize("class_name", SAMPLERS)
def test_what_is_read_is_what_the_class_says(class_name):
    sampler = SAMPLERS[class_name]
    module = import_module(sampler.module)
    scheduler = getattr(module, class_name)
    assert getattr(fastdiff, class_name) is scheduler
    for attribute in ("names", "a1111_names", "place"):
        assert getattr(sampler, attribute) == getattr(scheduler, attribute), attribute
    assert scheduler.a1111_names.keys() <= scheduler.names.keys()
    config = scheduler.config_class
    own = vars(config).get("__annotations__", {})
    values = {field.name: field.default for field in fields(config) if field.name in own}
    assert sampler.defaults.keys() == values.keys()
    assert all(known in (None, values[name]) for name, known in sampler.defaults.items())


def test_every_name_is_in_every_list(capsys):
    assert cli.main(["sample", "--help"]) == 0
    assert f"NAME {', '.join(SCHEDULERS)} (default" in " ".join(capsys.readouterr().out.split())
    assert {*SCHEDULERS.values()} == {*SAMPLERS} <= {*fastdiff.__all__} & {*dir(fastdiff)}
    for name in SCHEDULERS:
        assert checked("scheduler", name, SchedulerName) == name
    with pytest.raises(InputError, match=re.escape(f"is not one of {', '.join(SCHEDULERS)}")):
        checked("scheduler", "eular", SchedulerName)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_name_is_found_by_its_class_and_its_options(name):
    assert scheduler_name(SCHEDULERS[name], SCHEDULER_OPTIONS[name]) == name


def test_an_option_that_is_left_out_has_its_default():
    assert scheduler_name("DPMSolverMultistepScheduler", {}) == "dpm++2m"
    assert scheduler_name("PNDMScheduler", {}) == "pndm-rk"  # diffusers' default is Runge-Kutta steps
    assert scheduler_name("EulerDiscreteScheduler", {"use_karras_sigmas": None}) == "euler"
    assert scheduler_name("NoSuchScheduler", {}) is None


NEW = '''
"""DDIM by another name."""

from dataclasses import dataclass
from typing import ClassVar

from fastdiff.samplers.ddim import DDIMConfig, DDIMScheduler


@dataclass(frozen=True, kw_only=True)
class StrideConfig(DDIMConfig):
    """An option more than DDIM's, which says nothing."""

    stride_kind: str = "even"


class StrideScheduler(DDIMScheduler):
    """DDIM's steps."""

    names: ClassVar = {"stride": {}, "stride-odd": {"stride_kind": "odd"}}
    config_class = StrideConfig
'''
USED = """
import contextlib, io, sys
import fastdiff
from fastdiff import cli, sampler_names
said = io.StringIO()
with contextlib.redirect_stdout(said):
    assert cli.main(["sample", "--help"]) == 0
said = " ".join(said.getvalue().split())
assert ", stride, stride-odd (default" in said, said  # after those that say their place
assert "torch" not in sys.modules
from fastdiff.samplers.shared.from_config import name_of, scheduler_from_config
from fastdiff.schema import checked
name = checked("scheduler", "stride-odd", sampler_names.SchedulerName)
ours = scheduler_from_config({"_class_name": "DDIMScheduler"}, name)
assert type(ours) is fastdiff.StrideScheduler and "StrideScheduler" in fastdiff.__all__
assert name_of(ours) == "stride-odd" and type(scheduler_from_config(ours.config)) is type(ours)
assert name_of(fastdiff.EulerDiscreteScheduler.from_config(ours.config)) == "euler"  # that has no stride_kind
assert len(ours.schedule(3)) == 3
"""


def test_a_new_sampler_is_its_file(tmp_path):
    """A new sampler needs only its file. The test copies fastdiff/samplers, adds a file, and links everything else."""
    package = tmp_path / "fastdiff"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name != "samplers":
            (package / path.name).symlink_to(path.resolve())
    shutil.copytree(FOLDER, package / "samplers", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "samplers" / "stride.py").write_text(NEW, encoding="utf-8")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{USED}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "source",
    ["", NEW.replace("StrideConfig", "Stride"), NEW.replace('"stride": {}', '**EVEN, "stride": {}')],
    ids=["empty", "no-config", "names-are-no-literal"],
)
def test_a_file_that_is_no_sampler_is_named(tmp_path, source):
    (tmp_path / "stride.py").write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=r"stride\.py: a sampler needs one class"):
        read_samplers(tmp_path)
