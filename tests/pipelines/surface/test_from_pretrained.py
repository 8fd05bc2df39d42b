"""Pipeline.from_pretrained takes the options of diffusers' DiffusionPipeline.from_pretrained, and parts."""

import inspect
import json
import shutil

import diffusers
import pytest
import torch
from safetensors.torch import load_file

import fastdiff
from fastdiff import InputError, Pipeline
from fastdiff.checkpoints import hub, loading
from fastdiff.checkpoints.weights import diffusers_keys
from fastdiff.models.live import model_like
from fastdiff.pipelines import giving
from tests.parity.image_prompts.adapters import ip_adapter, nested
from tests.support.text_pipelines import KINDS, text_pipeline, tiny_unet, tiny_vae

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWN = {"num_inference_steps": 2, "output_type": "pt"}
TAKEN = {  # as a program for diffusers passes them
    "torch_dtype": torch.float32,
    "use_safetensors": True,
    "safety_checker": None,
    "feature_extractor": None,
    "requires_safety_checker": False,
    "image_encoder": None,
    "add_watermarker": None,
    "cache_dir": "somewhere",
    "force_download": False,
    "proxies": None,
    "local_files_only": True,
    "token": None,
    "revision": None,
    "variant": None,
    "device_map": "cpu",
    "low_cpu_mem_usage": True,
    "disable_mmap": False,
    "max_memory": None,
    "custom_pipeline": None,
    "output_loading_info": False,
}


def draw(pipe, **options):
    return pipe("a cat", seed=3, **DRAWN | options).images


@pytest.fixture
def ours(text_folder):
    """Load a kind on the CPU."""
    return lambda kind="sd1", **options: Pipeline.from_pretrained(text_folder(kind), device="cpu", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_diffusers_are_taken(kind, text_folder, ours):
    pipe = Pipeline.from_pretrained(pretrained_model_name_or_path=text_folder(kind), **TAKEN)
    assert pipe.device.type == "cpu" and pipe.dtype == torch.float32
    assert torch.equal(draw(pipe), draw(ours(kind)))


def test_every_option_of_diffusers_is_known():
    """The names come from the documentation of diffusers' method, whose signature is **kwargs."""
    text = inspect.getdoc(diffusers.DiffusionPipeline.from_pretrained).partition("Parameters:")[2]
    names = {line.split("(")[0].strip() for line in text.splitlines() if line.startswith("    ") and " (`" in line}
    names = {name for name in names if name.isidentifier()} - {"kwargs"}
    assert len(names) > 15
    own = inspect.signature(Pipeline.from_pretrained).parameters
    known = {*own, *loading.ACCEPTED, *giving.REFUSED, *giving.TAKEN}
    assert sorted(names - known) == []


def test_the_names_of_the_first_argument(text_folder):
    with pytest.warns(DeprecationWarning, match="name_or_path: use pretrained_model_name_or_path"):
        assert Pipeline.from_pretrained(name_or_path=text_folder("sd1"), device="cpu").name
    with pytest.raises(
        InputError, match=r"^pretrained_model_name_or_path: None is neither a string nor a path; bundled: emoji-sd"
    ):
        Pipeline.from_pretrained(device="cpu")
    with pytest.raises(InputError, match=r"^name_or_path: from_pretrained has no such argument"):
        Pipeline.from_pretrained("emoji-sd", name_or_path="emoji-sd", device="cpu")


@pytest.mark.parametrize("name", giving.REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name, ours):
    with pytest.raises(InputError, match=f"^{name}: ") as error:
        ours(**{name: True})
    assert "\n" not in str(error.value)


def test_what_is_left_out_by_none_is_taken(ours):
    assert ours(**dict.fromkeys(giving.REFUSED)).name


WRONG = {
    "dtype": ({"dtype": "half"}, "dtype: 'half' is unknown"),
    "both-dtypes": ({"dtype": "float32", "torch_dtype": torch.float16}, "torch_dtype: it is the older name of dtype"),
    "no-part": ({"torch_dtype": {"clip": torch.float16}}, "dtype: clip is not a part; use default, unet"),
    "safetensors": ({"use_safetensors": 1}, "use_safetensors: 1 is not true or false"),
    "no-bin": ({"use_safetensors": False}, r".* has no diffusion_pytorch_model\.bin; leave use_safetensors out"),
    "map": ({"device": None, "device_map": {"unet": 0}}, "device_map: .* spreads parts over devices; give one"),
    "device-map": ({"device_map": "cpu"}, "device_map: device is also given; leave out one of the two"),
    "no-device": ({"device": "auto", "device_map": "nowhere"}, "device_map: device: 'nowhere' is unknown"),
    "memory": ({"low_cpu_mem_usage": 3}, "low_cpu_mem_usage: 3 is not true or false"),
    "cache": ({"cache_dir": 3}, "cache_dir: 3 is neither a string nor a path"),
    "force": ({"force_download": 3}, "force_download: 3 is not true or false"),
    "local": ({"local_files_only": 3}, "local_files_only: 3 is not true or false"),
    "token": ({"token": 3}, "token: it must be a string or a bool"),
    "unknown": ({"strength": 3}, "strength: from_pretrained has no such argument; leave it out"),
    "part": ({"vae": 3}, "vae: 3 has the wrong type; give a model of fastdiff or of diffusers"),
    "other-part": ({"vae": fastdiff.UNet2DModel}, "vae: .* has the wrong type"),
    "layer": ({"unet": torch.nn.Linear(1, 1)}, "unet: fastdiff does not run a Linear"),
    "no-unet": ({"unet": None}, "unet: a StableDiffusionPipeline needs it; give a UNet2DConditionModel"),
    "no-vae": ({"vae": None}, "vae: None has the wrong type"),
    "transformer": ({"transformer": tiny_vae("sd1")}, "transformer: a StableDiffusionPipeline has no such part"),
    "tokenizer": ({"tokenizer": "a"}, "tokenizer: 'a' has the wrong type; give a CLIPTokenizer"),
    "no-tokenizer": ({"tokenizer": None}, "text_encoder: it needs its tokenizer"),
    "scheduler": ({"scheduler": 3}, "scheduler: int is not a scheduler"),
    "scheduler-class": ({"scheduler": fastdiff.DDIMScheduler}, "scheduler: .* is a class; give an instance or a name"),
    "zeros": ({"force_zeros_for_empty_prompt": 3}, "force_zeros_for_empty_prompt: 3 is not true or false"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_one_line(case, text_folder):
    options, line = WRONG[case]
    with pytest.raises(InputError, match=f"^{line}") as error:
        Pipeline.from_pretrained(text_folder("sd1"), **{"device": "cpu"} | options)
    assert "\n" not in str(error.value)


def test_a_controlnet_is_not_a_pipeline():
    with pytest.raises(InputError, match="emoji-edges is a ControlNet, which draws with a text model only"):
        Pipeline.from_pretrained("emoji-edges", device="cpu")


def test_each_part_has_its_dtype(ours):
    """As in diffusers, other parts are float32 unless the mapping has a default."""
    pipe = ours("sdxl", torch_dtype={"unet": torch.bfloat16, "text_encoder": "float16"})
    found = {name: part.dtype for name, part in pipe.components.items() if hasattr(part, "dtype")}
    assert found["unet"] == torch.bfloat16 and found["text_encoder"] == torch.float16
    assert found["vae"] == found["text_encoder_2"] == torch.float32
    pipe = ours("sdxl", torch_dtype={"unet": torch.float32, "default": torch.bfloat16})
    assert pipe.unet.dtype == torch.float32 and pipe.vae.dtype == torch.bfloat16
    assert torch.isfinite(draw(pipe)).all()


def test_pickles_are_read_if_they_are_asked_for(ours, text_folder, tmp_path):
    folder = shutil.copytree(text_folder("sd1"), tmp_path / "sd1")
    for file in [*folder.glob("*/*.safetensors")]:
        stem = "pytorch_model" if file.parent.name == "text_encoder" else "diffusion_pytorch_model"
        torch.save(load_file(file), file.with_name(f"{stem}.bin"))
    expected = draw(ours())
    assert torch.equal(draw(Pipeline.from_pretrained(folder, device="cpu", use_safetensors=False)), expected)
    for file in [*folder.glob("*/*.safetensors")]:
        file.unlink()
    assert torch.equal(draw(Pipeline.from_pretrained(folder, device="cpu")), expected)
    with pytest.raises(InputError, match=r"has no .*\.safetensors; leave use_safetensors out"):
        Pipeline.from_pretrained(folder, device="cpu", use_safetensors=True)


def test_hub_options_are_passed_on(ours, text_folder, monkeypatch):
    asked = {}

    def resolve(name, **options):
        asked.update(options, name=name)
        return text_folder("sd1")

    monkeypatch.setattr(hub, "resolve", resolve)
    options = {"revision": "v2", "token": "hf", "local_files_only": True, "cache_dir": "there", "force_download": True}
    Pipeline.from_pretrained("org/name", device="cpu", vae=tiny_vae("sd1"), **options)
    assert asked.items() >= (options | {"name": "org/name"}).items()
    assert [*asked["without"]] == ["vae"]


@pytest.mark.parametrize("kind", KINDS)
def test_live_parts_replace_the_folders(kind, text_pipes, text_folder, tmp_path):
    """A folder without any part but model_index.json is enough, and the pictures are the same."""
    theirs, ours = text_pipes(kind)
    folder = tmp_path / kind
    folder.mkdir()
    shutil.copy(text_folder(kind) / "model_index.json", folder)
    parts = {name: getattr(theirs, name) for name in ours.components}
    assert {"unet", "vae", "text_encoder", "tokenizer", "scheduler"} <= parts.keys()
    pipe = Pipeline.from_pretrained(folder, device="cpu", **parts)
    assert torch.equal(draw(pipe), draw(ours))
    shared = Pipeline.from_pretrained(folder, device="cpu", **pipe.components)
    assert all(getattr(shared, name) is part for name, part in pipe.components.items() if name != "scheduler")
    assert torch.equal(draw(shared), draw(ours))


def test_a_given_part_keeps_its_dtype_and_its_bits(ours):
    theirs = tiny_unet("sd1").to(torch.bfloat16)
    pipe = ours(unet=theirs)
    assert pipe.dtype == torch.bfloat16 and pipe.vae.dtype == torch.float32
    before, copy = {key: tensor.clone() for key, tensor in theirs.state_dict().items()}, pipe.unet
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()  # ours is a copy, so it does not change
    for name, parameter in copy.named_parameters():
        assert torch.equal(parameter, torch.cat([before[key] for key in diffusers_keys(copy, name)])), name


def test_other_layers_than_the_configs_are_refused():
    unet = tiny_unet("sd1")
    unet.conv_in.lora = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"^unet does not fit UNet2DConditionModel: unexpected: conv_in\.lora"):
        model_like(unet, "unet")


def test_a_live_ip_adapter_is_named():
    pipe = text_pipeline("sd1")
    pipe.load_ip_adapter(nested(ip_adapter(pipe.unet)), "", "", image_encoder_folder=None, low_cpu_mem_usage=False)
    with pytest.raises(InputError, match=r"^unet: it has an IP-Adapter; call unload_ip_adapter\(\) first"):
        model_like(pipe.unet, "unet")


@pytest.mark.parametrize(
    ("kind", "missing"), [("sd1", "text_encoder"), ("sdxl", "text_encoder"), ("sdxl", "text_encoder_2")]
)
def test_without_a_text_encoder_prompts_are_embeddings(kind, missing, text_pipes, text_folder, tmp_path):
    _, full = text_pipes(kind)
    folder = shutil.copytree(text_folder(kind), tmp_path / kind)
    shutil.rmtree(folder / missing)
    pipe = Pipeline.from_pretrained(folder, device="cpu", **{missing: None})
    assert getattr(pipe, missing) is None
    with pytest.raises(InputError, match=r"^prompt: this pipeline has no text encoder; give prompt_embeds"):
        draw(pipe)
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    embeds = dict(zip(names, full.encode_prompt("a cat", do_classifier_free_guidance=True), strict=False))
    assert torch.equal(pipe(seed=3, **embeds, **DRAWN).images, draw(full))


@pytest.mark.filterwarnings("ignore:The configuration file of this scheduler")
@pytest.mark.parametrize("name", ["DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_a_given_scheduler_is_changed_as_in_diffusers(name, ours, text_pipes):
    """StableDiffusionPipeline sets steps_offset and clip_sample of any scheduler that it is given, in place."""
    options = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    theirs = getattr(diffusers, name)(**options)
    diffusers.StableDiffusionPipeline(**text_pipes("sd1")[0].components | {"scheduler": theirs})
    changed = {key: value for key, value in theirs.config.items() if not key.startswith("_")}
    assert changed["steps_offset"] == 1
    for library in (diffusers, fastdiff):
        given = getattr(library, name)(**options)
        found = ours(scheduler=given).scheduler
        assert type(found) is getattr(fastdiff, name) and given.config["steps_offset"] == 0
        assert {key: found.config[key] for key in changed} == changed


def test_a_given_scheduler_may_lack_the_options_that_the_pipeline_changes(ours):
    given = fastdiff.DPMSolverSinglestepScheduler()  # has no steps_offset
    assert ours(scheduler=given).scheduler is given


def test_a_pipeline_of_labels_takes_parts(tmp_path):
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = diffusers.UNet2DModel(sample_size=8, block_out_channels=(32, 32), add_attention=False, **blocks)
    index = {"_class_name": "DDPMPipeline", "unet": ["diffusers", "UNet2DModel"], "scheduler": ["diffusers", "X"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    parts = {"unet": unet, "scheduler": diffusers.DDPMScheduler()}
    pipe = Pipeline.from_pretrained(tmp_path, device="cpu", **parts)
    assert pipe(2, num_inference_steps=1, output_type="pt").images.shape == (2, 3, 8, 8)
    with pytest.raises(InputError, match=r"^vae: a DDPMPipeline has no such part"):
        Pipeline.from_pretrained(tmp_path, device="cpu", vae=tiny_vae("sd1"), **parts)
