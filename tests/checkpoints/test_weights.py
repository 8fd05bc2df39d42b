"""Weights: all formats that diffusers saves, all kinds of bad files, and strict, fused, channels-last loading."""

import json
import os
import pickle
import struct
from pathlib import Path

import diffusers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from fastdiff.checkpoints.weights import diffusers_keys, load_state_dict, load_weights
from fastdiff.errors import InputError, NonFiniteError
from fastdiff.models.unet2d import UNet2DModel

STEM = "diffusion_pytorch_model"
BIN = {"safe_serialization": False}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.group_norm = nn.GroupNorm(2, 8)
        self.to_qkv = nn.Linear(8, 3 * 8)
        self.to_out = nn.ModuleList([nn.Linear(8, 8)])


class Model(nn.Module):
    """A module with the parameter names of our models, and nothing else."""

    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3)
        self.attentions = nn.ModuleList([Attention()])


def model_on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def state_of_model() -> dict[str, torch.Tensor]:
    """Return random weights for Model, by diffusers' names."""
    shapes = {"conv_in.weight": (8, 3, 3, 3), "conv_in.bias": (8,)}
    for layer in ("group_norm.weight", "group_norm.bias"):
        shapes[f"attentions.0.{layer}"] = (8,)
    for layer in ("to_q", "to_k", "to_v", "to_out.0"):
        shapes |= {f"attentions.0.{layer}.weight": (8, 8), f"attentions.0.{layer}.bias": (8,)}
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def load(state, dtype=torch.float32) -> Model:
    model = model_on_meta()
    load_weights(model, state, source="some/folder", dtype=dtype, device="cpu")
    return model


@pytest.fixture(scope="module")
def oracle() -> diffusers.UNet2DModel:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
    )


def assert_one_line(error, *named: str) -> None:
    message = str(error.value)
    assert all(name in message for name in named), message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param({}, id="single"),
        pytest.param({"variant": "fp16"}, id="variant"),
        pytest.param({"max_shard_size": "20KB"}, id="shards"),
        pytest.param({"max_shard_size": "20KB", "variant": "fp16"}, id="variant-shards"),
        pytest.param(BIN, id="bin"),
        pytest.param(BIN | {"variant": "fp16"}, id="bin-variant"),
        pytest.param(BIN | {"max_shard_size": "20KB"}, id="bin-shards"),
        pytest.param(BIN | {"max_shard_size": "20KB", "variant": "fp16"}, id="bin-variant-shards"),
    ],
)
def test_reads_what_diffusers_saves(tmp_path, oracle, saved):
    oracle.save_pretrained(tmp_path, **saved)
    state, expected = load_state_dict(tmp_path, saved.get("variant")), oracle.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_reads_the_older_name_of_a_variant_index(tmp_path, oracle):
    oracle.save_pretrained(tmp_path, max_shard_size="20KB", variant="fp16")
    (tmp_path / f"{STEM}.safetensors.index.fp16.json").rename(tmp_path / f"{STEM}.safetensors.fp16.index.json")
    assert load_state_dict(tmp_path, "fp16").keys() == oracle.state_dict().keys()


def test_shards_may_be_links_out_of_the_folder_as_in_the_hub_cache(tmp_path, oracle):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    oracle.save_pretrained(blobs, max_shard_size="20KB")
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert load_state_dict(snapshot).keys() == oracle.state_dict().keys()


def test_safetensors_win_over_bin_and_an_index_over_a_single_file_as_in_diffusers(tmp_path, oracle):
    oracle.save_pretrained(tmp_path, max_shard_size="20KB")
    save_file({"old": torch.zeros(1)}, tmp_path / f"{STEM}.safetensors")
    torch.save({"old": torch.zeros(1)}, tmp_path / f"{STEM}.bin")
    assert load_state_dict(tmp_path).keys() == oracle.state_dict().keys()


def test_no_weights_names_the_file(tmp_path):
    with pytest.raises(InputError) as error:
        load_state_dict(tmp_path)
    assert_one_line(error, str(tmp_path), f"{STEM}.safetensors", "save_pretrained")


def test_absent_variant_when_there_are_none(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / f"{STEM}.safetensors")
    with pytest.raises(InputError) as error:
        load_state_dict(tmp_path, "fp16")
    assert_one_line(error, f"{STEM}.fp16.safetensors", "leave the variant out")


@pytest.mark.parametrize("asked", [pytest.param(None, id="none-asked"), pytest.param("fp8", id="another-asked")])
def test_absent_variant_lists_those_that_are_there(tmp_path, asked):
    for name in ("fp16.safetensors", "non_ema.bin", "bf16-00001-of-00002.safetensors"):
        (tmp_path / f"{STEM}.{name}").touch()
    (tmp_path / f"{STEM}-00001-of-00002.old.safetensors").touch()
    with pytest.raises(InputError) as error:
        load_state_dict(tmp_path, asked)
    assert_one_line(error, "bf16, fp16, non_ema, old")


def safetensors_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), start=0, end=8) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", id="git-lfs-pointer"),
        pytest.param(b"\xff\xd8\xff\xe0 JFIF picture of a cat", id="jpeg"),
        pytest.param(safetensors_file({}, length=2**63), id="header-2^63"),
        pytest.param(safetensors_file({}, length=200 * 2**20), id="header-above-100MB"),
        pytest.param(safetensors_file({"a": entry()}, bytes(4)), id="truncated"),
        pytest.param(safetensors_file({"a": entry()}, bytes(16)), id="bytes-left-over"),
        pytest.param(safetensors_file({"a": entry(), "b": entry(start=4, end=12)}, bytes(12)), id="overlap"),
        pytest.param(safetensors_file({"a": entry(), "b": entry(start=12, end=20)}, bytes(20)), id="gap"),
        pytest.param(safetensors_file({"a": entry(shape=(float("nan"),))}, bytes(8)), id="shape-nan"),
        pytest.param(safetensors_file({"a": entry(shape=(-2,))}, bytes(8)), id="shape-negative"),
        pytest.param(safetensors_file({"a": entry(shape=(2**62, 2**62))}, bytes(8)), id="shape-overflows"),
        pytest.param(safetensors_file({"a": entry(dtype="F64")}, bytes(8)), id="dtype-of-another-size"),
        pytest.param(safetensors_file({"a": entry(dtype="X9")}, bytes(8)), id="dtype-unknown"),
        pytest.param(safetensors_file({"a": 1}), id="entry-is-a-number"),
        pytest.param(safetensors_file([]), id="header-is-a-list"),
        pytest.param(struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", id="header-is-not-text"),
    ],
)
def test_damaged_safetensors(tmp_path, content):
    path = tmp_path / f"{STEM}.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_state_dict(tmp_path)
    assert_one_line(error, str(path), "download or save it again")


@given(st.data())
def test_any_flipped_bytes_of_the_header_give_tensors_or_an_input_error(tmp_path_factory, data):
    content = bytearray(safetensors_file({"a": entry(), "b": entry(start=8, end=16)}, bytes(16)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 17))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("flipped")
    (folder / f"{STEM}.safetensors").write_bytes(content)
    try:
        assert all(isinstance(tensor, torch.Tensor) for tensor in load_state_dict(folder).values())
    except InputError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        pytest.param({"a": "../secret.safetensors"}, "../secret", id="parent"),
        pytest.param({"a": "/secret.safetensors"}, "/secret", id="absolute"),
        pytest.param({"a": "..\\secret.safetensors"}, "secret", id="windows-parent"),
        pytest.param({"a": ".."}, "'..'", id="dots"),
        pytest.param({"a": ""}, "''", id="empty"),
        pytest.param({"a": "gone.safetensors"}, "gone.safetensors", id="missing-shard"),
        pytest.param({"a": "shard.safetensors", "b": "shard.safetensors"}, "other keys", id="key-not-in-its-shard"),
        pytest.param([], "weight_map", id="a-list"),
        pytest.param({"a": 1}, "weight_map", id="shard-is-a-number"),
    ],
)
def test_bad_index(tmp_path, weight_map, named):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (tmp_path / "secret.safetensors", folder / "shard.safetensors"):
        save_file({"a": torch.zeros(1)}, path)
    (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError) as error:
        load_state_dict(folder)
    assert_one_line(error, f"{STEM}.safetensors.index.json", named)


class Malicious:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_pickle_that_runs_code_is_refused_and_not_run(tmp_path):
    marker, path = tmp_path / "ran", tmp_path / f"{STEM}.bin"
    torch.save({"a": Malicious(marker)}, path)
    with pytest.raises(InputError) as error:
        load_state_dict(tmp_path)
    assert_one_line(error, str(path), "safetensors")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Malicious(marker)))
    assert marker.exists(), "the payload would have run"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"PK\x03\x04 half a zip", id="truncated-zip"),
        pytest.param(b"\x80\x04K\x01.", id="plain-pickle"),
        pytest.param(b"<html>404</html>", id="html"),
    ],
)
def test_damaged_bin(tmp_path, content):
    (tmp_path / f"{STEM}.bin").write_bytes(content)
    with pytest.raises(InputError) as error:
        load_state_dict(tmp_path)
    assert_one_line(error, f"{STEM}.bin", "safetensors")


@pytest.mark.parametrize(
    "content", [pytest.param([torch.zeros(1)], id="list"), pytest.param({"a": {"b": torch.zeros(1)}}, id="nested")]
)
def test_bin_without_a_dictionary_of_tensors(tmp_path, content):
    torch.save(content, tmp_path / f"{STEM}.bin")
    with pytest.raises(InputError) as error:
        load_state_dict(tmp_path)
    assert_one_line(error, f"{STEM}.bin", "dictionary of tensors")


def test_load_fuses_lays_out_converts_and_freezes():
    state = state_of_model()
    given_state = dict(state)
    model = load(state, torch.bfloat16)
    attention = model.attentions[0]
    for kind in ("weight", "bias"):
        rows = [given_state[f"attentions.0.{part}.{kind}"] for part in ("to_q", "to_k", "to_v")]
        assert torch.equal(getattr(attention.to_qkv, kind), torch.cat(rows).bfloat16())
    assert torch.equal(model.conv_in.weight, given_state["conv_in.weight"].bfloat16())
    assert model.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    for parameter in model.parameters():
        assert parameter.dtype == torch.bfloat16 and parameter.device.type == "cpu" and not parameter.requires_grad


def test_the_model_shares_no_memory_with_the_file():
    state = state_of_model()
    given_tensors = list(state.values())
    model = load(state)
    for tensor in given_tensors:
        tensor.fill_(float("nan"))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@given(st.data())
def test_every_bad_key_is_listed(data):
    state = state_of_model()
    kinds = st.sampled_from(["good", "missing", "renamed", "misshapen", "integer"])
    verdicts = {key: data.draw(kinds, label=key) for key in state}
    shape = {key: tuple(tensor.shape) for key, tensor in state.items()}
    listed = []
    for key, verdict in verdicts.items():
        tensor = state[key]
        if verdict in ("missing", "renamed"):
            del state[key]
            listed.append(key)
        if verdict == "renamed":
            state[f"ema.{key}"] = tensor
            listed.append(f"ema.{key}")
        if verdict == "misshapen":
            state[key] = tensor[None]
            listed.append(f"{key} {(1, *shape[key])} for {shape[key]}")
        if verdict == "integer":
            state[key] = tensor.long()
            listed.append(f"{key} (torch.int64)")
    if not listed:
        load(state)
        return
    with pytest.raises(InputError) as error:
        load(state)
    assert_one_line(error, "some/folder does not fit Model", *listed)
    complaints = str(error.value).removesuffix("; use the weights that were saved with its config.json")
    good = [key for key, verdict in verdicts.items() if verdict == "good"]
    assert not [key for key in good if key in complaints.replace("; ", ", ").replace(": ", ", ").split(", ")]


@pytest.mark.parametrize("key", [pytest.param("lonely", id="no-dot"), pytest.param("query.weight", id="no-path")])
def test_a_key_outside_the_model_is_unexpected(key):
    with pytest.raises(InputError) as error:
        load(state_of_model() | {key: torch.zeros(1)})
    assert_one_line(error, f"unexpected: {key}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named_and_counted(value):
    state = state_of_model()
    for key in list(state)[:5]:
        state[key].view(-1)[-1] = value
    with pytest.raises(NonFiniteError) as error:
        load(state)
    assert_one_line(error, "some/folder", *list(state)[:3], "and 2 more")


def test_values_beyond_the_dtype_are_refused():
    state = state_of_model()
    state["conv_in.bias"][0] = 1e6
    with pytest.raises(InputError) as error:
        load(state, torch.float16)
    assert_one_line(error, "conv_in.bias", "torch.float16", "bfloat16")


def test_a_refused_load_leaves_the_model_as_it_was():
    model, state = model_on_meta(), state_of_model()
    state["attentions.0.to_k.bias"][0] = float("nan")
    with pytest.raises(NonFiniteError):
        load_weights(model, state, source="x", dtype=torch.float32, device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_buffer_kept_out_of_the_state_dict_is_caught():
    class Forgetful(Model):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    with torch.device("meta"):
        model = Forgetful()
    with pytest.raises(AssertionError, match="frequencies"):
        load_weights(model, state_of_model(), source="x", dtype=torch.float32, device="cpu")


def with_old_attention_keys(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for new, name in old.items():
        state = {key.replace(f".{new}.", f".{name}."): tensor for key, tensor in state.items()}
    return state


def test_old_attention_keys_load_as_in_diffusers(tmp_path, oracle):
    oracle.save_pretrained(tmp_path)
    state = with_old_attention_keys(oracle.state_dict())
    assert any("proj_attn" in key for key in state)
    save_file(state, tmp_path / f"{STEM}.safetensors")
    theirs = diffusers.UNet2DModel.from_pretrained(tmp_path).state_dict()
    ours = UNet2DModel.from_pretrained(tmp_path)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, torch.cat([theirs[key] for key in diffusers_keys(ours, name)])), name


def test_old_and_new_attention_keys_together_are_refused():
    state = state_of_model()
    both = state | with_old_attention_keys(dict(state))
    with pytest.raises(InputError) as error:
        load(both)
    assert_one_line(error, "unexpected", "attentions.0.query.weight", "attentions.0.proj_attn.bias")
