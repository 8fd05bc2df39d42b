"""Weights of single files equal diffusers' conversion, bit for bit."""

import copy

import diffusers
import pytest
import torch

import fastdiff
from fastdiff.checkpoints.weights import diffusers_state
from fastdiff.errors import InputError, NonFiniteError
from fastdiff.models.clip import CLIPTextModel, CLIPTextModelWithProjection
from tests.checkpoints.single_files import ldm

PIPELINES = {
    "sd1": diffusers.StableDiffusionPipeline,
    "sd2": diffusers.StableDiffusionPipeline,
    "sdxl": diffusers.StableDiffusionXLPipeline,
}
ENCODERS = {"sd1": ["text_encoder"], "sd2": ["text_encoder"], "sdxl": ["text_encoder", "text_encoder_2"]}


def state_of(model) -> dict[str, torch.Tensor]:
    state = diffusers_state(model) if isinstance(model, fastdiff.models.model.Model) else model.state_dict()
    return {key.removeprefix("text_model."): tensor for key, tensor in state.items()}


def assert_same(ours, theirs) -> None:
    ours, theirs = state_of(ours), state_of(theirs)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def ours_of(file, folder, **options):
    return fastdiff.Pipeline.from_single_file(file, config=folder, device="cpu", **options)


def theirs_of(kind, file, folder, **options):
    diffusers.utils.logging.disable_progress_bar()
    return PIPELINES[kind].from_single_file(str(file), config=str(folder), local_files_only=True, **options)


@pytest.mark.filterwarnings("ignore")  # diffusers' own
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, id=f"{kind}-{dtype}", marks=pytest.mark.slow if dtype and i % 3 != j else [])
        for i, dtype in enumerate([None, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
        for j, kind in enumerate(PIPELINES)  # make test runs each dtype with one kind, in turn
    ],
)
def test_every_part_of_a_whole_file_equals_diffusers(kind, dtype, saved, tmp_path):
    _, pipe, folder, file = saved(kind)
    if dtype is not None:
        file = ldm.save(ldm.whole(kind, pipe), tmp_path / "model.safetensors", dtype=dtype)
    ours, theirs = ours_of(file, folder), theirs_of(kind, file, folder, torch_dtype=torch.float32)
    for name in ["unet", "vae", *ENCODERS[kind]]:
        assert_same(getattr(ours, name), getattr(theirs, name))
        if dtype is None:
            assert_same(getattr(ours, name), getattr(pipe, name))


@pytest.mark.parametrize("kind", PIPELINES)
def test_encoders_alone_equal_the_encoders_of_the_whole_file(kind, saved, tmp_path):
    _, pipe, folder, _ = saved(kind)
    for name in ENCODERS[kind]:
        encoder = getattr(pipe, name)
        is_clip = name == "text_encoder" and kind != "sd2"
        state = ldm.clip(encoder) if is_clip else ldm.open_clip(encoder, last_layer=kind == "sd2")
        path = ldm.save(state, tmp_path / f"{name}.safetensors")
        model = CLIPTextModel if name == "text_encoder" else CLIPTextModelWithProjection
        alone = model.from_single_file(path, config=folder)
        assert_same(alone, encoder)
        assert_same(alone, getattr(ours_of(saved(kind).file, folder), name))
        half = ldm.save(state, tmp_path / f"{name}-half.safetensors", dtype=torch.float16)
        assert_same(model.from_single_file(half, config=folder), copy.deepcopy(encoder).half().float())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PIPELINES)
def test_a_unet_alone_and_a_vae_alone_equal_diffusers(kind, saved, tmp_path):
    _, pipe, folder, _ = saved(kind)
    unet, vae = ldm.ldm_unet(pipe.unet), ldm.ldm_vae(pipe.vae)
    files = {
        "unet": ldm.save(ldm.prefixed("model.diffusion_model.", unet), tmp_path / "unet.safetensors"),
        "vae": ldm.save(vae, tmp_path / "vae.safetensors"),
    }
    for name, path in files.items():
        kind_of = getattr(diffusers, type(getattr(pipe, name)).__name__)
        theirs = kind_of.from_single_file(str(path), config=str(folder), subfolder=name, local_files_only=True)
        assert_same(getattr(fastdiff, kind_of.__name__).from_single_file(path, config=folder), theirs)
    bare = ldm.save(unet, tmp_path / "bare.safetensors")
    ours = fastdiff.UNet2DConditionModel.from_single_file(bare, config=folder / "unet", sample_size=24)
    assert_same(ours, pipe.unet)
    assert ours.config.sample_size == 24


@pytest.mark.filterwarnings("ignore")
def test_parts_of_other_dtypes_in_one_file(saved, tmp_path):
    """As in merges: the U-Net in fp16, the VAE in float32, the text encoder in bfloat16."""
    _, pipe, folder, _ = saved("sd1")
    dtypes = {"model.diffusion_model.": torch.float16, "cond_stage_model.": torch.bfloat16}
    state = {
        key: tensor.to(next((dtype for prefix, dtype in dtypes.items() if key.startswith(prefix)), tensor.dtype))
        for key, tensor in ldm.whole("sd1", pipe).items()
        if tensor.is_floating_point()
    }
    file = ldm.save(state, tmp_path / "model.safetensors")
    ours, theirs = ours_of(file, folder), theirs_of("sd1", file, folder, torch_dtype=torch.float32)
    for name in ("unet", "vae", "text_encoder"):
        assert_same(getattr(ours, name), getattr(theirs, name))
    assert_same(ours.vae, pipe.vae)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sd1", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sd2", "sdxl"))])
def test_moving_averages_are_taken_only_where_asked(kind, saved, tmp_path):
    _, pipe, folder, file = saved(kind)
    state = ldm.prefixed("model.diffusion_model.", ldm.ldm_unet(pipe.unet))
    ema = {"model_ema." + key.removeprefix("model.").replace(".", ""): 2 * tensor for key, tensor in state.items()}
    path = ldm.save(state | ema, tmp_path / "unet.safetensors")
    plain = fastdiff.UNet2DConditionModel.from_single_file(path, config=folder)
    averaged = fastdiff.UNet2DConditionModel.from_single_file(path, config=folder, extract_ema=True)
    theirs = diffusers.UNet2DConditionModel.from_single_file(
        str(path), config=str(folder), subfolder="unet", local_files_only=True, extract_ema=True
    )
    assert_same(plain, pipe.unet)
    assert_same(averaged, theirs)
    whole = ldm.save(ldm.whole(kind, pipe) | ema, tmp_path / "whole.safetensors")
    assert_same(ours_of(whole, folder).unet, pipe.unet)
    of_whole = ours_of(whole, folder, extract_ema=True)
    assert_same(of_whole.unet, theirs)
    assert_same(of_whole.vae, pipe.vae)
    with pytest.raises(InputError, match="no moving averages"):
        ours_of(file, folder, extract_ema=True)
    del ema["model_ema." + "diffusion_modeltime_embed0weight"]
    path = ldm.save(state | ema, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"has no model_ema\.diffusion_modeltime_embed0weight"):
        fastdiff.UNet2DConditionModel.from_single_file(path, config=folder, extract_ema=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("model.diffusion_model.out.2.bias"), "missing: conv_out.bias"),
        (lambda state: state.update({"model.diffusion_model.more": torch.ones(2)}), "unknown: more"),
        (
            lambda state: state.update({"model.diffusion_model.out.2.bias": torch.ones(2)}),
            r"of another shape: conv_out.bias \(2,\) for \(4,\)",
        ),
        (
            lambda state: state.update({f"model.diffusion_model.more.{i}": torch.ones(2) for i in range(5000)}),
            "unknown: more.0, more.1, more.10 and 4997 more",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(change, said, saved, tmp_path):
    _, pipe, folder, _ = saved("sd1")
    state = ldm.whole("sd1", pipe)
    change(state)
    path = ldm.save(state, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"^[^\n]*its unet does not fit [^\n]*{said}[^\n]*--config") as error:
        ours_of(path, folder)
    assert len(str(error.value)) < 900


def test_nan_in_a_file_is_reported(saved, tmp_path):
    _, pipe, folder, _ = saved("sd1")
    state = ldm.whole("sd1", pipe)
    state["model.diffusion_model.out.2.bias"] = torch.full((4,), torch.nan)
    with pytest.raises(NonFiniteError, match=r"NaN or infinity in conv_out\.bias"):
        ours_of(ldm.save(state, tmp_path / "model.safetensors"), folder)


def test_another_layout_than_the_configs_is_refused(saved, tmp_path):
    folder = saved("sd1").folder
    with pytest.raises(InputError, match=r"model\.safetensors is a checkpoint of Stable Diffusion XL, but"):
        ours_of(saved("sdxl").file, folder)
    with pytest.raises(InputError, match=r"holds no VAE|holds no U-Net"):
        fastdiff.UNet2DConditionModel.from_single_file(
            ldm.save(ldm.ldm_vae(saved("sd1").pipe.vae), tmp_path / "vae.safetensors"), config=folder
        )
