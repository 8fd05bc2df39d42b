"""Weights in 8 bits in every kind of model: which weights are quantised, the outputs, and moves between devices."""

import copy
import weakref

import diffusers
import pytest
import torch

import fastdiff
from fastdiff import InputError, NonFiniteError, Pipeline
from fastdiff.checkpoints import loading, quantisation, weights
from fastdiff.checkpoints.quantisation import FORMATS, formats, names_in_8_bits
from fastdiff.checkpoints.weights import diffusers_keys
from fastdiff.execution.devices import on_meta
from fastdiff.kernels import conv2d as conv2d_module
from fastdiff.kernels import linear as linear_module
from fastdiff.kernels.host.calls import parts_of
from fastdiff.kernels.host.weights import Quantised, quantise
from fastdiff.models import dit
from fastdiff.models import model as model_module
from fastdiff.models.blocks import transformer
from tests.support import text_pipelines
from tests.support.planners import policy, value_function
from tests.support.tiny import UNET

DIT = {
    "sample_size": 8,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_embeds_ada_norm": 5,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
    "in_channels": 4,
    "out_channels": 4,
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
}
SCALE_SHIFT = {"resnet_time_scale_shift": "scale_shift", "num_class_embeds": 5}
K_BLOCKS = {"down_block_types": ("KDownBlock2D",) * 2, "up_block_types": ("KUpBlock2D",) * 2}


def text_unet(kind: str, length: int = 77):
    theirs = text_pipelines.tiny_unet(kind)
    ours = fastdiff.UNet2DConditionModel.from_config(theirs.config)
    generator = torch.Generator().manual_seed(1)
    given = {name: torch.randn(2, *shape, generator=generator) for name, shape in ours.config.prompt_shapes.items()}
    options = {"encoder_hidden_states": given.pop("encoder_hidden_states")}
    return fastdiff.UNet2DConditionModel, theirs, options | ({"added_cond_kwargs": given} if given else {})


CASES = {
    "unet2d": lambda: (fastdiff.UNet2DModel, diffusers.UNet2DModel(**UNET), {}),
    "unet2d-scale-shift": lambda: (
        fastdiff.UNet2DModel, diffusers.UNet2DModel(**UNET | SCALE_SHIFT), {"class_labels": torch.tensor([1, 3])}
    ),
    "unet1d": lambda: (fastdiff.UNet1DModel, diffusers.UNet1DModel(**policy(8, 16, 32)), {}),
    "value-function": lambda: (fastdiff.UNet1DModel, diffusers.UNet1DModel(**value_function(8, 16, 32)), {}),
    "dit": lambda: (
        fastdiff.DiTTransformer2DModel, diffusers.DiTTransformer2DModel(**DIT),
        {"class_labels": torch.tensor([1, 3])},
    ),
    "sd1": lambda: text_unet("sd1"),
    "sd2": lambda: text_unet("sd2"),
    "sdxl": lambda: text_unet("sdxl"),
}  # fmt: skip


def quantised_alike(theirs, ours, precision="int8"):
    """Return a copy of diffusers' model with weights quantised to 8 bits and dequantised."""
    alike, keys = copy.deepcopy(theirs), {key for name in names_in_8_bits(ours) for key in diffusers_keys(ours, name)}
    for key, parameter in alike.named_parameters():
        if key in keys:
            parameter.data = quantise(parameter.data, FORMATS[precision]).dequantised(torch.float32)
    return alike


def load(kind, theirs, folder, **options):
    theirs.save_pretrained(folder)
    return kind.from_pretrained(folder, **options)


@pytest.fixture
def whole_activations(monkeypatch):
    """Keep activations whole with fp8, as in diffusers' models."""
    for module in (conv2d_module, linear_module):
        monkeypatch.setattr(module, "as_multiplied", lambda x, weight: parts_of(x))
    for module in (dit, transformer):
        monkeypatch.setattr(module, "FP8", None)  # so that norms do not round to fp8


@pytest.mark.usefixtures("whole_activations")
@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("case", CASES)
def test_a_denoiser_predicts_with_the_weights_that_8_bits_stand_for(case, precision, randomise, tmp_path):
    kind, theirs, options = CASES[case]()
    whole = kind.from_config(theirs.config)
    randomise(theirs)
    shape = (2, theirs.config.in_channels, *((32,) if kind is fastdiff.UNet1DModel else (8, 8)))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours = load(kind, theirs, tmp_path / "a", precision=precision)
    alike = load(kind, quantised_alike(theirs, whole, precision), tmp_path / "b")
    with torch.inference_mode():
        y, expected = ours(x, 7, **options).sample, alike(x, 7, **options).sample
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    names = {name for name, module in ours.named_modules() if isinstance(module, Quantised)}
    assert names == set(names_in_8_bits(whole)) and names
    assert ours.dtype == torch.float32


@pytest.mark.parametrize("case", ["unet2d", "unet1d", "dit", "sdxl"])
def test_in_fp8_the_activations_are_rounded_too_and_a_picture_is_its_own(case, randomise, tmp_path):
    kind, theirs, options = CASES[case]()
    randomise(theirs)
    shape = (2, theirs.config.in_channels, *((32,) if kind is fastdiff.UNet1DModel else (8, 8)))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    fp8, int8, whole = (load(kind, theirs, tmp_path, precision=each) for each in ("fp8", "int8", "full"))
    with torch.inference_mode():
        expected = whole(x, 7, **options).sample
        error, of_int8 = ((each(x, 7, **options).sample - expected).square().mean() for each in (fp8, int8))
        assert 4 * of_int8 < error < 0.05 * expected.square().mean()
        louder = torch.stack([x[0], 100 * x[1]])
        torch.testing.assert_close(
            fp8(louder, 7, **options).sample[0], fp8(x, 7, **options).sample[0], rtol=1e-3, atol=1e-4
        )


def test_an_autoencoder_and_an_encoder_read_the_weights_that_8_bits_stand_for(tmp_path):
    theirs = text_pipelines.tiny_vae("sd1")
    z = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    vae = load(fastdiff.AutoencoderKL, theirs, tmp_path / "vae", precision="int8")
    alike = quantised_alike(theirs, fastdiff.AutoencoderKL.from_config(theirs.config))
    with torch.inference_mode():
        expected = alike.decode(z).sample
    torch.testing.assert_close(vae.decode(z).sample, expected, rtol=1e-4, atol=1e-4)

    theirs = text_pipelines.tiny_encoder(text_pipelines.CLIP)
    ids = torch.arange(1, text_pipelines.LENGTH)[None] % theirs.config.vocab_size
    encoder = load(fastdiff.CLIPTextModel, theirs, tmp_path / "clip", precision="int8")
    whole = fastdiff.CLIPTextModel.from_pretrained(tmp_path / "clip")
    y, expected = (model(ids).last_hidden_state for model in (encoder, whole))
    assert 0 < (y - expected).abs().max() < 0.05 * expected.abs().max()


RULE = {  # model -> layers that are not quantised, layers that are
    "unet2d": (
        ["conv_in", "conv_out", "time_embedding.linear_1", "down_blocks.1.resnets.0.conv_shortcut"],
        ["down_blocks.0.resnets.0.conv1", "time_emb_proj", "mid_block.attentions.0.to_qkv"],
    ),
    "dit": (
        ["pos_embed.proj", "norm1.emb.timestep_embedder.linear_2", "proj_out_1", "proj_out_2"],
        ["norm1.linear", "transformer_blocks.0.attn1.to_qkv", "transformer_blocks.1.ff.net.2"],
    ),
    "sdxl": (
        ["conv_in", "conv_out", "time_embedding.linear_1", "add_embedding.linear_2"],
        ["text_projections", "time_emb_proj", "down_blocks.1.attentions.0.proj_in"],
    ),
    "unet1d": (
        ["down_blocks.0.resnets.0.conv_in.conv1d", "out_block.final_conv1d_2", "up_blocks.0.upsample.conv"],
        ["down_blocks.1.resnets.0.conv_in.conv1d", "time_emb"],
    ),
}


@pytest.mark.parametrize("case", RULE)
def test_the_rule_of_which_weights_have_8_bits(case):
    kind, theirs, _ = CASES[case]()
    model = kind.from_config(theirs.config)
    names, (whole, quantised) = set(names_in_8_bits(model)), RULE[case]
    layers = dict(model.named_modules())
    assert all(f"{layer}.weight" not in names and hasattr(layers[layer], "weight") for layer in whole)
    assert {f"{layer}.weight" for layer in quantised} <= names


@pytest.fixture
def folder(randomise, tmp_path):
    randomise(diffusers.UNet2DModel(**UNET)).save_pretrained(tmp_path / "unet")
    return tmp_path / "unet"


@pytest.mark.parametrize(("precision", "allowed"), [("int8", 0.1), ("fp8", 0.5)])
def test_a_model_moves_and_is_copied_with_its_8_bits(folder, precision, allowed):
    model = fastdiff.UNet2DModel.from_pretrained(folder, precision=precision)
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = model(x, 3).sample
    moved = copy.deepcopy(model).to(torch.bfloat16)
    assert moved.dtype == torch.bfloat16 and (moved(x.bfloat16(), 3).sample.float() - expected).abs().max() < allowed
    assert {each.dtype for each in moved.parameters()} == {torch.bfloat16, FORMATS[precision], torch.float32}
    assert torch.equal(moved.to(torch.float32).mid_block.resnets[0].conv1.weight.scale,
                       model.mid_block.resnets[0].conv1.weight.scale)  # fmt: skip
    values = model.mid_block.resnets[0].conv1.weight.values
    assert values.is_contiguous(memory_format=torch.channels_last)


def test_a_model_takes_about_a_quarter_of_float32(folder):
    def size(model):
        return sum(each.numel() * each.element_size() for each in model.parameters())

    whole, eight = (fastdiff.UNet2DModel.from_pretrained(folder, precision=each) for each in ("full", "int8"))
    names = names_in_8_bits(whole)
    numbers = sum(whole.get_parameter(name).numel() for name in names)
    factors = sum(len(whole.get_parameter(name)) for name in names)
    assert size(eight) == size(whole) - 3 * numbers + 4 * factors


def test_weights_are_let_go_one_by_one(randomise, monkeypatch):
    theirs = randomise(diffusers.UNet2DModel(**UNET))
    with on_meta():
        ours = fastdiff.UNet2DModel.from_config(theirs.config)
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    alive, made = {name: weakref.ref(tensor) for name, tensor in state.items()}, []

    def quantised_tensors(name, weight, dtype):
        assert all(alive[each]() is None for each in made)
        made.append(name)
        return quantisation.quantised_tensors(name, weight, dtype)

    monkeypatch.setattr(weights, "quantised_tensors", quantised_tensors)
    names = formats(ours, "int8")
    weights.load_weights(ours, state, source="x", dtype=torch.bfloat16, device="cpu", in_8_bits=names)
    assert len(made) == len({key for name in names for key in diffusers_keys(ours, name)})


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused(folder, value, precision):
    from safetensors.torch import load_file, save_file

    path = folder / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    state["mid_block.resnets.0.conv1.weight"][0, 0, 0, 0] = value
    save_file(state, path)
    with pytest.raises(NonFiniteError, match=r"mid_block\.resnets\.0\.conv1\.weight"):
        fastdiff.UNet2DModel.from_pretrained(folder, precision=precision)


def test_another_precision_is_refused(folder, text_folder):
    message = "precision: 'fp4' is not one of full, int8, fp8"
    with pytest.raises(InputError, match=message):
        fastdiff.UNet2DModel.from_pretrained(folder, precision="fp4")
    with pytest.raises(InputError, match=message):
        Pipeline.from_pretrained(text_folder("sd1"), device="cpu", precision="fp4")


def test_a_card_without_fp8_is_told(folder, text_folder, monkeypatch):
    for module in (model_module, loading):
        monkeypatch.setattr(module, "resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    message = "^precision: NVIDIA A100 is sm_80 and has no fp8, which needs sm_89 or later; use int8 or full$"
    with pytest.raises(InputError, match=message):
        fastdiff.UNet2DModel.from_pretrained(folder, precision="fp8", device="cuda")
    with pytest.raises(InputError, match=message):
        Pipeline.from_pretrained(text_folder("sd1"), device="cuda", precision="fp8")


@pytest.mark.parametrize(("precision", "allowed"), [("int8", 0.05), ("fp8", 0.1)])
def test_a_pipeline_keeps_its_vae_whole(text_folder, precision, allowed):
    pipe = Pipeline.from_pretrained(text_folder("sdxl"), device="cpu", precision=precision)
    held = [any(isinstance(each, Quantised) for each in model.modules()) for model in pipe.models]
    assert [type(model).__name__ for model, is_held in zip(pipe.models, held, strict=True) if not is_held] == [
        "AutoencoderKL"
    ]
    picture = pipe("the cat", seed=1, num_inference_steps=2, output_type="pt").images
    whole = Pipeline.from_pretrained(text_folder("sdxl"), device="cpu")
    expected = whole("the cat", seed=1, num_inference_steps=2, output_type="pt").images
    assert not torch.equal(picture, expected) and (picture - expected).abs().mean() < allowed
    offloaded = pipe.offloaded_from(torch.device("cpu"))
    assert torch.equal(offloaded("the cat", seed=1, num_inference_steps=2, output_type="pt").images, picture)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("precision", ["int8", "fp8"])
    @pytest.mark.parametrize("name", ["emoji64", "emoji64-dit"])
    def test_a_picture_has_the_same_bits_in_any_batch_and_place(self, name, precision):
        pipe = Pipeline.from_pretrained(name, device="cuda", precision=precision)

        def draw(seeds):
            labels = [seed % 5 for seed in seeds]
            return pipe(class_labels=labels, seed=seeds, num_inference_steps=3, output_type="pt").images

        alone, three, eight = draw([7]), draw([3, 7, 1]), draw([0, 1, 2, 3, 4, 5, 6, 7])
        assert torch.equal(alone[0], three[1]) and torch.equal(alone[0], eight[7])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("case", CASES)
    def test_the_error_is_that_of_16_bits_and_of_8(self, case, dtype, randomise, tmp_path, exact_matmuls):
        """The error of 8-bit weights with 16-bit activations is bounded.

        int8: relative to float32 with the same 8-bit weights, at most twice our error of 16 bits with whole weights.
        fp8: bounded by the size of fp8's own error, because activations that differ in the last bit may be rounded to
        different values of e4m3.
        """
        kind, theirs, options = CASES[case]()
        randomise(theirs)
        shape = (2, theirs.config.in_channels, *((32,) if kind is fastdiff.UNet1DModel else (8, 8)))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

        def run(precision, dtype, device):
            def moved(value):
                if isinstance(value, dict):
                    return {name: moved(each) for name, each in value.items()}
                return value.to(device, dtype) if value.is_floating_point() else value.to(device)

            model = load(kind, theirs, tmp_path, precision=precision, dtype=dtype, device=device)
            with torch.inference_mode():
                outputs = [model(moved(x), 7, **moved(options)).sample for _ in range(3)]  # the third replays a graph
            assert all(torch.equal(each, outputs[0]) for each in outputs)
            return outputs[0].float().cpu()

        def rms(y):
            return y.square().mean().sqrt()

        whole, int8, fp8 = (run(precision, torch.float32, "cpu") for precision in ("full", "int8", "fp8"))
        allowed = rms(run("full", dtype, "cuda") - whole)
        assert rms(run("int8", dtype, "cuda") - int8) <= 2 * allowed + 1e-6
        assert rms(run("fp8", dtype, "cuda") - whole) <= 1.5 * rms(fp8 - whole) + 2 * allowed + 1e-6

    def test_offload_draws_the_same(self, text_folder):
        pipes = [
            Pipeline.from_pretrained(text_folder("sdxl"), device="cuda", precision="int8", offload=offload)
            for offload in (False, True)
        ]
        pictures = [pipe("the cat", seed=1, num_inference_steps=3, output_type="pt").images for pipe in pipes]
        assert torch.equal(*pictures)
