"""Type checkers see the public names and the results of calls, in the installed wheel."""

import re
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import fastdiff
from tests.tree.floors import ROOT
from tests.tree.packages import run

PROGRAM = """
from typing import Any

import PIL.Image
import torch
from typing_extensions import assert_type

import fastdiff
from fastdiff import DDIMScheduler, LabelPipeline, Pipeline, TextToImagePipeline, TrajectoryPipeline, UNet2DModel

pipe = fastdiff.Pipeline.from_pretrained("emoji-sd")
assert_type(pipe, Pipeline)
assert_type(pipe.to("cuda"), Pipeline)
assert_type(pipe("a cat", seed=7).images, list[PIL.Image.Image])
assert_type(pipe("a cat", output_type="np"), Any)
assert_type(pipe("a cat", return_dict=False), tuple[Any, ...])
for step in pipe.stream(prompt="a cat"):
    assert_type(step.preview(), list[PIL.Image.Image])
    assert_type(step.x0, torch.Tensor)
assert_type(TextToImagePipeline.from_pretrained("a")("a cat").images[0], PIL.Image.Image)
assert_type(LabelPipeline.from_pretrained("emoji64"), LabelPipeline)
plans = TrajectoryPipeline.from_pretrained("a")(num_images=3)
plans.trajectories, plans.values
assert_type(UNet2DModel.from_pretrained("a").to("cuda"), UNet2DModel)
assert_type(UNet2DModel(sample_size=32), UNet2DModel)
assert_type(DDIMScheduler(num_train_timesteps=10), DDIMScheduler)
assert_type(DDIMScheduler.from_pretrained("a").timesteps, torch.Tensor)
assert_type(fastdiff.accelerate("anything"), str)
assert_type(fastdiff.report(pipe).rows[0].flop, int)
assert_type(fastdiff.draw_many("emoji-sd", "out", num_images=2).pictures, int)
fastdiff.Pipline  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
plans.images  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
fastdiff.draw_many("emoji-sd", "out", num_images="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
"""
# An ignored line without an error is an error. mypy takes torch and numpy for Any, which saves it 15 seconds.
SETTINGS = """
[mypy]
strict = true
[mypy-torch.*,numpy.*]
follow_imports = skip
"""
CHECKERS = {
    "mypy": ["mypy", "--config-file", "mypy.ini", "--no-incremental", "--python-executable"],
    "pyright": ["basedpyright", "--level", "error", "--pythonpath"],
}


def test_the_stub_has_every_public_name_from_its_module():
    text = (ROOT / "fastdiff/__init__.pyi").read_text(encoding="utf-8")
    lines = {f"from {module} import {name} as {name}" for name, module in fastdiff._exports().items()}
    assert lines == {line for line in text.splitlines() if line.startswith("from ")}
    assert re.findall(r"^(\w+): ", text, re.MULTILINE) == ["__version__"]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Install the wheel into a new environment that also has this one's packages, and return its Python."""
    folder = tmp_path_factory.mktemp("user") / "venv"
    builder = venv.EnvBuilder(symlinks=sys.platform != "win32")
    builder.create(folder)
    python = builder.ensure_directories(folder).env_exe
    packages = Path(run([python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "z.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return Path(python)


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_knows_what_calls_return(installed, tmp_path, checker):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    (tmp_path / "pyrightconfig.json").write_text('{"reportUnnecessaryTypeIgnoreComment": "error"}')
    run([sys.executable, "-m", *CHECKERS[checker], installed, "program.py"], tmp_path)
