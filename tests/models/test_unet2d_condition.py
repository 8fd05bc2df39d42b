"""UNet2DConditionModel: errors, calls and construction. tests/parity compares it with diffusers."""

import dataclasses
import inspect
import json

import diffusers
import pytest
import torch

from fastdiff import InputError, UNet2DConditionModel, report
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.models.blocks.conditioning import Conditioning, Prompt

TINY = {
    "sample_size": 8,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}
SDXL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 10 + 24,
}


def blocks(down: str, up: str) -> dict:
    return {"down_block_types": down.split(), "up_block_types": up.split()}


SIMPLE = blocks("SimpleCrossAttnDownBlock2D DownBlock2D", "UpBlock2D SimpleCrossAttnUpBlock2D")

BAD_CONFIGS = {
    "unknown-option": ({"num_heads": 4}, "num_heads"),
    "heads-by-the-other-name": ({"num_attention_heads": 4}, "num_attention_heads: 4"),
    "dual-cross-attention": ({"dual_cross_attention": True}, "dual_cross_attention: True"),
    "gligen": ({"attention_type": "gated"}, "attention_type: 'gated'"),
    "unknown-norm-of-the-text": ({"cross_attention_norm": "batch_norm"}, "cross_attention_norm: 'batch_norm'"),
    "layer-norm-of-another-width": (
        SIMPLE | {"cross_attention_norm": "layer_norm"},
        "cross_attention_norm: layer_norm",
    ),
    "groups-of-a-narrow-text": (SIMPLE | {"cross_attention_norm": "group_norm"}, "divisible"),
    "unknown-projection": ({"encoder_hid_dim": 8, "encoder_hid_dim_type": "ip_image_proj"}, "'ip_image_proj'"),
    "image-projection-without-width": ({"encoder_hid_dim_type": "image_proj"}, "encoder_hid_dim: missing"),
    "text-projection-without-width": ({"encoder_hid_dim_type": "text_proj"}, "encoder_hid_dim: "),
    "image-addition-without-width": ({"addition_embed_type": "image"}, "encoder_hid_dim: missing"),
    "unknown-addition": ({"addition_embed_type": "sound"}, "addition_embed_type: 'sound'"),
    "only-a-hint": ({"addition_embed_type": "image_hint", "encoder_hid_dim": 8}, "in_channels: 4"),
    "images-of-two-widths": (
        {"addition_embed_type": "image", "encoder_hid_dim": 8, "encoder_hid_dim_type": "text_image_proj"},
        "encoder_hid_dim: 8, but text_image_proj and image read the same image_embeds; give 12",
    ),
    "unknown-class-embedding": ({"class_embed_type": "rows"}, "class_embed_type: 'rows'"),
    "unknown-middle": ({"mid_block_type": "UNetMidBlock2DFlat"}, "mid_block_type: 'UNetMidBlock2DFlat'"),
    "skip-down-block": (blocks("SkipDownBlock2D DownBlock2D", "UpBlock2D UpBlock2D"), "'SkipDownBlock2D'"),
    "decoder-up-block": (blocks("DownBlock2D DownBlock2D", "UpDecoderBlock2D UpBlock2D"), "'UpDecoderBlock2D'"),
    "k-blocks-and-others": (blocks("KDownBlock2D DownBlock2D", "UpBlock2D UpBlock2D"), "K blocks cannot be combined"),
    "no-skip-for-a-k-block": (blocks("KDownBlock2D KCrossAttnDownBlock2D", "KUpBlock2D KUpBlock2D"), "does not write"),
    "head-dim-that-does-not-divide": (SIMPLE | {"attention_head_dim": 3}, "attention_head_dim: 3 does not divide"),
    "head-dim-of-too-many-channels": (
        blocks("AttnDownBlock2D DownBlock2D", "UpBlock2D UpBlock2D") | {"attention_head_dim": 9},
        "attention_head_dim: 9 for 8 channels",
    ),
    "no-text": (blocks("DownBlock2D DownBlock2D", "UpBlock2D UpBlock2D") | {"mid_block_type": None}, "reads a text"),
    "lengths-differ": ({"block_out_channels": [8]}, "down_block_types: 2 given for 1 block_out_channels"),
    "heads-of-too-few-levels": ({"attention_head_dim": [2]}, "attention_head_dim: 1 given for 2"),
    "layers-of-too-many-levels": ({"layers_per_block": [1, 1, 1]}, "layers_per_block: 3 given for 2"),
    "flags-of-too-few-levels": ({"only_cross_attention": [True]}, "only_cross_attention: 1 given for 2"),
    "depths-of-too-few-levels": ({"transformer_layers_per_block": [1]}, "transformer_layers_per_block: 1 given for 2"),
    "asymmetric-without-reverse": (
        {"transformer_layers_per_block": [[1], 1]},
        "reverse_transformer_layers_per_block: missing, but",
    ),
    "depths-of-too-many-layers": (
        {"transformer_layers_per_block": [[1, 2], 1], "reverse_transformer_layers_per_block": [1, 1]},
        "2 given for the 1 layers of down_blocks.0",
    ),
    "reverse-depths-of-too-few-layers": (
        {"transformer_layers_per_block": 1, "reverse_transformer_layers_per_block": [1, [1]]},
        "1 given for the 2 layers of up_blocks.1",
    ),
    "texts-of-two-widths": (
        {"cross_attention_dim": [12, 16]},
        "cross_attention_dim: all attentions read the same text",
    ),
    "more-heads-than-channels": ({"attention_head_dim": 9}, "attention_head_dim: 9 heads for 8 channels"),
    "no-heads": ({"attention_head_dim": None}, "attention_head_dim: None"),
    "no-groups": ({"norm_num_groups": None}, "norm_num_groups: null works with K blocks only"),
    "groups-do-not-divide": ({"norm_num_groups": 3}, "divisible"),
    "even-kernel": ({"conv_in_kernel": 2}, "conv_in_kernel: 2 is even"),
    "even-last-kernel": ({"conv_out_kernel": 4}, "conv_out_kernel: 4 is even"),
    "projection-without-width": ({"class_embed_type": "projection"}, "projection_class_embeddings_input_dim: "),
    "sdxl-without-width": (SDXL | {"projection_class_embeddings_input_dim": None}, "addition_embed_type 'text_time'"),
    "sdxl-without-time-width": (SDXL | {"addition_time_embed_dim": None}, "addition_time_embed_dim: "),
    "concat-without-class": ({"class_embeddings_concat": True}, "class_embeddings_concat: it needs a class"),
    "concat-beside-addition": (
        SDXL | {"class_embeddings_concat": True, "num_class_embeds": 3},
        "class_embeddings_concat",
    ),
    "pooling-heads": ({"addition_embed_type": "text"}, "addition_embed_type_num_heads: 64 does not divide"),
    "odd-fourier": ({"time_embedding_type": "fourier", "time_embedding_dim": 41}, "time_embedding_dim: 41 is odd"),
    "no-frequencies": ({"freq_shift": 4}, "freq_shift: 4"),
    "padding": ({"downsample_padding": 2}, "downsample_padding: 2"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config_is_one_line_that_names_the_option(case):
    options, named = BAD_CONFIGS[case]
    with pytest.raises(InputError) as error:
        UNet2DConditionModel.from_config(TINY | options, source="here/config.json")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_config_defaults_are_diffusers():
    theirs = inspect.signature(diffusers.UNet2DConditionModel.__init__).parameters
    config = UNet2DConditionConfig
    ours = {field.name: field.default for field in dataclasses.fields(config)}
    assert ours == {name: parameter.default for name, parameter in theirs.items() if name != "self"}


@pytest.fixture(scope="module")
def model():
    return UNet2DConditionModel.from_config(TINY)


def call(model, n: int = 2, **options):
    """Call the model with valid arguments, some of them replaced by `options`."""
    given = {"sample": torch.zeros(n, 4, 8, 8), "timestep": 1, "encoder_hidden_states": torch.zeros(n, 5, 12)}
    return model(**given | options).sample


ZERO = torch.zeros(2, 5, 12)
SKIPS = [torch.zeros(2, 8, 8, 8)] * 2 + [torch.zeros(2, 8, 4, 4), torch.zeros(2, 16, 4, 4)]
MIDDLE = torch.zeros(2, 16, 4, 4)
BAD_CALLS = {
    "no-text": ({"encoder_hidden_states": None}, "encoder_hidden_states: None is not a tensor"),
    "text-of-another-width": (
        {"encoder_hidden_states": ZERO[..., :8]},
        r"its shape is \(2, 5, 8\); it must be \(2, L, 12\)",
    ),
    "one-text-for-two": ({"encoder_hidden_states": ZERO[:1]}, "encoder_hidden_states: its shape"),
    "text-without-tokens": ({"encoder_hidden_states": ZERO[:, :0]}, "encoder_hidden_states: its shape"),
    "text-of-another-dtype": ({"encoder_hidden_states": ZERO.half()}, "encoder_hidden_states: it is torch.float16"),
    "text-elsewhere": ({"encoder_hidden_states": ZERO.to("meta")}, "encoder_hidden_states: "),
    "text-with-grad": (
        {"encoder_hidden_states": ZERO.clone().requires_grad_()},
        "encoder_hidden_states: it requires grad",
    ),
    "mask-of-other-tokens": ({"encoder_attention_mask": torch.ones(2, 4)}, "encoder_attention_mask: its shape"),
    "mask-of-a-list": ({"encoder_attention_mask": [1, 0]}, "encoder_attention_mask: "),
    "mask-that-fits-one-level-only": ({"attention_mask": torch.ones(2, 64)}, "attention_mask: its shape"),
    "labels": ({"class_labels": torch.tensor([0, 1])}, "class_labels: this model takes no"),
    "guidance-embedding": ({"timestep_cond": torch.zeros(2, 4)}, "timestep_cond: the model's config has no"),
    "additions": ({"added_cond_kwargs": {"text_embeds": ZERO}}, "added_cond_kwargs: this model takes no text_embeds"),
    "lines": ({"added_cond_kwargs": {"a\x1b\n": ZERO, 1: ZERO}}, r"takes no 'a\\x1b\\n', 1; leave it out"),
    "additions-of-no-dictionary": ({"added_cond_kwargs": [1]}, "added_cond_kwargs: "),
    "image-embeds": (
        {"added_cond_kwargs": {"image_embeds": [ZERO]}},
        "added_cond_kwargs: this model takes no image_emb",
    ),
    "attention-processor": ({"cross_attention_kwargs": {"scale": 0.5}}, "cross_attention_kwargs: "),
    "t2i-adapter": ({"down_intrablock_additional_residuals": [MIDDLE]}, "down_intrablock_additional_residuals: "),
    "down-without-mid": ({"down_block_additional_residuals": SKIPS}, "mid_block_additional_residual: missing"),
    "mid-without-down": ({"mid_block_additional_residual": MIDDLE}, "down_block_additional_residuals: missing"),
    "too-few-residuals": (
        {"down_block_additional_residuals": SKIPS[:3], "mid_block_additional_residual": MIDDLE},
        "down_block_additional_residuals: 3 given; give a list of 4",
    ),
    "residual-of-another-size": (
        {"down_block_additional_residuals": SKIPS[::-1], "mid_block_additional_residual": MIDDLE},
        "down_block_additional_residuals: its shape",
    ),
    "text-for-a-timestep": ({"timestep": "1"}, "timestep: '1' is not a timestep"),
    "return-dict": ({"return_dict": 1}, "return_dict: 1"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_wrong_argument_is_one_line_that_names_it(model, case):
    options, message = BAD_CALLS[case]
    with pytest.raises(InputError, match=message) as error:
        call(model, **options)
    assert "\n" not in str(error.value)


IMAGES = {"encoder_hid_dim": 6, "encoder_hid_dim_type": "image_proj", "addition_embed_type": "image_hint"}
IMAGES |= {"in_channels": 8}
GIVEN = {"image_embeds": torch.zeros(2, 6), "hint": torch.zeros(2, 3, 64, 64)}


@pytest.mark.parametrize(
    ("added", "message"),
    [
        pytest.param(None, "hint, image_embeds is missing; .*encoder_hid_dim_type 'image_proj' needs it", id="none"),
        pytest.param({"image_embeds": GIVEN["image_embeds"]}, "hint is missing", id="half"),
        pytest.param(GIVEN | {"image_embeds": torch.zeros(2, 5)}, "image_embeds: its shape", id="width"),
        pytest.param(GIVEN | {"hint": torch.zeros(2, 3, 64, 32)}, "hint: its shape", id="size"),
    ],
)
def test_additions_of_images(added, message):
    model = UNet2DConditionModel.from_config(TINY | IMAGES)
    assert call(model, encoder_hidden_states=None, added_cond_kwargs=GIVEN).shape == (2, 4, 8, 8)
    with pytest.raises(InputError, match=f"added_cond_kwargs: .*{message}"):
        call(model, encoder_hidden_states=None, added_cond_kwargs=added)


K = blocks("KDownBlock2D KCrossAttnDownBlock2D", "KCrossAttnUpBlock2D KUpBlock2D")
K |= {"block_out_channels": [32, 32], "time_embedding_dim": 32, "mid_block_type": None}


def test_calls_that_do_not_fit_the_blocks():
    k, simple = (UNet2DConditionModel.from_config(TINY | options) for options in (K, SIMPLE))
    assert call(k).shape == call(simple).shape == (2, 4, 8, 8)
    with pytest.raises(InputError, match="down_block_additional_residuals: K blocks take no residuals"):
        call(k, down_block_additional_residuals=SKIPS, mid_block_additional_residual=MIDDLE)
    with pytest.raises(InputError, match="sample: height 2, width 8"):  # K blocks pad by reflection
        call(k, sample=torch.zeros(2, 4, 2, 8))
    doubling = TINY | blocks("DownBlock2D CrossAttnDownBlock2D", "AttnUpBlock2D UpBlock2D")
    with pytest.raises(InputError, match="height 7, width 8: both must be multiples of 2"):
        call(UNet2DConditionModel.from_config(doubling), sample=torch.zeros(2, 4, 7, 8))


@pytest.mark.parametrize("options", [SIMPLE, K, IMAGES, SIMPLE | {"resnet_skip_time_act": True}], ids=str)
def test_the_loops_parts_agree_with_a_call(options, randomise):
    """`project` and `embed`, as the loop uses them, give a call's prediction, in any batch."""
    model = randomise(UNet2DConditionModel.from_config(TINY | options))
    shapes = model.config.added_shapes
    added = {name: torch.randn(2, *shape, generator=torch.Generator().manual_seed(3)) for name, shape in shapes.items()}
    sample, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, model.config.text_width)
    expected = call(model, sample=sample, timestep=3, encoder_hidden_states=text, added_cond_kwargs=added or None)
    prompt, t = Prompt(text, added=tuple(added.values())), torch.tensor([3, 3])
    conditioning = Conditioning(model.embed(t, None, prompt), t, model.project(prompt))
    x = sample.permute(0, 2, 3, 1).contiguous()
    predicted = model.predict(x, conditioning).permute(0, 3, 1, 2)
    torch.testing.assert_close(predicted, expected, rtol=0, atol=1e-5)
    alone = model.project(Prompt(text[1:], added=tuple(each[1:] for each in added.values())))
    assert all(torch.equal(one[0], both[1]) for one, both in zip(alone, conditioning.text, strict=True))


ADDED = {"text_embeds": torch.zeros(2, 10), "time_ids": torch.zeros(2, 6)}


@pytest.mark.parametrize(
    ("added", "message"),
    [
        pytest.param(None, "text_embeds, time_ids is missing", id="none"),
        pytest.param({"text_embeds": ADDED["text_embeds"]}, "time_ids is missing", id="half"),
        pytest.param(
            ADDED | {"time_ids": torch.zeros(2, 5)}, "10 channels and 5 time_ids make 30 channels", id="refiner"
        ),
        pytest.param(ADDED | {"time_ids": torch.zeros(1, 6)}, "time_ids: its shape", id="one-for-two"),
    ],
)
def test_additions_of_sdxl(added, message):
    model = UNet2DConditionModel.from_config(TINY | SDXL)
    assert call(model, added_cond_kwargs=ADDED).shape == (2, 4, 8, 8)
    with pytest.raises(InputError, match=f"added_cond_kwargs: .*{message}"):
        call(model, added_cond_kwargs=added)


@pytest.mark.parametrize("padding", [0, 1])
def test_sizes(padding):
    model = UNet2DConditionModel.from_config(TINY | {"downsample_padding": padding})
    least = 2 - padding
    assert call(model, sample=torch.zeros(2, 4, least, 7)).shape == (2, 4, least, 7)
    if padding == 0:
        with pytest.raises(InputError, match="sample: height 1, width 7"):
            call(model, sample=torch.zeros(2, 4, 1, 7))


def test_a_text_is_projected_once_and_serves_every_step(model, randomise):
    """`project_text` and `embed`, as the loop uses them, agree with a call, also for one condition for all pictures."""
    model = randomise(model)
    x, text = torch.randn(2, 8, 8, 4), torch.randn(1, 5, 12)
    prompt, t = Prompt(text), torch.tensor([10])
    conditioning = model.conditioning(t, prompt=prompt)
    assert conditioning.temb.shape == (1, model.conditioning_width)
    assert torch.equal(conditioning.text[0], model.project_text(text))
    assert torch.equal(conditioning.temb, model.embed(t, None, prompt))
    expected = call(model, sample=x.permute(0, 3, 1, 2), timestep=10, encoder_hidden_states=text.expand(2, -1, -1))
    torch.testing.assert_close(model.predict(x, conditioning).permute(0, 3, 1, 2), expected, rtol=0, atol=1e-5)
    chosen = conditioning.of(torch.tensor([0, 0]))
    assert [len(each) for each in (chosen.temb, chosen.timesteps, *chosen.text)] == [2, 2, 2]
    with pytest.raises(InputError, match="prompt: missing, but this model reads a text"):
        model.conditioning(t)


@pytest.mark.parametrize("options", [{}, SDXL], ids=["sd", "sdxl"])
def test_a_report_tells_of_an_example_of_a_text(options):
    found = report(UNet2DConditionModel.from_config(TINY | options), batch_size=2)
    counts = {row.operation: 0 for row in found.rows}
    for row in found.rows:
        counts[row.operation] += row.count
    blocks = 4  # transformer blocks: one down, one mid, two up
    assert counts["geglu"] == blocks and counts["layer_norm"] == 3 * blocks and counts["attention"] == 2 * blocks
    assert counts["linear"] == (1 + 5) * blocks  # in; Q K V, out, Q, out, the MLP's second: none of the text


def test_half_precision_stays_near_float32(randomise):
    model = randomise(UNet2DConditionModel.from_config(TINY))
    sample, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)
    expected = call(model, sample=sample, encoder_hidden_states=text)
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 6e-2)):
        output = call(model.to(dtype), sample=sample.to(dtype), encoder_hidden_states=text.to(dtype))
        assert output.dtype == dtype
        assert (output - expected).norm() < tolerance * expected.norm()
        model.float()


def test_scores_beyond_float16(randomise):
    """upcast_attention: attention scores beyond 65,504 stay finite."""
    model = randomise(UNet2DConditionModel.from_config(TINY | {"upcast_attention": True}))
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    with torch.no_grad():
        for layer in (block.attn1.to_qkv, block.attn2.to_q):
            layer.weight[:8] = 200 * torch.eye(8)
        block.attn1.to_qkv.weight[8:16] = 200 * torch.eye(8)
    sample, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)
    expected = call(model, sample=sample, encoder_hidden_states=text)
    output = call(model.half(), sample=sample.half(), encoder_hidden_states=text.half())
    assert output.isfinite().all()
    assert (output - expected).norm() < 2e-2 * expected.norm()


def test_a_folder_of_diffusers(tmp_path, randomise):
    theirs = randomise(diffusers.UNet2DConditionModel(**TINY))
    theirs.save_pretrained(tmp_path / "unet")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    ours = UNet2DConditionModel.from_pretrained(tmp_path, subfolder="unet")
    sample, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)
    with torch.no_grad():
        expected = theirs(sample, 3, text).sample
    torch.testing.assert_close(ours(sample, 3, text).sample, expected, rtol=0, atol=1e-4)


def test_a_folder_of_another_class_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    with pytest.raises(InputError, match="describes a UNet2DModel, but UNet2DConditionModel is wanted"):
        UNet2DConditionModel.from_pretrained(tmp_path)
