"""The configs of Stable Diffusion give models of the published sizes."""

import diffusers
import pytest
import torch
import transformers

import fastdiff
from benchmarks.models import stable_diffusion as sd

PARAMETERS = {  # in the published weights
    "UNet2DConditionModel": ((sd.SD15, 859_520_964), (sd.SD21, 865_910_724), (sd.SDXL, 2_567_463_684)),
    "AutoencoderKL": ((sd.SD15_VAE, 83_653_863), (sd.SDXL_VAE, 83_653_863)),
    "CLIPTextModel": ((sd.SD15_TEXT, 123_060_480), (sd.SD21_TEXT, 340_387_840)),
    "CLIPTextModelWithProjection": ((sd.SDXL_TEXT_2, 694_659_840),),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "count"), [(name, *case) for name, cases in PARAMETERS.items() for case in cases]
)
def test_parameters(name, config, count):
    with torch.device("meta"):
        ours = getattr(fastdiff, name).from_config(config)
        if name.startswith("CLIP"):
            theirs = getattr(transformers, name)(transformers.CLIPTextConfig(**config))
        else:
            theirs = getattr(diffusers, name)(**config)
    for model in (ours, theirs):
        assert sum(parameter.numel() for parameter in model.parameters()) == count
