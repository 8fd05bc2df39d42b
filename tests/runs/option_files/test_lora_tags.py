"""`<lora:name:0.8>` in the weighted prompts of the command and of bulk: the names are those of --lora."""

import shutil

import pytest

from fastdiff import Pipeline
from fastdiff.bulk.fingerprint import take_fingerprint
from fastdiff.bulk.folder import Folder
from fastdiff.bulk.plan import Plan
from fastdiff.bulk.stopping import Stop
from fastdiff.bulk.worker import Worker
from fastdiff.pipelines import load_pipeline
from fastdiff.requests import png
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import find_model
from tests.adapters.formats import in_diffusers, in_kohya, random_loras, save
from tests.support.text_pipelines import text_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "a cat"
WEIGHTED = ("--prompt-syntax", "weighted")


@pytest.fixture(scope="module")
def loras():
    return [random_loras(text_pipeline("sd1"), seed=seed) for seed in (1, 2)]


@pytest.fixture
def here(tmp_path, monkeypatch, loras):
    """A current folder with two LoRAs."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "ink.safetensors", in_diffusers(loras[0]))
    save(tmp_path / "wash.safetensors", in_kohya(loras[1], alpha=2.0))
    return tmp_path


@pytest.fixture
def drawn(here, sample, text_folder, pixels):
    """Return a function that draws prompts in one run with LoRAs, and returns the pixels of each picture."""
    count = iter(range(100))

    def draw(loras, *prompts, flags=()):
        out = here / f"{next(count)}"
        asked = [flag for text in prompts for flag in ("--prompt", text)]
        asked += [flag for text in loras for flag in ("--lora", text)]
        own = ("--seed", "5", "--model", str(text_folder("sd1")), *asked)
        assert sample(*WEIGHTED, *flags, "-o", f"{out}/", own=own) == 0
        return [pixels(path) for path in sorted(out.glob("*.png"), key=lambda path: _place(path, prompts))]

    return draw


def _place(path, prompts):
    return prompts.index(png.read_settings(path)["prompt"])


@pytest.mark.parametrize(
    ("given", "prompt", "same"),
    [
        (("ink:1",), "a <lora:ink:0.8>cat", ("ink:0.8",)),
        (("ink:0.3",), "a cat<lora:ink>", ("ink:1",)),
        (("ink:0.3", "wash:0.5"), "a cat<lora:wash:-2>", ("ink:0.3", "wash:-2")),
        (("ink:1", "wash:1"), "<lora:wash:0.2>a cat<lora:ink:0.3>", ("ink:0.3", "wash:0.2")),
        (("ink:0",), "a cat", ()),
        (("ink:1",), "a cat<lora:ink:0>", ()),
    ],
)
def test_the_weight_of_the_prompt_replaces_the_flags(drawn, given, prompt, same):
    given, same = ([each.replace(":", ".safetensors:") for each in texts] for texts in (given, same))
    assert drawn(given, prompt) == drawn(same, "a cat")


def test_prompts_with_other_tags_are_the_pictures_of_each_alone(drawn, text_folder, here):
    given = ("ink.safetensors:0", "wash.safetensors:0.4")
    prompts = ["a cat", *(f"a cat <lora:ink:{each}>" for each in ("1", "0.5:0.5", "0:1", "1:0")), "<lora:wash:1>a cat"]
    together = drawn(given, *prompts)
    assert together == [drawn(given, each)[0] for each in prompts]
    assert len(set(together)) == len(prompts)
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    for name in ("ink", "wash"):
        pipe.load_lora_weights(f"{name}.safetensors", adapter_name=name)
    pipe.set_adapters(["ink", "wash"], [{"text_encoder": 0.0, "unet": 1.0}, 0.4])
    (image,) = pipe("a cat", num_inference_steps=1, seed=5, prompt_syntax="weighted").images
    assert image.tobytes() == together[3], "the text encoder's weight comes first"


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_weights_in_8_bits(drawn, precision):
    flags = ("--precision", precision)
    assert drawn(["ink.safetensors"], "a cat<lora:ink:0.8>", flags=flags) == drawn(
        ["ink.safetensors:0.8"], "a cat", flags=flags
    )


def test_the_png_has_the_prompt_as_typed_and_from_repeats_it(here, sample, text_folder, pixels, capsys):
    prompt = "a  cat <lora:ink:0.50> (x:1.2)"
    own = ("--seed", "5", "--model", str(text_folder("sd1")), "--prompt", prompt)
    given = ("--lora", "ink.safetensors:0.3", "--lora", "wash.safetensors:0.2", *WEIGHTED)
    assert sample(*given, "-o", "first.png", own=own) == 0
    record, text = png.read_settings("first.png"), png.read_text("first.png")["parameters"]
    assert record["prompt"] == prompt and record["lora"] == ["ink.safetensors:0.3", "wash.safetensors:0.2"]
    assert text.startswith("a  cat <lora:ink:0.50> (x:1.2) <lora:wash:0.2>\n") and 'Lora hashes: "ink: ' in text
    shutil.move("ink.safetensors", "mine.safetensors")
    (here / "other").mkdir()
    shutil.move("mine.safetensors", "other/ink.safetensors")
    again = ("--from", "first.png", "--lora-dir", "other")
    assert sample(*again, "-o", "again.png", own=()) == 0
    assert pixels("again.png") == pixels("first.png") and png.read_settings("again.png")["prompt"] == prompt
    assert sample(*again, "--resume", "-o", "again.png", own=()) == 0
    shutil.move("other/ink.safetensors", "other/renamed.safetensors")
    capsys.readouterr()
    assert sample(*again, "-o", "none.png", own=()) == 2
    err = capsys.readouterr().err
    assert err.endswith("prompt: <lora:ink>: no --lora has this name; the names are renamed, wash\n")
    assert err.count("\n") == 1


REFUSED = {
    "unknown": (["a <lora:zebra:1>"], "<lora:zebra>: no --lora has this name; the names are ink, wash"),
    "alike": (["a <lora:inc:1>"], "<lora:inc>: no --lora has this name; did you mean ink? the names are ink, wash"),
    "of-several": (["a", "b <lora:x>"], "no --lora has this name; the names are ink, wash (in 'b <lora:x>')"),
    "weight": (["a <lora:ink:x>"], "<lora:ink>: its weight 'x' is not a number"),
    "twice": (["a <lora:ink> <lora:ink:0>"], "<lora:ink> is there twice"),
    "lyco": (["<lyco:ink:1>"], "load the file as a LoRA, and write <lora:ink>"),
}


@pytest.mark.parametrize(("prompts", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_one_line_and_no_file(here, sample, text_folder, capsys, prompts, message):
    before = sorted(here.rglob("*"))
    own = ("--model", str(text_folder("sd1")), *(flag for text in prompts for flag in ("--prompt", text)))
    given = ("--lora", "ink.safetensors", "--lora", "wash.safetensors", *WEIGHTED)
    assert sample(*given, own=own) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err
    assert sorted(here.rglob("*")) == before


def test_without_files_and_in_a_negative_prompt(here, sample, capsys):
    assert sample(*WEIGHTED, "--prompt", "a <lora:ink:1>") == 2
    assert "<lora:ink>: no --lora has this name; give its file with --lora" in capsys.readouterr().err
    assert sample(*WEIGHTED, "--lora", "ink.safetensors", "--negative-prompt", "<lora:ink:1>") == 2
    assert "negative-prompt: <lora:ink> names a LoRA, which only the prompt may" in capsys.readouterr().err


def test_a_plain_prompt_has_tags_as_text(here, sample, text_folder, pixels):
    for name, tag in (("first", "<lora:ink:x>"), ("second", "")):
        own = ("--model", str(text_folder("sd1")), "--prompt", f"a cat {tag}", "--seed", "5")
        assert sample("--lora", "ink.safetensors", "-o", f"{name}.png", own=own) == 0
    assert pixels("first.png") != pixels("second.png")
    assert png.read_text("first.png")["parameters"].startswith("a cat <lora:ink:x> <lora:ink:1>\n")


def test_files_of_one_name_go_by_their_paths(here, drawn, sample, capsys):
    for name in ("a", "b"):
        (here / name).mkdir()
        shutil.copy(here / "ink.safetensors", here / name / "ink.safetensors")
    given = ["a/ink.safetensors:0", "b/ink.safetensors:0"]
    assert drawn(given, "a cat<lora:b/ink.safetensors:0.8>") == drawn(["ink.safetensors:0.8"], "a cat")
    assert sample(*WEIGHTED, "--lora", given[0], "--lora", given[1], "--prompt", "<lora:ink>") == 2
    assert "the names are a/ink.safetensors, b/ink.safetensors" in capsys.readouterr().err


def test_rows_of_bulk_are_the_pictures_of_sample(here, drawn, text_folder, pixels):
    prompts = ["a cat", "a cat<lora:ink:1>", "a dog<lora:ink:1>", "a cat<lora:ink:0:1>", "a cat", "<lora:ink:1>a cat"]
    (here / "rows.csv").write_text("prompt\n" + "\n".join(prompts))
    options = {"prompt_syntax": "weighted", "lora": ("ink.safetensors:0",), "num_inference_steps": 1, "seed": 5}
    request = Request(model=str(text_folder("sd1")), **options)
    card = find_model(request)
    alone = {each: drawn(["ink.safetensors:0"], each)[0] for each in set(prompts)}
    for size in (1, 4):
        plan = Plan.make(request, card, spec="rows.csv", batch_size=size)
        pipe = load_pipeline(card, plan.run.request, "cpu", names_loras=plan.run.names_loras)
        folder, fingerprint = Folder(here / f"bulk{size}", plan.format), take_fingerprint(pipe, "x")
        folder.open(plan, fingerprint)
        Worker(plan, folder, pipe, fingerprint, Stop()).work()
        found = [pixels(path) for path in sorted(folder.path.rglob("*.png"))]
        assert found == [alone[each] for each in prompts]
    assert len(set(found)) == 4, "two pictures are there twice"
