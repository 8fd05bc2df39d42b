"""The lines of the guide work as they stand."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.serve.conftest import served_by
from tests.tree.floors import ROOT

GUIDE = (ROOT / "docs/guides/serve.md").read_text(encoding="utf-8")
HERE = "http://127.0.0.1:8000"


def commands() -> list[tuple[str, str]]:
    """Return the lines of the guide that call curl or read its answers, each with the output below it."""
    blocks = re.findall(r"^```console\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^\$ ((?:.*\\\n)*.*\n)((?:(?!\$ ).*\n)*)", "".join(blocks), re.MULTILINE)
    return [(line, output) for line, output in found if "curl" in line or "answer.json" in line]


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_lines_of_the_guide(tmp_path, sd1, one_thread):
    (python,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    with served_by(sd1) as served:

        def here(text: str) -> str:
            return text.replace(HERE, served.server.address).replace("20}", "2}").replace("steps=20", "steps=2")

        code = here(python).replace("partial_images=2)", 'partial_images=2, extra_body={"num_inference_steps": 4})')
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        kinds = [line.split()[0].rpartition(".")[2] for line in done.stdout.splitlines()]
        assert kinds == ["partial_image", "partial_image", "completed"]
        lines = commands()
        assert len(lines) == 6
        for line, output in lines:
            done = subprocess.run(here(line), shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert not output or done.stdout.strip() == output.strip()
    assert (tmp_path / "fox.png").read_bytes()[1:4] == b"PNG"
    for name in ("answer.json", "edited.json"):
        assert json.loads((tmp_path / name).read_bytes())["data"][0]["b64_json"]
