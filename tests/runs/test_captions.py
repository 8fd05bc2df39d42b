"""Requests to Z-Image: the library's pictures in any batch, what it refuses, and settings that repeat them."""

from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import save_file

from fastdiff import InputError, Pipeline
from fastdiff.bulk.spec import complete_rows, read_rows
from fastdiff.pipelines.base import load_pipeline
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run, draw, find_model
from fastdiff.runs.notices import find_notices
from fastdiff.runs.option_files.loras import with_loras_here
from tests.parity.z_image import loras, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ("a cat", "a dog and a long prompt, longer than the other one")
SIZE = {"height": 16, "width": 24}
USUAL = SIZE | {"num_inference_steps": 3, "guidance_scale": 2.0}


@pytest.fixture
def folder(randomise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.pipeline(randomise).save_pretrained(tmp_path / "z-image")
    Image.new("RGB", (34, 18), "red").save("start.png")
    return tmp_path / "z-image"


def prepared(folder, batch_size=None, **options) -> Run:
    request = Request(**{"model": str(folder), "prompt": PROMPTS, "seed": (5,)} | USUAL | options)
    return Run.prepare(request, find_model(request), COMMAND, batch_size=batch_size)


def finished(run: Run) -> list:
    pipe = Pipeline.from_pretrained(run.request.model, device="cpu")
    return [each for progress in draw(run, pipe) for each in progress.finished]


def test_pictures_are_the_librarys_in_any_batch(folder):
    options = {"negative_prompt": "blurry"}
    wanted = Pipeline.from_pretrained(folder, device="cpu")([*PROMPTS], seed=5, **USUAL, **options).images
    for batch in (1, 2):
        found = finished(prepared(folder, batch, **options))
        assert [each.image.tobytes() for each in found] == [each.tobytes() for each in wanted]
    record = found[1].record
    assert (record["prompt"], record["negative_prompt"], record["guidance_scale"]) == (PROMPTS[1], "blurry", 2.0)
    assert record["scheduler"] == "flow-euler"


def test_a_picture_to_start_from(folder):
    start = {"init_image": "start.png", "height": None, "width": None}
    run = prepared(folder, prompt=PROMPTS[:1], **start)
    (found,) = finished(run)
    given = {"image": Image.open("start.png"), "num_inference_steps": 3, "guidance_scale": 2.0}
    (wanted,) = Pipeline.from_pretrained(folder, device="cpu")(PROMPTS[0], seed=5, **given).images
    assert found.image.tobytes() == wanted.tobytes() and found.image.size == (32, 16)
    assert found.record["strength"] == 0.6
    few = prepared(folder, prompt=PROMPTS[:1], strength=0.1, **start)  # int(3 - 3 * 0.1) = 2, so one step is taken
    assert len(finished(few)) == 1
    with pytest.raises(InputError, match="strength 0: it leaves none of 3 steps"):
        prepared(folder, strength=0.0, **start)


def test_a_mask(folder):
    Image.new("L", (34, 18)).save("mask.png")
    given = {"init_image": "start.png", "mask": "mask.png", "height": None, "width": None}
    run = prepared(folder, prompt=PROMPTS[:1], **given)
    (found,) = finished(run)
    pictures = {"image": Image.open("start.png"), "mask_image": Image.open("mask.png")}
    options = pictures | {"num_inference_steps": 3, "guidance_scale": 2.0}
    library = Pipeline.from_pretrained(folder, device="cpu")
    (wanted,) = library(PROMPTS[0], seed=5, **options).images
    assert found.image.tobytes() == wanted.tobytes() and found.image.size == (32, 16)
    assert (found.record["strength"], found.record["mask"]) == (1.0, "mask.png")
    (cropped,) = finished(prepared(folder, prompt=PROMPTS[:1], **given | {"mask": "start.png", "mask_crop": 2}))
    assert cropped.image.size == (34, 18)


def test_bulk_pictures_with_and_without_masks_have_their_own_size(folder):
    Image.new("L", (34, 18)).save("mask.png")
    request = Request(model=str(folder), num_inference_steps=3)
    Path("spec.jsonl").write_text(
        '{"prompt": "a cat", "image": "start.png"}\n{"prompt": "a cat", "image": "start.png", "mask": "mask.png"}\n'
    )
    completed, cells = complete_rows(request, read_rows("spec.jsonl"), find_model(request))
    assert (completed.height, completed.width) == (16, 32)
    assert [cell.start.strength for cell in cells] == [0.6, 1.0]


def test_a_lora_and_its_record(folder):
    tensors = loras.in_kohya(loras.random_loras(tiny.pipeline(lambda model: None).transformer))
    save_file({key: each.contiguous().clone() for key, each in tensors.items()}, "style.safetensors")
    run = prepared(folder, prompt=PROMPTS[:1], lora=("style.safetensors:0.8",))
    pipe = load_pipeline(run.card, run.request, "cpu")
    (found,) = [each for progress in draw(run, pipe) for each in progress.finished]
    library = Pipeline.from_pretrained(folder, device="cpu")
    (plain,) = library(PROMPTS[0], seed=5, **USUAL).images
    library.load_lora_weights("style.safetensors", adapter_name="style")
    library.set_adapters("style", 0.8)
    (wanted,) = library(PROMPTS[0], seed=5, **USUAL).images
    assert found.image.tobytes() == wanted.tobytes() != plain.tobytes()
    assert found.record["lora"] == ["style.safetensors:0.8"]
    source = Recorded("a.png", {**found.record, "lora": ["elsewhere/style.safetensors:0.8"]})
    again = with_loras_here(Request.from_flags({}, source), source, None)
    assert (again.lora, again.prompt) == (("style.safetensors:0.8",), PROMPTS[:1])


def test_defaults_are_those_of_diffusers(folder):
    request = prepared(folder, **dict.fromkeys(USUAL)).request
    assert (request.num_inference_steps, request.guidance_scale) == (50, 5.0)
    assert (request.height, request.width) == (256, 256)  # 128 latents, and this VAE makes two pixels of each


def test_a_prompt_that_is_cut_is_told(folder):
    lines = find_notices(prepared(folder, prompt=("a cat " * 200,)))
    assert any("longer than the 512 tokens" in line for line in lines)
    assert find_notices(prepared(folder)) == []


REFUSED = {
    "clip_skip": (1, "clip-skip 1"),
    "prompt_syntax": ("weighted", "prompt-syntax: Z-Image does not have it; leave it out"),
    "guidance_start": (0.5, "guidance-start: Z-Image"),
    "guidance_stop": (0.5, "guidance-stop: Z-Image"),
    "upscale": (2.0, "upscale: Z-Image"),
    "control": (("emoji-edges",), "control: Z-Image"),
    "embedding": (("x.safetensors",), "embedding: Z-Image"),
    "ip_adapter": (("x",), "ip-adapter: Z-Image"),
}


@pytest.mark.parametrize(("name", "value", "message"), [(name, *each) for name, each in REFUSED.items()], ids=REFUSED)
def test_settings_of_stable_diffusion_are_refused(folder, name, value, message):
    with pytest.raises(InputError, match=message):
        prepared(folder, **{name: value})


def test_a_negative_prompt_has_no_effect_without_guidance(folder):
    unguided = find_notices(prepared(folder, negative_prompt="blurry", guidance_scale=0.0))
    assert unguided == ["negative prompt: no effect, because cfg-scale 0 is no guidance"]
    assert find_notices(prepared(folder, negative_prompt="blurry", guidance_scale=1.0)) == []


def test_settings_that_change_nothing_are_taken(folder):
    usual = {"clip_skip": 0, "guidance_start": 0.0, "guidance_stop": 1.0, "prompt_syntax": "plain", "upscale": 1.0}
    assert prepared(folder, **usual).request == prepared(folder).request


def test_a_lora_tag_is_drawn_as_text_and_the_remedy_works(folder):
    (notice,) = find_notices(prepared(folder, prompt=("a cat <lora:style:0.8>",)))
    assert notice == "prompt: '<lora:style:0.8>': it is drawn as text; give its file with --lora"
    with pytest.raises(InputError, match="prompt-syntax: Z-Image does not have it"):
        prepared(folder, prompt_syntax="weighted")
