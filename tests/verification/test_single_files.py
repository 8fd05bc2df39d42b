"""`fastdiff verify` of single files: diffusers reads the file itself, with its own names of the tensors."""

import json

import pytest
import torch

from fastdiff import cli
from fastdiff.checkpoints.single_files import keys
from tests.checkpoints.single_files import ldm

pytestmark = pytest.mark.filterwarnings("ignore")  # diffusers' own


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return ldm.save_pipeline("sd1", tmp_path_factory.mktemp("sd1"))


def verify(capsys, file, folder, *more) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["verify", str(file), "--config", str(folder), "--device", "cpu", *map(str, more)])
    return code, *capsys.readouterr()


def rows(out: str) -> dict[str, dict]:
    return {row["what"]: row for row in json.loads(out)["comparisons"]}


def test_every_part_of_a_file_agrees(saved, tmp_path, capsys):
    """The empty keys change diffusers' scheduler too, and another VAE replaces both VAEs."""
    _, pipe, folder, _ = saved
    hints = {"v_pred": torch.empty(0), "ztsnr": torch.empty(0)}
    file = ldm.save(ldm.whole("sd1", pipe) | hints, tmp_path / "model.safetensors")
    vae = ldm.save({key: 1.1 * each for key, each in ldm.ldm_vae(pipe.vae).items()}, tmp_path / "vae.safetensors")
    code, out, err = verify(capsys, file, folder, "--vae", vae, "--json")
    assert (code, err) == (0, "")
    parts = [
        "tokenizer ids",
        "text_encoder hidden_states",
        "U-Net t=999",
        "VAE decode",
        "4 steps of ddim, guidance 7.5",
    ]
    assert set(parts) <= rows(out).keys()


SLOW = ["sd1-inpainting", "sd2", "sd2-base", "sdxl", "sd2-inpainting", "sdxl-inpainting"]


@pytest.mark.parametrize("kind", ["sdxl-refiner", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_other_kinds_agree(tmp_path, capsys, kind):
    """SD 2-base differs from SD 2 in what it predicts. Another VAE is scaled as the model's kind asks."""
    _, pipe, folder, file = ldm.save_pipeline(kind.removesuffix("-base"), tmp_path)
    if kind == "sd2-base":
        path = folder / "scheduler" / "scheduler_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"prediction_type": "epsilon"}))
    vae = ldm.save({key: 1.1 * each for key, each in ldm.ldm_vae(pipe.vae).items()}, tmp_path / "vae.safetensors")
    for more in ([], ["--vae", vae]):
        code, out, err = verify(capsys, file, folder, *more)
        assert (code, err) == (0, "") and out.endswith("within tolerance\n")
    assert cli.main(["verify", str(folder), "--device", "cpu"]) == 0


def test_a_wrong_name_of_a_tensor_is_found(saved, capsys, monkeypatch):
    _, _, folder, file = saved
    monkeypatch.setitem(keys._VAE_ATTENTION, "q", "to_k")
    monkeypatch.setitem(keys._VAE_ATTENTION, "k", "to_q")
    code, out, _ = verify(capsys, file, folder, "--json")
    failed = [what for what, row in rows(out).items() if not row["passed"]]
    assert code == 1 and failed == ["VAE decode", "VAE encode", "4 steps of pndm, guidance 7.5"]


def test_another_vae_of_a_folder_is_compared(saved, tmp_path, capsys):
    _, pipe, folder, _ = saved
    vae = ldm.save({key: 1.1 * each for key, each in ldm.ldm_vae(pipe.vae).items()}, tmp_path / "vae.safetensors")
    capsys.readouterr()
    assert cli.main(["verify", str(folder), "--vae", str(vae), "--device", "cpu"]) == 0


def test_the_precision_of_a_file_is_measured(saved, capsys):
    _, _, folder, file = saved
    code, out, _ = verify(capsys, file, folder, "--precision", "int8", "--json")
    whats = {row["what"].partition(" ")[0] for row in json.loads(out)["differences"]}
    assert code == 0 and whats == {"text_encoder", "unet", "4"}


def test_nan_in_a_weight_is_one_line_that_names_the_tensor(saved, tmp_path, capsys):
    _, pipe, folder, _ = saved
    state = ldm.whole("sd1", pipe) | {"model.diffusion_model.out.2.bias": torch.full((4,), torch.nan)}
    code, out, err = verify(capsys, ldm.save(state, tmp_path / "model.safetensors"), folder)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "NaN or infinity in conv_out.bias" in err
