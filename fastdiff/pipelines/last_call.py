"""The facts of a text-to-image pipeline's last call, as attributes with the names of diffusers' pipelines."""

from typing import Any

from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.pipelines.adapting import Adapting
from fastdiff.pipelines.base import LastRun
from fastdiff.pipelines.drawing import DrawingOptions


class LastCall(Adapting):
    """A pipeline that remembers its last call."""

    cross_attention_kwargs: Any = None
    denoising_start: float | None = None
    denoising_end: float | None = None
    denoiser: UNet2DConditionModel

    @property
    def guidance_scale(self) -> float:
        """The guidance scale of the last call, or else the default."""
        return self._last_run.guidance_scale

    @property
    def guidance_rescale(self) -> float:
        """The `guidance_rescale` of the last call."""
        return self._last_run.guidance_rescale

    @property
    def clip_skip(self) -> int | None:
        """The `clip_skip` of the last call."""
        return self._last_run.clip_skip

    @property
    def num_timesteps(self) -> int:
        """The number of model calls in the last call, or else in one with the default steps."""
        return self._last_run.num_timesteps

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the last call was guided by two halves of a batch."""
        return self.guidance_scale > 1 and self.denoiser.config.time_cond_proj_dim is None

    @property
    def _last_run(self) -> LastRun:
        if self._last is not None:
            return self._last
        usual = self._complete(DrawingOptions())
        return LastRun(usual.guidance_scale, len(self._schedule(usual)))
