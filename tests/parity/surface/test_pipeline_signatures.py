"""Our pipelines have the public surface of diffusers': names, positions and defaults.

A name is supported, or it is refused: calling it raises one InputError. `REFUSED` lists the names that may be refused.
"""

import diffusers
import pytest
from diffusers.experimental import ValueGuidedRLPipeline

import fastdiff
from fastdiff import InputError
from fastdiff.pipelines.signatures import CALLS, ENCODE_PROMPT
from fastdiff.refused import OF_PIPELINES
from tests.parity.surface import walk
from tests.parity.surface.walk import NOTHING
from tests.support.text_pipelines import text_pipeline
from tests.support.tiny import UNET, save_unet

# The names that may be refused, by what they belong to. Later issues bring adapters and image to image.
REFUSED = {
    "uploads": "push_to_hub",
    "custom code": "register_for_auto_class",
    "LoRA": """delete_adapters disable_lora enable_lora enable_lora_hotswap fuse_lora fused_loras get_active_adapters
        get_list_adapters load_lora_into_text_encoder load_lora_into_unet load_lora_weights lora_scale lora_state_dict
        num_fused_loras pack_weights save_lora_weights set_adapters set_lora_device text_encoder_name unet_name
        unfuse_lora unload_lora_weights write_lora_layers""",
    "IP-Adapter": """encode_image load_ip_adapter prepare_ip_adapter_image_embeds set_ip_adapter_scale
        unload_ip_adapter""",
    "embeddings of pipelines without prompts": """load_textual_inversion maybe_convert_prompt
        unload_textual_inversion""",
    "FreeU": "disable_freeu enable_freeu",
    "offloading of layers": "enable_group_offload enable_sequential_cpu_offload model_cpu_offload_seq",
    "image to image and other pipelines of the same parts": "from_pipe",
    "parts of diffusers' own constructors": """download extract_init_dict from_config get_config_dict register_modules
        register_to_config""",
    "parts of diffusers' own call": """check_inputs de_normalize decode_latents get_guidance_scale_embedding normalize
        prepare_extra_step_kwargs prepare_latents reset_x0 run_diffusion run_safety_checker to_torch upcast_vae""",
}
MAY_BE_REFUSED = {name for names in REFUSED.values() for name in names.split()}

# Arguments that make a call of each pipeline short, and the ones that are not its defaults
CALLED = {
    "StableDiffusionPipeline": {"prompt": "a cat", "num_inference_steps": 2},
    "StableDiffusionXLPipeline": {"prompt": "a cat", "num_inference_steps": 2},
    "DDPMPipeline": {"num_inference_steps": 2},
    "DDIMPipeline": {"num_inference_steps": 2},
    "DiTPipeline": {"class_labels": [0], "num_inference_steps": 2},
}
THEIRS = {name: getattr(diffusers, name) for name in CALLED} | {"ValueGuidedRLPipeline": ValueGuidedRLPipeline}

# Defaults of ours that are not diffusers', and why they give the same
EQUIVALENT = {
    ("from_pretrained", "pretrained_model_name_or_path"): (NOTHING, "diffusers cannot load None"),
    ("load_config", "pretrained_model_name_or_path"): (NOTHING, "diffusers cannot load None"),
    ("save_pretrained", "max_shard_size"): (None, "each model's default"),
    ("fuse_lora", "components"): (None, "all parts of the pipeline that take adapters"),
    ("unfuse_lora", "components"): (None, "all parts of the pipeline that take adapters"),
}


def save_dit(folder):
    options = {"num_attention_heads": 1, "attention_head_dim": 16, "num_layers": 1, "sample_size": 8}
    transformer = diffusers.DiTTransformer2DModel(**options, num_embeds_ada_norm=3)
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler()).save_pretrained(folder)


def save_ddpm(folder):
    diffusers.DDPMPipeline(diffusers.UNet2DModel(**UNET), diffusers.DDPMScheduler()).save_pretrained(folder)


SAVE = {
    "StableDiffusionPipeline": lambda folder: text_pipeline("sd1").save_pretrained(folder),
    "StableDiffusionXLPipeline": lambda folder: text_pipeline("sdxl").save_pretrained(folder),
    "DDPMPipeline": save_ddpm,
    "DDIMPipeline": lambda folder: save_unet(folder, **UNET),
    "DiTPipeline": save_dit,
}


@pytest.fixture(scope="module")
def loaded():
    """The pipelines that `pipe` has loaded, by their class in diffusers."""
    return {}


@pytest.fixture(params=THEIRS)
def pipe(request, tmp_path, loaded):
    """Return our pipeline of a tiny folder that diffusers saved. Tests must not change it."""
    if request.param not in loaded:
        folder = tmp_path / "pipeline"
        if request.param in SAVE:
            SAVE[request.param](folder)
        else:
            _, folder = request.getfixturevalue("save_value_guided")()
        loaded[request.param] = fastdiff.Pipeline.from_pretrained(folder, device="cpu")
    return loaded[request.param]


def test_pipelines_have_what_diffusers_pipelines_have(pipe):
    theirs = THEIRS[pipe.diffusers_class]
    lines = walk.missing(theirs, pipe, OF_PIPELINES, EQUIVALENT, object)
    assert not lines, "\n".join(lines)  # pytest itself would truncate a long list


def test_pipelines_refuse_by_name(pipe):
    theirs = THEIRS[pipe.diffusers_class]
    names = [name for name in walk.public_names(theirs, object) if walk.is_refused(type(pipe), name)]
    assert [name for name in names if name not in MAY_BE_REFUSED] == []
    assert {"push_to_hub", "enable_sequential_cpu_offload"} <= {*names}
    walk.assert_refused(pipe, names)
    assert ("load_textual_inversion" in names) == (hasattr(theirs, "load_textual_inversion") and not pipe.reads_text)


def test_calls_take_diffusers_positions(pipe):
    theirs = THEIRS[pipe.diffusers_class]
    assert CALLS[pipe.diffusers_class] == _names(theirs.__call__)
    if hasattr(theirs, "encode_prompt"):
        assert ENCODE_PROMPT[pipe.diffusers_class] == _names(theirs.encode_prompt)


def _names(function):
    return tuple(name for name, each in walk.parameters(function).items() if each.kind not in walk.VARIABLE)


def test_every_default_of_a_call_can_be_said(pipe):
    if pipe.diffusers_class not in CALLED:
        pytest.skip("diffusers' call runs an environment")
    found = walk.parameters(THEIRS[pipe.diffusers_class].__call__).values()
    defaults = {each.name: each.default for each in found if each.kind not in walk.VARIABLE}
    defaults = {name: value for name, value in defaults.items() if value is not NOTHING}
    assert len(pipe(**defaults | CALLED[pipe.diffusers_class]).images) == 1
    by_position = [(defaults | CALLED[pipe.diffusers_class])[name] for name in CALLS[pipe.diffusers_class]]
    assert len(pipe(*by_position).images) == 1


def test_a_bad_value_of_any_argument_is_one_input_error_that_names_it(pipe):
    given = CALLED.get(pipe.diffusers_class, {})
    for name in _names(THEIRS[pipe.diffusers_class].__call__):
        with pytest.raises(InputError, match=name):
            pipe(**given | {name: object()})


def test_every_option_of_from_pretrained_is_honoured_or_refused_by_name(tmp_path):
    save_unet(tmp_path, **UNET)
    names = walk.options_of(diffusers.DiffusionPipeline.from_pretrained)
    assert {"cache_dir", "custom_pipeline", "device_map"} <= {*names}
    for name in names[1:]:
        default = {"force_download": False}.get(name)
        fastdiff.Pipeline.from_pretrained(tmp_path, **{"device": "cpu", name: default})
        with pytest.raises(InputError, match=f"^{name.removeprefix('torch_')}"):
            fastdiff.Pipeline.from_pretrained(tmp_path, **{name: object()})


def test_refused_names_are_names_of_diffusers():
    unknown = [name for name in OF_PIPELINES if not any(hasattr(each, name) for each in THEIRS.values())]
    assert unknown == []
