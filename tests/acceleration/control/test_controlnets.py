"""accelerate on live ControlNet pipelines: diffusers' own loop, with our U-Net, ControlNets and VAE."""

import copy
import inspect

import diffusers
import pytest
import torch

import fastdiff
from tests.parity.control.pipelines import KINDS as PIPELINES
from tests.parity.image_starts.pictures import mask, of_same_parts, picture
from tests.support.pairwise import product
from tests.support.text_pipelines import text_pipeline, tiny_controlnet

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context"),
]
PROMPT = "a photo of the cat"
CONTROL = picture(5)
STARTS = {
    "text": {"image": CONTROL},
    "image": {"image": picture(), "control_image": CONTROL, "strength": 0.8},
    "mask": {"image": picture(), "mask_image": mask(), "control_image": CONTROL},
}
SIZE = {"height": 16, "width": 20}


def live(start="text", kind="sd1", count=1, **options):
    """Return a live pipeline of diffusers with `count` ControlNets, whose config has `options`."""
    nets = [tiny_controlnet(kind, seed=4 + i, **options) for i in range(count)]
    return of_same_parts(PIPELINES[start], kind, text_pipeline(kind), controlnet=nets[0] if count == 1 else nets)


def draw(pipe, **options):
    given = {"prompt": PROMPT, "num_inference_steps": 4, "output_type": "latent", **STARTS["text"]}
    return pipe(**given | options, generator=torch.Generator().manual_seed(3)).images


def nets_of(pipe):
    return getattr(pipe.controlnet, "nets", [pipe.controlnet])


def assert_as_before(pipe, **options):
    """Check that accelerate changes neither the latents nor, with two runs, what is remembered from call to call."""
    expected = draw(pipe, **options)
    assert fastdiff.accelerate(pipe) is pipe
    for _ in range(2):
        assert (draw(pipe, **options) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(("start", "kind"), product(list(STARTS), ["sd1", "sdxl"], together=1))
def test_latents_are_those_of_diffusers(start, kind):
    pipe = live(start, kind)
    assert_as_before(pipe, **STARTS[start])
    assert "forward" in vars(pipe.controlnet) and "forward" in vars(pipe.unet) and "_decode" in vars(pipe.vae)
    assert (draw(pipe, **STARTS[start]) - draw(pipe, **STARTS[start], controlnet_conditioning_scale=0.0)).std() > 1e-2
    with pytest.raises(fastdiff.InputError, match="inference only"):
        pipe.controlnet(torch.zeros(1, 4, 8, 8, requires_grad=True), 0, torch.zeros(1, 5, 32), torch.zeros(1, 3, 8, 8))


ONE = {
    "scale": {"controlnet_conditioning_scale": 0.4},
    "guess": {"guess_mode": True, "guidance_scale": 3.0},
    "unguided": {"guidance_scale": 1.0},
    "between": {"control_guidance_start": 0.3, "control_guidance_end": 0.6},
    "several": {"prompt": [PROMPT, "riding"], "num_images_per_prompt": 2},
}
TWO = {
    "default": {},
    "scales": {"controlnet_conditioning_scale": [0.4, 1.3]},
    "guess": {"guess_mode": True},
    "never-both": {"control_guidance_start": [0.0, 0.5], "control_guidance_end": [0.5, 1.0]},
}


@pytest.mark.parametrize(("options", "kind"), [(each, ("sd1", "sdxl")[i % 2]) for i, each in enumerate(ONE)])
def test_arguments(options, kind):
    assert_as_before(live(kind=kind), **ONE[options])


@pytest.mark.parametrize(("options", "kind"), [(each, ("sdxl", "sd1")[i % 2]) for i, each in enumerate(TWO)])
def test_two_controlnets(options, kind):
    pipe = live(kind=kind, count=2)
    assert_as_before(pipe, image=[CONTROL, picture(6)], **SIZE, **TWO[options])
    assert all("forward" in vars(net) for net in nets_of(pipe))


def test_means_over_the_pixels():
    assert_as_before(live(global_pool_conditions=True), control_guidance_end=0.5)


@pytest.mark.parametrize("options", [{}, {"guess_mode": True}, {"control_guidance_end": 0.5}], ids=str)
def test_a_call_makes_no_new_programs(options):
    """A guided loop needs one program for each model. Steps without a ControlNet run none of it."""
    pipe = fastdiff.accelerate(live())
    counts = []
    for _ in range(3):
        draw(pipe, num_inference_steps=6, **options)
        models = [part.forward.__self__.ours() for part in (pipe.unet, pipe.controlnet)]
        counts.append([[len(each._programs) for each in model._graphs.values()] for model in models])
    assert counts == [[[1], [1]]] * 3


@pytest.mark.parametrize("guess", [False, True])
def test_the_conditioning_is_computed_once(guess, monkeypatch):
    """In guess mode, diffusers gives the ControlNet another view of the text at each step."""
    pipe, calls = fastdiff.accelerate(live(kind="sdxl")), []
    ours = pipe.controlnet.forward.__self__.ours()
    project = ours.project
    monkeypatch.setattr(ours, "project", lambda prompt: calls.append(prompt) or project(prompt))
    draw(pipe, guess_mode=guess)
    assert len(calls) == 1


def test_a_step_without_the_controlnet_does_not_run_it(monkeypatch):
    pipe = fastdiff.accelerate(live(count=2))
    steps = []
    for i, net in enumerate(nets_of(pipe)):
        ours = net.forward.__self__.ours()
        ours.use_graphs = False
        monkeypatch.setattr(ours, "predict", lambda *args, run=ours.predict, i=i: steps.append(i) or run(*args))
    draw(pipe, image=[CONTROL, CONTROL], control_guidance_start=[0.0, 0.5], control_guidance_end=[0.5, 1.0])
    assert steps == [0, 0, 1, 1]  # of PNDM's 5 calls, the third has neither


@pytest.mark.parametrize("pooled", [False, True])
def test_the_output_has_diffusers_class(pooled):
    """`down_block_res_samples` and `mid_block_res_sample` by name, and in channels-last memory."""
    net = tiny_controlnet("sd1", global_pool_conditions=pooled)
    given = torch.randn(2, 4, 8, 10), 7, torch.randn(2, 5, 32), torch.rand(2, 3, 16, 20)
    with torch.no_grad():
        for options in ({}, {"conditioning_scale": 0.0}, {"conditioning_scale": 0.5, "guess_mode": True}):
            expected = net(*given, **options)
            found = fastdiff.accelerate(net)(*given, **options)
            fastdiff.restore(net)
            assert type(found) is type(expected)
            pairs = zip(found.down_block_res_samples, expected.down_block_res_samples, strict=True)
            for ours, theirs in (*pairs, (found.mid_block_res_sample, expected.mid_block_res_sample)):
                assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= 1e-4
                assert ours.is_contiguous(memory_format=torch.channels_last)


def test_restore_gives_the_bits_of_diffusers_back():
    pipe = live(count=2)
    options = {"image": [CONTROL, picture(6)], **SIZE}
    expected = draw(pipe, **options)
    before = [{name: each.clone() for name, each in net.state_dict().items()} for net in nets_of(pipe)]
    fastdiff.accelerate(pipe)
    for net, state in zip(nets_of(pipe), before, strict=True):
        assert all(torch.equal(each, state[name]) for name, each in net.state_dict().items())
        assert net.state_dict().keys() == state.keys()
    fastdiff.restore(pipe)
    assert all("forward" not in vars(part) for part in (pipe.unet, *nets_of(pipe)))
    assert torch.equal(draw(pipe, **options), expected)
    with pytest.raises(fastdiff.InputError, match="not accelerated"):
        fastdiff.restore(pipe)


@pytest.mark.parametrize("count", [1, 2])
def test_controlnets_alone(count):
    pipe = live(count=count)
    options = {"image": [CONTROL, picture(6)][:count] if count > 1 else CONTROL, **SIZE}
    expected = draw(pipe, **options)
    assert fastdiff.accelerate(pipe.controlnet) is pipe.controlnet
    assert all("forward" in vars(net) for net in nets_of(pipe)) and "forward" not in vars(pipe.unet)
    assert (draw(pipe, **options) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert all("forward" not in vars(net) for net in nets_of(fastdiff.restore(pipe)))


def test_one_controlnet_twice():
    """Its parameters are shared once."""
    net = tiny_controlnet("sd1")
    pipe = of_same_parts(PIPELINES["text"], "sd1", text_pipeline("sd1"), controlnet=[net, net])
    assert_as_before(pipe, image=[CONTROL, picture(6)], **SIZE)
    assert "forward" not in vars(fastdiff.restore(pipe).controlnet.nets[0])


def test_changed_weights_change_the_picture():
    pipe = fastdiff.accelerate(live())
    for name in ("controlnet_down_blocks.0", "time_embedding.linear_1", "down_blocks.0.resnets.0.conv1"):
        before = draw(pipe)
        with torch.no_grad():
            pipe.controlnet.get_submodule(name).weight.neg_()
        changed = draw(pipe)
        assert (changed - before).abs().max() > 1e-3, name
    assert (draw(fastdiff.restore(pipe)) - changed).abs().max() <= 1e-4 * changed.abs().max()


def test_a_controlnet_of_another_class_stays_diffusers():
    known = inspect.signature(diffusers.ControlNetUnionModel).parameters
    config = {name: value for name, value in tiny_controlnet("sdxl").config.items() if name in known}
    torch.manual_seed(0)
    union = diffusers.ControlNetUnionModel(**config, num_trans_channel=16, num_trans_head=2, num_proj_channel=16)
    parts = text_pipeline("sdxl").components | {"controlnet": union.eval()}
    pipe = diffusers.StableDiffusionXLControlNetUnionPipeline(**parts, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    given = {"prompt": PROMPT, "num_inference_steps": 2, "output_type": "latent"}
    given |= {"control_image": [CONTROL], "control_mode": [0]}
    expected = pipe(**given, generator=torch.Generator().manual_seed(3)).images
    fastdiff.accelerate(pipe)
    assert "forward" in vars(pipe.unet) and "forward" not in vars(union)
    found = pipe(**given, generator=torch.Generator().manual_seed(3)).images
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", ["UNetControlNetXSModel", "SparseControlNetModel", "ControlNetUnionModel"])
def test_other_classes_alone_are_refused_by_name(kind):
    model = getattr(diffusers, kind).__new__(getattr(diffusers, kind))
    torch.nn.Module.__init__(model)
    with pytest.raises(fastdiff.InputError, match=f"{kind} cannot be accelerated"):
        fastdiff.accelerate(model)


class TestPrecision:
    def test_the_controlnets_are_in_8_bits_too(self):
        pipe = live(count=2)
        options = {"image": [CONTROL, picture(6)], **SIZE}
        expected = draw(pipe, **options)
        fastdiff.accelerate(pipe, precision="int8")
        assert all(any(each.isnan().any() for each in net.parameters()) for net in (pipe.unet, *nets_of(pipe)))
        assert not any(each.isnan().any() for each in pipe.vae.parameters())
        found = draw(pipe, **options)
        assert 0 < (found - expected).norm() < 0.1 * expected.norm()
        fastdiff.restore(pipe)
        assert (draw(pipe, **options) - found).abs().max() <= 1e-4 * found.abs().max()

    def test_no_weight_is_rounded_if_one_model_is_refused(self):
        changes = {
            "FreeU": lambda pipe: pipe.unet.enable_freeu(0.9, 0.2, 1.1, 1.2),
            "several dtypes": lambda pipe: pipe.unet.conv_in.double(),
            "already runs with full": lambda pipe: fastdiff.accelerate(pipe.unet),
        }
        for message, change in changes.items():
            pipe = live()
            change(pipe)
            before = copy.deepcopy(pipe.controlnet.state_dict())
            with pytest.raises(fastdiff.InputError, match=message):
                fastdiff.accelerate(pipe, precision="int8")
            assert all(torch.equal(each, before[name]) for name, each in pipe.controlnet.state_dict().items())
