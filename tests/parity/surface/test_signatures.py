"""Our models and schedulers have the public surface of diffusers': names, positions and defaults.

A name is supported, or it is refused: calling it raises one InputError. `REFUSED` lists the names that may be refused.
"""

import inspect

import diffusers
import pytest
import torch
import transformers
from torch import nn

import fastdiff
from fastdiff import InputError
from fastdiff.models import classes
from fastdiff.refused import OF_MODELS, OF_SCHEDULERS
from fastdiff.sampler_names import SAMPLERS
from fastdiff.samplers.shared.from_config import scheduler_from_config, scheduler_like
from tests.parity.surface import walk
from tests.parity.surface.walk import NOTHING
from tests.support.planners import policy

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # diffusers'

# The names that may be refused, by what they belong to. Later issues bring adapters and FreeU.
REFUSED = {
    "uploads": "push_to_hub",
    "custom code": "register_for_auto_class",
    "adapters": """active_adapters add_adapter delete_adapters disable_adapters disable_lora enable_adapters enable_lora
        enable_lora_hotswap fuse_lora load_attn_procs load_lora_adapter save_attn_procs save_lora_adapter set_adapter
        set_adapters text_encoder_name unet_name unfuse_lora unload_lora attn_processors""",
    "FreeU": "enable_freeu",
    "training": "enable_gradient_checkpointing",
    "quantisation": "dequantize enable_layerwise_casting",
    "offloading of layers": "enable_group_offload",
    "several GPUs": "enable_parallelism",
    "parts of diffusers' own constructors": "extract_init_dict get_config_dict register_to_config",
    "parts of diffusers' own forward": """create_coordinate_grid get_aug_embed get_class_embed get_time_embed
        patchify_and_embed patchify_and_embed_omni process_encoder_hidden_states unpatchify""",
    "parts of diffusers' own step": """convert_model_output deis_first_order_update dpm_solver_first_order_update
        get_lms_coefficient get_order_list get_scalings_for_boundary_condition_discrete
        multistep_deis_second_order_update multistep_deis_third_order_update multistep_dpm_solver_second_order_update
        multistep_dpm_solver_third_order_update multistep_uni_c_bh_update multistep_uni_p_bh_update previous_timestep
        singlestep_dpm_solver_second_order_update singlestep_dpm_solver_third_order_update singlestep_dpm_solver_update
        state_in_first_order step_plms step_prk stretch_shift_to_terminal time_shift""",
}
MAY_BE_REFUSED = {name for names in REFUSED.values() for name in names.split()}

BLOCKS = {"block_out_channels": (8,), "norm_num_groups": 4}
MODELS = {
    "UNet2DModel": BLOCKS | {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)},
    "UNet2DConditionModel": BLOCKS
    | {
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
    },
    "ControlNetModel": BLOCKS
    | {
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "down_block_types": ("CrossAttnDownBlock2D",),
        "conditioning_embedding_out_channels": (8,),
    },
    "UNet1DModel": policy(8, 16),
    "DiTTransformer2DModel": {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 8},
    "ZImageTransformer2DModel": {
        "dim": 16,
        "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "cap_feat_dim": 8,
        "axes_dims": (4, 2, 2),
        "axes_lens": (128, 16, 16),
        "all_patch_size": (2,),
        "all_f_patch_size": (1,),
    },
    "AutoencoderKL": BLOCKS,
    "AutoencoderTiny": {},
}
ENCODER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODERS = {  # transformers' class -> the class of its config, and options
    "CLIPTextModel": ("CLIPTextConfig", ENCODER),
    "CLIPTextModelWithProjection": ("CLIPTextConfig", ENCODER),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", ENCODER),
    "Qwen3Model": ("Qwen3Config", ENCODER | {"num_key_value_heads": 1, "vocab_size": 99}),
}

# Defaults of ours that are not diffusers', and why they give the same
EQUIVALENT = {
    ("save_pretrained", "save_function"): (None, "diffusers' default is torch.save, which it uses for .bin alone"),
    ("forward", "timestep"): (NOTHING, "diffusers' DiT cannot run without a timestep"),
    ("scale_noise", "noise"): (NOTHING, "diffusers cannot scale None"),
    ("forward", "input_ids"): (NOTHING, "transformers cannot run without ids"),
    ("forward", "pixel_values"): (NOTHING, "transformers cannot run without a picture"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """Return diffusers' class and a tiny model of ours."""
    return getattr(diffusers, request.param), getattr(fastdiff, request.param)(**MODELS[request.param])


@pytest.fixture(scope="module", params=SAMPLERS)
def scheduler(request):
    """Return diffusers' class and a scheduler of ours."""
    needed, *_ = SAMPLERS[request.param].names.values()
    return getattr(diffusers, request.param), getattr(fastdiff, request.param)(**needed)


def test_every_model_is_walked():
    kinds = [kind for kind in classes.Model.classes.values() if kind.__module__.startswith("fastdiff.")]
    ours = {kind.__name__ for kind in kinds if hasattr(kind, "part")}
    assert ours == {*MODELS, *ENCODERS}


def test_models_have_what_diffusers_models_have(model):
    theirs, ours = model
    lines = walk.missing(theirs, ours, OF_MODELS, EQUIVALENT, nn.Module)
    lines += walk.differences("forward", theirs.forward, type(ours).forward, EQUIVALENT)
    lines += walk.differences("constructor", theirs.__init__, type(ours), EQUIVALENT)
    assert not lines, "\n".join(lines)  # pytest itself would truncate a long list


def test_schedulers_have_what_diffusers_schedulers_have(scheduler):
    theirs, ours = scheduler
    lines = walk.missing(theirs, ours, OF_SCHEDULERS, EQUIVALENT, object)
    lines += walk.differences("constructor", theirs.__init__, type(ours), EQUIVALENT)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("attribute", ["num_inference_steps", "timesteps", "order", "init_noise_sigma", "config"])
def test_schedulers_have_the_documented_attributes(attribute, scheduler):
    _, ours = scheduler
    assert hasattr(ours, attribute)


def refused_names(theirs, ours, table) -> list[str]:
    """Return the names of diffusers' class that ours refuses."""
    return [
        name for name in walk.public_names(theirs, nn.Module) if name in table and walk.is_refused(type(ours), name)
    ]


def test_models_refuse_by_name(model):
    theirs, ours = model
    names = refused_names(theirs, ours, OF_MODELS)
    assert [name for name in names if name not in MAY_BE_REFUSED] == []
    walk.assert_refused(ours, names)


def test_schedulers_refuse_by_name(scheduler):
    theirs, ours = scheduler
    names = refused_names(theirs, ours, OF_SCHEDULERS)
    assert [name for name in names if name not in MAY_BE_REFUSED] == []
    walk.assert_refused(ours, names)


def test_refused_names_are_names_of_diffusers():
    """A name that diffusers removes, or that we support, leaves the tables."""
    classes = [getattr(diffusers, name) for name in (*MODELS, *SAMPLERS)]
    classes += [getattr(transformers, name) for name in ENCODERS]
    unknown = [name for name in {*OF_MODELS, *OF_SCHEDULERS} if not any(hasattr(each, name) for each in classes)]
    assert unknown == []


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_called_as_transformers(name):
    theirs, kind = getattr(transformers, name), getattr(fastdiff, name)
    of_config, options = ENCODERS[name]
    config = getattr(transformers, of_config)(**options)
    ours = kind(config)
    lines = walk.differences("forward", theirs.forward, kind.forward, EQUIVALENT)
    for method in (
        "num_parameters",
        "get_memory_footprint",
        "set_attn_implementation",
        "gradient_checkpointing_disable",
    ):
        lines = [*lines, *walk.differences(method, getattr(theirs, method), getattr(kind, method), EQUIVALENT)]
    assert not lines, "\n".join(lines)
    names = ("push_to_hub", "add_adapter", "load_adapter", "dequantize", "gradient_checkpointing_enable")
    walk.assert_refused(ours, [*names, "resize_token_embeddings", "set_input_embeddings", "register_for_auto_class"])
    state = theirs(config)
    assert ours.num_parameters() == state.num_parameters()
    assert ours.get_memory_footprint() == state.get_memory_footprint(return_buffers=False)


LOADERS = {name: options for name, options in MODELS.items()} | {"DDIMScheduler": {}}


@pytest.mark.parametrize("name", LOADERS)
def test_every_option_of_from_pretrained_is_honoured_or_refused_by_name(name, tmp_path):
    theirs, kind = getattr(diffusers, name), getattr(fastdiff, name)
    kind(**LOADERS[name]).save_pretrained(tmp_path)
    names = walk.options_of(theirs.from_pretrained)
    assert {"cache_dir", "revision"} <= {*names}
    defaults = dict.fromkeys(names[1:]) | {"force_download": False, "return_unused_kwargs": False}
    assert isinstance(kind.from_pretrained(tmp_path, **{option: defaults[option] for option in names[1:]}), kind)
    for option in names[1:]:
        with pytest.raises(InputError, match=f"^{option.removeprefix('torch_')}"):
            kind.from_pretrained(tmp_path, **{option: object()})


def test_from_pretrained_takes_the_name_by_keyword(tmp_path):
    for name, options in LOADERS.items():
        kind = getattr(fastdiff, name)
        kind(**options).save_pretrained(tmp_path / name)
        ours = kind.from_pretrained(pretrained_model_name_or_path=tmp_path, subfolder=name)
        assert ours.to_json_string() == kind(**options).to_json_string()


def test_from_pretrained_takes_the_name_of_earlier_versions(tmp_path):
    for name, old in (("UNet2DModel", "name_or_path"), ("DDIMScheduler", "folder")):
        kind = getattr(fastdiff, name)
        kind(**LOADERS[name]).save_pretrained(tmp_path / name)
        with pytest.warns(DeprecationWarning, match="pretrained_model_name_or_path"):
            kind.from_pretrained(**{old: tmp_path / name})
        with pytest.raises(InputError, match="name_or_path: None"):
            kind.from_pretrained()


REFUSED_SCHEDULERS = (
    "EDMEulerScheduler",
    "EDMDPMSolverMultistepScheduler",
    "FlowMatchHeunDiscreteScheduler",
)


@pytest.mark.parametrize("name", REFUSED_SCHEDULERS)
def test_schedulers_that_stay_out_are_refused_by_name(name):
    with pytest.raises(InputError, match=name):
        scheduler_like(getattr(diffusers, name)())


def test_a_folder_of_a_scheduler_that_stays_out_is_refused_by_name():
    with pytest.raises(InputError, match="DPMSolverSDEScheduler"):  # diffusers builds it with torchsde only
        scheduler_from_config({"_class_name": "DPMSolverSDEScheduler"})


@pytest.mark.parametrize("name", MODELS)
def test_configs_equal_diffusers(name):
    theirs, ours = (getattr(library, name)(**MODELS[name]) for library in (diffusers, fastdiff))
    options = {key: value for key, value in theirs.config.items() if not key.startswith("_")}
    assert dict(ours.config) == options
    for key, value in options.items():
        assert ours.config[key] == getattr(ours.config, key) == ours.config.get(key) == value
        assert key in ours.config
    assert "no_such_option" not in ours.config
    assert getattr(ours, "sample_size", None) == getattr(theirs.config, "sample_size", None)


def test_outputs_are_read_as_diffusers():
    ours = fastdiff.AutoencoderKL(**MODELS["AutoencoderKL"])
    decoded = ours.decode(torch.zeros(1, 4, 4, 4))
    assert decoded["sample"] is decoded.sample is decoded[0] is decoded.to_tuple()[0]
    step = fastdiff.DDPMScheduler().step(torch.zeros(1, 3, 4, 4), 5, torch.zeros(1, 3, 4, 4))
    assert step["prev_sample"] is step.prev_sample
    assert len(ours.decode(torch.zeros(1, 4, 4, 4), return_dict=False)) == 1
    with pytest.raises(KeyError):
        decoded["no_such_field"]


def test_constructors_take_diffusers_positions():
    theirs = inspect.signature(diffusers.UNet2DModel.__init__).parameters
    values = {name: each.default for name, each in theirs.items() if name != "self"} | MODELS["UNet2DModel"]
    assert fastdiff.UNet2DModel(*values.values()).config == fastdiff.UNet2DModel(**MODELS["UNet2DModel"]).config
    assert fastdiff.DDIMScheduler(500, 0.001, 0.01, "scaled_linear").config["beta_end"] == 0.01
    for kind, count in ((fastdiff.UNet2DModel, 40), (fastdiff.DDIMScheduler, 6)):
        with pytest.raises(InputError, match="by position"):
            kind(*[1] * count)
