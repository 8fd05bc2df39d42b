"""Our schedulers' interface against diffusers': configs and their conversion, saved files, results, refusals."""

import copy
import inspect
import json
import pickle

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers

import fastdiff
from fastdiff import sampler_names
from fastdiff.errors import InputError
from fastdiff.samplers.shared.from_config import scheduler_from_config
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import FOREIGN_OPTIONS

SCHEDULERS = {name: getattr(fastdiff, kind) for name, kind in sampler_names.SCHEDULERS.items()}
BOTH = ("ddpm", "ddim")
THEIRS = {"ddpm": diffusers.DDPMScheduler, "ddim": diffusers.DDIMScheduler}
PICTURE = (1, 3, 4, 4)


def generator():
    return torch.Generator().manual_seed(0)


def step(scheduler, timestep, **kwargs):
    """Return a step from fixed random pictures, with fixed noise unless the caller gives another."""
    output, sample = torch.randn((2, *PICTURE), generator=generator())
    return scheduler.step(output, timestep, sample, **{"generator": generator(), **kwargs})


@pytest.mark.parametrize("kind", BOTH)
def test_the_result_is_unpacked_and_named(kind):
    ours = SCHEDULERS[kind]()
    ours.set_timesteps(5)
    result = step(ours, 400)
    assert result[0] is result.prev_sample
    assert result[1] is result.pred_original_sample
    assert type(step(ours, 400, return_dict=False)) is tuple


@pytest.mark.parametrize("kind", BOTH)
def test_scale_model_input_changes_nothing(kind):
    ours = SCHEDULERS[kind]()
    sample = torch.ones(PICTURE)
    assert ours.scale_model_input(sample, 5) is sample


@pytest.mark.parametrize("kind", BOTH)
def test_config_is_read_as_diffusers(kind):
    theirs, ours = (made[kind](num_train_timesteps=77, prediction_type="sample") for made in (THEIRS, SCHEDULERS))
    for name in set(inspect.signature(type(theirs).__init__).parameters) - {"self"}:
        assert ours.config[name] == theirs.config[name], name
        assert getattr(ours.config, name) == theirs.config[name], name
    assert dict(ours.config)["num_train_timesteps"] == 77
    assert not hasattr(ours.config, "no_such_option")
    for change in (lambda: setattr(ours.config, "beta_end", 1), lambda: ours.config.update(beta_end=1)):
        with pytest.raises(TypeError, match="frozen"):
            change()


def config_values(scheduler):
    return {key: value for key, value in scheduler.config.items() if not key.startswith("_")}


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("source", BOTH)
def test_configs_travel_between_schedulers_and_libraries(source, target):
    """As in diffusers, the target takes the options that it has and keeps the others for the way back."""
    special = {"variance_type": "fixed_large"} if source == "ddpm" else {"set_alpha_to_one": False}
    options = {"beta_end": 0.03, "timestep_spacing": "trailing", **special}
    theirs, ours = THEIRS[source](**options), SCHEDULERS[source](**options)
    expected = config_values(THEIRS[target].from_config(theirs.config))
    for config in (theirs.config, ours.config, dict(ours.config)):
        converted = SCHEDULERS[target].from_config(config)
        assert config_values(converted).items() >= expected.items()
        back = SCHEDULERS[source].from_config(converted.config)
        assert config_values(back).items() >= config_values(theirs).items()
    assert config_values(THEIRS[target].from_config(ours.config)).items() >= expected.items()


def test_unset_options_of_another_scheduler_are_this_ones_defaults():
    theirs = diffusers.EulerDiscreteScheduler(beta_end=0.03)  # its own default spacing is linspace
    ours = fastdiff.DDIMScheduler.from_config(theirs.config)
    expected = diffusers.DDIMScheduler.from_config(theirs.config)
    assert (ours.config.timestep_spacing, ours.config.beta_end) == ("leading", 0.03)
    assert torch.equal(ours.betas, expected.betas)


def test_keywords_replace_options_of_the_config():
    config = diffusers.DDPMScheduler().config
    ours = fastdiff.DDIMScheduler.from_config(config, timestep_spacing="trailing", rescale_betas_zero_snr=True)
    assert (ours.config.timestep_spacing, ours.config.rescale_betas_zero_snr) == ("trailing", True)


@pytest.mark.parametrize("kind", BOTH)
def test_from_pretrained_reads_what_diffusers_saves(kind, tmp_path):
    theirs = THEIRS[kind](beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    theirs.save_pretrained(tmp_path / "scheduler")
    for ours in (
        SCHEDULERS[kind].from_pretrained(tmp_path / "scheduler"),
        SCHEDULERS[kind].from_pretrained(str(tmp_path), subfolder="scheduler"),
        scheduler_from_config(json.loads((tmp_path / "scheduler" / "scheduler_config.json").read_text())),
    ):
        assert type(ours) is SCHEDULERS[kind]
        assert config_values(ours) == config_values(theirs)
    with pytest.raises(InputError, match=r"scheduler_config\.json does not exist"):
        SCHEDULERS[kind].from_pretrained(tmp_path)


def test_the_early_release_that_the_cifar_model_was_saved_with():
    config = {
        "_class_name": "DDPMScheduler",
        "_diffusers_version": "0.1.1",
        "num_train_timesteps": 1000,
        "tensor_format": "pt",
        "timestep_values": None,
        "trained_betas": None,
        "variance_type": "fixed_large",
    }
    ours = scheduler_from_config(config)
    assert isinstance(ours, fastdiff.DDPMScheduler)
    assert ours.config.variance_type == "fixed_large"


@pytest.mark.parametrize("name", [scheduler.name for scheduler in KarrasDiffusionSchedulers])
def test_options_of_every_compatible_scheduler_are_known(name):
    scheduler = getattr(diffusers, name)
    if not hasattr(scheduler, "from_config") or isinstance(scheduler, diffusers.utils.DummyObject):
        pytest.skip(f"{name} needs a package that is not installed")
    options = set(inspect.signature(scheduler.__init__).parameters) - {"self", "kwargs"}
    ours = set(fastdiff.DDIMScheduler().config) | set(fastdiff.DDPMScheduler().config)
    assert options <= FOREIGN_OPTIONS | ours


@pytest.mark.parametrize("kind", BOTH)
def test_schedulers_are_copied_and_pickled(kind):
    ours = SCHEDULERS[kind](beta_end=0.03)
    ours.set_timesteps(5)
    expected = step(ours, 400)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert copied.config == ours.config
        assert torch.equal(step(copied, 400).prev_sample, expected.prev_sample)


def test_the_schedule_is_the_scheduler():
    """The pipeline's table and the scheduler's steps have the same numbers."""
    ours = fastdiff.DDIMScheduler(timestep_spacing="trailing")
    ours.set_timesteps(10)
    schedule = ours.schedule(10, eta=0.5, use_clipped_model_output=True)
    assert torch.equal(schedule.timesteps, ours.timesteps)
    rows = [ours._row(int(t), torch.device("cpu"), 0.5, True) for t in ours.timesteps]
    assert torch.equal(schedule.rows, torch.stack(rows))
    assert torch.equal(ours.schedule(10).rows, ours.schedule(10, eta=0.0, use_clipped_model_output=False).rows)


@pytest.mark.parametrize("kind", BOTH)
def test_the_rows_of_a_run_are_made_once(kind, monkeypatch):
    ours = SCHEDULERS[kind]()
    ours.set_timesteps(3)
    made = []
    make_rows = ours._make_rows
    monkeypatch.setattr(ours, "_make_rows", lambda *args: made.append(args) or make_rows(*args))
    for _ in range(2):
        for t in ours.timesteps:
            step(ours, t)
    assert len(made) == 1


def refused_step(kind, num_inference_steps, timestep, options=None, **kwargs):
    ours = SCHEDULERS[kind](**options or {})
    if num_inference_steps is not None:
        ours.set_timesteps(num_inference_steps)
    step(ours, timestep, **kwargs)


ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False}
REFUSED = {
    "ddim-before-set-timesteps": (lambda: refused_step("ddim", None, 10), "call set_timesteps before step"),
    "ddim-timestep-past-the-training": (lambda: refused_step("ddim", 5, 1000), "timestep is 1000; it must be from 0"),
    "ddpm-negative-timestep": (lambda: refused_step("ddpm", None, -1), "timestep is -1; it must be from 0 to 999"),
    "ddpm-timestep-not-of-the-run": (lambda: refused_step("ddpm", 5, 3), "timestep 3 is not one of the scheduler's"),
    "two-noises": (
        lambda: refused_step("ddim", 5, 400, eta=1.0, variance_noise=torch.zeros(PICTURE)),
        "generator and variance_noise",
    ),
    "too-few-generators": (
        lambda: randn_tensor((3, 2), [generator(), generator()], torch.device("cpu"), torch.float32),
        "2 generators for 3 pictures; give one for each",
    ),
    "epsilon-of-zero-snr": (lambda: refused_step("ddim", 5, 999, ZERO_SNR), "epsilon divides by the signal"),
    "both-kinds-of-steps": (
        lambda: fastdiff.DDPMScheduler().set_timesteps(5, timesteps=[3, 1]),
        "either num_inference_steps or timesteps",
    ),
    "no-steps": (lambda: fastdiff.DDIMScheduler().set_timesteps(0), "num_inference_steps is 0"),
    "sigmoid-ddim": (lambda: fastdiff.DDIMScheduler(beta_schedule="sigmoid"), "'sigmoid' is not one of"),
    "unknown-option": (lambda: fastdiff.DDPMScheduler(beta_edn=0.1), "DDPMScheduler: unknown option beta_edn"),
    "another-scheduler": (
        lambda: scheduler_from_config({"_class_name": "EDMEulerScheduler"}),
        "the model's scheduler EDMEulerScheduler is not supported; choose the scheduler ddim, ddpm, euler",
    ),
    "no-scheduler": (lambda: scheduler_from_config({}), "the model's scheduler without a _class_name is not supported"),
    "unknown-name": (lambda: scheduler_from_config({}, "eular"), "scheduler 'eular' is unknown; use ddim, ddpm, euler"),
    "eta-for-ddpm": (lambda: fastdiff.DDPMScheduler().schedule(5, eta=0.5), "eta is an option of ddim and tcd"),
    "clipped-for-ddpm": (
        lambda: fastdiff.DDPMScheduler().schedule(5, use_clipped_model_output=True),
        "use_clipped_model_output is an option of ddim",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_learned_variance_wants_twice_the_channels():
    with pytest.raises(ValueError, match="model_output has shape"):
        step(fastdiff.DDPMScheduler(variance_type="learned_range"), 5)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_name_chooses_the_scheduler_whatever_the_config_says(name):
    config = diffusers.PNDMScheduler(skip_prk_steps=True).config
    assert type(scheduler_from_config(config, name)) is SCHEDULERS[name]
