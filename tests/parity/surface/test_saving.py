"""`save_pretrained`: diffusers and transformers read our models, schedulers and tokenizers back, equal in bits."""

import json
import shutil

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file

import fastdiff
from fastdiff import InputError
from fastdiff.checkpoints import hub
from fastdiff.sampler_names import SAMPLERS
from fastdiff.text.tokenizer import CLIPTokenizer
from tests.support.planners import policy, value_function

# diffusers'
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword", "ignore:__array_wrap__"
)

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "projection_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 98,
    "bos_token_id": 97,
}
UNET = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
CASES = {
    "unet": ("UNet2DModel", UNET),
    "unet-scale-shift": ("UNet2DModel", UNET | {"resnet_time_scale_shift": "scale_shift", "num_class_embeds": 3}),
    "unet-text": (
        "UNet2DConditionModel",
        UNET
        | {
            "cross_attention_dim": 24,
            "attention_head_dim": (2, 4),
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
    ),
    "policy": ("UNet1DModel", policy(8, 16, 32)),  # its transposed convolutions have another form in fastdiff
    "value-function": ("UNet1DModel", value_function(8, 16, 32)),
    "dit": ("DiTTransformer2DModel", {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}),
    "z-image": (
        "ZImageTransformer2DModel",
        {"dim": 16, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 8, "axes_dims": (4, 2, 2)},
    ),
    "vae": ("AutoencoderKL", {"block_out_channels": (8,), "norm_num_groups": 4, "shift_factor": 0.5}),
    "text": ("CLIPTextModel", TEXT),
    "text-projection": ("CLIPTextModelWithProjection", TEXT),
}


@pytest.fixture
def save_theirs(tmp_path, randomise):
    """Save a random model of diffusers or transformers. Return it, our class and the folder."""

    def save(case: str):
        name, options = CASES[case]
        if name.startswith("CLIP"):
            theirs = getattr(transformers, name)(transformers.CLIPTextConfig(**options))
        else:
            theirs = getattr(diffusers, name)(**options)
        randomise(theirs).save_pretrained(tmp_path / "theirs")
        return theirs, getattr(fastdiff, name), tmp_path / "theirs"

    return save


def assert_same(loaded, theirs) -> None:
    """Check that a model of diffusers or transformers has the weights and the options of another."""
    state, expected = loaded.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(state[key], expected[key])] == []
    configs = [config if isinstance(config, dict) else config.to_dict() for config in (loaded.config, theirs.config)]
    options, wanted = (json.loads(json.dumps(dict(config), default=str)) for config in configs)
    differing = {key for key in wanted if not key.startswith("_") and options[key] != wanted[key]}
    assert differing <= {"dtype", "architectures"}


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_is_read_back_equal_in_bits(case, save_theirs, tmp_path):
    theirs, kind, folder = save_theirs(case)
    kind.from_pretrained(folder).save_pretrained(tmp_path / "ours")
    assert_same(type(theirs).from_pretrained(tmp_path / "ours"), theirs)
    again = kind.from_pretrained(tmp_path / "ours")
    assert again.num_parameters() == theirs.num_parameters()


def test_old_transformers_find_their_keys(save_theirs, tmp_path):
    """Before transformers 5, every key of a CLIPTextModel begins with text_model."""
    _, kind, folder = save_theirs("text")
    kind.from_pretrained(folder).save_pretrained(tmp_path / "ours")
    assert all(key.startswith("text_model.") for key in load_file(tmp_path / "ours" / "model.safetensors"))


@pytest.mark.parametrize("case", ["unet", "text"])
def test_a_large_model_has_shards_of_a_variant(case, save_theirs, tmp_path):
    theirs, kind, folder = save_theirs(case)
    ours = kind.from_pretrained(folder)
    ours.save_pretrained(tmp_path / "ours", max_shard_size="10KB", variant="fp16")
    assert len([*(tmp_path / "ours").glob("*.fp16-*.safetensors")]) > 2
    assert_same(type(theirs).from_pretrained(tmp_path / "ours", variant="fp16"), theirs)
    kind.from_pretrained(tmp_path / "ours", variant="fp16")


def test_saving_again_leaves_no_shards_of_the_model_before(save_theirs, tmp_path):
    _, kind, folder = save_theirs("unet")
    ours = kind.from_pretrained(folder)
    ours.save_pretrained(tmp_path / "ours", max_shard_size="10KB")
    ours.save_pretrained(tmp_path / "ours")
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert names == {"config.json", "diffusion_pytorch_model.safetensors"}


def test_half_precision_is_kept(save_theirs, tmp_path):
    _, kind, folder = save_theirs("unet")
    kind.from_pretrained(folder, dtype=torch.float16).save_pretrained(tmp_path / "ours")
    state = load_file(tmp_path / "ours" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}


REFUSALS = {
    "pickle": ({"safe_serialization": False}, "safe_serialization"),
    "save-function": ({"save_function": print}, "save_function"),
    "flashpack": ({"use_flashpack": True}, "use_flashpack"),
    "upload": ({"push_to_hub": True}, "push_to_hub: .*hf upload"),
    "size": ({"max_shard_size": "big"}, "max_shard_size: 'big'"),
    "bool-size": ({"max_shard_size": True}, "max_shard_size: True"),
    "variant": ({"variant": "../x"}, "variant"),
    "unknown": ({"sharded": True}, "sharded"),
}


@pytest.mark.parametrize(("options", "said"), REFUSALS.values(), ids=REFUSALS)
def test_what_saving_refuses(options, said, tmp_path):
    model = fastdiff.UNet2DModel.from_config(UNET)
    with pytest.raises(InputError, match=said):
        model.save_pretrained(tmp_path / "ours", **options)
    assert not (tmp_path / "ours").exists()


def test_8_bit_weights_are_not_saved(save_theirs, tmp_path):
    _, kind, folder = save_theirs("unet")
    with pytest.raises(InputError, match="8 bits"):
        kind.from_pretrained(folder, precision="int8").save_pretrained(tmp_path / "ours")


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for place, said in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "below", "cannot be written")):
        with pytest.raises(InputError, match=said):
            fastdiff.UNet2DModel.from_config(UNET).save_pretrained(place)
        with pytest.raises(InputError, match=said):
            fastdiff.DDIMScheduler().save_pretrained(place)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_saved_scheduler_is_read_back_with_an_equal_config(name, tmp_path):
    needed, *_ = SAMPLERS[name].names.values()
    ours = getattr(fastdiff, name).from_config(getattr(diffusers, name)().config, **needed)
    ours.save_pretrained(tmp_path)
    theirs = getattr(diffusers, name).from_pretrained(tmp_path)
    own = {key: value for key, value in theirs.config.items() if not key.startswith("_")}
    assert own == {key: _listed(value) for key, value in ours.config.items() if not key.startswith("_")}
    again = type(ours).from_pretrained(tmp_path)
    assert again.to_json_string() == ours.to_json_string() == (tmp_path / "scheduler_config.json").read_text()


def _listed(value):
    return [*value] if isinstance(value, tuple) else value


PROMPTS = ("a cat, 2 dogs!", "Ünïcode <|endoftext|> x", "", "word " * 100)


@pytest.mark.parametrize("layout", ["old", "new"])
def test_a_saved_tokenizer_is_read_back(layout, tmp_path):
    source = hub.bundled_models()["emoji-sd"] / "tokenizer"
    shutil.copytree(source, tmp_path / "source")
    if layout == "new":  # a single tokenizer.json
        shutil.rmtree(tmp_path / "source")
        transformers.CLIPTokenizer.from_pretrained(source).save_pretrained(tmp_path / "source")
    ours = CLIPTokenizer(tmp_path / "source")
    ours.save_pretrained(tmp_path / "source")
    theirs = transformers.CLIPTokenizer.from_pretrained(tmp_path / "source")
    before = transformers.CLIPTokenizer.from_pretrained(source)
    again = CLIPTokenizer(tmp_path / "source")
    for prompt in PROMPTS:
        options = {"padding": "max_length", "truncation": True, "max_length": ours.length}
        expected = before(prompt, **options).input_ids
        assert theirs(prompt, **options).input_ids == expected
        assert [*again(prompt).ids] == expected
    assert theirs.model_max_length == before.model_max_length
