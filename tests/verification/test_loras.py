"""`fastdiff verify --lora`: LoRAs agree with diffusers + peft, and a file that diffusers misreads is named."""

import json
import sys

import peft
import pytest
import torch

from fastdiff import cli
from fastdiff.adapters import building
from fastdiff.verification.loras import misreading
from tests.adapters.formats import in_diffusers, in_kohya, in_ldm, random_loras, save
from tests.support.text_pipelines import text_pipeline


@pytest.fixture(scope="module")
def loras():
    return random_loras(text_pipeline("sd1"))


def verified(capsys, folder, *files) -> tuple[int, dict]:
    flags = [word for file in files for word in ("--lora", str(file))]
    capsys.readouterr()  # drops the output of saving the folder
    code = cli.main(["verify", str(folder), "--device", "cpu", "--json", *flags])
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out)


def test_two_loras_agree_with_peft(text_folder, tmp_path, capsys, loras):
    first = save(tmp_path / "a.safetensors", in_diffusers(loras))
    second = save(tmp_path / "b.safetensors", in_diffusers(random_loras(text_pipeline("sd1"), seed=1)))
    code, report = verified(capsys, text_folder("sd1"), f"{first}:0.8", f"{second}:-0.5")
    assert code == 0 and report["passed"] and report["versions"]["peft"] == peft.__version__
    assert report["loras"] == [
        f"lora {first}, weight 0.8: loaded by diffusers and peft",
        f"lora {second}, weight -0.5: loaded by diffusers and peft",
    ]
    _, plain = verified(capsys, text_folder("sd1"))
    assert "loras" not in plain
    largest = [
        [row["largest"] for row in each["comparisons"] if row["what"] == "U-Net t=0"] for each in (report, plain)
    ]
    assert largest[0] != largest[1], "both sides ignore the LoRAs"


def test_a_file_that_diffusers_misreads_is_merged_by_hand(text_folder, tmp_path, capsys, loras):
    first, *others = loras
    tensors = in_kohya({first: loras[first]}, 3.0) | in_kohya({place: loras[place] for place in others}, 8.0)
    file = save(tmp_path / "kohya.safetensors", tensors)
    assert cli.main(["verify", str(text_folder("sd1")), "--device", "cpu", "--lora", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    reason = "diffusers takes one alpha for all layers, and the file has several"
    assert lines[1] == f"lora {file}, weight 1: merged by hand, because {reason}"
    assert lines[-1] == "within tolerance"


def test_what_peft_fails_to_load_is_merged_by_hand(text_folder, tmp_path, capsys, loras, monkeypatch):
    def fail(*args, **options):
        raise ValueError("unknown\nkeys")

    monkeypatch.setattr("diffusers.StableDiffusionPipeline.load_lora_weights", fail)
    file = save(tmp_path / "a.safetensors", in_diffusers(loras))
    code, report = verified(capsys, text_folder("sd1"), file)
    assert code == 0 and report["loras"][0].endswith("because diffusers cannot load it (ValueError: unknown keys)")


def test_a_lora_that_fastdiff_scales_wrong_is_found(text_folder, tmp_path, capsys, loras, monkeypatch):
    right = building._lora
    monkeypatch.setattr(building, "_lora", lambda *args, **options: right(*args[:3], 5.0, **options))
    file = save(tmp_path / "a.safetensors", in_diffusers(loras))
    code, report = verified(capsys, text_folder("sd1"), file)
    failed = {row["what"].split()[0] for row in report["comparisons"] if not row["passed"]}
    assert code == 1 and failed == {"text_encoder", "U-Net", "4"}


def _magnitude(loras):
    return in_diffusers(loras) | {"text_encoder.x.lora_magnitude_vector.weight": torch.ones(2)}


MISREAD = {
    "one alpha": (lambda loras: in_kohya(loras, 8.0), None),
    "no alpha": (in_kohya, None),
    "LDM's names": (in_ldm, "diffusers drops some of LDM's names of layers"),
    "no part": (
        lambda loras: {key.removeprefix("unet."): each for key, each in in_diffusers(loras).items()},
        "diffusers drops keys that do not name their model",
    ),
    "DoRA": (_magnitude, "diffusers does not load the DoRA magnitudes of text encoders"),
    "LoHa": (
        lambda loras: {f"lora_unet_x.hada_{each}": torch.ones(2, 2) for each in ("w1_a", "w1_b", "w2_a", "w2_b")},
        "diffusers does not read LoHa",
    ),
}


@pytest.mark.parametrize("name", MISREAD)
def test_what_diffusers_misreads_is_known(name, tmp_path, loras):
    make, reason = MISREAD[name]
    assert misreading(str(save(tmp_path / "a.safetensors", make(loras)))) == reason


def test_bad_input_is_one_line(text_folder, tmp_path, capsys, loras, monkeypatch):
    file = save(tmp_path / "a.safetensors", in_diffusers(loras))
    folder = str(text_folder("sd1"))
    capsys.readouterr()
    for model, given, message in (
        (folder, tmp_path / "none.safetensors", "does not exist; give a safetensors file, or FILE:WEIGHT"),
        (f"{folder}/unet", file, "is a model alone; give the folder of its pipeline"),
        ("emoji64", file, "lora"),
    ):
        assert cli.main(["verify", model, "--device", "cpu", "--lora", str(given)]) == 2
        err = capsys.readouterr().err
        assert message in err and len(err.splitlines()) == 1
    monkeypatch.setitem(sys.modules, "peft", None)
    assert cli.main(["verify", folder, "--device", "cpu", "--lora", str(file)]) == 2
    assert capsys.readouterr().err.endswith("verify --lora needs peft, which is not installed; pip install peft\n")
