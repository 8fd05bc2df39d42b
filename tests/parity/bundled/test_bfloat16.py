"""The bundled models in bfloat16 on a CPU, against diffusers in float32 and in bfloat16, with their trained weights."""

import diffusers
import pytest
import torch

import fastdiff
from fastdiff.checkpoints import hub
from fastdiff.kernels.plans import cpu

MODELS = {"emoji64": "UNet2DModel", "emoji-sd": "UNet2DConditionModel"}


def inputs(config):
    """Return a sample, and a text or a label."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, config.in_channels, config.sample_size, config.sample_size, generator=generator)
    if "cross_attention_dim" in config:
        return sample, torch.randn(1, 77, config.cross_attention_dim, generator=generator)
    return sample, torch.tensor([3])


def predicted(model, sample, condition):
    """Return the prediction at one timestep, in float32."""
    condition = condition.to(model.dtype) if condition.is_floating_point() else condition
    with torch.inference_mode():
        return model(sample.to(model.dtype), 500, condition).sample.float()


@pytest.mark.parametrize("name, kind", MODELS.items(), ids=MODELS)
def test_errors_are_at_most_twice_diffusers(name, kind):
    """The first call runs the model, the second traces it, and the third replays the trace."""
    if not cpu.by_onednn(torch.ones(1, dtype=torch.bfloat16)):
        pytest.skip("oneDNN does not compute in bfloat16 on this CPU")
    folder = hub.bundled_models()[name] / "unet"
    theirs = getattr(diffusers, kind).from_pretrained(folder).eval()
    ours = getattr(fastdiff, kind).from_pretrained(folder, torch_dtype=torch.bfloat16)
    given = inputs(theirs.config)
    expected = predicted(theirs, *given)
    allowed = (predicted(theirs.to(torch.bfloat16), *given) - expected).abs()
    for _ in range(3):
        error = (predicted(ours, *given) - expected).abs()
        assert error.max() <= 2 * allowed.max()
        assert error.square().mean().sqrt() <= 1.5 * allowed.square().mean().sqrt()
    assert error.max() > 1e-4, "float32 would be this close"
