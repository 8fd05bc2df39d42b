"""`fastdiff.report` of text-to-image pipelines. tests/kernels/host/test_recording.py tests everything else."""

from collections import Counter

import pytest
import torch

import fastdiff
from fastdiff.errors import InputError
from fastdiff.pipelines import TextToImagePipeline
from fastdiff.pipelines.reporting import Report, Row, report
from tests.support.text_pipelines import KINDS


@pytest.fixture
def pipe(text_folder):
    return lambda kind: fastdiff.Pipeline.from_pretrained(text_folder(kind), device="cpu")


def count(found: Report, operation: str) -> int:
    return sum(row.count for row in found.rows if row.operation == operation)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind != "sdxl" else ()) for kind in KINDS]
)
def test_a_guided_step_is_a_prediction_of_both_halves_and_one_step(pipe, kind):
    pipe = pipe(kind)
    found, alone = report(pipe), report(pipe.denoiser)
    assert found.what == "TextToImagePipeline, 1x8x8x4, float32, cpu"
    assert count(found, "denoise_step") == 1
    for operation in ("conv2d", "attention", "linear"):
        assert count(found, operation) == count(alone, operation) > 0
    assert found.flop == 2 * alone.flop
    assert count(report(pipe, guidance_scale=1.0), "conv2d") == count(alone, "conv2d")


def operations(found: Report) -> Counter:
    """Count the operations of each shape. Their torch functions differ: a norm calls more of them for a large mean."""
    counts: Counter = Counter()
    for row in found.rows:
        counts[row.operation, row.shape, row.flop] += row.count
    return counts


@pytest.mark.slow
def test_prompts_and_sizes_are_those_of_a_call(pipe):
    pipe = pipe("sdxl")
    assert isinstance(pipe, TextToImagePipeline)
    usual = report(pipe)
    assert operations(report(pipe, prompt="a cat", original_size=(64, 64))) == operations(usual)
    embeds = {"prompt_embeds": torch.zeros(1, 24, 72), "pooled_prompt_embeds": torch.zeros(1, 24)}
    assert operations(report(pipe, **embeds)) == operations(usual)
    assert report(pipe, height=16, width=32).what.startswith("TextToImagePipeline, 1x8x16x4")
    assert report(pipe, batch_size=2).flop == 2 * usual.flop


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_inference_steps": 1}, "num_inference_steps: a report shows the second step"),
        ({"height": 9}, "height"),
        ({"class_labels": 1}, "class_labels: this model takes prompts"),
        ({"prompt": 7}, "prompt: 7 is not"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_one_line(pipe, options, message):
    with pytest.raises(InputError, match=message):
        report(pipe("sd1"), **options)


def test_totals_count_every_call():
    rows = (
        Row("conv2d", "8x8", 3, 10, ("ours", "moments"), ("add",), ""),
        Row("linear", "4", 2, 5, (), ("addmm",), ""),
    )
    totals = Report("a model", rows, variants=2)
    assert (totals.kernel_launches, totals.launches, totals.flop) == (6, 11, 40)
    assert totals.share == 0.75


def test_what_is_no_model_is_refused():
    with pytest.raises(InputError, match=r"model: .* give a Pipeline, UNet2DModel"):
        report(torch.nn.Linear(2, 2))
