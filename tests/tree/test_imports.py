"""Quick commands import no heavy packages, and the library needs neither triton nor diffusers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastdiff import extras
from fastdiff.errors import InputError
from tests.support.waiting import TIMEOUT

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "triton",
    "numpy",
    "PIL",
    "diffusers",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "tqdm",
    "gradio",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "scipy",
    "shtab",
}

COMMANDS = {
    "--help": 0,
    "--version": 0,
    "sample --help": 0,
    "verify --help": 0,
    "bench --help": 0,
    "doctor --help": 0,
    "tune --help": 0,
    "bulk --help": 0,
    "serve --help": 0,
    "models emoji64": 0,
    "": 2,
    "sample --steps 0": 2,
    "sample --scheduler eular": 2,
    "sample --label hippogriff": 2,
    "sample -m no-such-model": 2,
    "sample -o picture.jpg": 2,
    "sample --from no-such.png": 2,
    "info no-such.png": 2,
    "bulk": 2,
    "bulk --out x --steps 0": 2,
    "bulk --out x --spec no-such.csv": 2,
    "bulk --out tests": 2,
    "status no-such": 2,
    "doctor no-such": 2,
    "verify emoji64 --steps 1001": 2,
    "bench emoji64 --steps 0": 2,
    "tune no-such-workload": 2,
    "completion tcsh": 2,
}
# `import fastdiff`, then `python -m fastdiff` for each command. Prints the exit code, stderr and the modules so far.
PROGRAM = """
import contextlib, io, json, runpy, sys
import fastdiff
rows = [(None, "", list(sys.modules))]
for command in sys.argv[1:]:
    sys.argv = ["fastdiff", *command.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_module("fastdiff", run_name="__main__")
        except SystemExit as end:
            code = end.code
    rows.append((code, said.getvalue(), list(sys.modules)))
print(json.dumps(rows))
"""


def python(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)


def test_what_comes_at_once_imports_nothing_heavy():
    """One interpreter runs all commands, so the first command in a failure is the one that imported too much."""
    done = python("-c", PROGRAM, *COMMANDS)
    assert done.returncode == 0, done.stderr
    package, *rows = json.loads(done.stdout)
    assert "fastdiff" in package[2] and [name for name in package[2] if name.startswith("fastdiff.")] == []
    assert "argparse" in rows[0][2], "the commands were not run"
    wrong = []
    for command, (code, said, modules) in zip(["import fastdiff", *COMMANDS], [package, *rows], strict=True):
        heavy = {name.partition(".")[0] for name in modules} & HEAVY
        if code != COMMANDS.get(command) or heavy:
            wrong.append((command, code, said, heavy))
    assert not wrong


def test_every_public_name_is_there_without_triton_and_diffusers():
    code = (
        "import sys\n"
        "sys.modules.update(triton=None, diffusers=None)\n"  # importing them raises, as if they were not installed
        "import fastdiff\n"
        "print(*(name for name in fastdiff.__all__ if getattr(fastdiff, name) is None))"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_a_picture_drawn_on_a_cpu_imports_no_triton(tmp_path):
    code = (
        "import sys\n"
        "from fastdiff.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print(code, 'torch' in sys.modules, [name for name in sys.modules if name.partition('.')[0] == 'triton'])"
    )
    picture = tmp_path / "picture.png"
    drawing = "sample -m emoji64 --label 0 --num-images 1 --steps 1 --device cpu --out"
    done = python("-c", code, *drawing.split(), str(picture))
    assert picture.exists() and done.stdout.splitlines()[-1] == "0 True []", done.stderr


@pytest.mark.slow
def test_loading_a_model_has_torch_import_no_compiler():
    code = (
        "import sys, fastdiff; fastdiff.UNet2DModel.from_pretrained('emoji64'); print('torch._dynamo' in sys.modules)"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize("error", [ModuleNotFoundError, ImportError], ids=["not-there", "of-another-version"])
def test_a_package_that_cannot_be_imported_is_named_with_its_remedy(monkeypatch, error):
    """A package that needs a newer version of another package raises a plain ImportError."""

    def fail(name):
        raise error(name)

    monkeypatch.setattr(extras, "import_module", fail)
    with pytest.raises(InputError, match=r"^a check needs scipy, which is not installed; pip install scipy$"):
        extras.import_scipy_stats("a check")
