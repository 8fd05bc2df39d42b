"""A live ZImageTransformer2DModel, alone and in diffusers' pipeline, on fastdiff."""

import diffusers
import peft
import pytest
import torch

import fastdiff

OPTIONS = {
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "in_channels": 4,
    "cap_feat_dim": 8,
    "axes_dims": (4, 6, 6),
}
GIVEN = (
    [torch.randn(4, 1, *size, generator=torch.Generator().manual_seed(0)) for size in ((8, 12), (8, 8))],
    torch.tensor([0.2, 0.7]),
    [torch.randn(length, 8, generator=torch.Generator().manual_seed(1)) for length in (5, 40)],
)


@pytest.fixture
def model(randomise):
    model = randomise(diffusers.ZImageTransformer2DModel(**OPTIONS))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.data += 1
    return model


def theirs(model, **options):
    with torch.no_grad():
        return model(*GIVEN, **options).sample


def assert_equal(made, expected):
    for own, wanted in zip(made, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-4)


def test_same_object_same_outputs_shared_memory(model):
    expected, before = theirs(model), {name: each.clone() for name, each in model.state_dict().items()}
    assert fastdiff.accelerate(model) is model
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    output = model(*GIVEN)
    assert type(output) is diffusers.models.modeling_outputs.Transformer2DModelOutput
    assert_equal(output.sample, expected)
    for name in ("layers.1.attention.to_k.weight", "layers.0.adaLN_modulation.0.weight", "cap_pad_token"):
        model.get_parameter(name).data.mul_(1.5)
    changed = model(*GIVEN, return_dict=False)[0]
    assert not torch.allclose(changed[0], expected[0], atol=1e-3)
    assert_equal(fastdiff.restore(model)(*GIVEN).sample, changed)


def test_adapters_and_their_scale(model):
    layers = r".*(to_q|to_out\.0|w1|w2|layers\.\d+\.adaLN_modulation\.0)"
    model.add_adapter(peft.LoraConfig(r=2, target_modules=layers, init_lora_weights=False))
    expected = {scale: theirs(model, joint_attention_kwargs={"scale": scale}) for scale in (1.0, 0.5)}
    assert not torch.allclose(expected[1.0][0], expected[0.5][0], atol=1e-3)
    fastdiff.accelerate(model)
    for scale, wanted in expected.items():
        assert_equal(model(*GIVEN, joint_attention_kwargs={"scale": scale}).sample, wanted)
    with pytest.raises(fastdiff.InputError, match="joint_attention_kwargs: scale 'a' is not a finite number"):
        model(*GIVEN, joint_attention_kwargs={"scale": "a"})


@pytest.mark.parametrize("guidance_scale", [0.0, 2.0])
def test_pipeline_draws_the_same_latents(model, guidance_scale):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = diffusers.ZImagePipeline(scheduler, None, None, None, model)
    pipe.set_progress_bar_config(disable=True)
    texts, options = GIVEN[2], {"num_inference_steps": 3, "guidance_scale": guidance_scale}

    def draw():
        generator = torch.Generator().manual_seed(3)
        return pipe(
            prompt_embeds=[*texts], negative_prompt_embeds=[*texts[::-1]], height=64, width=96,
            generator=generator, output_type="latent", **options,
        ).images  # fmt: skip

    expected = draw()
    assert fastdiff.accelerate(pipe) is pipe and "forward" in vars(model)
    assert (draw() - expected).abs().max() <= 1e-4 * expected.abs().max()
