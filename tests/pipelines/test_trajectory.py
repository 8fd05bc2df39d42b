"""TrajectoryPipeline: known values, the horizon, the order of the trajectories, and what is refused."""

import numpy as np
import pytest
import torch

from fastdiff import (
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
    InputError,
    NonFiniteError,
    Pipeline,
    TrajectoryPipeline,
    UNet1DModel,
    UNet2DModel,
    UniPCMultistepScheduler,
)
from fastdiff.diffusion.trajectories import place_conditions, read_conditions, sort_trajectories
from tests.support import planners

POLICY = planners.policy(8, 16, 16, in_channels=5, out_channels=5)
VALUES = planners.value_function(8, 32, in_channels=5, out_channels=5)
CPU = torch.device("cpu")


@pytest.fixture
def policy(randomise):
    return randomise(UNet1DModel.from_config(POLICY))


@pytest.fixture
def pipe(policy, randomise):
    return TrajectoryPipeline(policy, DDIMScheduler(), value_function=randomise(UNet1DModel.from_config(VALUES)))


def plan(pipe, **options):
    return pipe(**{"horizon": 8, "num_inference_steps": 3} | options)


def test_trajectories_are_arrays_or_tensors_and_nothing_is_clamped(pipe):
    array, tensor = (plan(pipe, num_images=2, output_type=kind).trajectories for kind in ("np", "pt"))
    assert (array.shape, array.dtype, tensor.dtype) == ((2, 5, 8), np.float32, torch.float32)
    assert torch.equal(torch.from_numpy(array), tensor) and array.flags.c_contiguous
    assert plan(pipe).values is None and np.array_equal(plan(pipe).trajectories, array[:1])
    far = plan(pipe, conditions={3: [7.0]}).trajectories
    assert far[0, -1, 3] == 7
    assert np.array_equal(plan(pipe, conditions={3: [7.0]}, return_dict=False)[0], far)


@pytest.mark.parametrize("scheduler", [DDIMScheduler, DDPMScheduler])
def test_known_values_hold_after_every_step_and_the_bits_of_a_seed_in_any_batch(pipe, scheduler):
    pipe.scheduler = scheduler()
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    conditions = {0: rows, 7: np.float64([1, 2]), np.int64(2): rows.numpy()}
    steps = list(pipe.stream(horizon=8, num_inference_steps=3, conditions=conditions, seed=20, output_type="pt"))
    assert len(steps) == 3
    for step in steps:
        x = step.x_t[:, 0].transpose(1, 2)
        assert torch.equal(x[:, -3:, 0], rows) and torch.equal(x[:, -3:, 2], rows)
        assert torch.equal(x[:, -2:, 7], torch.tensor([1.0, 2.0]).expand(4, 2))
        assert not torch.equal(step.x0[:, 0, 0, -3:], rows), "x0 is what the model says"
    many = steps[-1].trajectories.trajectories
    for i in range(4):
        alone = {0: rows[i], 7: [1, 2], 2: rows[i].tolist()}
        assert torch.equal(plan(pipe, conditions=alone, seed=20 + i, output_type="pt").trajectories, many[i : i + 1])


def test_the_noise_is_set_before_the_first_step_and_latents_stay_as_they_are(pipe):
    latents = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    other, before = latents.clone(), latents.clone()
    other[:, -2:, 4] += 3  # the known values are set here
    first, second = (plan(pipe, latents=x, conditions={4: [0.5, 1]}).trajectories for x in (latents, other))
    assert np.array_equal(first, second) and torch.equal(latents, before)
    assert not np.array_equal(first, plan(pipe, latents=latents).trajectories)


def test_latents_have_the_horizon(pipe):
    latents = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    assert pipe(latents=latents, num_inference_steps=2).trajectories.shape == (3, 5, 16)
    assert plan(pipe, latents=latents, horizon=16).trajectories.shape == (3, 5, 16)


def test_a_config_may_say_the_horizon(randomise):
    pipe = TrajectoryPipeline(randomise(UNet1DModel.from_config(POLICY | {"sample_size": 16})), DDIMScheduler())
    assert pipe(num_inference_steps=2).trajectories.shape == (1, 5, 16)
    assert plan(pipe).trajectories.shape == (1, 5, 8)


def test_the_best_come_first_and_equals_in_the_order_of_their_seeds(pipe):
    trajectories, values = plan(pipe, num_images=5, sort_by_value=True)
    assert values.shape == (5,) and list(values) == sorted(values, reverse=True) and len(set(values)) == 5
    plain = plan(pipe, num_images=5).trajectories
    assert sorted(x.tobytes() for x in plain) == sorted(x.tobytes() for x in trajectories)
    with torch.no_grad():
        for parameter in pipe.value_function.parameters():
            parameter.zero_()
    trajectories, values = plan(pipe, num_images=5, sort_by_value=True)
    assert not values.any() and np.array_equal(trajectories, plain)


ENDLESS: list = []
ENDLESS.append(ENDLESS)
CONDITIONS = {
    "no-mapping": ([1, 2], r"conditions: \[1, 2\] is not a mapping"),
    "beyond-the-horizon": ({8: [1.0]}, "conditions: position 8 is outside horizon 8; positions are 0 to 7"),
    "negative": ({-1: [1.0]}, "conditions: position -1 is outside horizon 8"),
    "fraction": ({1.0: [1.0]}, r"conditions: position 1\.0 is not a whole number"),
    "text": ({"0": [1.0]}, "conditions: position '0' is not a whole number"),
    "bool": ({True: [1.0]}, "conditions: position True is not a whole number"),
    "twice": ({2: [1.0], torch.tensor(2): [1.0]}, "conditions: position 2 is given twice"),
    "too-wide": ({0: [0.0] * 6}, r"conditions\[0\]: 6 values for 5 channels"),
    "empty": ({0: []}, r"conditions\[0\]: it has shape \(0,\)"),
    "a-number": ({0: 1.0}, r"conditions\[0\]: it has shape \(\)"),
    "cube": ({0: torch.zeros(1, 1, 1)}, r"conditions\[0\]: it has shape \(1, 1, 1\)"),
    "complex": ({0: torch.zeros(2, dtype=torch.complex64)}, r"conditions\[0\]: it has shape .* torch.complex64"),
    "words": ({0: ["a"]}, r"conditions\[0\]: \['a'\] is not numeric"),
    "ragged": ({0: [[1.0], [1.0, 2.0]]}, r"conditions\[0\]: .* is not numeric"),
    "none": ({0: None}, r"conditions\[0\]: None is not numeric"),
    "nan": ({0: [float("nan")]}, r"conditions\[0\]: it holds NaN"),
    "beyond-float32": ({0: np.array([1e300])}, r"conditions\[0\]: it holds NaN or infinity"),
    "a-long-range": ({0: range(2**60)}, r"conditions\[0\]: range\(0, .* is too many numbers"),
    "long-rows": ({0: [[1.0], range(2**60)]}, r"conditions\[0\]: .* is too many numbers"),
    "a-long-view": ({0: torch.zeros(1).expand(2**40)}, r"conditions\[0\]: .* is too many numbers"),
    "in-itself": ({0: ENDLESS}, r"conditions\[0\]: .* is not numeric"),
    "sparse": ({0: torch.ones(2).to_sparse()}, r"conditions\[0\]: .*; give dense real numbers"),
    "two-counts": (
        {0: torch.zeros(2, 1), 1: torch.zeros(3, 1)},
        "conditions: .* for 2 and 3 trajectories",
    ),
}


@pytest.mark.parametrize("case", CONDITIONS)
def test_conditions_that_cannot_be_set(case, pipe):
    conditions, message = CONDITIONS[case]
    with pytest.raises(InputError, match=message) as error:
        plan(pipe, conditions=conditions)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"horizon": None}, "horizon: this model's config has none", id="no-horizon"),
        pytest.param({"horizon": 10}, "horizon 10: .* multiples of 4", id="odd-horizon"),
        pytest.param({"horizon": 0}, "horizon: 0 is not a whole number", id="zero"),
        pytest.param({"horizon": "8"}, "horizon: '8' is not a whole number", id="text"),
        pytest.param({"height": 8}, "height: this model plans trajectories; give horizon", id="height"),
        pytest.param({"width": 8}, "width: this model plans trajectories; give horizon", id="width"),
        pytest.param({"output_type": "pil"}, "output_type: 'pil' is not one of np, pt", id="pictures"),
        pytest.param({"class_labels": 1}, "class_labels: this model is unconditional", id="labels"),
        pytest.param({"guidance_scale": 2}, "guidance_scale: 2.0 needs a model with a null label", id="guidance"),
        pytest.param({"n_guide_steps": 2}, "n_guide_steps: 2 asks for .* gradient, which is not sup", id="gradient"),
        pytest.param({"sort_by_value": 1}, "sort_by_value: 1 is not true or false", id="sort"),
        pytest.param({"latents": torch.zeros(1, 5, 1, 8)}, r"latents: expected \(N, 5, L\)", id="latents-of-pictures"),
        pytest.param({"latents": torch.zeros(1, 4, 8)}, r"latents: expected \(N, 5, L\)", id="latents-channels"),
        pytest.param({"latents": torch.zeros(1, 5, 16)}, "latents: their horizon is 16", id="latents"),
        pytest.param(
            {"batch_size": 3, "conditions": {0: torch.zeros(2, 1)}},
            "batch_size and conditions are for 3 and 2",
            id="counts",
        ),
    ],
)
def test_options_that_are_refused(options, message, pipe):
    with pytest.raises(InputError, match=message) as error:
        plan(pipe, **options)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("scheduler", [EulerDiscreteScheduler, UniPCMultistepScheduler])
def test_schedulers_that_scale_the_input_or_keep_outputs_are_refused(pipe, scheduler):
    pipe.scheduler = scheduler()
    with pytest.raises(InputError, match="trajectories need ddim or ddpm; choose one of them"):
        plan(pipe)


def test_what_the_value_function_cannot_do(pipe, policy):
    with pytest.raises(InputError, match=r"sort_by_value: the value_function: horizon 32: .* 1 to 16"):
        plan(pipe, horizon=32, sort_by_value=True)
    with pytest.raises(InputError, match="sort_by_value: this pipeline has no value_function"):
        plan(TrajectoryPipeline(policy, DDIMScheduler()), sort_by_value=True)


@pytest.mark.parametrize("name", ["horizon", "conditions"])
def test_models_of_pictures_have_no_trajectories(name):
    pipe = Pipeline.from_pretrained("emoji64", device="cpu")
    with pytest.raises(InputError, match=f"{name}: this model draws pictures; leave it out"):
        pipe(**{name: {0: [1.0]} if name == "conditions" else 8})


def test_parts_that_do_not_fit_together(policy, randomise):
    values = UNet1DModel.from_config(VALUES)
    with pytest.raises(InputError, match="denoiser: this model is a value function"):
        TrajectoryPipeline(values, DDIMScheduler())
    with pytest.raises(InputError, match="value_function: UNet1DModel is no value function"):
        TrajectoryPipeline(policy, DDIMScheduler(), value_function=policy)
    with pytest.raises(InputError, match=r"value_function: .* of 6 channels"):
        TrajectoryPipeline(policy, DDIMScheduler(), value_function=UNet1DModel.from_config(VALUES | {"in_channels": 6}))
    with pytest.raises(InputError, match=r"value_function: .* of 5 channels, and the denoiser does not make"):
        blocks = {"block_out_channels": (32,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
        unet = UNet2DModel.from_config(blocks | {"in_channels": 5, "out_channels": 5})
        TrajectoryPipeline(unet, DDIMScheduler(), value_function=values)


def test_a_step_of_trajectories_has_no_preview(pipe):
    step = next(pipe.stream(horizon=8, num_inference_steps=2))
    assert step.trajectories is None and step.images is None
    assert step.decoder(step.x0, "pt").shape == (1, 5, 8)
    with pytest.raises(InputError, match="output_type: 'pil' is not one of np, pt"):
        step.preview()


def test_nan_is_an_error_that_names_the_step(pipe, policy):
    with torch.no_grad():
        policy.out_block.final_conv1d_2.bias[0] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or infinite at step 1 of 3"):
        plan(pipe)
    with pytest.raises(NonFiniteError):
        sort_trajectories(torch.zeros(2, 5, 8), torch.tensor([0.0, float("nan")]))


def test_known_values_are_set_in_place_at_the_last_channels_alone():
    known = place_conditions(read_conditions({1: [1.0, 2.0], 2: torch.full((3, 1), 9)}), 4, 3, CPU)
    x = torch.zeros(3, 1, 4, 3)
    assert known.set_in(x) is x
    assert x[0, 0].tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 9], [0, 0, 0]] and torch.equal(x[0], x[2])
    assert place_conditions({}, 4, 3, CPU) is None


def test_moving_a_pipeline_moves_the_value_function(pipe):
    pipe.to(torch.float64)
    assert pipe.value_function.dtype == torch.float64


@pytest.mark.parametrize("shape", [(1, 5, 8), (1, 2, 8, 5), (1, 1, 8, 4)], ids=str)
def test_what_is_no_state_of_trajectories_is_not_decoded(pipe, shape):
    with pytest.raises(InputError, match=r"x: expected \(N, 1, L, 5\)"):
        pipe.decode(torch.zeros(shape), "np")
