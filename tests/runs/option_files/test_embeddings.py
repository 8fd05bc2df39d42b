"""Embeddings of the command: flags, the PNG's settings, files that moved, and what is refused in one line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from fastdiff import Pipeline, cli
from fastdiff.bulk.plan import Plan
from fastdiff.checkpoints.model_hash import begin_files_hash, file_hash
from fastdiff.requests import png
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.file_option import FileOption
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run, find_model
from fastdiff.runs.notices import find_notices
from fastdiff.runs.option_files.kinds import files_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("cat.safetensors", "cat.safetensors", None),
        ("cat.safetensors:<cat>", "cat.safetensors", "<cat>"),
        ("C:\\a\\cat.SFT:<a:b>", "C:\\a\\cat.SFT", "<a:b>"),
        ("C:\\cat.safetensors", "C:\\cat.safetensors", None),
        ("a.pt:x.safetensors:y", "a.pt", "x.safetensors:y"),
        ("cat.safetensors:", "cat.safetensors:", None),
        ("cat", "cat", None),
    ],
)
def test_a_file_and_its_value(text, path, value):
    found = FileOption.parse(text)
    assert found == (path, value) and str(found) == text


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with two embeddings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTDIFF_MODELS", raising=False)
    generator = torch.Generator().manual_seed(0)
    save_file({"emb_params": torch.randn(2, 32, generator=generator)}, tmp_path / "blurb.safetensors")
    save_file({"<dog>": torch.randn(1, 32, generator=generator)}, tmp_path / "dog.safetensors")
    return tmp_path


PROMPT = "a blurb cat, <dog>"
BOTH = ("--embedding", "blurb.safetensors", "--embedding", "dog.safetensors:<dog>")


def test_the_picture_is_the_librarys_and_the_png_says_it(here, sample, text_folder, pixels):
    assert sample(*BOTH, "-o", "first.png") == 0
    assert sample("-o", "plain.png") == 0
    assert pixels("first.png") != pixels("plain.png")
    digits = [file_hash(here / name) for name in ("blurb.safetensors", "dog.safetensors")]
    record, text = png.read_settings("first.png"), png.read_text("first.png")["parameters"]
    assert record["embedding"] == ["blurb.safetensors:blurb", "dog.safetensors:<dog>"]
    assert record["embedding_hashes"] == digits
    assert f', TI hashes: "blurb: {digits[0][:12]}, <dog>: {digits[1][:12]}", ' in text
    assert (
        "embedding" not in png.read_settings("plain.png")
        and "TI hashes" not in png.read_text("plain.png")["parameters"]
    )
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    pipe.load_textual_inversion(["blurb.safetensors", "dog.safetensors"])
    wanted = pipe(record["prompt"], num_inference_steps=1, seed=5, guidance_scale=record["guidance_scale"]).images[0]
    assert wanted.tobytes() == pixels("first.png")


def test_from_finds_moved_files_by_hash_then_by_name(here, sample, capsys, pixels):
    assert sample(*BOTH, "-o", "first.png") == 0
    (here / "mine/deep").mkdir(parents=True)
    shutil.move("blurb.safetensors", "mine/deep/renamed.safetensors")
    save_file({"emb_params": torch.ones(2, 32)}, here / "mine/blurb.safetensors")
    again = ("--from", "first.png")
    assert sample(*again, "--embedding-dir", "mine", "-o", "again.png", own=()) == 0
    assert png.read_settings("again.png")["embedding"][0] == "mine/deep/renamed.safetensors:blurb"
    assert pixels("again.png") == pixels("first.png")

    (here / "mine/deep/renamed.safetensors").unlink()
    capsys.readouterr()
    assert sample(*again, "--embedding-dir", "mine", "-o", "other.png", own=()) == 0
    now, drawn = (
        file_hash(here / "mine/blurb.safetensors")[:10],
        png.read_settings("first.png")["embedding_hashes"][0],
    )
    line = (
        f"mine/blurb.safetensors has the embedding hash {now}, and first.png was drawn with {drawn[:10]}; the picture"
    )
    assert line in capsys.readouterr().err
    assert pixels("other.png") != pixels("first.png")

    assert sample(*again, "-o", "none.png", own=()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"with the embedding blurb.safetensors, hash {drawn[:10]}: it is not at" in err
    assert "give the file with --embedding, or its folder with --embedding-dir" in err
    assert sample(*again, "--embedding", "dog.safetensors", "-o", "dog.png", own=()) == 0
    assert png.read_settings("dog.png")["embedding"] == ["dog.safetensors:<dog>"]


def test_a_file_of_the_current_folder_is_found_by_its_name(here, sample, pixels):
    (here / "there").mkdir()
    shutil.move("dog.safetensors", "there/dog.safetensors")
    assert sample("--embedding", "there/dog.safetensors", "-o", "first.png") == 0
    shutil.move("there/dog.safetensors", "dog.safetensors")
    assert sample("--from", "first.png", "-o", "again.png", own=()) == 0
    assert png.read_settings("again.png")["embedding"] == ["dog.safetensors:<dog>"]
    assert pixels("again.png") == pixels("first.png")


def test_another_model_or_a_label_drops_them():
    source = Recorded("p.png", {"model": "a", "seed": 1, "prompt": "x", "embedding": ["a.safetensors:<a>"]})
    assert Request.from_flags({}, source).embedding == ("a.safetensors:<a>",)
    assert Request.from_flags({"seed": "2"}, source).embedding == ("a.safetensors:<a>",)
    assert Request.from_flags({"model": "b"}, source).embedding == ()


def test_resume_compares_them(here, sample, capsys):
    assert sample(*BOTH, "-o", "first.png") == 0
    assert sample(*BOTH, "-o", "first.png", "--resume") == 0
    capsys.readouterr()
    assert sample("-o", "first.png", "--resume") == 2
    assert "embedding" in capsys.readouterr().err


def test_the_cut_of_a_prompt_counts_their_tokens(here, text_folder):
    """The notices come before the model is loaded, from the file's header alone."""
    save_file({"emb_params": torch.ones(20, 32)}, here / "long.safetensors")
    request = Request(model=str(text_folder("sd1")), prompt=("long cat long",), embedding=("long.safetensors:long",))
    (line,) = find_notices(Run.prepare(request, find_model(request), COMMAND))
    assert line.startswith("prompt: longer than the 24 tokens that the model reads; cut: 'long_1 long_2")


REFUSED = {
    "missing": (["--embedding", "no.safetensors"], "no.safetensors does not exist"),
    "a-pickle": (["--embedding", "a.pt"], "a.pt is a pickle"),
    "width": (["--embedding", "wide.safetensors"], "768 channels, so it is for Stable Diffusion 1"),
    "space": (["--embedding", "my cat.safetensors"], "token: 'my cat' has a space"),
    "twice": (["--embedding", "dog.safetensors", "--embedding", "blurb.safetensors:<dog>"], "has the token <dog> too"),
    "a-model": (["--embedding", "lora.safetensors"], "is a LoRA, and no embedding"),
    "no-folder": (["--embedding-dir", "nowhere"], "--embedding-dir: nowhere is not a folder"),
    "labels": (["--model", "emoji64", "--embedding", "dog.safetensors"], "embedding: emoji64 has no text encoder"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_one_line_and_no_file(here, sample, capsys, flags, message):
    (here / "a.pt").write_bytes(b"\x80\x04}.")
    save_file({"<wide>": torch.ones(1, 768)}, here / "wide.safetensors")
    save_file({"lora_unet_x.lora_up.weight": torch.ones(1, 32)}, here / "lora.safetensors")
    shutil.copy("blurb.safetensors", "my cat.safetensors")
    own = ("--model", "emoji64") if "emoji64" in flags else None
    before = sorted(here.rglob("*"))
    assert (sample(*flags, own=own) if own else sample(*flags)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err
    assert sorted(here.rglob("*")) == before


def test_a_bulk_run_knows_their_names_and_contents(here, text_folder):
    request = Request(model=str(text_folder("sd1")), prompt=("a cat",), embedding=("dog.safetensors:<dog>",))
    card = find_model(request)
    plan = Plan.make(request, card)
    assert plan.record["embedding"] == ["dog.safetensors:<dog>"]

    def digits():
        return begin_files_hash(card, None, files_of(plan.run.request)).result()

    before = digits()
    assert before != begin_files_hash(card, None).result() and before == digits()
    save_file({"<dog>": torch.ones(1, 32)}, here / "dog.safetensors")
    assert digits() != before


def test_info_and_models_say_what_a_file_is(here, capsys):
    save_file({"clip_l": torch.ones(3, 768), "clip_g": torch.ones(3, 1280)}, here / "pair.safetensors")
    assert cli.main(["info", "pair.safetensors", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    wanted = {
        "kind": "embedding (textual inversion)",
        "base model": "Stable Diffusion XL",
        "token": "pair",
        "vectors": 3,
    }
    assert wanted.items() <= facts.items() and facts["SHA-256"] == file_hash(here / "pair.safetensors")
    assert cli.main(["info", "dog.safetensors"]) == 0
    assert "token: <dog>\nvectors: 1\n" in capsys.readouterr().out
    assert cli.main(["models", "--models-dir", "."]) == 0
    out = capsys.readouterr().out
    assert "embedding for Stable Diffusion XL, token pair, 3 vectors" in out
    assert "embedding for a text encoder of width 32, token <dog>, 1 vector\n" in out
