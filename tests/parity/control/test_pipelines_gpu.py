"""Pipelines with ControlNets on a GPU: diffusers' latents, the error of 16 bits, and the CUDA graphs of a step.

The tests of graphs also run on a CPU, where programs take the graphs' part.
"""

import copy

import pytest
import torch

import fastdiff
from tests.parity.control.pipelines import controlled
from tests.parity.image_starts.pictures import mask, picture
from tests.support.text_pipelines import text_pipeline

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
pytestmark = [
    pytest.mark.usefixtures("exact_matmuls", "one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context"),
    pytest.mark.filterwarnings("ignore:`upcast_vae` is deprecated"),
]
STARTS = {
    "text": {"image": [picture(5), picture(6)]},
    "image": {"image": picture(), "control_image": [picture(5), picture(6)], "strength": 0.8},
    "mask": {"image": picture(), "mask_image": mask(), "control_image": [picture(5), picture(6)]},
}
ENDS = {"control_guidance_start": [0.0, 0.5], "control_guidance_end": [0.5, 1.0]}


def pair(start, kind, text_folder, device, dtype=torch.float32):
    """Return diffusers' pipeline with two ControlNets and ours on a device."""
    ours = fastdiff.Pipeline.from_pretrained(text_folder(kind), device="cpu")
    theirs, ours = controlled(start, kind, (text_pipeline(kind), ours), count=2)
    return theirs.to(device, dtype), ours.to(device, dtype)


def draw(pipe, **options):
    given = {
        "prompt": "a cat riding",
        "num_inference_steps": 6,
        "output_type": "latent",
        "height": 16,
        "width": 20,
    }
    return pipe(**given | options, generator=torch.Generator().manual_seed(3)).images


def graphs(pipe):
    """Return the captured graphs, or the programs, by the name of their function."""
    found = {}
    for (name, _), each in pipe.unet._graphs.items():
        held = getattr(each, "_graphs", None) or getattr(each, "_programs", {})
        found[name] = [id(graph) for graph in held.values() if graph is not None]
    return {name: ids for name, ids in found.items() if ids}


def nets_of(name, pipe):
    """Return the indices of the ControlNets in a function's name."""
    places = [net.place for net in pipe.controlnet]
    return [places.index(each) for each in name if each in places]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), *DEVICES[1:]])
@pytest.mark.parametrize("options", [{}, {"guess_mode": True}, ENDS], ids=["default", "guess", "ends"])
@pytest.mark.parametrize(("start", "kind"), [("text", "sd1"), ("text", "sdxl"), ("image", "sd1"), ("mask", "sdxl")])
def test_float32_is_diffusers(start, kind, options, text_folder, device):
    theirs, ours = pair(start, kind, text_folder, device)
    given = STARTS[start] | options
    expected = draw(theirs, **given)
    for _ in range(2):  # the second run uses graphs from its first step
        assert (draw(ours, **given) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("way", ["pipeline", "accelerate"])
def test_16_bits_err_at_most_twice_as_much_as_diffusers(way, dtype, kind, text_folder, device):
    theirs, ours = pair("text", kind, text_folder, device)
    exact = draw(theirs, **STARTS["text"])
    theirs.to(dtype)
    error = (draw(theirs, **STARTS["text"]).float() - exact).norm()
    pipe = ours.to(dtype) if way == "pipeline" else fastdiff.accelerate(theirs)
    assert (draw(pipe, **STARTS["text"]).float() - exact).norm() <= 2 * error


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_one_graph_and_a_call_makes_no_new_one(text_folder, device):
    _, ours = pair("text", "sd1", text_folder, device)
    draw(ours, **STARTS["text"])
    drawn, before = draw(ours, **STARTS["text"]), graphs(ours)
    assert [len(ids) for ids in before.values()] == [1]
    other = draw(ours, image=[picture(8), picture(9)], controlnet_conditioning_scale=[0.3, 0.6])
    assert not torch.equal(other, drawn)
    assert torch.equal(draw(ours, **STARTS["text"]), drawn)
    assert graphs(ours) == before and not ours.controlnet[0]._graphs


@pytest.mark.parametrize("device", DEVICES)
def test_steps_without_a_controlnet_have_a_graph_without_it(text_folder, device):
    _, ours = pair("text", "sdxl", text_folder, device)
    off = {"control_guidance_start": [0.0, 0.0], "control_guidance_end": [0.5, 0.5]}
    for _ in range(2):
        draw(ours, **STARTS["text"], **off)
    first = graphs(ours)
    assert sorted(nets_of(name, ours) for name in first) == [[], [0, 1]]
    for _ in range(2):
        draw(ours, **STARTS["text"], **ENDS)
    assert sorted(nets_of(name, ours) for name in graphs(ours).keys() - first.keys()) == [[0], [1]]


@pytest.mark.parametrize("device", DEVICES)
def test_accelerate_makes_one_graph_of_each_model(text_folder, device):
    theirs, _ = pair("text", "sd1", text_folder, device)
    expected = draw(theirs, **STARTS["text"])
    plain = copy.deepcopy(theirs.controlnet.nets[0].state_dict())
    fastdiff.accelerate(theirs)
    models = [part.forward.__self__.ours() for part in (theirs.unet, *theirs.controlnet.nets)]
    counts = []
    for _ in range(3):
        drawn = draw(theirs, **STARTS["text"])
        assert (drawn - expected).abs().max() <= 1e-4 * expected.abs().max()
        held = [getattr(each, "_graphs", None) or each._programs for model in models for each in model._graphs.values()]
        counts.append([[id(graph) for graph in each.values()] for each in held])
    assert counts[0] == counts[1] == counts[2] and [len(each) for each in counts[0]] == [1, 1, 1]
    after = theirs.controlnet.nets[0].state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in plain.items())
