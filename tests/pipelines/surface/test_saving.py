"""save_pretrained of a pipeline: diffusers and fastdiff read it back, with weights equal in bits."""

import json

import diffusers
import pytest
import torch
import transformers

import fastdiff
from fastdiff import InputError, Pipeline
from fastdiff.text.tokenizer import CLIPTokenizer
from tests.support.text_pipelines import KINDS, MERGED, save_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWN = {"num_inference_steps": 2, "output_type": "pt"}


def index_of(folder):
    return json.loads((folder / "model_index.json").read_text())


def assert_same_weights(found, expected):
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype for key in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_reads_a_text_pipeline_back(kind, text_pipes, text_folder, tmp_path):
    theirs, ours = text_pipes(kind)
    ours.save_pretrained(tmp_path)
    index, expected = index_of(tmp_path), index_of(text_folder(kind))
    assert {key: index.get(key) for key in expected} == expected
    back = type(theirs).from_pretrained(tmp_path)
    assert type(back) is type(theirs)
    for name, part in theirs.components.items():
        if isinstance(part, torch.nn.Module):
            assert_same_weights(getattr(back, name), part)
        if name.startswith("tokenizer"):
            texts = ["a cat", "The photo of!! ASTRONAUT's <|endoftext|> é", " ".join(MERGED)]
            assert getattr(back, name)(texts).input_ids == part(texts).input_ids
            assert getattr(back, name).pad_token == part.pad_token
    assert {**back.scheduler.config}.items() >= {
        key: value for key, value in theirs.scheduler.config.items() if not key.startswith("_")
    }.items()
    again = Pipeline.from_pretrained(tmp_path, device="cpu")
    assert torch.equal(again("a cat", **DRAWN).images, ours("a cat", **DRAWN).images)


def test_weights_keep_their_dtype_and_a_variant_its_name(text_folder, tmp_path):
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu", dtype=torch.float16)
    pipe.save_pretrained(str(tmp_path), safe_serialization=True, variant="fp16", max_shard_size="1MB")
    assert all(".fp16" in file.name for file in tmp_path.glob("*/*.safetensors"))
    back = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path, variant="fp16", dtype=torch.float16)
    again = Pipeline.from_pretrained(tmp_path, device="cpu", variant="fp16", torch_dtype=torch.float16)
    assert back.unet.dtype == again.dtype == torch.float16
    for name, parameter in again.unet.named_parameters():
        assert torch.equal(parameter, pipe.unet.get_parameter(name))


@pytest.mark.parametrize("name", [pytest.param("emoji64", marks=pytest.mark.slow), "emoji64-dit"])
def test_labels_and_defaults_are_kept(name, tmp_path):
    pipe = Pipeline.from_pretrained(name, device="cpu")
    pipe.save_pretrained(tmp_path)
    again = Pipeline.from_pretrained(tmp_path, device="cpu")
    assert again.info == pipe.info and again.diffusers_class == pipe.diffusers_class
    options = {"class_labels": 3, "seed": 5} | DRAWN
    assert torch.equal(again(**options).images, pipe(**options).images)
    theirs = getattr(diffusers, type(pipe.denoiser).__name__).from_pretrained(tmp_path / pipe.denoiser.part.name)
    assert_same_weights(theirs, type(theirs).from_pretrained(pipe._card.folder / pipe.denoiser.part.name))


def test_diffusers_reads_a_pipeline_of_pictures_back(tmp_path, randomise):
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "add_attention": False}
    options = {"sample_size": 8, "block_out_channels": (32, 32), **blocks}
    for scheduler, name in [(fastdiff.DDPMScheduler(), "DDPMPipeline"), (fastdiff.DDIMScheduler(), "DDIMPipeline")]:
        pipe = fastdiff.LabelPipeline(randomise(fastdiff.UNet2DModel.from_config(options)), scheduler)
        pipe.save_pretrained(tmp_path / name)
        assert not (tmp_path / name / "fastdiff.json").exists()
        back = getattr(diffusers, name).from_pretrained(tmp_path / name)
        run = {"num_inference_steps": 2, "output_type": "np"}
        theirs, ours = (each(generator=torch.Generator().manual_seed(0), **run).images for each in (back, pipe))
        assert abs(theirs - ours).max() < 1e-4


def test_another_scheduler_is_kept(tmp_path):
    """DDIMPipeline would replace it by DDIM."""
    pipe = Pipeline.from_pretrained("emoji64", device="cpu", scheduler="euler")
    assert pipe.diffusers_class == "DDIMPipeline" and pipe.config["_class_name"] == "DDPMPipeline"
    pipe.save_pretrained(tmp_path)
    assert pipe.info.scheduler == "ddim"  # the model's default, which would replace it too
    assert Pipeline.from_pretrained(tmp_path, device="cpu").scheduler_name == "euler"


def test_planners_are_read_back(save_value_guided, save_planner, tmp_path):
    for saved in (save_value_guided, lambda: save_planner("DDPM")):
        pipe = Pipeline.from_pretrained(saved()[1], device="cpu")
        pipe.save_pretrained(tmp_path / "again")
        again = Pipeline.from_pretrained(tmp_path / "again", device="cpu")
        assert again.components.keys() == pipe.components.keys()
        options = {"horizon": 16, "num_inference_steps": 2}
        assert (again(**options).trajectories == pipe(**options).trajectories).all()


def test_config_says_what_diffusers_says(text_pipes):
    for kind in ("sd1", "sdxl"):
        theirs, ours = text_pipes(kind)
        for key, value in theirs.config.items():
            if key not in ("_diffusers_version", "_name_or_path"):
                assert ours.config[key] == value, key
        assert ours.config._class_name == type(theirs).__name__ == ours.diffusers_class
        assert ours.parameters.keys() >= {"requires_safety_checker" if kind == "sd1" else "add_watermarker"}
    assert ours.name_or_path == ours.name


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"save_directory": 3}, "save_directory: 3 is neither a string nor a path"),
        ({"push_to_hub": True}, "push_to_hub: "),
        ({"safe_serialization": False}, ".*only safetensors are written"),
        ({"use_flashpack": True}, "use_flashpack: only safetensors are written"),
        ({"variant": "../x"}, "variant: '../x' is not a variant"),
        ({"max_shard_size": "big"}, "max_shard_size: 'big' is not a size"),
        ({"strength": 3}, "strength: save_pretrained has no such option"),
    ],
)
def test_what_cannot_be_saved_is_one_line(options, line, text_pipes, tmp_path):
    with pytest.raises(InputError, match=f"^{line}") as error:
        text_pipes("sd1")[1].save_pretrained(**{"save_directory": tmp_path / "x"} | options)
    assert "\n" not in str(error.value)


def test_a_file_is_no_folder(text_pipes, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file; give a folder"):
        text_pipes("sd1")[1].save_pretrained(tmp_path / "file")


def test_parts_that_no_class_of_diffusers_has_are_refused(tmp_path, randomise):
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "add_attention": False}
    options = {"sample_size": 8, "block_out_channels": (32, 32), "in_channels": 4, "out_channels": 4, **blocks}
    vae = fastdiff.AutoencoderKL.from_config({})
    pipe = fastdiff.LabelPipeline(fastdiff.UNet2DModel.from_config(options), fastdiff.DDPMScheduler(), vae=vae)
    with pytest.raises(InputError, match=r"^vae: a DDPMPipeline has no such part, so it cannot be saved"):
        pipe.save_pretrained(tmp_path)


@pytest.mark.parametrize("layout", ["two-files", "one-file", "both", "old"])
@pytest.mark.parametrize("pad", ["<|endoftext|>", "!"])
def test_tokenizers_are_read_back(layout, pad, tmp_path):
    ours = CLIPTokenizer(save_tokenizer(tmp_path / "first", layout, pad))
    ours.save_pretrained(tmp_path / "second")
    again, theirs = CLIPTokenizer(tmp_path / "second"), transformers.CLIPTokenizer.from_pretrained(tmp_path / "second")
    live = CLIPTokenizer.like(theirs)
    assert again.length == live.length == ours.model_max_length
    for text in ("a cat", "The PHOTO of!! <|endoftext|> it's é 12", " ".join(MERGED) * 3):
        assert again(text) == live(text) == ours(text)
        ids = theirs(text, padding="max_length", max_length=ours.length, truncation=True).input_ids
        assert tuple(ids) == ours(text).ids
