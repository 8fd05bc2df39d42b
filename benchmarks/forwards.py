"""A forward of the measured models: how ours is built of a config, and what it is given."""

from collections.abc import Callable
from typing import Any

import torch
from harness import DEVICE
from shapes import MODELS_CPU, MODELS_GPU
from torch import Tensor, nn

import fastdiff
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.models.blocks.conditioning import Conditioning, Prompt
from fastdiff.models.prompt import PromptCheck

GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32  # where a workload does not name another
WORKLOADS = MODELS_GPU if GPU else MODELS_CPU


def is_planner(config: dict) -> bool:
    """Whether the model's samples are of one dimension."""
    return class_name(config) == "UNet1DModel"


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a workload is measured in."""
    return torch.float32 if name.endswith("_fp32") else DTYPE


def class_name(config: dict) -> str:
    """The name of the model's class, in diffusers and here."""
    if "cross_attention_dim" in config:
        return "UNet2DConditionModel"
    if "mid_block_type" in config:
        return "UNet1DModel"
    return "DiTTransformer2DModel" if "patch_size" in config else "UNet2DModel"


def random_model(config: dict, dtype: torch.dtype) -> nn.Module:
    """Our model with the same random weights in every run, on DEVICE."""
    torch.manual_seed(0)
    with DEVICE:  # random numbers of a large model take the CPU long
        return getattr(fastdiff, class_name(config)).from_config(config).to(dtype)


def ours(name: str) -> Callable[[], Any]:
    """Our forward of a workload."""
    config, batch, _ = WORKLOADS[name]
    model, given = random_model(config, dtype_of(name)), in_dtype(inputs(config, batch), dtype_of(name))
    return lambda: model(*given)


def inputs(config: dict, batch: int) -> tuple[Any, ...]:
    """Sample (N, C, H, W) or (N, C, L) float32, timesteps (N,); of pictures labels (N,) or None, or a text."""
    timesteps = torch.full((batch,), 500, device=DEVICE)
    if is_planner(config):
        return torch.randn(batch, config["in_channels"], config["sample_size"], device=DEVICE), timesteps
    if "cross_attention_dim" in config:
        return text_inputs(config, timesteps)
    side, labelled = config["sample_size"], config.keys() & {"num_class_embeds", "num_embeds_ada_norm"}
    sample = torch.randn(batch, config.get("in_channels", 3), side, side, device=DEVICE)
    labels = torch.zeros(batch, dtype=torch.int64, device=DEVICE) if labelled else None
    return sample, timesteps, labels


def text_inputs(config: dict, timesteps: Tensor) -> tuple[Any, ...]:
    """Sample, timesteps, a text (N, 77, C), and SDXL's numbers and pooled text at their place among the arguments."""
    shapes = UNet2DConditionConfig.from_mapping(config, "config").prompt_shapes
    batch, side = len(timesteps), config["sample_size"]
    text, *added = (torch.randn(batch, *shape, device=DEVICE) for shape in shapes.values())
    given = torch.randn(batch, config.get("in_channels", 4), side, side, device=DEVICE), timesteps, text
    return (*given, *[None] * 4, dict(zip(("text_embeds", "time_ids"), added, strict=True))) if added else given


def in_dtype(given: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The same arguments with all floats in `dtype`."""

    def cast(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cast(each) for name, each in value.items()}
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, given))


def with_text_outside(ours: fastdiff.UNet2DConditionModel, given: tuple[Any, ...]) -> Callable[[], Tensor]:
    """The forward of `given` without the keys and values of its text, which are made here, as a sampling loop does."""
    sample, timesteps, text, *rest = given
    check = PromptCheck(ours.config, ours.dtype, ours.device, len(sample))
    prompt = check.prompt(text, added_cond_kwargs=rest[-1] if rest else None)
    projected = ours.project_text(text)

    def predict(x: Tensor, timesteps: Tensor, prompt: Prompt) -> tuple[Tensor]:
        conditioning = Conditioning(ours.embed(timesteps, None, prompt), timesteps, (projected,))
        return (ours.predict(x.contiguous(), conditioning),)

    run = ours.graphed("text outside", predict)
    return lambda: ours.channels_first(run(ours.channels_last(sample), timesteps, prompt)[0])
