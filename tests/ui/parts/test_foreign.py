"""The settings that AUTOMATIC1111 and similar tools write into PNG files."""

import pytest

from fastdiff.requests.png import sampler_name
from fastdiff.sampler_names import SCHEDULERS
from fastdiff.ui.parts.upload import parse_parameters

TEXT = """a cat, (best: 1.2)
on a mat
Negative prompt: blurry
Steps: 28, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7.5, Seed: 123, Size: 512x768, Model hash: abc, \
Clip skip: 2, Lora hashes: "a: 1, Seed: 2", Version: v1.9"""


def test_prompts_and_settings():
    values, rest = parse_parameters(TEXT)
    assert values == {
        "prompt": "a cat, (best: 1.2)\non a mat",
        "negative_prompt": "blurry",
        "steps": 28,
        "guidance_scale": 7.5,
        "seed": 123,
        "clip_skip": 1,
        "scheduler": "dpm++2m-karras",
        "width": 512,
        "height": 768,
    }
    assert rest == ["Model hash", "Lora hashes", "Version"]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_come_back(scheduler):
    sampler, kind = sampler_name(scheduler)
    for line in (f"Sampler: {sampler}, Schedule type: {kind or 'Automatic'}", f"Sampler: {sampler} {kind or ''}"):
        assert parse_parameters(f"a\nSteps: 1, {line}")[0]["scheduler"] == scheduler


def test_values_that_are_no_numbers_are_named():
    assert parse_parameters("a\nSteps: many, Seed: 1") == ({"prompt": "a", "seed": 1}, ["Steps"])


def test_a_text_without_settings_is_a_prompt():
    assert parse_parameters("a cat") == ({"prompt": "a cat"}, [])
