"""LoRAs and embeddings in the shared model: the command's bits, nothing loaded again, nothing of another run."""

import shutil
import threading

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from fastdiff import cli
from fastdiff.diffusion.shared_steps import AskedStep, Company
from fastdiff.errors import InputError, NonFiniteWeightsError
from fastdiff.hosting.applying import KEPT, _loaded
from fastdiff.hosting.catalogue.offered import OptionFiles
from fastdiff.hosting.models import Models
from fastdiff.pipelines import Pipeline
from fastdiff.pipelines.adapting import Adapting
from fastdiff.requests import png
from fastdiff.ui.drawing import draw, prepare, with_files_here
from fastdiff.ui.inputs.axes import Axes, Axis
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.progress import View
from fastdiff.ui.queueing.queue import Job
from fastdiff.ui.shared import Shared
from fastdiff.ui.sheet import draw_sheet, prepare_sheet
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = Limits(pictures=4, steps=50, side=128)
BOTH = ["style.safetensors:0.8", "deep/detail.safetensors:-0.5"]
PROMPT = "a blurb cat"


@pytest.fixture
def picture(equipped, tmp_path):
    """Return a function that draws one picture and returns its file."""
    count = iter(range(100))

    def draw_one(shared=equipped, **asked):
        options = {"model": "./text/sd1", "prompt": "a cat", "seed": 5, "steps": 1} | asked
        folder = tmp_path / f"{next(count)}"
        (drawn,) = [
            each
            for _, some in draw(prepare(UncheckedRequest(**options), shared, LIMITS), shared, folder)
            for each in some
        ]
        return drawn.path

    return draw_one


def commands(models_dir, folders, tmp_path, monkeypatch, *flags: str):
    """Return the file that the command draws, in a folder with the LoRAs, the embeddings and the model."""
    here = tmp_path / "here"
    for folder in folders:
        shutil.copytree(folder, here, dirs_exist_ok=True)
    (here / "text").symlink_to(models_dir / "text")
    monkeypatch.chdir(here)
    monkeypatch.delenv("FASTDIFF_MODELS", raising=False)
    command = ["sample", "-m", "./text/sd1", "-s", "5", "--steps", "1", "--num-images", "1", "--device", "cpu", *flags]
    assert cli.main([*command, "-o", str(tmp_path / "command.png")]) == 0
    return tmp_path / "command.png"


def test_the_file_is_the_commands_byte_for_byte(picture, models_dir, folders, tmp_path, monkeypatch):
    plain = picture().read_bytes()
    mine = picture(prompt=PROMPT, negative_prompt="<dog>", lora=BOTH)
    flags = ["--lora", BOTH[0], "--lora", BOTH[1], "--embedding", "blurb.safetensors", "--embedding", "dog.safetensors"]
    theirs = commands(
        models_dir, folders, tmp_path, monkeypatch, "--prompt", PROMPT, "--negative-prompt", "<dog>", *flags
    )
    assert mine.read_bytes() == theirs.read_bytes()
    text = png.read_text(mine)["parameters"]
    assert text.startswith("a blurb cat <lora:style:0.8> <lora:detail:-0.5>\n")
    assert 'Lora hashes: "style: ' in text and 'TI hashes: "blurb: ' in text
    assert picture().read_bytes() == plain, "the next run has neither"


def test_in_8_bits_it_is_the_commands_too(picture, models_dir, folders, tmp_path, monkeypatch):
    """The next run has the bits of the plain model again, and full weights their own."""
    plain, full = picture(precision="int8").read_bytes(), picture(lora=BOTH).read_bytes()
    mine = picture(lora=BOTH, precision="int8")
    assert picture(precision="int8").read_bytes() == plain
    tagged = picture(prompt="a cat <lora:style:0.8>", prompt_syntax="weighted", precision="int8")
    assert picture(lora=BOTH).read_bytes() == full
    assert picture(lora=BOTH, precision="int8").read_bytes() == mine.read_bytes()
    flags = ["--lora", BOTH[0], "--lora", BOTH[1], "--precision", "int8"]
    theirs = commands(models_dir, folders, tmp_path, monkeypatch, "--prompt", "a cat", *flags)
    assert mine.read_bytes() == theirs.read_bytes() != full
    assert Image.open(tagged).tobytes() == Image.open(picture(lora=BOTH[:1], precision="int8")).tobytes()


def test_a_model_in_8_bits_whose_files_have_changed(picture, models_dir, folders, tmp_path):
    """A LoRA needs the weights again that were rounded."""
    shutil.copytree(models_dir / "text", tmp_path / "models" / "text")
    shared = Shared(Models(tmp_path / "models", device="cpu", files=OptionFiles(*folders)))
    plain = Image.open(picture(shared, precision="int8")).tobytes()
    weights = next((tmp_path / "models").glob("text/sd1/unet/*.safetensors"))
    state = load_file(weights)
    weights.unlink()  # the folder of `models_dir` may have the same file
    save_file({name: 0.5 * each for name, each in state.items()}, weights)
    with pytest.raises(InputError, match="is not the weight that was loaded"):
        picture(shared, lora=BOTH, precision="int8")
    assert Image.open(picture(shared, precision="int8")).tobytes() == plain


def test_a_weight_or_another_lora_loads_no_model_and_reads_no_file_again(picture, equipped, monkeypatch):
    files = []
    load = Adapting.load_lora_weights
    monkeypatch.setattr(Adapting, "load_lora_weights", lambda *args, **kw: files.append(args[1]) or load(*args, **kw))
    first = picture(lora=BOTH).read_bytes()
    monkeypatch.setattr(Pipeline, "from_card", None)
    files.clear()
    pictures = [picture(lora=each).read_bytes() for each in (BOTH[:1], [], BOTH[1:], BOTH[::-1], ["style.safetensors"])]
    assert picture(lora=BOTH).read_bytes() == first
    assert not files
    assert len({*pictures, first}) == len(pictures) + 1


def test_loras_that_no_run_uses_leave_the_memory(picture, folders, models_dir, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    for i in range(KEPT + 3):
        shutil.copy(folders[0] / "style.safetensors", mine / f"{i}.safetensors")
    shared = Shared(Models(models_dir, device="cpu", files=OptionFiles(mine)))
    for i in range(KEPT + 3):
        picture(shared, lora=[f"{i}.safetensors"])
    pipe = shared.models.pipeline(shared.catalogue.card("./text/sd1"), None)
    assert len(_loaded(pipe)) == KEPT + 1
    assert _loaded(pipe)[-1] == f"{KEPT + 2}"


def test_a_file_that_changed_is_read_again(picture, folders, models_dir, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(folders[0] / "style.safetensors", mine / "a.safetensors")
    shared = Shared(Models(models_dir, device="cpu", files=OptionFiles(mine)))
    first = Image.open(picture(shared, lora=["a.safetensors"])).tobytes()
    shutil.copy(folders[0] / "deep" / "detail.safetensors", mine / "b")
    (mine / "b").replace(mine / "a.safetensors")
    assert Image.open(picture(shared, lora=["a.safetensors"])).tobytes() != first


def test_a_bad_file_is_named_and_the_model_draws_the_same_bits_afterwards(picture, folders):
    plain, lora = picture().read_bytes(), picture(lora=BOTH).read_bytes()
    with pytest.raises(NonFiniteWeightsError, match=r"^broken\.safetensors: NaN or infinity in ") as caught:
        picture(lora=[*BOTH, "broken.safetensors"], prompt=PROMPT)
    assert str(folders[0]) not in str(caught.value)
    assert picture().read_bytes() == plain
    assert picture(lora=BOTH).read_bytes() == lora


def test_a_file_that_is_gone(picture, folders, models_dir, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(folders[0] / "style.safetensors", mine)
    shared = Shared(Models(models_dir, device="cpu", files=OptionFiles(mine)))
    run = prepare(UncheckedRequest(model="./text/sd1", prompt="a", steps=1, lora=["style.safetensors"]), shared, LIMITS)
    (mine / "style.safetensors").unlink()
    with pytest.raises(InputError, match=r"style\.safetensors is gone; reload the page"):
        list(draw(run, shared, tmp_path / "out"))


def test_runs_that_take_turns_do_not_share_loras_or_embeddings(equipped, picture, tmp_path):
    """Each picture of a sheet over prompts has the embeddings in its own prompt, and all have the LoRA."""
    alone = [picture(prompt=each, lora=BOTH[:1]) for each in ("cat", PROMPT)]
    asked = UncheckedRequest(model="./text/sd1", prompt="cat", seed=5, steps=1, lora=BOTH[:1])
    sheet = prepare_sheet(asked, Axes(Axis("prompt", ("cat", PROMPT)), None), equipped, LIMITS)
    drawn = [each for _, some in draw_sheet(sheet, equipped, tmp_path / "sheet") for each in some]
    assert [png.read_settings(each.path).get("embedding") for each in drawn[:2]] == [None, ["blurb.safetensors:blurb"]]
    assert [each.path.read_bytes() for each in drawn[:2]] == [each.read_bytes() for each in alone]
    assert png.read_settings(drawn[2].path)["lora"] == BOTH[:1]


def test_a_picture_gives_its_loras_back_to_the_form(equipped, picture):
    record, lines = with_files_here(png.read_settings(picture(lora=BOTH)), "p.png", equipped.catalogue)
    assert UncheckedRequest.from_record(record).lora == BOTH and not lines


def test_a_tag_names_a_lora_on_offer_and_the_file_is_the_commands(picture, models_dir, folders, tmp_path, monkeypatch):
    prompt, weighted = "a cat <lora:detail:0.5>", {"prompt_syntax": "weighted"}
    mine = picture(prompt=prompt, lora=BOTH[:1], **weighted)
    assert png.read_settings(mine)["lora"] == [BOTH[0], "deep/detail.safetensors:0"]
    flags = ["--lora", BOTH[0], "--lora", "deep/detail.safetensors:0", "--prompt-syntax", "weighted"]
    theirs = commands(models_dir, folders, tmp_path, monkeypatch, "--prompt", prompt, *flags)
    assert mine.read_bytes() == theirs.read_bytes()
    other = picture(prompt="a cat <lora:detail:-1><lora:style:0.2>", lora=BOTH[:1], **weighted)
    same = picture(prompt="a cat", lora=["style.safetensors:0.2", "deep/detail.safetensors:-1"], **weighted)
    pixels = [Image.open(path).tobytes() for path in (mine, other, same)]
    assert pixels[1] == pixels[2] != pixels[0]


def test_a_tag_without_a_lora_here(equipped, picture):
    for prompt, message in (
        ("<lora:styl:1>", r"<lora:styl>: \./text/sd1 has no LoRA of this name here; did you mean style\?"),
        ("<lora:zebra:1>", "<lora:zebra>: ./text/sd1 has no LoRA of this name here; such as .*detail"),
        ("<lora:style:x>", "<lora:style>: its weight 'x' is not a number"),
    ):
        with pytest.raises(InputError, match=message):
            picture(prompt=prompt, prompt_syntax="weighted")
    record = png.read_settings(picture(prompt="a <lora:style:1>", prompt_syntax="weighted"))
    again, lines = with_files_here(record, "p.png", equipped.catalogue)
    assert (again["prompt"], again["lora"], lines) == ("a <lora:style:1>", ["style.safetensors:0"], [])
    record["prompt"] = "a <lora:gone:1><lora:style:1>"
    again, lines = with_files_here(record, "p.png", equipped.catalogue)
    assert again["prompt"] == "a <lora:style:1>"
    assert lines == ["not restored: <lora:gone>, as no LoRA here has this name"]


def test_two_loras_of_one_name(picture, folders, models_dir, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        shutil.copy(folders[0] / "style.safetensors", tmp_path / "mine" / name)
    shared = Shared(Models(models_dir, device="cpu", files=OptionFiles(tmp_path / "mine")))
    weighted = {"prompt": "a <lora:style:1>", "prompt_syntax": "weighted"}
    with pytest.raises(InputError, match=r"a/style\.safetensors and b/style\.safetensors have this name; choose one"):
        picture(shared, **weighted)
    drawn = picture(shared, lora=["b/style.safetensors:0.5"], **weighted)
    assert png.read_settings(drawn)["lora"] == ["b/style.safetensors:0.5"]


def test_users_with_other_loras_at_once_get_the_pictures_that_each_gets_alone(picture, equipped, tmp_path, monkeypatch):
    """Users with the same LoRAs share steps, and the others wait."""
    tagged = {"prompt": "a cat <lora:style:0.8>", "prompt_syntax": "weighted"}
    asked = {"a": {"lora": BOTH}, "b": {"lora": BOTH[:1]}, "c": {"lora": BOTH}, "d": {}, "e": tagged, "f": tagged}
    asked = {owner: {"steps": 3, "scheduler": "ddim"} | each for owner, each in asked.items()}
    alone = {owner: picture(**each).read_bytes() for owner, each in asked.items()}
    counts, take, gate = [], Company.take, threading.Event()
    monkeypatch.setattr(Company, "take", lambda *args: counts.append((type(args[1][0]), len(args[1]))) or take(*args))
    labels = equipped.models.pipeline(equipped.catalogue.card("emoji64"), None)
    equipped.engine.call(labels, gate.wait)  # all begin together
    jobs = {}
    for owner, each in asked.items():
        unchecked = UncheckedRequest(**{"model": "./text/sd1", "prompt": "a cat", "seed": 5} | each)
        run, view = prepare(unchecked, equipped, LIMITS), View()
        jobs[owner] = Job(owner, "Draw", owner, view.follow(draw(run, equipped, tmp_path / owner)), [view])
        equipped.queue.add(jobs[owner], 32, 16)
    wait_for(lambda: len(equipped.engine._queue) == len(jobs))
    gate.set()
    wait_for(lambda: not equipped.queue.is_drawing)
    assert {owner: job.views[0].drawn[0].path.read_bytes() for owner, job in jobs.items()} == alone
    assert sorted(count for kind, count in counts if kind is AskedStep) == [1] * 3 * 4 + [2] * 3
