"""Scheduler configs: the values that they refuse."""

import math

import pytest

from fastdiff.errors import InputError
from fastdiff.samplers.ddim import DDIMConfig
from fastdiff.samplers.ddpm import DDPMConfig

REFUSED_CONFIGS = {
    "unknown-prediction": ({"prediction_type": "flow"}, "prediction_type: 'flow' is not one of epsilon"),
    "unknown-spacing": ({"timestep_spacing": "karras"}, "timestep_spacing: 'karras' is not one of leading, trailing"),
    "unknown-betas": ({"beta_schedule": "cosine"}, "beta_schedule: 'cosine' is not one of .*squaredcos_cap_v2"),
    "no-training-steps": ({"num_train_timesteps": 0}, "num_train_timesteps: 0 is not a whole number from 1"),
    "text-for-a-number": ({"num_train_timesteps": "1000"}, "num_train_timesteps: '1000' is not a whole number"),
    "fraction-for-a-whole": ({"steps_offset": 0.5}, "steps_offset: 0.5 is not a whole number"),
    "truth-for-a-number": ({"beta_start": True}, "beta_start: True is not a number"),
    "number-for-truth": ({"clip_sample": 1}, "clip_sample: 1 is not true or false"),
    "null": ({"clip_sample_range": None}, "clip_sample_range: None is not a number"),
    "negative-beta": ({"beta_start": -0.1}, "beta_start: -0.1 is not a number from 0 to 1"),
    "nan-beta": ({"beta_end": math.nan}, "beta_end: nan is not a number from 0 to 1"),
    "ratio-above-one": (
        {"dynamic_thresholding_ratio": 1.5},
        "dynamic_thresholding_ratio: 1.5 is not a number",
    ),
    "too-few-betas": ({"trained_betas": [0.1, 0.2]}, "trained_betas has 2 values for 1000 training steps; give one"),
    "betas-of-text": ({"trained_betas": ["a"]}, r"trained_betas: \['a'\] is not a list"),
    "betas-of-a-number": ({"trained_betas": 3}, "trained_betas: 3 is not a list"),
    "unknown-option": ({"clip_smaple": True}, "unknown option clip_smaple"),
}


@pytest.mark.parametrize("config_class", [DDPMConfig, DDIMConfig])
@pytest.mark.parametrize(("options", "message"), REFUSED_CONFIGS.values(), ids=REFUSED_CONFIGS)
def test_a_wrong_option_is_named(config_class, options, message):
    with pytest.raises(InputError, match=message) as error:
        config_class.from_mapping(options)
    assert "\n" not in str(error.value)


REFUSED_BY_ONE = {
    "ddim-sigmoid": (DDIMConfig, {"beta_schedule": "sigmoid"}, "'sigmoid' is not one of linear"),
    "ddim-laplace": (DDIMConfig, {"beta_schedule": "laplace"}, "'laplace' is not one of linear"),
    "ddpm-variance": (DDPMConfig, {"variance_type": "small"}, "variance_type: 'small' is not one of fixed_small"),
}


@pytest.mark.parametrize(("config_class", "options", "message"), REFUSED_BY_ONE.values(), ids=REFUSED_BY_ONE)
def test_an_option_of_the_other_scheduler_is_named(config_class, options, message):
    with pytest.raises(InputError, match=message):
        config_class(**options)
