"""Calls of text-to-image pipelines with ControlNets."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastdiff.checkpoints.registry import pipeline_class
from fastdiff.execution.devices import naming_lost_device
from fastdiff.execution.memory import or_explain
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.pipelines.controlling import Controlling, ControlOptions, ControlRun
from fastdiff.pipelines.drawing import Drawing, DrawingOptions, options_of
from fastdiff.pipelines.last_call import LastCall
from fastdiff.pipelines.refining import PartOptions
from fastdiff.requests.defaults import STRENGTH, Sampling


class ControlCalls(LastCall):
    """A pipeline whose calls may have ControlNets."""

    controlnets: tuple[ControlNetModel, ...]

    @property
    def diffusers_class(self) -> str:
        """See `Saving`: the folder's class, with or without a ControlNet as the pipeline has one."""
        return pipeline_class(super().diffusers_class, controlled=bool(self.controlnets))

    def _complete(self, options: DrawingOptions, *, masked: bool = False) -> Sampling:
        # diffusers' ControlNet pipelines have one guidance, with and without a mask
        return super()._complete(options, masked=masked and not self.controlnets)

    def _control(
        self, options: Mapping[str, Any], image: Any, strength: float | None, mask: Any
    ) -> tuple[Controlling | None, Any, float | None]:
        """Return the ControlNets of a call, the image to start from, and its strength."""
        control = options_of(ControlOptions, options)
        if not self.controlnets:
            control.check_unused()
            return None, image, strength
        control, image = control.with_image(image, (strength, mask))
        of_image = image is not None and mask is None and options.get("denoising_start") is None
        read = control.read(self.controlnets, masked=mask is not None)
        return read, image, STRENGTH if of_image and strength is None else strength

    def _control_run(
        self, control: Controlling, drawing: Drawing, prompts: int, asked: DrawingOptions, part: PartOptions
    ) -> ControlRun:
        """Embed the control pictures of a call, and return what controls its steps."""
        start, steps = drawing.starts_from, len(drawing.schedule)
        if part.denoising_end is not None:  # the steps count as in the whole run
            begin = None if start is None else start.begin
            steps = len(self._schedule(drawing.sampling, asked.timesteps, asked.sigmas, begin))
        with naming_lost_device(), self._working(*self.controlnets):
            embed = partial(control.run, self.denoiser, drawing.subjects, prompts, steps, start)
            return or_explain(embed, drawing.portions.problem)
