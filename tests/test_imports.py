"""Commands that come at once import nothing heavy, and the library needs neither triton nor diffusers."""

import subprocess
import sys

import pytest

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
    "scipy",
}


def python(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        ("sample --help", 0),
        ("verify --help", 0),
        ("bulk --help", 0),
        ("models emoji64", 0),
        ("", 2),
        ("sample --steps 0", 2),
        ("sample --scheduler eular", 2),
        ("sample --label hippogriff", 2),
        ("sample -m no-such-model", 2),
        ("sample -o picture.jpg", 2),
        ("sample --from no-such.png", 2),
        ("info no-such.png", 2),
        ("bulk", 2),
        ("bulk --out x --steps 0", 2),
        ("bulk --out x --spec no-such.csv", 2),
        ("bulk --out tests", 2),
        ("status no-such", 2),
        ("verify emoji64 --steps 1001", 2),
    ],
)
def test_what_comes_at_once_imports_nothing_heavy(command, code):
    done = python("-X", "importtime", "-m", "fastdiff", *command.split())
    assert done.returncode == code, done.stderr
    rows = [line.split("|") for line in done.stderr.splitlines() if line.startswith("import time:")]
    imported = {row[-1].strip().partition(".")[0] for row in rows}
    assert {"fastdiff", "argparse"} <= imported, "the report is not what this test reads"
    assert not imported & HEAVY


def test_import_of_the_package_does_no_work():
    loaded = python("-c", "import sys, fastdiff; print(*sys.modules)").stdout.split()
    assert "fastdiff" in loaded and not {name.partition(".")[0] for name in loaded} & HEAVY
    assert [name for name in loaded if name.startswith("fastdiff.")] == []


def test_every_public_name_is_there_without_triton_and_diffusers():
    code = (
        "import sys\n"
        "sys.modules.update(triton=None, diffusers=None)\n"  # importing them raises, as where they are not installed
        "import fastdiff\n"
        "print(*(name for name in fastdiff.__all__ if getattr(fastdiff, name) is None))"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_loading_a_model_has_torch_import_no_compiler():
    code = (
        "import sys, fastdiff; fastdiff.UNet2DModel.from_pretrained('emoji64'); print('torch._dynamo' in sys.modules)"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
