"""The drawings of a user's model, and that every launch with candidates is found in them."""

from types import SimpleNamespace

import pytest
import torch

from fastdiff.checkpoints.single_files import cards
from fastdiff.errors import InputError
from fastdiff.kernels.host.recording import record
from fastdiff.kernels.plans.tuning import using
from fastdiff.models.z_image import ZImageTransformer2DModel
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import find_model
from fastdiff.tuning import timing
from fastdiff.tuning.drawings import user_models as drawings
from fastdiff.tuning.shapes import Asked
from fastdiff.warming import drawing
from fastdiff.warming.card import CARDS, pretended
from fastdiff.warming.ghosts import GPU
from tests.checkpoints.single_files import ldm
from tests.parity.z_image import tiny as z_image
from tests.support.text_pipelines import text_pipeline

# kernel -> the operation that looks up its tiles; `geglu` and `swiglu` are products too
TUNED = {
    "conv_by_pointers": "conv2d",
    "conv_by_descriptors": "conv2d",
    "linear_kernel": "linear",
    "attention_kernel": "attention",
}
# their blocks and warps order sums, or they copy at the speed of the memory; see docs/kernels.md
UNTUNED = {
    "moments_kernel",
    "merge_kernel",
    "normalise_kernel",
    "apply_kernel",
    "layer_norm_kernel",
    "rotary_kernel",
} | {
    "scale_input_kernel",
    "denoise_kernel",
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(timing, "DEVICE", torch.device("cpu"))


def of_model(folder, sizes=({},), batches=(1,), **options):
    request = Request(model=str(folder), **options)
    return drawings.of_model(request, find_model(request), sizes, batches)


def test_a_single_file_is_drawn_in_each_size_and_batch(tmp_path, monkeypatch):
    _, _, folder, file = ldm.save_pipeline("sd1", tmp_path)
    (tmp_path / "sd1").symlink_to(folder)
    monkeypatch.setattr(cards, "CONFIGS", tmp_path)
    loads = []
    monkeypatch.setattr(
        drawings, "load_pipeline", lambda *given, real=drawings.load_pipeline: loads.append(given) or real(*given)
    )
    found = of_model(file, [{"width": 16, "height": 32}, {}], [1, 2])
    names = [name.partition(", ")[2] for name in found]
    assert names == ["16x32, batch 1", "16x32, batch 2", "16x16, batch 1", "16x16, batch 2"]
    pictures = [[image.size for image in make()().images] for make in found.values()]
    assert pictures == [[(16, 32)], [(16, 32)] * 2, [(16, 16)], [(16, 16)] * 2]
    assert len(loads) == 1


@pytest.mark.parametrize(("steps", "expected"), [(None, drawings.MOST_STEPS), (3, 3)])
def test_what_a_pipeline_with_controlnets_is_given(monkeypatch, steps, expected):
    given, remembered = [], []
    encoders = SimpleNamespace(remember=remembered.append)
    pipe = SimpleNamespace(encoders=encoders, stream=lambda **options: given.append(options) or [1, 2])
    monkeypatch.setattr(drawings, "load_pipeline", lambda model, request, device: given.append(request) or pipe)
    size = {"width": 96, "height": 64}
    for control in (("emoji-edges",), ("emoji-edges", "emoji-edges")):
        (make,) = of_model("emoji-sd", [size], control=control, num_inference_steps=steps).values()
        assert make()() == 2
        request, options = given[-2:]
        assert request.control == control and options["num_inference_steps"] == expected
        images = options["control_image"]
        assert remembered.pop() == 0, "each drawing runs the text encoders"
        assert [each.size for each in (images if len(control) > 1 else [images])] == [(96, 64)] * len(control)


def test_a_controlnet_needs_a_text_model():
    with pytest.raises(InputError, match=r"^--control: emoji64 reads no text, "):
        of_model("emoji64", control=("emoji-edges",))


def project(model, prompt, real=ZImageTransformer2DModel.project):
    """Z-Image's `project` with numbers in memory, which it reads: captions of 32 tokens, and latents of 128x128."""
    count = len(prompt.text)
    numbers = torch.full((count,), 32), torch.full((count, 2), 128)
    return real(model, prompt._replace(added=numbers))


@pytest.mark.parametrize("card", ["sm_80", pytest.param("sm_120", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sdxl", "z_image"])
def test_every_launch_with_candidates_is_looked_up(kind, card, tmp_path, monkeypatch):
    """Encoders, denoiser and decoder, with launches recorded instead of run."""
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.setattr(jit.JITFunction, "run", lambda kernel, *_, **__: SimpleNamespace(hash=kernel.__name__))
    (z_image.pipeline(lambda model: None) if kind == "z_image" else text_pipeline(kind)).save_pretrained(tmp_path)
    monkeypatch.setattr(ZImageTransformer2DModel, "project", project)
    request, asked = Request(model=str(tmp_path), num_inference_steps=2), Asked()
    model = find_model(request)
    with pretended(CARDS[card]):
        pipe = drawing.load(model, request)
        with using(asked), record(GPU, asked):
            drawing.draw(pipe, next(drawing.runs(request, model, 1)))
    launches = [TUNED[kernel] for call in asked.calls for kernel in call.kernels if kernel in TUNED]
    looked_up = {name: sum(n for (each, _), n in asked.counts.items() if each == name) for name in set(TUNED.values())}
    assert looked_up == {name: launches.count(name) for name in looked_up} and all(looked_up.values())
    others = {kernel for call in asked.calls for kernel in call.kernels} - TUNED.keys()
    assert others <= UNTUNED
