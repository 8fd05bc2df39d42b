"""accelerate on live Stable Diffusion pipelines: diffusers' own loop, with our U-Net and our VAE."""

import copy
import gc
import weakref

import diffusers
import pytest
import torch

import fastdiff
from tests.support.pairwise import product
from tests.support.text_pipelines import KINDS, text_pipeline

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # diffusers
PROMPT = "a photo of the cat"


@pytest.fixture(params=["sd1", pytest.param("sd2", marks=pytest.mark.slow), "sdxl"])
def pipe(request):
    return text_pipeline(request.param)


def draw(pipe, seed=3, **options):
    given = {"prompt": PROMPT, "num_inference_steps": 4, "output_type": "np"}
    return pipe(**given | options, generator=torch.Generator().manual_seed(seed)).images


def assert_as_before(pipe, **options):
    """Check that accelerate changes neither the latents nor the pictures."""
    latents, pictures = draw(pipe, output_type="latent", **options), draw(pipe, **options)
    fastdiff.accelerate(pipe)
    error = (draw(pipe, output_type="latent", **options) - latents).abs().max()
    assert error <= 1e-4 and error <= 1e-5 * latents.abs().max()
    assert abs(draw(pipe, **options) - pictures).max() <= 1e-4


def runs_on_fastdiff(pipe) -> bool:
    """fastdiff refuses a sample that requires grad; diffusers accepts it."""
    refused = 0
    for call in (lambda x: pipe.vae.decode(x), lambda x: pipe.vae.encode(torch.cat([x[:, :3]] * 4, 2))):
        try:
            call(torch.zeros(1, 4, 8, 8, requires_grad=True))
        except fastdiff.InputError:
            refused += 1
    assert refused in (0, 2) and (refused == 2) == ("forward" in vars(pipe.unet))
    return refused == 2


@pytest.mark.parametrize("pipe", KINDS, indirect=True)
def test_pictures_are_those_of_diffusers(pipe):
    assert not runs_on_fastdiff(pipe)
    assert_as_before(pipe)
    assert runs_on_fastdiff(pipe)
    assert fastdiff.accelerate(pipe) is pipe
    assert abs(draw(pipe) - draw(pipe, prompt="the astronaut riding")).mean() > 1e-2  # the prompt has an effect


OPTIONS = {
    "negative": {"negative_prompt": "the photo", "guidance_scale": 3.0},
    "no-guidance": {"guidance_scale": 1.0},
    "rescaled": {"guidance_rescale": 0.7},
    "several": {"prompt": [PROMPT, "astronaut riding"], "num_images_per_prompt": 2},
    "size": {"height": 24, "width": 40},
    "many-steps": {"num_inference_steps": 12},
}


@pytest.mark.parametrize(("options", "pipe"), product(OPTIONS, KINDS[::-1], together=1), indirect=["pipe"])
def test_every_argument_does_what_it_did(pipe, options):
    assert_as_before(pipe, **options)


SCHEDULERS = {
    "DDIM": {},
    "DDPM": {},
    "EulerAncestralDiscrete": {},
    "HeunDiscrete": {},
    "LMSDiscrete": {"use_karras_sigmas": True},
    "DPMSolverMultistep": {},
    "UniPCMultistep": {},
    "LCM": {},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("DDPM", "HeunDiscrete", "UniPCMultistep") else pytest.mark.slow)
        for name in SCHEDULERS
    ],
)
def test_schedulers_are_swapped_as_before(name):
    pipe, kind = fastdiff.accelerate(text_pipeline("sd1")), getattr(diffusers, f"{name}Scheduler")
    pipe.scheduler = kind.from_config(pipe.scheduler.config, **SCHEDULERS[name])
    pictures = draw(pipe)
    pipe = fastdiff.restore(pipe)
    assert abs(draw(pipe) - pictures).max() <= 1e-4


@pytest.mark.parametrize(("kind", "pipe"), product(["pil", "np", "pt", "latent"], KINDS, together=1), indirect=["pipe"])
def test_output_types(pipe, kind):
    expected = draw(pipe, output_type=kind)
    found = draw(fastdiff.accelerate(pipe), output_type=kind)
    assert type(found) is type(expected)
    if kind != "pil":
        assert found.shape == expected.shape and found.dtype == expected.dtype
    else:
        assert [picture.size for picture in found] == [picture.size for picture in expected]


def test_a_plain_tuple(pipe):
    given = {"prompt": PROMPT, "num_inference_steps": 2, "output_type": "np", "return_dict": False}
    fastdiff.accelerate(pipe)
    assert isinstance(pipe(**given), tuple)


def replace_text(pipe, step, t, tensors):
    return {"prompt_embeds": tensors["prompt_embeds"].flip(-1)} if step == 1 else {}


def edit_text(pipe, step, t, tensors):
    if step == 1:
        tensors["prompt_embeds"].mul_(-1)
    return {}


def replace_latents(pipe, step, t, tensors):
    return {"latents": tensors["latents"].flip(-1)}


def end_guidance(pipe, step, t, tensors):
    """End guidance midway, as diffusers' guide does. Half the batch remains."""
    if step != 1:
        return {}
    pipe._guidance_scale = 0.0
    return {name: tensor.chunk(2)[-1] for name, tensor in tensors.items() if name != "latents"}


def stop(pipe, step, t, tensors):
    pipe._interrupt = True
    return {}


CALLBACKS = [replace_text, edit_text, replace_latents, end_guidance, stop]


@pytest.mark.parametrize(("callback", "pipe"), product(CALLBACKS, KINDS[::-1], together=1), indirect=["pipe"])
def test_callbacks_change_what_they_changed(pipe, callback):
    plain, seen = draw(pipe), []

    def watched(pipe, step, t, tensors):
        seen.append((step, int(t), sorted(tensors)))
        return callback(pipe, step, t, tensors)

    names = ["latents", "prompt_embeds", *(["add_text_embeds", "add_time_ids"] if "XL" in type(pipe).__name__ else [])]
    options = {"callback_on_step_end": watched, "callback_on_step_end_tensor_inputs": names}
    changed = draw(pipe, **options)
    before = list(seen)
    assert abs(changed - plain).max() > 1e-2
    fastdiff.accelerate(pipe)
    assert abs(draw(pipe, **options) - changed).max() <= 1e-4
    assert seen == 2 * before


def test_restore_gives_the_bits_of_diffusers_back(pipe):
    expected = draw(pipe)
    before = {name: part.state_dict() for name, part in (("unet", pipe.unet), ("vae", pipe.vae))}
    before = {
        name: {key: (each.clone(), each.stride()) for key, each in state.items()} for name, state in before.items()
    }
    draw(fastdiff.accelerate(fastdiff.accelerate(pipe)))
    assert fastdiff.restore(pipe) is pipe
    assert not runs_on_fastdiff(pipe)
    for name, state in before.items():
        after = getattr(pipe, name).state_dict()
        assert list(after) == list(state)
        for key, (tensor, strides) in state.items():
            assert torch.equal(after[key], tensor) and after[key].stride() == strides
            assert after[key].untyped_storage().nbytes() == tensor.nbytes  # its own memory
    assert (draw(pipe) == expected).all()
    with pytest.raises(fastdiff.InputError, match="restore: this model is not accelerated"):
        fastdiff.restore(pipe)


def test_a_folder_saved_while_accelerated(pipe, tmp_path):
    before = {name: tensor.clone() for name, tensor in [*pipe.unet.state_dict().items()]}
    expected = draw(pipe)
    fastdiff.accelerate(pipe).save_pretrained(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.unet.state_dict().items())
    loaded = type(pipe).from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.unet.state_dict().items())
    assert abs(draw(loaded) - expected).max() <= 1e-5


def test_another_pipeline_of_the_same_parts():
    """Two pipelines share their parts, so one call accelerates both. The second also encodes pictures."""
    pipe = text_pipeline("sd1")
    other = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    picture = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = draw(other, image=picture, strength=0.8)
    fastdiff.accelerate(pipe)
    assert abs(draw(other, image=picture, strength=0.8) - expected).max() <= 1e-4
    assert runs_on_fastdiff(other) and runs_on_fastdiff(fastdiff.accelerate(other))


def test_a_controlnet_is_followed(randomise):
    """Its outputs are arguments of each U-Net call. See also tests/acceleration/control."""
    pipe = text_pipeline("sd1")
    controlnet = diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(8, 16))
    parts = pipe.components | {"controlnet": randomise(controlnet)}
    other = diffusers.StableDiffusionControlNetPipeline(**parts, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    picture = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = draw(other, image=picture)
    assert abs(draw(other, image=picture, controlnet_conditioning_scale=0.0) - expected).max() > 1e-2
    fastdiff.accelerate(other)
    assert abs(draw(other, image=picture) - expected).max() <= 1e-4
    assert runs_on_fastdiff(other) and "forward" in vars(controlnet)


def test_another_vae_stays_diffusers():
    tiny = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    pipe = text_pipeline("sd1", vae=tiny.eval())
    expected = draw(pipe)
    fastdiff.accelerate(pipe)
    assert "forward" in vars(pipe.unet) and "_decode" not in vars(tiny)
    assert abs(draw(pipe) - expected).max() <= 1e-4
    assert "forward" not in vars(fastdiff.restore(pipe).unet)


def test_nothing_is_swapped_where_one_part_is_refused():
    pipe = text_pipeline("sd1")
    pipe.vae.fuse_qkv_projections()
    with pytest.raises(fastdiff.InputError, match="Fused"):
        fastdiff.accelerate(pipe)
    assert "forward" not in vars(pipe.unet) and "_apply" not in vars(pipe.unet)


@pytest.mark.slow
class TestMoves:
    def test_half_precision(self, pipe):
        """SDXL's pipeline moves its VAE to float32 to decode, and then back."""
        exact = draw(pipe)
        theirs = abs(draw(pipe.to(torch.bfloat16)) - exact).mean()
        assert abs(draw(fastdiff.accelerate(pipe)) - exact).mean() <= 2 * theirs + 1e-3
        assert pipe.unet.dtype == pipe.vae.dtype == torch.bfloat16

    @pytest.mark.filterwarnings("ignore:`upcast_vae` is deprecated")
    def test_sdxl_in_float16_decodes_in_float32(self):
        pipe = text_pipeline("sdxl")
        latents = draw(pipe, output_type="latent")
        pipe.to(torch.float16)
        scaled = latents / pipe.vae.config.scaling_factor
        expected = copy.deepcopy(pipe.vae).float().decode(scaled).sample
        fastdiff.accelerate(pipe)
        given = {"callback_on_step_end": lambda pipe, step, t, tensors: {"latents": latents.half()}}
        drawn = draw(pipe, output_type="pt", **given)
        assert pipe.vae.dtype == torch.float16
        assert (drawn - (expected / 2 + 0.5).clamp(0, 1)).abs().max() <= 2e-3

    def test_nothing_keeps_the_memory_that_weights_leave(self, pipe):
        """Otherwise an offload would free no memory."""
        draw(fastdiff.accelerate(pipe))
        gc.disable()
        try:
            for part in (pipe.unet, pipe.vae):
                ours = weakref.ref(part._apply.__self__.ours())
                assert ours() is not None
                part.to(torch.bfloat16)
                assert ours() is None
        finally:
            gc.enable()

    def test_a_move_within_inference_mode(self, pipe):
        expected = draw(fastdiff.accelerate(pipe))
        with torch.inference_mode():
            pipe.unet.double().float()
            # no conditioning is kept in inference mode, and a CPU rounds the products of other shapes in another way
            assert abs(draw(pipe) - expected).max() <= 1e-5
        with torch.no_grad():
            pipe.unet.conv_in.weight.neg_()
        assert abs(draw(pipe) - expected).max() > 1e-3

    def test_a_deep_copy_runs_its_own_weights(self, pipe):
        expected = draw(fastdiff.accelerate(pipe))
        other = copy.deepcopy(pipe.unet)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        assert abs(draw(pipe) - expected).max() == 0
        pipe.unet = other
        assert abs(draw(pipe) - expected).max() > 1e-2
        expected = draw(pipe)
        assert abs(draw(fastdiff.restore(pipe)) - expected).max() <= 1e-4

    @pytest.mark.parametrize(
        "pipe", ["sd1", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])], indirect=True
    )
    def test_weights_that_change_change_the_picture(self, pipe):
        """Weights of the U-Net and of the VAE change in place, through `data`, or by new memory."""
        fastdiff.accelerate(pipe)
        for part, name in ((pipe.unet, "mid_block.attentions.0.proj_in"), (pipe.vae, "decoder.conv_in")):
            for change in ("in place", "through data", "elsewhere", "loaded"):
                before, weight = draw(pipe), part.get_submodule(name).weight
                if change == "elsewhere":  # what PEFT's safe fusing does
                    weight.data = -weight.data
                elif change == "loaded":
                    state = {key: tensor.clone() for key, tensor in part.state_dict().items()}
                    part.load_state_dict(state | {f"{name}.weight": -weight.detach()}, assign=True)
                else:
                    with torch.no_grad():
                        (weight if change == "in place" else weight.data).neg_()
                changed = draw(pipe)
                assert abs(changed - before).max() > 1e-3, change
        assert abs(draw(fastdiff.restore(pipe)) - changed).max() <= 1e-4
