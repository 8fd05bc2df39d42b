"""The settings that other tools write into PNG, JPEG and WebP files."""

import io
import json

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fastdiff.errors import InputError
from fastdiff.requests import foreign
from fastdiff.requests.foreign import scheduler_name
from fastdiff.requests.png import sampler_name
from fastdiff.sampler_names import SCHEDULERS
from tests.requests.foreign_pictures import A1111, COMFYUI, FOOOCUS, INVOKEAI, NOVELAI, exif_picture, png_picture

PIXELS = 10_000


@pytest.fixture
def picture(tmp_path):
    def write(data: bytes, name: str = "theirs.png"):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


MODELS = {  # with the hash
    "AUTOMATIC1111": ("dreams", "abc"),
    "ComfyUI": ("v1-5.safetensors", ""),
    "Fooocus": ("xl", "0"),
    "InvokeAI": ("sd", ""),
    "NovelAI": ("Stable Diffusion", "1D44365E"),
}


@pytest.mark.parametrize(
    ("texts", "tool", "values", "lacking"),
    [
        pytest.param(
            A1111,
            "AUTOMATIC1111",
            {
                "prompt": "a cat, (best: 1.2)\non a mat",
                "negative_prompt": "blurry",
                "steps": 28,
                "guidance_scale": 7.5,
                "seed": 123,
                "clip_skip": 1,
                "scheduler": "dpm++2m-karras",
                "width": 512,
                "height": 768,
                "prompt_syntax": "weighted",
            },
            ["Denoising strength", "Model"],
            id="AUTOMATIC1111",
        ),
        pytest.param(
            COMFYUI,
            "ComfyUI",
            {
                "prompt": "a red fox",
                "negative_prompt": "text",
                "steps": 20,
                "guidance_scale": 8.0,
                "seed": 5,
                "scheduler": "euler-a",
                "width": 512,
                "height": 640,
            },
            ["denoise", "Model"],
            id="ComfyUI",
        ),
        pytest.param(
            INVOKEAI,
            "InvokeAI",
            {
                "prompt": "a house",
                "negative_prompt": "blurry",
                "steps": 30,
                "guidance_scale": 6.5,
                "seed": 11,
                "clip_skip": 1,
                "scheduler": "dpm++2m-karras",
                "width": 640,
                "height": 512,
            },
            ["loras", "Model"],
            id="InvokeAI",
        ),
        pytest.param(
            FOOOCUS,
            "Fooocus",
            {
                "prompt": "a boat",
                "steps": 30,
                "guidance_scale": 4.0,
                "seed": 77,
                "clip_skip": 1,
                "scheduler": "dpm++2m-sde-karras",
                "width": 832,
                "height": 1216,
            },
            ["styles", "sharpness", "Model"],
            id="Fooocus",
        ),
        pytest.param(
            NOVELAI,
            "NovelAI",
            {
                "prompt": "a knight",
                "negative_prompt": "lowres",
                "steps": 28,
                "guidance_scale": 11.0,
                "seed": 3,
                "scheduler": "euler-a",
                "width": 512,
                "height": 768,
            },
            ["strength", "Model"],
            id="NovelAI",
        ),
    ],
)
def test_each_tool(picture, texts, tool, values, lacking):
    found = foreign.parse(str(picture(png_picture(texts))), PIXELS)
    own = dict(zip(("model", "model_hash"), MODELS[tool], strict=True))
    assert found == {"tool": tool, "values": values, "lacking": lacking, **own}


HIRES = "a cat\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 512x512, {}, Version: v1.9"


@pytest.mark.parametrize(
    ("said", "values", "lacking"),
    [
        ("Denoising strength: 0.7, Hires upscale: 2, Hires upscaler: Latent", (2.0, 0.7, "latent"), ["Hires steps"]),
        (
            "Denoising strength: 0.5, Hires upscale: 1.5, Hires steps: 10, Hires upscaler: Lanczos",
            (1.5, 0.5, "pixels"),
            [],
        ),
        ("Denoising strength: 0.5, Hires upscale: 2, Hires steps: 10, Hires upscaler: None", (2.0, 0.5, "pixels"), []),
        ("Denoising strength: 0.5, Hires upscale: 2, Hires steps: 10", (2.0, 0.5, "latent"), []),
        (
            "Denoising strength: 0.5, Hires upscale: 2, Hires steps: 15, Hires upscaler: 4x-UltraSharp",
            (2.0, 0.5, "pixels"),
            ["Hires upscaler", "Hires steps"],
        ),
        (
            "Denoising strength: 0.5, Hires upscale: 2, Hires steps: 10, Hires upscaler: Latent (nearest)",
            (2.0, 0.5, "latent"),
            ["Hires upscaler"],
        ),
        (
            "Denoising strength: 0.5, Hires resize: 768x768, Hires upscaler: Latent",
            None,
            ["Denoising strength", "Hires resize", "Hires upscaler"],
        ),
        ("Denoising strength: x, Hires upscale: 2", None, ["Denoising strength", "Hires upscale"]),
        ("Hires upscale: 2", None, ["Hires upscale"]),
        ("Denoising strength: nan, Hires upscale: 2", None, ["Denoising strength", "Hires upscale"]),
        ("Denoising strength: 0.5, Hires upscale: nan", None, ["Denoising strength", "Hires upscale"]),
        ("Denoising strength: 0.5, Hires upscale: 1", None, ["Denoising strength", "Hires upscale"]),
    ],
)
def test_a_picture_of_hires_fix(picture, said, values, lacking):
    found = foreign.parse(str(picture(png_picture({"parameters": HIRES.format(said)}))), PIXELS)
    names = ("upscale", "upscale_strength", "upscale_mode")
    assert {name: found["values"][name] for name in names if name in found["values"]} == dict(
        zip(names, values or (), strict=False)
    )
    assert found["lacking"] == lacking


@pytest.mark.parametrize(
    ("prompt", "is_weighted"),
    [
        ("a cat", False),
        ("a <lora:ink:1>", True),
        ("[a]", True),
        ("a BREAK b", True),
        ("a" * 150, True),
        ("a BREAKb", False),
        ("a" * 149, False),
    ],
)
def test_prompts_of_a1111_are_weighted(picture, prompt, is_weighted):
    text = HIRES.format("Clip skip: 2").replace("a cat", prompt)
    found = foreign.parse(str(picture(png_picture({"parameters": text}))), PIXELS)
    assert found["values"]["prompt"] == prompt
    assert (found["values"].get("prompt_syntax") == "weighted") is is_weighted


@pytest.mark.parametrize("form", ["JPEG", "WEBP"])
def test_a_process_reads_the_comment_in_exif(picture, form):
    found = foreign.read(picture(exif_picture(A1111["parameters"], form)), PIXELS)
    assert found is not None
    assert found.values["prompt"] == "a cat, (best: 1.2)\non a mat"
    assert (found.values["seed"], found.values["scheduler"]) == (123, "dpm++2m-karras")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_come_back(scheduler):
    sampler, kind = sampler_name(scheduler)
    assert scheduler_name(sampler, kind or "Automatic") == scheduler
    assert scheduler_name(f"{sampler} {kind or ''}") == scheduler  # older versions append the schedule


@pytest.mark.parametrize(
    ("sampler", "schedule", "ours"),
    [
        ("euler_ancestral", "normal", "euler-a"),
        ("k_euler_ancestral", "", "euler-a"),
        ("dpmpp_2m_sde_gpu", "karras", "dpm++2m-sde-karras"),
        ("dpmpp_2m_k", "", "dpm++2m-karras"),
        ("kdpm_2", "", "dpm2"),
        ("dpm_2_ancestral", "karras", "dpm2-a-karras"),
        ("uni_pc", "normal", "unipc"),
        ("DPM adaptive", "", "DPM adaptive"),
        ("DPM++ 2S a", "", "DPM++ 2S a"),
        ("Euler", "Exponential", "Euler Exponential"),
    ],
)
def test_samplers_of_other_tools(sampler, schedule, ours):
    assert scheduler_name(sampler, schedule) == ours


def test_values_that_are_no_numbers_are_named(picture):
    text = "a\nSteps: many, Sampler: Euler, Seed: 1, CFG scale: 2"
    found = foreign.parse(str(picture(png_picture({"parameters": text}))), PIXELS)
    assert found["lacking"] == ["steps"] and found["values"]["seed"] == 1


def test_more_samplers_are_counted(picture):
    nodes = json.loads(COMFYUI["prompt"])
    nodes["30"] = {**nodes["3"], "inputs": {**nodes["3"]["inputs"], "steps": 9}}
    found = foreign.parse(str(picture(png_picture(COMFYUI | {"prompt": json.dumps(nodes)}))), PIXELS)
    assert found["values"]["steps"] == 20 and "1 more samplers" in found["lacking"]


def test_names_are_few_and_short(picture):
    settings = ", ".join(f"{'name' * 20}{i}: 1" for i in range(50))
    text = f"a\nSteps: 1, Sampler: Euler, Seed: 1, CFG scale: 2, {settings}"
    found = foreign.parse(str(picture(png_picture({"parameters": text}))), PIXELS)
    assert len(found["lacking"]) == foreign.MAX_NAMES and max(map(len, found["lacking"])) == foreign.MAX_NAME


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "PNG"])
def test_a_picture_without_settings(picture, form):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, form)
    assert foreign.parse(str(picture(file.getvalue())), PIXELS) == {}


def test_too_many_pixels_and_damage(picture):
    large = picture(exif_picture("a", "JPEG", size=200))
    with pytest.raises(InputError, match=r"theirs\.png is too large \(200x200 pixels\); drop"):
        foreign.read(large, PIXELS)
    with pytest.raises(InputError, match=r"theirs\.png is damaged"):
        foreign.read(picture(b"\xff\xd8\xff\xe0JFIF"), PIXELS)


def test_a_hostile_text_ends(picture, monkeypatch):
    monkeypatch.setattr(foreign, "SECONDS", 0.5)
    info = PngInfo()
    info.add_text("parameters", "Hashes: {" * 100_000)
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=info)
    with pytest.raises(InputError, match=r"theirs\.png: its settings take more than 0\.5 s to read; type them in"):
        foreign.read(picture(file.getvalue()), PIXELS)
