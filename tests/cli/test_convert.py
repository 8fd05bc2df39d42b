"""`fastdiff convert`: a single file becomes a folder of diffusers, or nothing appears."""

import diffusers
import pytest
import torch

from tests.checkpoints.single_files import headers, ldm


@pytest.mark.filterwarnings("ignore")  # diffusers' own
@pytest.mark.parametrize("kind", ["sd1", "sdxl", "sd1-inpainting", "sdxl-refiner"])
def test_diffusers_reads_the_folder_with_the_same_weights(here, tmp_path, kind):
    _, pipe, folder, _ = ldm.save_pipeline(kind, tmp_path)
    ldm.save(ldm.whole(kind, pipe) | {"v_pred": torch.empty(0)}, tmp_path / "half.safetensors", dtype=torch.float16)
    done = here("convert", "half.safetensors", "--out", "out", "--config", folder)
    assert done.returncode == 0, done.stderr
    theirs = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float16)
    assert type(theirs) is type(pipe)
    encoders = [name for name in ("text_encoder", "text_encoder_2") if getattr(pipe, name, None) is not None]
    for name in ("unet", "vae", *encoders):
        ours, wanted = getattr(theirs, name).state_dict(), getattr(pipe, name).state_dict()
        assert [key for key in wanted if not torch.equal(ours[key], wanted[key].half())] == []
    assert theirs.scheduler.config.prediction_type == "v_prediction"
    words, their_words = (each.tokenizer or each.tokenizer_2 for each in (pipe, theirs))
    assert their_words("a cat").input_ids == words("a cat").input_ids


def test_what_fails_leaves_nothing(here, tmp_path, refused, monkeypatch, capfd):
    _, _, folder, file = ldm.save_pipeline("sd1", tmp_path)
    (tmp_path / "there").mkdir()
    capfd.readouterr()  # the progress of saving
    refused(here("convert", file, "--out", "there", "--config", folder), "there exists; give the name of a new folder")
    headers.write(tmp_path / "lora.safetensors", {"lora_unet_mid_block.lora_up.weight": (2, 2)})
    refused(here("convert", "lora.safetensors", "--out", "out"), "is a LoRA")
    names = sorted(path.name for path in tmp_path.iterdir())

    def failing(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastdiff.models.clip.CLIPTextModel.save_pretrained", failing)
    done = here("convert", file, "--out", "out", "--config", folder)
    assert done.returncode != 0 and "No space left" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == names
