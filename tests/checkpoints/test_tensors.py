"""Tensors that a weight file can hold but a model cannot: an error of one line, without a warning from torch."""

import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fastdiff.checkpoints.weights import load_state_dict, load_weights
from fastdiff.errors import InputError, NonFiniteError

STEM = "diffusion_pytorch_model"
KEY = "layer.weight"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)


def load(folder) -> Model:
    """Load a model like any model in a folder. A warning is an error."""
    with torch.device("meta"):
        model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(model, load_state_dict(folder), source=folder, dtype=torch.float32, device="cpu")
    return model


def assert_refused(folder, *named: str, kind=InputError) -> None:
    with pytest.raises(kind) as error:
        load(folder)
    message = str(error.value)
    assert all(name in message for name in (str(folder), *named)), message
    assert len(message.splitlines()) == 1


def odd_tensors() -> dict[str, object]:
    return {
        "sparse": torch.eye(2).to_sparse(),
        "sparse-csr": torch.eye(2).to_sparse_csr(),
        "meta": torch.zeros(2, 2, device="meta"),
        "quantised": torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
    }


@pytest.mark.filterwarnings("ignore")  # torch warns when such tensors are made
@pytest.mark.parametrize("kind", ["sparse", "sparse-csr", "meta", "quantised", "nested"])
def test_bin_of_tensors_without_values(tmp_path, kind):
    torch.save({KEY: odd_tensors()[kind]}, tmp_path / f"{STEM}.bin")
    assert_refused(tmp_path, f"{STEM}.bin", "save the model as safetensors")


@pytest.mark.parametrize("key", [1, None, ("a", "b"), b"layer.weight", 1.5])
def test_bin_of_keys_that_are_not_strings(tmp_path, key):
    torch.save({KEY: torch.eye(2), key: torch.eye(2)}, tmp_path / f"{STEM}.bin")
    assert_refused(tmp_path, f"other than named plain tensors: {key}")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("extension", ["bin", "safetensors"])
def test_tensors_that_are_not_real(tmp_path, extension, dtype):
    save = torch.save if extension == "bin" else save_file
    save({KEY: torch.zeros(2, 2, dtype=dtype)}, tmp_path / f"{STEM}.{extension}")
    assert_refused(tmp_path, f"not floating point: {KEY} ({dtype})")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8(tmp_path, dtype):
    weight = torch.tensor([[0.5, -1.0], [2.0, 0.0]])
    save_file({KEY: weight.to(dtype)}, tmp_path / f"{STEM}.safetensors")
    assert torch.equal(load(tmp_path).layer.weight, weight)
    weight[1, 1] = float("nan")
    save_file({KEY: weight.to(dtype)}, tmp_path / f"{STEM}.safetensors")
    assert_refused(tmp_path, f"NaN or infinity in {KEY}", kind=NonFiniteError)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="an older torch")
def test_float4_of_two_numbers_in_each(tmp_path):
    packed = torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({KEY: packed}, tmp_path / f"{STEM}.bin")
    assert_refused(tmp_path, KEY)


def test_bin_of_parameters(tmp_path):
    torch.save({KEY: nn.Parameter(torch.eye(2))}, tmp_path / f"{STEM}.bin")
    weight = load(tmp_path).layer.weight
    assert torch.equal(weight, torch.eye(2)) and weight.is_leaf and not weight.requires_grad


def test_positions_that_old_checkpoints_keep_are_passed_over(tmp_path):
    save_file({KEY: torch.eye(2), "embeddings.position_ids": torch.arange(3)}, tmp_path / f"{STEM}.safetensors")
    assert torch.equal(load(tmp_path).layer.weight, torch.eye(2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_warning_of_torch_does_not_precede_the_line(tmp_path):
    torch.save({KEY: odd_tensors()["quantised"]}, tmp_path / f"{STEM}.bin")
    code = """if True:
        import sys
        from fastdiff.checkpoints.weights import load_state_dict
        try:
            load_state_dict(sys.argv[1])
        except ValueError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert "named plain tensors" in done.stdout and done.stderr == ""
