"""LoRAs of the command: flags, the PNG's settings, files that moved, and what is refused in one line."""

import shutil

import pytest
from safetensors.torch import save_file

from fastdiff import Pipeline
from fastdiff.bulk.plan import Plan
from fastdiff.checkpoints.model_hash import begin_files_hash, file_hash
from fastdiff.requests import png
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import find_model
from fastdiff.runs.option_files.kinds import files_of
from tests.adapters.formats import in_diffusers, in_kohya, random_loras, save
from tests.support.text_pipelines import text_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def loras():
    return [random_loras(text_pipeline("sd1"), seed=seed) for seed in (1, 2)]


@pytest.fixture
def here(tmp_path, monkeypatch, loras):
    """A current folder with two LoRAs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTDIFF_MODELS", raising=False)
    save(tmp_path / "style.safetensors", in_diffusers(loras[0]))
    save(tmp_path / "detail.safetensors", in_kohya(loras[1], alpha=2.0))
    return tmp_path


PROMPT = "a cat"
BOTH = ("--lora", "style.safetensors", "--lora", "detail.safetensors:0.5")


def test_the_picture_is_the_librarys_and_the_png_says_it(here, sample, text_folder, pixels):
    assert sample(*BOTH, "-o", "first.png") == 0
    assert sample("-o", "plain.png") == 0
    assert pixels("first.png") != pixels("plain.png")
    digits = [file_hash(here / name) for name in ("style.safetensors", "detail.safetensors")]
    record, text = png.read_settings("first.png"), png.read_text("first.png")["parameters"]
    assert record["lora"] == ["style.safetensors:1", "detail.safetensors:0.5"]
    assert record["lora_hashes"] == digits
    assert text.startswith("a cat <lora:style:1> <lora:detail:0.5>\n")
    assert f', Lora hashes: "style: {digits[0][:12]}, detail: {digits[1][:12]}", ' in text
    assert "lora" not in png.read_settings("plain.png") and "Lora" not in png.read_text("plain.png")["parameters"]
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    for name in ("style", "detail"):
        pipe.load_lora_weights(f"{name}.safetensors", adapter_name=name)
    pipe.set_adapters(["style", "detail"], [1, 0.5])
    wanted = pipe("a cat", num_inference_steps=1, seed=5, guidance_scale=record["guidance_scale"]).images[0]
    assert wanted.tobytes() == pixels("first.png")


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_in_8_bits_the_picture_is_that_of_a_folder_with_the_merged_weights(
    here, sample, text_folder, pixels, precision
):
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    for name in ("style", "detail"):
        pipe.load_lora_weights(f"{name}.safetensors", adapter_name=name)
    pipe.set_adapters(["style", "detail"], [1, 0.5])
    pipe.fuse_lora(["unet", "text_encoder"])
    pipe.unload_lora_weights()
    pipe.save_pretrained("merged")
    assert sample(*BOTH, "--precision", precision, "-o", "8-bits.png") == 0
    assert sample("--model", "merged", "--precision", precision, "-o", "merged.png") == 0
    assert sample("--precision", precision, "-o", "plain.png") == 0
    assert pixels("8-bits.png") == pixels("merged.png") != pixels("plain.png")
    record = png.read_settings("8-bits.png")
    assert record["precision"] == precision and record["lora"] == ["style.safetensors:1", "detail.safetensors:0.5"]


def test_from_finds_moved_files_by_hash_then_by_name(here, sample, capsys, loras, pixels):
    assert sample(*BOTH, "-o", "first.png") == 0
    (here / "mine/deep").mkdir(parents=True)
    shutil.move("style.safetensors", "mine/deep/renamed.safetensors")
    save(here / "mine/style.safetensors", in_diffusers(loras[1]))
    again = ("--from", "first.png")
    assert sample(*again, "--lora-dir", "mine", "-o", "again.png", own=()) == 0
    assert png.read_settings("again.png")["lora"][0] == "mine/deep/renamed.safetensors:1"
    assert pixels("again.png") == pixels("first.png")

    (here / "mine/deep/renamed.safetensors").unlink()
    capsys.readouterr()
    assert sample(*again, "--lora-dir", "mine", "-o", "other.png", own=()) == 0
    now, drawn = (
        file_hash(here / "mine/style.safetensors")[:10],
        png.read_settings("first.png")["lora_hashes"][0][:10],
    )
    line = f"mine/style.safetensors has the LoRA hash {now}, and first.png was drawn with {drawn}; the picture will"
    assert line in capsys.readouterr().err

    assert sample(*again, "-o", "none.png", own=()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"with the LoRA style.safetensors, hash {drawn}: it is not at" in err
    assert "give the file with --lora, or its folder with --lora-dir" in err
    assert sample(*again, "--lora", "detail.safetensors", "-o", "one.png", own=()) == 0
    assert png.read_settings("one.png")["lora"] == ["detail.safetensors:1"]


def test_another_model_or_a_label_drops_them():
    source = Recorded("p.png", {"model": "a", "seed": 1, "prompt": "x", "lora": ["a.safetensors:0.5"]})
    assert Request.from_flags({"seed": "2"}, source).lora == ("a.safetensors:0.5",)
    assert Request.from_flags({"model": "b"}, source).lora == ()


def test_resume_compares_them(here, sample, capsys):
    assert sample(*BOTH, "-o", "first.png") == 0
    assert sample(*BOTH, "-o", "first.png", "--resume") == 0
    capsys.readouterr()
    assert sample("--lora", "style.safetensors:0.3", "-o", "first.png", "--resume") == 2
    assert "lora" in capsys.readouterr().err


REFUSED = {
    "missing": (["--lora", "no.safetensors"], "'no.safetensors' does not exist"),
    "a-pickle": (["--lora", "a.pt"], "a.pt is a pickle"),
    "weight": (["--lora", "style.safetensors:strong"], "its weight 'strong' is not a number"),
    "infinite": (["--lora", "style.safetensors:inf"], "its weight 'inf' is not a number"),
    "twice": ([*BOTH, "--lora", "style.safetensors:2"], "it is given twice"),
    "another": (["--lora", "other.safetensors"], "have no layer in this model"),
    "no-folder": (["--lora-dir", "nowhere"], "--lora-dir: nowhere is not a folder"),
    "labels": (["--model", "emoji64", "--lora", "style.safetensors"], "lora: emoji64 has no text encoder"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_one_line_and_no_file(here, sample, capsys, flags, message, loras):
    (here / "a.pt").write_bytes(b"\x80\x04}.")
    save_file(
        {f"x{key}": each.contiguous() for key, each in in_diffusers(loras[0]).items()}, here / "other.safetensors"
    )
    before = sorted(here.rglob("*"))
    assert (sample(*flags, own=()) if "emoji64" in flags else sample(*flags)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err
    assert sorted(here.rglob("*")) == before


def test_a_bulk_run_knows_their_weights_and_contents(here, text_folder, loras):
    request = Request(model=str(text_folder("sd1")), prompt=("a cat",), lora=("style.safetensors:0.5",))
    card = find_model(request)
    plan = Plan.make(request, card)
    assert plan.record["lora"] == ["style.safetensors:0.5"]

    def digits():
        return begin_files_hash(card, None, files_of(plan.run.request)).result()

    before = digits()
    assert before != begin_files_hash(card, None).result() and before == digits()
    save(here / "style.safetensors", in_diffusers(loras[1]))
    assert digits() != before


def test_a_hub_id_is_downloaded(here, sample, text_folder, pixels, monkeypatch, capsys):
    asked, listed = [], ["README.md"]

    def snapshot_download(repo_id, allow_patterns, **options):
        asked.append((repo_id, allow_patterns, options["revision"]))
        return str(here / "remote")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name, **options: listed)
    (here / "remote").mkdir()
    assert sample("--lora", "org/style:0.5", "-o", "none.png") == 2
    line = "hub model org/style has no pytorch_lora_weights.safetensors; name the file with weight_name="
    assert line in capsys.readouterr().err
    shutil.copy("style.safetensors", here / "remote" / "ink.safetensors")
    listed += ["ink.safetensors", "ink.bin"]
    assert sample("--lora", "org/style:0.5", "-o", "only.png") == 0
    assert png.read_settings("only.png")["lora"] == [f"{here}/remote/ink.safetensors:0.5"]
    listed.append("more/b.safetensors")
    assert sample("--lora", "org/style:0.5", "-o", "none.png") == 2
    line = "org/style has no pytorch_lora_weights.safetensors, and 2 others: ink.safetensors, more/b.safetensors;"
    assert line in capsys.readouterr().err
    shutil.copy("style.safetensors", here / "remote" / "pytorch_lora_weights.safetensors")
    assert sample("--lora", "org/style:0.5", "-o", "hub.png") == 0
    assert sample("--lora", "style.safetensors:0.5", "-o", "file.png") == 0
    assert pixels("hub.png") == pixels("file.png") == pixels("only.png")
    assert asked[-1] == ("org/style", ["pytorch_lora_weights.safetensors"], None)
    pipe = Pipeline.from_pretrained(text_folder("sd1"))
    shutil.copy("style.safetensors", here / "remote" / "a.safetensors")
    pipe.load_lora_weights("org/style", weight_name="a.safetensors", revision="v2")
    assert asked[-1] == ("org/style", ["a.safetensors"], "v2") and pipe.get_active_adapters() == ["default_0"]
