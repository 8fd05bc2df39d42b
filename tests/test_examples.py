"""The scripts and the notebook in examples/ run on a CPU, without a network, and change nothing beside their folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import TIMEOUT

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = {  # name -> what it prints last
    "own_loop": "label 15 in 2 steps of DDIMScheduler: own-loop.png",
    "prompts": "two more in ., the second by euler-a",
    "labels": "step 2 of 2",
    "accelerate_diffusers": "largest difference, restored:    0.0e+00 of 1",
    "planner": "each begins with the observation: True",
    "bulk": "again: 4 pictures",
    "image_to_image": "two sheets: strengths.png, green-apple.png",
    "inpainting": "two sheets: mouth.png, green-body.png",
    "controlnet": "one sheet: edges.png",
    "outlines": "2 outlines in 4 styles: outlines.png",
}
QUICK = ("own_loop",)
STEPS = {"image_to_image": 5}  # at a strength of 0.2, fewer would leave no step


def run(arguments: list[str], folder: Path, text: str | None = None) -> str:
    """Run Python in a folder, on the CPU and without a network; return what it prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, input=text, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def cells_of(notebook: Path) -> list[str]:
    """Return the sources of a notebook's code cells."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SCRIPTS.keys()
    assert [path.name for path in EXAMPLES.glob("*.ipynb")] == ["first_pictures.ipynb"]


def test_no_script_has_the_name_of_a_package():
    """A script's folder comes first on its path: a script `accelerate.py` would replace that package for diffusers."""
    packages = {"accelerate", "diffusers", "torch", "transformers", "triton", *sys.stdlib_module_names}
    assert not SCRIPTS.keys() & packages


def test_scripts_are_short():
    assert all(len(path.read_text("utf-8").splitlines()) < 40 for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS]
)
def test_scripts_run(name, tmp_path):
    printed = run([str(EXAMPLES / f"{name}.py"), "--steps", str(STEPS.get(name, 2))], tmp_path)
    assert printed.splitlines()[-1] == SCRIPTS[name]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    """Each code cell runs in turn, in one namespace, as a kernel would run them."""
    sources = cells_of(EXAMPLES / "first_pictures.ipynb")
    assert not any(line.lstrip().startswith(("%", "!")) for source in sources for line in source.splitlines())
    first = sources[0].replace("STEPS = 8", "STEPS = 2")
    assert first != sources[0]
    program = "import json, sys\nnamespace = {}\nfor source in json.load(sys.stdin): exec(source, namespace)"
    run(["-c", program], tmp_path, json.dumps([first, *sources[1:]]))
    assert [path.name for path in tmp_path.iterdir()] == ["green-dog.png"]


def test_the_notebook_holds_no_outputs():
    cells = json.loads((EXAMPLES / "first_pictures.ipynb").read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
