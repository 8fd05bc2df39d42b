"""UNet2DConditionModel on a GPU: compared with float32 on the CPU, in any batch, with graphs."""

import pytest
import torch

from fastdiff import UNet2DConditionModel
from fastdiff.models.blocks.conditioning import Prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
]

SMALL = {
    "sample_size": 16,
    "block_out_channels": (64, 128),
    "layers_per_block": 1,
    "cross_attention_dim": 96,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
}
TEXT_TIME = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 80 + 6 * 32,
}
SMALL_MODELS = {
    "sd": SMALL,
    "sdxl": SMALL | TEXT_TIME | {"transformer_layers_per_block": (1, 2), "use_linear_projection": True},
    "only-cross": SMALL | {"only_cross_attention": (True, False), "attention_head_dim": (2, 16)},
    "added-text": SMALL | {"addition_embed_type": "text", "addition_embed_type_num_heads": 4, "encoder_hid_dim": 40},
    "lcm": SMALL | {"time_cond_proj_dim": 24, "num_class_embeds": 5},
}


def inputs(config, n: int, size: tuple[int, int] | None = None) -> dict:
    """Return the arguments of a call for n pictures. A picture's arguments do not depend on n."""
    height, width = size or (config.sample_size, config.sample_size)
    rows = []
    for i in range(n):
        generator = torch.Generator().manual_seed(i)
        shapes = {"sample": (config.in_channels, height, width)} | config.prompt_shapes
        row = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if "time_ids" in row:
            row["time_ids"] = torch.tensor([8.0 * height, 8.0 * width, i, 0, 8.0 * height, 8.0 * width])
        if config.time_cond_proj_dim is not None:
            row["timestep_cond"] = torch.randn(config.time_cond_proj_dim, generator=generator)
        rows.append(row)
    given = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    given["timestep"] = torch.tensor([(37 + 211 * i) % 1000 for i in range(n)])
    if "time_ids" in given:
        given["added_cond_kwargs"] = {name: given.pop(name) for name in ("text_embeds", "time_ids")}
    if config.num_class_embeds:
        given["class_labels"] = torch.arange(n) % config.num_class_embeds
    return given


def moved(given: dict, dtype=torch.float32) -> dict:
    """Move arguments to the GPU, with floats in `dtype`."""

    def move(value):
        if isinstance(value, dict):
            return {name: move(each) for name, each in value.items()}
        return value.to("cuda", dtype if value.is_floating_point() else None)

    return {name: move(value) for name, value in given.items()}


@pytest.fixture(params=SMALL_MODELS)
def model(request, randomise):
    model = randomise(UNet2DConditionModel.from_config(SMALL_MODELS[request.param])).requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            layer.weight += 1
    return model


@pytest.mark.parametrize("size", [None, (13, 18)], ids=["even", "odd"])
def test_float32_is_the_reference(model, size):
    given = inputs(model.config, 2, size)
    expected = model(**given).sample
    model.cuda()
    for _ in range(3):  # eager, captured, replayed
        error = (model(**moved(given)).sample.cpu() - expected).abs().max()
        assert error <= 1e-4 * max(1, expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_same_bits_in_any_batch(model, dtype):
    model.to("cuda", dtype)
    together = model(**moved(inputs(model.config, 8), dtype)).sample
    for n in (1, 3):
        assert torch.equal(model(**moved(inputs(model.config, n), dtype)).sample, together[:n])


def test_graphs_change_no_bit_with_masks_and_residuals(model):
    model.to("cuda", torch.bfloat16)
    n, keys = 2, 77
    shapes = model.config.residual_shapes(16, 16)

    def given(seed):
        torch.manual_seed(seed)
        *down, mid = (torch.randn(n, *shape, device="cuda").bfloat16() for shape in shapes)
        extras = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        mask = torch.rand(n, keys, device="cuda") > 0.3
        return moved(inputs(model.config, n), torch.bfloat16) | extras | {"encoder_attention_mask": mask}

    calls = [given(seed) for seed in (0, 1)]
    model.use_graphs = False
    expected = [model(**call).sample for call in calls]
    assert not torch.equal(*expected)
    model.use_graphs = True
    for _ in range(3):
        for call, wanted in zip(calls, expected, strict=True):
            assert torch.equal(model(**call).sample, wanted)


@pytest.mark.parametrize("model", ["sd"], indirect=True)
def test_a_text_that_is_projected_outside_gives_the_calls_bits(model):
    model.to("cuda", torch.bfloat16)
    given = moved(inputs(model.config, 2), torch.bfloat16)
    prompt = Prompt(given["encoder_hidden_states"])
    conditioning = model.conditioning(given["timestep"], prompt=prompt)
    x = given["sample"].permute(0, 2, 3, 1).contiguous()
    for _ in range(3):
        (y,) = model.graphed("loop", lambda x, conditioning: (model.predict(x, conditioning),))(x, conditioning)
        assert torch.equal(y.permute(0, 3, 1, 2), model(**given).sample)
    conditioning.text[0].mul_(1.5)  # edit a prompt in place: a graph reads it again
    (changed,) = model.graphed("loop", lambda x, conditioning: (model.predict(x, conditioning),))(x, conditioning)
    assert not torch.equal(changed, y)


@pytest.mark.parametrize("model", ["sd"], indirect=True)
def test_scores_beyond_float16(model):
    """upcast_attention: attention scores beyond 65,504 stay finite and near float32."""
    attention = model.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    channels = attention.to_qkv.weight.shape[1]
    for rows in (slice(0, channels), slice(channels, 2 * channels)):
        attention.to_qkv.weight[rows] = 300 * torch.eye(channels)
    given = inputs(model.config, 2)
    expected = model.cuda()(**moved(given)).sample
    output = model.half()(**moved(given, torch.float16)).sample
    assert output.isfinite().all()
    assert (output - expected).norm() < 2e-2 * expected.norm()
