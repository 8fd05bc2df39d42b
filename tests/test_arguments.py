"""Every public entry refuses a wrong argument at once, with a one-line TypeError or InputError that names it."""

import numpy as np
import pytest
import torch

import fastdiff
from fastdiff import (
    DDIMScheduler,
    DDPMScheduler,
    DiTTransformer2DModel,
    InputError,
    LabelPipeline,
    Pipeline,
    UNet1DModel,
    UNet2DModel,
)
from fastdiff.checkpoints.model_info import ModelInfo
from tests.support.planners import policy
from tests.support.tiny import UNET

DIT = {
    "sample_size": 8,
    "in_channels": 3,
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "num_embeds_ada_norm": 3,
}
PLANNER = policy(8, 16, sample_size=8, in_channels=3, out_channels=2)
MODELS = {
    "plain": UNet2DModel.from_config(UNET),
    "labelled": UNet2DModel.from_config(UNET | {"num_class_embeds": 3}),
    "rows": UNet2DModel.from_config(UNET | {"class_embed_type": "identity"}),
    "numbers": UNet2DModel.from_config(UNET | {"class_embed_type": "timestep"}),
    "learned": UNet2DModel.from_config(UNET | {"time_embedding_type": "learned", "num_train_timesteps": 10}),
    "dit": DiTTransformer2DModel.from_config(DIT),
    "planner": UNet1DModel.from_config(PLANNER),
}
INFO = ModelInfo(labels=("cat", "dog"), null_label=2)
X = torch.zeros(2, 3, 8, 8)
HUGE = 10**400
LONG = 10**5000  # more digits than Python prints
MORE = {  # values that are wrong for every argument
    "text": "x",
    "complex": torch.zeros(2, dtype=torch.complex64),
    "object": object(),
    "dict": {"x": 1},
}
NUMBER = MORE | {"true": True, "nan": float("nan"), "inf": float("inf"), "huge": HUGE, "long": LONG, "list": [1, [2]]}
COUNT = NUMBER | {"none-of-it": 0, "negative": -1, "fraction": 1.9, "floats": torch.tensor(1.9)}
TENSOR = MORE | {
    "none": None,
    "number": 1,
    "list": [],
    "array": np.zeros((2, 3, 8, 8), np.float32),
    "integers": torch.zeros(2, 3, 8, 8, dtype=torch.int64),
    "complexes": X.to(torch.complex64),
    "bools": X.bool(),
    "meta": X.to("meta"),
    "sparse": X.to_sparse(),
    "scalar": torch.tensor(0.0),
    "empty": X[:0],
}
FLAG = MORE | {"number": 1, "list": []}
TEXT = {"number": 1.9, "true": True, "object": object(), "list": [], "dict": {}, "nul": "a\0", "lines": "a\nb"}
TEXT |= {"surrogate": "\ud800"}
DEVICE = MORE | {"negative": -1, "list": [], "true": True, "meta": "meta", "fraction": 1.9, "huge": HUGE}
DTYPE = MORE | {"int8": torch.int8, "complex64": torch.complex64, "float8": torch.float8_e4m3fn, "numpy": np.float32}
LABELS = {
    "text": "x",
    "empty": [],
    "endless": range(2**60),
    "fraction": 1.9,
    "fractions": torch.tensor([1.9]),
    "negative": -1,
    "above": 3,
    "true": True,
    "dict": {},
    "object": object(),
    "long": LONG,
    "bytes": b"ab",
    "complex": torch.zeros(1, dtype=torch.complex64),
    "rows": torch.zeros(2, 2, dtype=torch.int64),
    "empty-tensor": torch.zeros(0, dtype=torch.int64),
    "0-d": torch.tensor(1.9),
    "meta": torch.zeros(1, dtype=torch.int64, device="meta"),
}
SEEDS = NUMBER | {
    "negative": -1,
    "fraction": 1.9,
    "list": [1.9],
    "empty": [],
    "bytes": b"ab",
    "above": 2**32,
    "endless": range(2**60),
}
GENERATORS = MORE | {"number": 1, "empty": [], "list": [None], "tuple": (torch.Generator(),)}
STREAM = {
    "num_inference_steps": COUNT,
    "num_images": COUNT | {"none": None, "too-many": 10**9},
    "seed": SEEDS | {"none": None},
    "class_labels": LABELS,
    "guidance_scale": NUMBER | {"negative": -5},
    "eta": NUMBER | {"negative": -1},
    "use_clipped_model_output": FLAG,
    "batch_size": COUNT | {"too-many": 10**9},
    "height": COUNT | {"too-many": 2**40},
    "width": COUNT,
    "generator": GENERATORS,
    "latents": {name: value for name, value in TENSOR.items() if name != "none"} | {"odd": X[..., :7]},
    "output_type": MORE | {"list": [], "array": np.array(["pil", "np"])},
    "no_such_option": {"number": 1},
}


def pipe(model="labelled", scheduler=None):
    return LabelPipeline(MODELS[model], scheduler or DDIMScheduler(), INFO if model == "labelled" else None)


def stream(**options):
    pipe().stream(**{"class_labels": 0, "num_inference_steps": 2} | options)


def call_unet(model="labelled", **options):
    labels = {} if model != "labelled" else {"class_labels": torch.tensor([0, 1])}
    return MODELS[model](**{"sample": X, "timestep": 1} | labels | options)


def call_dit(**options):
    return MODELS["dit"](**{"hidden_states": X, "timestep": 1, "class_labels": torch.tensor([0, 1])} | options)


def call_planner(**options):
    return MODELS["planner"](**{"sample": X[:, :, 0], "timestep": 1} | options)


def step(kind, **options):
    scheduler = kind()
    scheduler.set_timesteps(2)
    return scheduler.step(**{"model_output": X, "timestep": 500, "sample": X} | options)


def noisy(method, first, **options):
    return getattr(DDIMScheduler(), method)(**{first: X, "noise": X, "timesteps": torch.tensor([1, 2])} | options)


CALL = {
    "sample": TENSOR | {"channels": X[:, :2], "half": X.half(), "odd": X[..., :7]},
    "timestep": {key: value for key, value in NUMBER.items() if key != "list"}
    | {"none": None, "list": [1], "three": torch.tensor([1, 2, 3]), "bools": torch.tensor(True)}
    | {"meta": torch.tensor(1, device="meta")},
    "class_labels": {key: value for key, value in LABELS.items() if not isinstance(value, str)}
    | {"list": [0, 1], "three": torch.tensor([0, 1, 2]), "tensor-above": torch.tensor([0, 3])}
    | {"tensor-negative": torch.tensor([0, -1]), "none": None, "bytes": torch.tensor([0, 1], dtype=torch.uint8)},
    "return_dict": FLAG | {"none": None},
}
TIMESTEPS = MORE | {"none": None, "floats": torch.tensor([1.9]), "above": torch.tensor([1000])}
TIMESTEPS |= {"negative": torch.tensor([-1]), "three": torch.tensor([1, 2, 3]), "empty": torch.tensor([]).long()}
STEP = {
    "model_output": TENSOR | {"channels": X[:, :2]},
    "sample": TENSOR,
    "timestep": COUNT | {"none": None, "above": 1000},
    "generator": GENERATORS,
    "return_dict": FLAG,
}
del STEP["timestep"]["none-of-it"]
NOISY = {"noise": {name: value for name, value in TENSOR.items() if name != "scalar"}, "timesteps": TIMESTEPS}
CUSTOM = MORE | {"fractions": [1.9], "bools": [True, False], "huge": [HUGE], "empty": [], "ragged": [[1], [2, 3]]}
PRETRAINED = {
    "pretrained_model_name_or_path": TEXT | {"none": None},
    "device": DEVICE,
    "dtype": DTYPE,
    "variant": TEXT,
    "revision": TEXT,
    "token": {"number": 1.9, "list": []},
    "local_files_only": FLAG,
    "no_such_option": {"number": 1},
}


def pretrained(kind, **options):
    return kind.from_pretrained(**{"pretrained_model_name_or_path": "emoji64", "device": "cpu"} | options)


def make_pipeline(**options):
    return LabelPipeline(**{"denoiser": MODELS["plain"], "scheduler": DDIMScheduler()} | options)


def set_timesteps(kind, **options):
    kind().set_timesteps(**({"num_inference_steps": 5} if "timesteps" not in options else {}) | options)


ENTRIES = {
    "Pipeline": (make_pipeline, {"denoiser": MORE | {"none": None}, "scheduler": MORE | {"none": None},
                                 "info": MORE, "name": TEXT | {"none": None}, "vae": MORE}),
    "Pipeline.stream": (stream, STREAM),
    "Pipeline.__call__": (lambda **options: pipe()(**options), {"return_dict": FLAG}),
    "Pipeline.from_pretrained": (
        lambda **options: pretrained(Pipeline, **options),
        PRETRAINED | {"scheduler": MORE | {"empty": "", "list": []}},
    ),
    "Pipeline.to": (lambda to: pipe().to(to), {"to": {**DEVICE, **DTYPE}}),
    "UNet2DModel": (call_unet, CALL),
    "UNet2DModel learned": (
        lambda **options: call_unet("learned", **options),
        {"timestep": {"above": 10, "negative": -1, "above-tensor": torch.tensor([1, 10]), "float": torch.tensor(1.0)}},
    ),
    "UNet2DModel rows": (
        lambda **options: call_unet("rows", **options),
        {"class_labels": {"indices": torch.tensor([0, 1]), "narrow": torch.zeros(2, 31)}},
    ),
    "UNet2DModel.from_config": (
        UNet2DModel.from_config, {"config": TEXT | {"none": None, "text": "x", "dict": {1: 2}}},
    ),
    "UNet2DModel.from_pretrained": (
        lambda **options: pretrained(UNet2DModel, **options), PRETRAINED | {"subfolder": TEXT},
    ),
    "DiTTransformer2DModel": (
        call_dit,
        {"timestep": CALL["timestep"], "class_labels": {**CALL["class_labels"], "tensor-above": torch.tensor([0, 4])},
         "return_dict": FLAG, "cross_attention_kwargs": FLAG | {"array": np.zeros(2)}},
    ),
    "UNet1DModel": (
        call_planner,
        {"sample": TENSOR | {"channels": X[:, :2, 0], "half": X[:, :, 0].half(), "odd": X[:, :, 0, :7]},
         "timestep": CALL["timestep"], "return_dict": FLAG, "class_labels": {"indices": torch.tensor([0, 1])}},
    ),
    "UNet1DModel.from_config": (
        UNet1DModel.from_config, {"config": TEXT | {"none": None, "text": "x", "dict": {1: 2}}},
    ),
    "DDIMScheduler.step": (
        lambda **options: step(DDIMScheduler, **options),
        STEP | {"eta": NUMBER | {"none": None, "negative": -1}, "use_clipped_model_output": FLAG,
                "variance_noise": {name: value for name, value in TENSOR.items() if name != "none"}},
    ),
    "DDPMScheduler.step": (lambda **options: step(DDPMScheduler, **options), STEP),
    "DDPMScheduler.previous_timestep": (DDPMScheduler().previous_timestep, {"timestep": STEP["timestep"]}),
    "add_noise": (
        lambda **options: noisy("add_noise", "original_samples", **options),
        NOISY | {"original_samples": NOISY["noise"]},
    ),
    "get_velocity": (lambda **options: noisy("get_velocity", "sample", **options), NOISY | {"sample": NOISY["noise"]}),
    "scale_model_input": (
        lambda **options: DDIMScheduler().scale_model_input(**{"sample": X, "timestep": 1} | options),
        {"sample": MORE | {"none": None}, "timestep": NUMBER},
    ),
    "accelerate": (fastdiff.accelerate, {"model_or_pipeline": MORE | {"none": None, "ours": MODELS["plain"]}}),
    "restore": (fastdiff.restore, {"model_or_pipeline": MORE | {"none": None}}),
    "report": (
        lambda **options: fastdiff.report(**{"model": pipe(), "class_labels": 0} | options),
        {"model": MORE | {"none": None}, "batch_size": COUNT, "height": COUNT, "class_labels": LABELS,
         "num_inference_steps": {"one": 1}, "no_such_option": {"number": 1}},
    ),
    "report of a model": (
        lambda **options: fastdiff.report(MODELS["labelled"], **options),
        {"batch_size": COUNT, "height": COUNT | {"odd": 7}, "width": COUNT,
         "class_labels": {key: value for key, value in CALL["class_labels"].items() if key != "none"}},
    ),
    "report of a planner": (
        lambda **options: fastdiff.report(MODELS["planner"], **options),
        {"horizon": COUNT | {"odd": 7}, "height": {"number": 1}, "class_labels": {"indices": torch.tensor([0])}},
    ),
}  # fmt: skip
for kind in (DDIMScheduler, DDPMScheduler):
    for name, call, arguments in (
        ("", kind, {"num_train_timesteps": {"text": "x", "true": True, "zero": 0}, "no_such_option": {"number": 1}}),
        (".from_config", kind.from_config, {"config": TEXT | {"none": None, "text": "x", "dict": {1: 2}}}),
        (".from_pretrained", kind.from_pretrained, {"pretrained_model_name_or_path": TEXT | {"none": None}}),
        (
            ".set_timesteps",
            lambda kind=kind, **options: set_timesteps(kind, **options),
            {"num_inference_steps": COUNT | {"above": 1001, "none": None}, "device": DEVICE},
        ),
        (
            ".schedule",
            lambda kind=kind, **options: kind().schedule(**{"num_inference_steps": 3} | options),
            {"num_inference_steps": COUNT, "eta": NUMBER | {"negative": -1}, "use_clipped_model_output": FLAG},
        ),
    ):
        ENTRIES[kind.__name__ + name] = call, arguments
ENTRIES["DDPMScheduler.set_timesteps"][1]["timesteps"] = CUSTOM

CASES = [
    pytest.param(call, argument, values, id=f"{entry}-{argument}")
    for entry, (call, arguments) in ENTRIES.items()
    for argument, values in arguments.items()
]


@pytest.mark.parametrize(("call", "argument", "values"), CASES)
def test_a_wrong_argument_is_named(call, argument, values):
    faults = {name: fault_of_refusal(call, argument, value) for name, value in values.items()}
    lines = [f"{name}: {fault}" for name, fault in faults.items() if fault]
    assert not lines, "\n".join(lines)


def fault_of_refusal(call, argument: str, value) -> str | None:
    """Return what is wrong with how a call refuses a wrong value, or None."""
    try:
        call(**{argument: value})
    except (TypeError, InputError) as error:
        message = str(error)
        if argument in message and "\n" not in message and len(message) < 500:
            return None
        return f"not a line of less than 500 characters that names {argument}: {message[:500]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it is taken"


def test_a_generator_of_another_device_is_refused_before_the_first_step():
    class Elsewhere(torch.Generator):
        device = torch.device("cuda:1")

    with pytest.raises(InputError, match="generator is on cuda:1"):
        stream(generator=Elsewhere(), latents=X[:1])
    with pytest.raises(InputError, match="generator is on cuda:1"):
        step(DDIMScheduler, generator=[Elsewhere()])


@pytest.mark.parametrize("side", ["height", "width"])
def test_latents_of_another_size_than_asked_for(side):
    stream(latents=X, **{side: 8})
    with pytest.raises(InputError, match=f"latents: they make pictures of {side} 8, but {side} is 16"):
        stream(latents=X, **{side: 16})


LABEL_LISTS = {
    "names": ["cat", "x"],
    "fractions": [0, 1.9],
    "booleans": [True],
    "above": [0, 3],
    "nested": [[0], [1, 2]],
    "array": np.array([0, 1]),
}


@pytest.mark.parametrize("name", LABEL_LISTS)
def test_a_wrong_label_among_others(name):
    with pytest.raises(InputError, match="class_labels"):
        stream(class_labels=LABEL_LISTS[name])


@pytest.mark.parametrize("labels", ["x", None, [[0.5], [1, 2]], torch.zeros(2, 31), torch.zeros(2, 32).bool(), 1.9])
def test_rows_that_do_not_fit_the_model(labels):
    with pytest.raises(InputError, match="class_labels"):
        pipe("rows").stream(class_labels=labels)


def test_a_move_that_cannot_be_moves_nothing():
    ours = pipe()
    for to in ("x", "meta", torch.int8, 1.9):
        with pytest.raises(InputError, match=r"to|device|dtype"):
            ours.to(to)
    assert (ours.device, ours.dtype) == (torch.device("cpu"), torch.float32)


TAKEN = {
    "steps": ({"num_inference_steps": np.int64(2)}, {"num_inference_steps": torch.tensor(2)}),
    "pictures": ({"num_images": np.int32(2)}, {"num_images": torch.tensor(2)}),
    "seed": ({"seed": np.uint32(7)}, {"seed": torch.tensor(7)}, {"seed": (7,)}, {"seed": [np.int64(7)]}),
    "label": ({"class_labels": np.int64(1)}, {"class_labels": torch.tensor(1)}, {"class_labels": (1,)},
              {"class_labels": "1"}, {"class_labels": torch.tensor([1], dtype=torch.int32)}),
    "guidance": ({"guidance_scale": np.float32(2)}, {"guidance_scale": 2}, {"guidance_scale": torch.tensor(2.0)}),
    "eta": ({"eta": np.float64(0.5)}, {"eta": torch.tensor(0.5)}),
    "size": ({"height": np.int64(8)}, {"width": torch.tensor(8)}),
    "latents": ({"latents": X[:1].half()}, {"latents": X[:1].double()}, {"latents": X[:1].clone().requires_grad_()}),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_numbers_of_numpy_and_tensors_of_one_are_numbers(case):
    pictures = [
        pipe()(**{"class_labels": 0, "num_inference_steps": 2, "output_type": "pt"} | options).images
        for options in TAKEN[case]
    ]
    for other in pictures[1:]:
        assert torch.equal(other, pictures[0])


@pytest.mark.parametrize("timestep", [1, 1.0, 1.9, np.int64(1), np.float32(1), torch.tensor(1), torch.tensor([1, 1])])
def test_timesteps_that_diffusers_takes(timestep):
    expected = call_unet(timestep=1).sample
    assert torch.equal(call_unet(timestep=timestep).sample, expected)


@pytest.mark.parametrize("timestep", [np.int64(500), torch.tensor(500), torch.tensor([500])])
def test_timesteps_that_diffusers_steps_from(timestep):
    expected = step(DDIMScheduler).prev_sample
    assert torch.equal(step(DDIMScheduler, timestep=timestep, eta=0).prev_sample, expected)
