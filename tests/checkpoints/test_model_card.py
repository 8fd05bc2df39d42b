"""ModelCard: the contents of a model folder's JSON files."""

import json
import shutil
from pathlib import Path

import diffusers
import pytest

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.configs.dit import DiTTransformer2DConfig
from fastdiff.checkpoints.configs.unet2d import UNet2DConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from tests.support.timing import at_once


@pytest.fixture
def folder(tmp_path):
    """A copy of a bundled model's JSON files. `edit(file, key=value)` changes a key; None removes it."""

    def copy(name: str = "emoji64-dit") -> Path:
        shutil.copytree(
            hub.bundled_models()[name], tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "fastdiff.json")
        )
        return tmp_path / "m"

    return copy


@pytest.fixture
def of_prompts(text_folder, tmp_path):
    """A copy of the JSON files of a tiny text pipeline, sd1, sd2 or sdxl. Change them with `edit`."""

    def copy(kind: str) -> Path:
        return shutil.copytree(text_folder(kind), tmp_path / kind, ignore=shutil.ignore_patterns("*.safetensors"))

    return copy


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    ("name", "part", "config"),
    [("emoji64", "unet", UNet2DConfig), ("emoji64-dit", "transformer", DiTTransformer2DConfig)],
)
def test_bundled_models(name, part, config):
    card = ModelCard.read(name, hub.bundled_models()[name])
    assert (card.name, card.denoiser.name, type(card.config)) == (name, part, config)
    assert (card.scheduler, card.num_train_timesteps, card.scale, card.size) == ("ddim", 1000, 1, (64, 64))
    assert card.revision is None
    assert card.labels == list(range(card.info.null_label))
    assert [card.label_name(label) for label in card.labels] == list(card.info.labels)
    for group in card.info.label_groups:
        assert card.choices_name(card.info.label_choices(group)) == group


def test_a_folder_without_configs_has_no_card(tmp_path):
    with pytest.raises(InputError, match=r"model_index\.json does not exist"):
        ModelCard.read("x", tmp_path)


def test_labels_without_names_are_listed_by_number(folder):
    root = folder()
    edit(root / "model_index.json", id2label={"0": "cat", "7": "dog", "99999": "beyond"})
    card = ModelCard.read("x", root)
    assert card.labels == list(range(card.config.null_label))
    assert [card.label_name(label) for label in card.labels[:9]] == ["cat", 1, 2, 3, 4, 5, 6, "dog", 8]
    assert card.choices_name((7,)) == "dog" and card.choices_name((8,)) == 8
    assert card.label_name(None) is None


def test_labels_of_a_list_in_fastdiff_json_are_those_it_holds(folder):
    root = folder()
    (root / "fastdiff.json").write_text(json.dumps({"labels": ["cat", None, "dog"]}))
    assert ModelCard.read("x", root).labels == [0, 1, 2]


def test_a_vae_multiplies_the_size(folder):
    root = folder()
    edit(root / "model_index.json", vae=["diffusers", "AutoencoderKL"])
    (root / "vae").mkdir()
    config = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    (root / "vae" / "config.json").write_text(json.dumps(config | {"block_out_channels": [8, 8, 8, 8]}))
    card = ModelCard.read("x", root)
    assert (card.scale, card.size, card.size_factor) == (8, (512, 512), 8 * card.config.patch_size)


@pytest.mark.parametrize(("kind", "layers", "most"), [("sd1", (3,), 3), ("sdxl", (3, 3), 2)])
def test_how_many_layers_of_text_encoders_may_be_left_out(text_folder, kind, layers, most):
    card = ModelCard.read(kind, text_folder(kind))
    assert (card.text_layers, card.most_clip_skip) == (layers, most)


def test_a_text_encoder_without_config_is_no_model(text_folder, tmp_path):
    folder = shutil.copytree(text_folder("sdxl"), tmp_path / "sdxl")
    (folder / "text_encoder_2" / "config.json").unlink()
    with pytest.raises(InputError, match=r"text_encoder_2/config\.json does not exist"):
        ModelCard.read("sdxl", folder)


@pytest.mark.parametrize(
    ("pipeline", "scheduler", "expected"),
    [
        pytest.param("DDPMPipeline", "DDPMScheduler", "ddpm", id="ddpm"),
        pytest.param("DDPMPipeline", "DDIMScheduler", "ddim", id="ddpm-pipeline-of-ddim"),
        pytest.param("DDPMPipeline", "EDMEulerScheduler", None, id="unknown"),
        pytest.param("DDIMPipeline", "PNDMScheduler", "ddim", id="ddim-whatever-the-folder-holds"),
    ],
)
def test_scheduler(folder, pipeline, scheduler, expected):
    root = folder("emoji64")
    edit(root / "model_index.json", _class_name=pipeline, scheduler=["diffusers", scheduler])
    assert ModelCard.read("x", root).scheduler == expected


@pytest.mark.parametrize("count", [0, 10.0, "1000", True, [1000]], ids=repr)
def test_a_wrong_number_of_training_steps_is_one_line(folder, count):
    root = folder()
    edit(root / "scheduler" / "scheduler_config.json", num_train_timesteps=count)
    with pytest.raises(InputError, match=r"scheduler_config\.json: num_train_timesteps: .* is not a whole number"):
        ModelCard.read("x", root)


def test_more_training_steps_than_any_model_has_are_refused(folder):
    root = folder()
    edit(root / "scheduler" / "scheduler_config.json", num_train_timesteps=10**9)
    with pytest.raises(InputError, match=r"num_train_timesteps: 1000000000 is not .* to 100000"):
        ModelCard.read("x", root)


@pytest.mark.parametrize(
    ("name", "part", "options"),
    [
        ("emoji64", "unet", {"num_class_embeds": 10**9}),
        ("emoji64-dit", "transformer", {"num_embeds_ada_norm": 10**9}),
        ("emoji64-dit", "transformer", {"num_layers": 10**9}),
        ("emoji64", "unet", {"sample_size": 10**9}),
    ],
)
def test_a_config_without_end_is_refused_at_once(folder, name, part, options):
    root = folder(name)
    edit(root / part / "config.json", **options)
    message = rf"config\.json: {next(iter(options))}: 1000000000 is not .* to [0-9]+"
    with at_once(0.5), pytest.raises(InputError, match=message):
        ModelCard.read("x", root)


def test_labels_and_groups_by_the_thousand_are_checked_in_no_time(folder):
    root = folder()
    edit(root / "transformer" / "config.json", num_embeds_ada_norm=50_000)
    names = [f"label {i}" for i in range(50_000)]
    groups = {f"group {i}": names[i : i + 10] for i in range(5_000)} | {"all": names}
    (root / "fastdiff.json").write_text(json.dumps({"labels": names, "label_groups": groups}))
    with at_once(5):
        card = ModelCard.read("x", root)
        assert card.choices_name(tuple(range(4_999, 5_009))) == "group 4999"


def test_the_revision_is_the_commit_of_a_snapshot(folder, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    folder().rename(snapshot)
    assert ModelCard.read("a/b", snapshot).revision == "0123abcd"


def test_cards_of_text_pipelines(of_prompts):
    cards = {kind: ModelCard.read("x", of_prompts(kind)) for kind in ("sd1", "sd2", "sdxl")}
    assert all(card.reads_text and type(card.config) is UNet2DConditionConfig for card in cards.values())
    assert [card.scheduler for card in cards.values()] == ["pndm", "ddim", "euler"]
    assert [len(card.tokenizers) for card in cards.values()] == [1, 1, 2]
    assert {(card.scale, card.size, card.size_factor, card.notice) for card in cards.values()} == {
        (2, (16, 16), 2, None)
    }


def test_parts_that_are_not_run_are_told_in_one_line(of_prompts):
    root = of_prompts("sd1")
    clip = ["transformers", "CLIPImageProcessor"]
    edit(root / "model_index.json", safety_checker=["stable_diffusion", "Any"], feature_extractor=clip)
    assert ModelCard.read("x", root).notice == "x: its safety_checker and feature_extractor will not be run"


@pytest.mark.parametrize(
    ("kind", "version", "size", "expected"),
    [
        pytest.param("sd1", "0.6.0", 8, 128, id="old"),
        pytest.param("sd1", "0.0.4", 32, 128, id="very-old"),
        pytest.param("sd1", "0.8.0.dev0", 32, 128, id="old-from-source"),
        pytest.param("sd1", "0.6.0", 96, 192, id="old-and-large"),
        pytest.param("sd1", "0.6.0", [32, 48], None, id="old-of-two-sides"),
        pytest.param("sd1", "0.9.0", 32, 64, id="not-so-old"),
        pytest.param("sd1", "0.9.0.dev0", 32, 64, id="not-so-old-from-source"),
        pytest.param("sd1", "0.10.2", 32, 64, id="newer"),
        pytest.param("sd1", None, 32, 64, id="no-version"),
        pytest.param("sdxl", "0.6.0", 32, 64, id="another-pipeline"),
    ],
)
def test_the_sample_size_of_old_stable_diffusion(of_prompts, kind, version, size, expected):
    """StableDiffusionPipeline raises a sample_size under 64 to 64 in U-Nets saved by diffusers before 0.9."""
    root = of_prompts(kind)
    edit(root / "unet" / "config.json", _diffusers_version=version, sample_size=size)
    side = (96, 64) if expected is None else (expected, expected)  # (width, height)
    assert ModelCard.read("x", root).size == side


@pytest.mark.filterwarnings("ignore::FutureWarning")  # diffusers warns that it corrects the config
@pytest.mark.parametrize("size", [32, 96])
def test_the_sample_size_is_that_of_the_live_pipeline(of_prompts, size):
    root = of_prompts("sd1")
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "scheduler", "safety_checker", "feature_extractor"))
    for version in ("0.8.0", "0.8.1.dev0", "0.9.0", "0.9.0.dev0", "0.10.0", "0.20.1"):
        edit(root / "unet" / "config.json", _diffusers_version=version, sample_size=size)
        config = json.loads((root / "unet" / "config.json").read_text())
        unet = diffusers.UNet2DConditionModel.from_config(config)
        pipe = diffusers.StableDiffusionPipeline(**parts, unet=unet, requires_safety_checker=False)
        assert ModelCard.read("x", root).config.sample_size == pipe.unet.config.sample_size, version


def test_an_empty_prompt_is_zeros_where_sdxl_says_so(of_prompts):
    root = of_prompts("sdxl")
    for said, expected in ((True, True), (False, False), (None, True)):  # None: the key is missing
        edit(root / "model_index.json", force_zeros_for_empty_prompt=said)
        assert ModelCard.read("x", root).zeros_for_no_prompt is expected
    edit(root / "model_index.json", force_zeros_for_empty_prompt="yes")
    with pytest.raises(InputError, match=r"model_index\.json: force_zeros_for_empty_prompt: 'yes' is not"):
        ModelCard.read("x", root)
    assert not ModelCard.read("x", of_prompts("sd1")).zeros_for_no_prompt
