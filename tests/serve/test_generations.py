"""Pictures of POST /v1/images/generations are the command's, alone and together, in any format."""

import io
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from fastdiff import cli
from fastdiff.serve.drawing.engine_drawer import partial_steps
from tests.adapters.formats import in_diffusers, random_loras, save
from tests.serve.conftest import error_of, pictures_of, served_by
from tests.support.text_pipelines import text_pipeline

FIELDS = {
    "negative_prompt": "an astronaut",
    "num_inference_steps": 3,
    "guidance_scale": 3.5,
    "seed": 7,
    "scheduler": "euler-a",
    "size": "24x16",
}
FLAGS = [
    *("--negative-prompt", "an astronaut", "--steps", "3", "--cfg-scale", "3.5", "--seed", "7"),
    *("--scheduler", "euler-a", "--width", "24", "--height", "16"),
]


def sampled(tmp_path: Path, model: Path, *flags: str) -> list[bytes]:
    """Return the files that `fastdiff sample` writes, run where the model's path is its name."""
    out = tmp_path / "sampled"
    command = ["sample", "-m", model.name, "--device", "cpu", "--prompt", "a cat", "-o", str(out), "--quiet", *flags]
    assert cli.main(command) == 0
    return [path.read_bytes() for path in sorted(out.iterdir())]


def test_files_are_the_commands_byte_for_byte(served, sd1, tmp_path, monkeypatch):
    monkeypatch.chdir(sd1.parent)
    expected = sampled(tmp_path, sd1, "--num-images", "2", *FLAGS)
    answer = served.generate(n=2, **FIELDS)
    assert pictures_of(answer) == expected
    first, second = answer.json()["data"]
    assert (first["seed"], second["seed"]) == (7, 8)
    assert first["settings"]["scheduler"] == "euler-a" and first["settings"]["model"] == sd1.name
    assert answer.json()["size"] == "24x16" and answer.json()["output_format"] == "png"


def test_what_a_request_leaves_open_is_as_in_the_command(served, sd1, tmp_path, monkeypatch):
    monkeypatch.chdir(sd1.parent)
    expected = sampled(tmp_path, sd1, "--steps", "1")
    answer = served.http.post("/v1/images/generations", json={"prompt": "a cat", "num_inference_steps": 1, "n": None})
    assert pictures_of(answer) == expected


def test_requests_together_get_the_pictures_that_they_get_alone(served):
    asked = [{"prompt": prompt, "seed": i, "num_inference_steps": 2 + i % 3} for i, prompt in enumerate("abcdef")]
    alone = [pictures_of(served.generate(**fields)) for fields in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda fields: pictures_of(served.generate(**fields)), asked))
    assert together == alone and len({*map(tuple, alone)}) == len(asked)


@pytest.mark.parametrize("kind", ["webp", "jpeg"])
def test_formats_and_their_quality(served, kind):
    files = [pictures_of(served.generate(output_format=kind, output_compression=each))[0] for each in (10, 100)]
    assert len(files[0]) < len(files[1])
    for file in files:
        image = Image.open(io.BytesIO(file))
        assert (image.format, image.size) == (kind.upper(), (16, 16))


def test_a_random_seed_is_told(served):
    answer = served.generate(seed="random")
    seed = answer.json()["data"][0]["seed"]
    assert pictures_of(served.generate(seed=seed)) == pictures_of(answer)


def test_usage_counts_tokens(served):
    usage = served.generate("a cat", n=2, size="40x16", negative_prompt="an astronaut").json()["usage"]
    assert usage["input_tokens_details"] == {"image_tokens": 0, "text_tokens": 5}
    assert usage["output_tokens"] == 2 * 3 and usage["total_tokens"] == 11


def test_the_safety_identifier_comes_back(served):
    assert served.generate(user="ann").json()["safety_identifier"] == "ann"
    assert served.generate(user="ann", safety_identifier="bob").json()["safety_identifier"] == "bob"
    assert "safety_identifier" not in served.generate(user="").json()


def test_two_models_and_their_list(sd1, text_folder, one_thread, tmp_path):
    sdxl = text_folder("sdxl")
    with served_by(sd1, sdxl) as served:
        models = served.http.get("/v1/models").json()
        assert [each["id"] for each in models["data"]] == [sd1.name, sdxl.name]
        assert served.http.get(f"/v1/models/{sdxl.name}").json()["id"] == sdxl.name
        settings = [
            served.generate(**model).json()["data"][0]["settings"]["model"] for model in ({}, {"model": sdxl.name})
        ]
        assert settings == [sd1.name, sdxl.name]
        assert error_of(served.generate(model=str(sdxl)))["code"] == "model_not_found"
        assert served.http.get("/v1/models/nothing").status_code == 404


@pytest.fixture(scope="module")
def lora_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    save(folder / "style.safetensors", in_diffusers(random_loras(text_pipeline("sd1"))))
    return folder


def test_loras_are_names_of_the_operators_files(sd1, lora_dir, tmp_path, monkeypatch, one_thread):
    shutil.copy(lora_dir / "style.safetensors", tmp_path)
    (tmp_path / sd1.name).symlink_to(sd1)
    monkeypatch.chdir(tmp_path)
    lora = "style.safetensors:0.5"
    (plain,), (styled,) = sampled(tmp_path / "plain", sd1, *FLAGS), sampled(tmp_path, sd1, *FLAGS, "--lora", lora)
    with served_by(sd1, lora_dir=lora_dir) as served, ThreadPoolExecutor(6) as pool:
        asked = [FIELDS, {**FIELDS, "loras": [lora]}] * 3
        files = list(pool.map(lambda fields: pictures_of(served.generate(**fields)), asked))
        assert files == [[plain], [styled]] * 3 and plain != styled
        for name in ("../style.safetensors", str(lora_dir / "style.safetensors"), "https://x/style.safetensors", ""):
            assert error_of(served.generate(loras=[name]))["param"] == "loras"


def test_partial_pictures_come_early_and_are_spread():
    assert partial_steps(3, 20) == [2, 8, 14]
    assert partial_steps(1, 20) == [2] and partial_steps(0, 20) == []
    assert partial_steps(3, 3) == [2] and partial_steps(3, 1) == []
