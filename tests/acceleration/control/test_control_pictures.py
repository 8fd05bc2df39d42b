"""accelerate embeds a control picture once for a loop, and follows every change to the picture and to the weights."""

import pytest
import torch

import fastdiff
from tests.acceleration.control.test_controlnets import CONTROL, SIZE, draw, live, nets_of
from tests.parity.control.pipelines import KINDS as PIPELINES
from tests.parity.image_starts.pictures import of_same_parts, picture
from tests.support.text_pipelines import text_pipeline, tiny_controlnet

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context"),
]
TIMESTEPS = torch.arange(900, 0, -300)
TWO = {"image": [CONTROL, picture(6)], **SIZE}


def ours_of(net):
    return net.forward.__self__.ours()


def counted(net, monkeypatch):
    """Return a list that grows with each call of `embed_condition`."""
    ours, calls = ours_of(net), []
    embed = ours.embed_condition
    monkeypatch.setattr(ours, "embed_condition", lambda pixels: calls.append(pixels) or embed(pixels))
    return calls


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def pair(no_grad):
    """A ControlNet of diffusers, and an equal one that runs on fastdiff."""
    return tiny_controlnet("sd1"), fastdiff.accelerate(tiny_controlnet("sd1"))


def inputs(count=1):
    """Return the sample, the text and the control pictures of a call."""
    generator = torch.Generator().manual_seed(2)
    shapes = (4, 8, 10), (5, 32), (3, 16, 20)
    return [torch.randn(count, *shape, generator=generator) for shape in shapes]


def check(pair, timestep, sample, text, control):
    """Compare the residuals of a call, and return the middle's."""
    expected, found = (net(sample, timestep, text, control).mid_block_res_sample for net in pair)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    return found


@pytest.mark.parametrize("options", [{}, {"guess_mode": True}, {"control_guidance_start": 0.4}], ids=str)
def test_a_loop_embeds_its_picture_once(options, monkeypatch):
    pipe = fastdiff.accelerate(live())
    calls = counted(pipe.controlnet, monkeypatch)
    for runs in (1, 2):
        draw(pipe, **options)
        assert len(calls) == runs


@pytest.mark.parametrize("is_one_net", [False, True])
def test_several_pictures(is_one_net, monkeypatch):
    pipe = live(count=2)
    if is_one_net:
        net = tiny_controlnet("sd1")
        pipe = of_same_parts(PIPELINES["text"], "sd1", text_pipeline("sd1"), controlnet=[net, net])
    expected = draw(pipe, **TWO)
    fastdiff.accelerate(pipe)
    calls = [counted(net, monkeypatch) for net in {*nets_of(pipe)}]
    assert (draw(pipe, **TWO) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert sum(map(len, calls)) == 2


def test_the_embedding_is_one_object_and_changes_no_bits(pair, monkeypatch):
    """A CUDA graph need not copy an input that it has."""
    sample, text, control = inputs(2)
    ours, extras = ours_of(pair[1]), []
    predicted = ours._predicted
    monkeypatch.setattr(ours, "_predicted", lambda *args: extras.append(args[5]) or predicted(*args))
    found = [check(pair, t, sample, text, control) for t in TIMESTEPS]
    assert len(extras) == 3 and len({id(each) for each in extras}) == 1
    monkeypatch.undo()
    ours.control_reader = None
    assert all(
        torch.equal(check(pair, t, sample, text, control), each) for t, each in zip(TIMESTEPS, found, strict=True)
    )


def test_a_call_outside_of_a_loop_embeds_in_its_graph(pair, monkeypatch):
    sample, text, control = inputs()
    check(pair, 7, sample, text, control)
    ours = ours_of(pair[1])
    monkeypatch.setattr(ours, "_predicted", lambda *args: pytest.fail("embedded before") if args[5:] else [text] * 4)
    for timestep in (7, torch.tensor(7)):
        pair[1](sample, timestep, text, control)


@pytest.mark.parametrize("change", ["in-place", "another"])
def test_a_change_of_the_picture_in_a_callback_counts_at_the_next_step(change):
    def edit(pipe, step, timestep, tensors):
        image = tensors["image"].mul_(0.3) if change == "in-place" else 0.3 * tensors["image"]
        return {"image": image}

    given = {"callback_on_step_end": edit, "callback_on_step_end_tensor_inputs": ["image"]}
    plain, fast = live(), fastdiff.accelerate(live())
    expected = draw(plain, **given)
    assert (draw(plain) - expected).abs().max() > 1e-2
    for _ in range(2):
        assert (draw(fast, **given) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_write_to_a_weight_counts_at_the_next_step(pair):
    sample, text, control = inputs()
    for t in TIMESTEPS:
        check(pair, t, sample, text, control)
        for net in pair:
            net.controlnet_cond_embedding.blocks[0].weight.mul_(-1.5)


@pytest.mark.parametrize("what", ["picture", "weight"])
def test_a_write_that_torch_does_not_count_counts_when_the_loop_starts_again(what, pair):
    sample, text, control = inputs()
    for _run in range(3):
        for t in TIMESTEPS:
            check(pair, t, sample, text, control)
        for net in pair:
            net.controlnet_cond_embedding.blocks[0].weight.data.mul_(-1.5 if what == "weight" else 1)
        control.data.mul_(0.5 if what == "picture" else 1)


def test_an_adapter_of_the_embedding(pair):
    """Its scale counts at the next step, although no parameter of the live model changes."""
    peft = pytest.importorskip("peft")
    sample, text, control = inputs()
    for net in pair:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["conv_out"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, net)
    found = []
    for t, scale in zip(TIMESTEPS, (1.0, 4.0, -2.0), strict=True):
        for net in pair:
            net.controlnet_cond_embedding.conv_out.set_scale("default", scale)
        found.append(check(pair, t, sample, text, control))
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_inference_tensors_are_not_kept(pair):
    with torch.inference_mode():
        sample, text, control = inputs()
    first, second, _ = (check(pair, t, sample, text, control) for t in TIMESTEPS)
    with torch.inference_mode():
        control.mul_(0.3)
        check(pair, TIMESTEPS[1], sample, text, control)
        assert torch.equal(check(pair, TIMESTEPS[0], *inputs()), first)
    assert (first - second).abs().max() > 1e-4


def test_a_picture_that_is_gone_is_dropped(pair):
    sample, text, control = inputs()
    check(pair, TIMESTEPS[0], sample, text, control)
    kept = ours_of(pair[1]).control_reader._kept
    other = control.clone()
    check(pair, TIMESTEPS[0], sample, text, other)
    assert len(kept._made) == 2
    del control
    check(pair, TIMESTEPS[1], sample, text, other)
    assert len(kept._made) == 1
