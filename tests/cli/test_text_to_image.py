"""`fastdiff sample` with a Stable Diffusion folder: from prompts to PNG files that reproduce themselves."""

import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sd_parsers import ParserManager

from fastdiff import cli
from fastdiff.pipelines import Pipeline
from fastdiff.requests import png
from tests.support.waiting import TIMEOUT

CAT, RIDER = "a photo of the cat", "the astronaut riding the cat"
LONG = "the photo of the cat riding the photo of the astronaut riding the photo of the cat of the ocean of the cat"
CUT = "longer than the 24 tokens that the model reads; cut: "


@pytest.fixture
def sample(tmp_path, monkeypatch, capsys):
    """Runs `fastdiff sample ARGS` on the CPU in tmp_path. Returns the exit code, stdout and fastdiff's own lines."""
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> tuple[int, str, list[str]]:
        code = cli.main(["sample", "--device", "cpu", *map(str, args)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        lines = [part for line in err.splitlines() for part in line.split("\r")]
        return code, out, [line.strip() for line in lines if line.strip().startswith("fastdiff: ")]

    return run


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_pictures_are_prompts_by_seeds_and_equal_the_librarys(sample, text_folder, tmp_path, files, kind):
    folder = text_folder(kind)
    (tmp_path / "prompts.txt").write_text(f"\n  \n{RIDER}\r\n", encoding="utf-8")
    code, out, said = sample(
        "-m", folder, "--prompt", CAT, "--prompt-file", "prompts.txt", "--negative-prompt", "the ocean", "-s", 7,
        "--num-images", 2, "--steps", 3, "--guidance", 4, "--height", 32, "--width", 24, "--clip-skip", 1, "-b", 3,
        "--scheduler", "dpm++2m-karras", "--json", "--grid",
    )  # fmt: skip
    assert code == 0, said
    lines = [json.loads(line) for line in out.splitlines()]
    cells = [(prompt, seed) for prompt in (CAT, RIDER) for seed in (7, 8)]
    assert [(line["prompt"], line["seed"], line["label"]) for line in lines] == [(*cell, None) for cell in cells]
    names = [f"outputs/{prompt.replace(' ', '-')}-{seed}.png" for prompt, seed in cells]
    assert [line["path"] for line in lines] == names and files(tmp_path) == sorted(
        [*names, "outputs/grid.png", "prompts.txt"]
    )
    pipe = Pipeline.from_pretrained(folder, device="cpu", scheduler="dpm++2m-karras")
    options = {"negative_prompt": "the ocean", "num_inference_steps": 3, "guidance_scale": 4, "clip_skip": 1}
    expected = pipe([CAT, RIDER], seed=[7, 8], height=32, width=24, **options).images
    for name, image in zip(names, expected, strict=True):
        with Image.open(name) as found:
            assert found.size == (24, 32) and np.array_equal(np.asarray(found), np.asarray(image))
    with Image.open("outputs/grid.png") as sheet:
        assert sheet.size == (2 * 26 + 2, 2 * 34 + 2)


def test_a_picture_with_a_style_has_the_bits_of_the_whole_text(sample, text_folder, tmp_path):
    (tmp_path / "styles.csv").write_text("name,prompt,negative_prompt\nridden,the astronaut riding {prompt},dog\n")
    options = "-m", text_folder("sd1"), "--steps", 2, "-s", 3, "--height", 16, "--width", 16
    styled = "--prompt", "the\ncat", "--styles", "styles.csv", "--style", "ridden"
    assert sample(*options, *styled, "-o", "styled.png")[0] == 0
    whole = "--prompt", "the astronaut riding the\ncat", "--negative-prompt", "dog"
    assert sample(*options, *whole, "-o", "whole.png")[0] == 0
    assert sample("--from", "styled.png", "-m", text_folder("sd1"), "-o", "again.png")[0] == 0
    first, second, third = (Path(f"{name}.png").read_bytes() for name in ("styled", "whole", "again"))
    assert first == second == third
    assert png.read_settings("styled.png")["prompt"] == "the astronaut riding the\ncat"


def test_precision_is_kept_in_the_picture_and_told_apart_by_resume(sample, text_folder):
    options = "-m", text_folder("sd1"), "--prompt", "cat", "-s", 7, "--steps", 2
    assert sample(*options, "--precision", "int8", "-o", "eight")[0] == 0
    assert sample(*options, "-o", "full")[0] == 0
    records = {name: png.read_settings(f"{name}/cat-7.png") for name in ("eight", "full")}
    assert "Precision: int8" in png.read_text("eight/cat-7.png")["parameters"]
    assert records["eight"] == records["full"] | {"precision": "int8"} and "precision" not in records["full"]
    pictures = {name: np.asarray(Image.open(f"{name}/cat-7.png")) for name in records}
    assert not np.array_equal(pictures["eight"], pictures["full"])
    assert sample("--from", "eight/cat-7.png", "-o", "again")[0] == 0
    assert Path("again/cat-7.png").read_bytes() == Path("eight/cat-7.png").read_bytes()
    assert sample("--from", "eight/cat-7.png", "--precision", "full", "-o", "other")[0] == 0
    assert Path("other/cat-7.png").read_bytes() == Path("full/cat-7.png").read_bytes()
    assert sample(*options, "--precision", "int8", "-o", "eight", "--resume")[0] == 0
    for flags, name, said in (
        (("--precision", "int8"), "full", '"full", not "int8"'),
        ((), "eight", '"int8", not "full"'),
    ):
        code, _, lines = sample(*options, *flags, "-o", name, "--resume")
        assert code == 2 and f"was drawn with precision {said}" in lines[0]
    code, _, lines = sample(*options, "--precision", "fp4")
    assert code == 2 and "--precision" in lines[0] and len(lines) == 1


def test_without_a_prompt_the_models_own_are_drawn(sample, text_folder, tmp_path, files):
    shutil.copytree(text_folder("sd1"), tmp_path / "model")
    (tmp_path / "model" / "fastdiff.json").write_text(json.dumps({"prompts": [CAT, RIDER, "a", "b", "c"]}))
    code, _, said = sample("-m", "model", "--steps", 1, "-o", "drawn")
    assert code == 0, said
    assert files(tmp_path / "drawn") == [
        "a-0.png",
        "a-photo-of-the-cat-0.png",
        "b-0.png",
        f"{RIDER.replace(' ', '-')}-0.png",
    ]
    assert png.read_settings("drawn/a-photo-of-the-cat-0.png")["prompt"] == CAT
    assert sample("--from", "drawn/a-photo-of-the-cat-0.png", "-o", "again")[0] == 0
    again, first = Path("again/a-photo-of-the-cat-0.png"), Path("drawn/a-photo-of-the-cat-0.png")
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("kind", ["sd1", pytest.param("sd2", marks=pytest.mark.slow), "sdxl"])
def test_from_redraws_the_same_bytes(sample, text_folder, tmp_path, kind):
    args = ["-m", text_folder(kind), "--prompt", CAT, "--prompt", RIDER, "--negative-prompt", "the\nocean"]
    args += ["--steps", 2, "--height", 24, "--clip-skip", 2, "-s", 9, "--grid", "--guidance-stop", 0.5]
    args += ["--prompt-syntax", "weighted", "--emphasis", "no-norm"]
    assert sample(*args)[0] == 0
    first = tmp_path / "outputs/a-photo-of-the-cat-9.png"
    assert sample("--from", first, "-o", "again.png")[0] == 0
    assert Path("again.png").read_bytes() == first.read_bytes()
    assert sample("--from", "outputs/grid.png", "-o", "all", "--grid")[0] == 0
    for path in (tmp_path / "outputs").iterdir():
        assert (tmp_path / "all" / path.name).read_bytes() == path.read_bytes()
    # flags override the PNG's settings
    assert sample("--from", first, "--prompt", "ocean", "--width", 32, "--clip-skip", 0, "-o", "other.png")[0] == 0
    other = png.read_settings("other.png")
    assert (other["prompt"], other["negative_prompt"], other["clip_skip"]) == ("ocean", "the\nocean", None)
    assert (other["width"], other["height"], other["seed"]) == (32, 24, 9)


def test_other_tools_read_the_settings(sample, text_folder):
    prompt = "the cat,\nSteps: 1, Negative prompt: (ocean:1.2) 🙂"
    args = ["-m", text_folder("sd1"), "--prompt", prompt, "--negative-prompt", "ocean", "--steps", 2]
    assert sample(*args, "--clip-skip", 1, "--scheduler", "dpm++2m-karras", "-o", "a.png")[0] == 0
    *first, last = png.read_text("a.png")["parameters"].split("\n")
    defused = "the cat,\nSteps : 1, Negative prompt : (ocean:1.2) 🙂"
    assert "\n".join(first) == f"{defused}\nNegative prompt: ocean"
    digits = png.read_settings("a.png")["model_hash"]
    assert last.startswith("Steps: 2, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7.5, Seed: 0, Size: 16x16, ")
    assert f", Model hash: {digits[:10]}, Model: " in last and ", Clip skip: 2, Version: fastdiff " in last
    (sampler,) = ParserManager().parse("a.png").samplers
    assert [each.value for each in sampler.prompts] == [defused]
    assert [each.value for each in sampler.negative_prompts] == ["ocean"]
    assert sampler.model.hash == digits[:10] and sampler.parameters["steps"] == "2"
    assert png.read_settings("a.png")["prompt"] == prompt


def test_resume_goes_on_and_refuses_another_prompt(sample, text_folder, tmp_path):
    args = ["-m", text_folder("sd1"), "--prompt", CAT, "--prompt", RIDER, "--steps", 2, "--grid", "-o", "a"]
    assert sample(*args)[0] == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    for name in ("the-astronaut-riding-the-cat-0.png", "grid.png"):
        (tmp_path / "a" / name).unlink()
    code, _, said = sample(*args, "--resume")
    assert code == 0 and said[-1].startswith("fastdiff: kept 1, wrote 1 picture")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == whole
    for flags, message in [
        (["--negative-prompt", "ocean"], r'was drawn with negative_prompt null, not "ocean"'),
        (["--height", "32"], "was drawn with height 16, not 32"),
        (["--clip-skip", "1"], "was drawn with clip_skip null, not 1"),
    ]:
        code, _, said = sample(*args, "--resume", *flags)
        assert code == 2 and message in said[-1]
    args[3] = "A photo of the cat!"  # has the same file name
    code, _, said = sample(*args, "--resume")
    assert code == 2 and 'was drawn with prompt "a photo of the cat", not "A photo of the cat!"' in said[-1]
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == whole


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_the_ends_that_are_cut_are_said_once_and_before_the_first_picture(sample, text_folder, kind):
    args = ["-m", text_folder(kind), "--prompt", LONG, "--prompt", CAT, "--negative-prompt", f"bad {LONG}"]
    code, _, said = sample(*args, "--steps", 1, "--num-images", 2, "-b", 1)
    assert code == 0 and len(said) == 4
    assert said[0] == f"fastdiff: prompt: {CUT}'an of the cat'"
    assert said[1] == f"fastdiff: negative prompt: {CUT}'ocean of the cat'"
    assert said[2].startswith("fastdiff: drawing 4 pictures") and said[3].startswith("fastdiff: wrote 4 pictures")
    assert logging.getLogger("fastdiff").handlers == []


def test_a_negative_prompt_without_effect_is_said(sample, text_folder):
    args = ["-m", text_folder("sd1"), "--prompt", CAT, "--negative-prompt", LONG, "--steps", 1, "--guidance", 1]
    code, _, said = sample(*args)
    assert code == 0 and len(said) == 3
    assert said[0] == "fastdiff: negative prompt: no effect, because cfg-scale 1 is no guidance"


def test_parts_that_are_not_run_are_said_and_explain_draws_nothing(sample, text_folder, tmp_path, files):
    folder = Path(shutil.copytree(text_folder("sd1"), tmp_path / "sd"))
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    before = files(tmp_path)
    code, out, said = sample("-m", folder, "--prompt", CAT, "--explain", "--height", 32)
    assert code == 0 and said == [f"fastdiff: {folder}: its safety_checker will not be run"]
    assert out.startswith("TextToImagePipeline, 1x16x8x4, float32, cpu\n") and files(tmp_path) == before


def test_models_says_what_a_text_model_is(fastdiff, text_folder):
    done = fastdiff("models", text_folder("sdxl"))
    name, first = str(text_folder("sdxl")), done.stdout.splitlines()[0]
    assert first == f"{name}: 16x16, euler, draws from prompts" and "guidance_scale: 5.0\n" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "prompt: sd1 draws from text; give --prompt or --prompt-file"),
        (["--label", "0"], "label '0': sd1 draws from prompts; leave it out"),
        (["--label", "0", "--prompt", "a"], "label '0': sd1 draws from prompts; leave it out"),
        (["--prompt", "a" * 10_001], "prompt: .* is not a list of up to 50000 texts, each of up to 10000 characters"),
        (["--prompt", "\udcff"], "prompt: .* is not a list of .* characters of Unicode"),
        (["--prompt", "a", "--negative-prompt", "\udcff"], "negative-prompt: .* is not a string of up to 10000"),
        (["--prompt-file", "none.txt"], "prompt-file none.txt does not exist; give a text file"),
        (["--prompt-file", "empty.txt"], "prompt-file empty.txt has no prompts; write one per line"),
        (["--prompt", "a", "--prompt-file", "empty.txt"], "prompt-file empty.txt has no prompts"),
        (["--prompt-file", "latin.txt"], "prompt-file latin.txt is not UTF-8 text; save it as UTF-8"),
        (["--prompt-file", "sd1"], r"prompt-file sd1 cannot be read \(Is a directory\); give a text file"),
        (["--prompt", "a", "--clip-skip", "4"], "clip-skip 4: the text encoder of sd1 can skip at most 3 layers"),
        (["--prompt", "a", "--clip-skip", "-1"], "clip-skip: -1 is not a whole number from 0"),
        (["-m", "sdxl", "--prompt", "a", "--clip-skip", "3"], "clip-skip 3: .* of sdxl can skip at most 2 layers"),
        (["--prompt", "a", "--height", "31"], "height 31, width 16: both must be multiples of 2"),
        (["--prompt", "a", "--width", "0"], "width: 0 is not a whole number from 1 to 65536"),
        (["--prompt", "a", "--horizon", "8"], "horizon 8: sd1 draws pictures, which have none; leave it out"),
        (["--prompt", "a", "--guidance", "-1"], "cfg-scale: -1.0 is not a number of at least 0"),
        (["--prompt", "a", "-o", "{label}.png"], "-o {label}.png has {label}, but these pictures have no label"),
        (
            ["--prompt", "a", "--prompt", "b", "-o", "{seed}.png"],
            "two pictures have the name 0.png; put .*{prompt}",
        ),
        (["-m", "emoji64", "--prompt", "a"], "prompt: emoji64 has no text encoder; leave it out, or give a --label"),
        (["-m", "emoji64", "--label", "0", "--prompt", "a"], "prompt: emoji64 has no text encoder; leave it out"),
        (["-m", "emoji-sd", "--label", "0"], "label '0': emoji-sd draws from prompts; leave it out, or give another"),
        (["-m", "emoji64", "--negative-prompt", "a"], "negative-prompt: emoji64 has no text encoder"),
        (["-m", "emoji64", "--clip-skip", "1"], "clip-skip: emoji64 has no text encoder"),
        (["-m", "emoji64", "--height", "65"], "height 65, width 64: both must be multiples of 8"),
    ],
    ids=lambda value: "_".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(sample, text_folder, tmp_path, files, monkeypatch, args, message):
    monkeypatch.setattr(Pipeline, "from_card", lambda *args, **options: pytest.fail("weights were loaded"))
    for kind in ("sd1", "sdxl"):
        (tmp_path / kind).symlink_to(text_folder(kind))
    (tmp_path / "empty.txt").write_text(" \n\t\n")
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    before = files(tmp_path)
    code, out, said = sample(*([] if "-m" in args else ["-m", "sd1"]), *args)
    assert (code, out, len(said)) == (2, "", 1)
    assert re.match(f"fastdiff: error: {message}", said[0]), said
    assert files(tmp_path) == before


def test_a_record_without_a_prompt_cannot_be_redrawn(sample, text_folder):
    """Another program that draws from prompt_embeds might write such a record."""
    args = ["-m", text_folder("sd1"), "--prompt", CAT, "--steps", 1, "-o", "a.png"]
    assert sample(*args)[0] == 0
    record = {name: value for name, value in png.read_settings("a.png").items() if name not in ("schema", "numerics")}
    Path("b.png").write_bytes(png.encode(Image.new("RGB", (16, 16)), record | {"prompt": None}))
    code, _, said = sample("--from", "b.png", "-o", "c.png")
    assert code == 2 and "draws from text; give --prompt" in said[0]


LACKING = {
    "tokenizer": "tokenizer",
    "tokenizer/tokenizer.json": "has neither tokenizer.json nor vocab.json",
    "text_encoder": "text_encoder/config.json does not exist",
    "vae": "vae/config.json does not exist",
    "unet": "config.json does not exist",
    "scheduler": "scheduler_config.json does not exist",
}
# Draws with each given folder, and prints the exit code, stderr, and whether torch has been imported.
DRAW_WITH_EACH = """
import contextlib, io, json, sys
from fastdiff.cli import main
for folder in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["sample", "-m", folder, "--prompt", "a cat"])
    print(json.dumps([code, said.getvalue(), "torch" in sys.modules]))
"""


def test_what_a_folder_lacks_is_said_before_torch_is_imported(text_folder, tmp_path):
    folders = [tmp_path / str(i) for i in range(len(LACKING))]
    for folder, missing in zip(folders, LACKING, strict=True):
        path = shutil.copytree(text_folder("sd1"), folder) / missing
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    command = [sys.executable, "-c", DRAW_WITH_EACH, *map(str, folders)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    for line, (missing, message) in zip(done.stdout.splitlines(), LACKING.items(), strict=True):
        code, said, is_imported = json.loads(line)
        assert (code, is_imported) == (2, False), missing
        assert said.startswith("fastdiff: error: ") and message in said and said.count("\n") == 1, missing


def test_the_model_is_hashed_beside_its_loading(sample, text_folder, monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("loading")

    begun = []
    monkeypatch.setattr("fastdiff.runs.drawing.begin_hash", lambda card, variant: begun.append(card.folder))
    monkeypatch.setattr("fastdiff.pipelines.load_pipeline", refuse)
    with pytest.raises(RuntimeError, match="loading"):
        sample("--model", text_folder("sd1"), "--prompt", CAT, "--num-images", 1)
    assert begun == [text_folder("sd1")]
