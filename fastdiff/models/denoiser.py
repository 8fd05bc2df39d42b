"""Denoiser: the base class of the models that are called at each step, with their conditioning and input checks."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fastdiff.arguments import as_float, naming, shown
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.registry import DenoiserPart
from fastdiff.errors import InputError
from fastdiff.execution.replaying.trees import Fixed
from fastdiff.execution.tensors import INDICES, REAL, beside, tensor, within
from fastdiff.models.blocks.conditioning import Conditioning, Given, Prompt
from fastdiff.models.blocks.resnet import Conditioned
from fastdiff.models.model import Model

MOST_TIMESTEP = 2**31  # float64 holds integers up to it exactly


class Recalled(NamedTuple):
    """A conditioning that earlier calls have computed."""

    time: tuple[Tensor, Tensor]  # `Conditioning.temb` and `timesteps`
    text: Fixed  # `Conditioning.text`


# Called with the arguments of `Denoiser.recall`
Recall = Callable[["Denoiser", Tensor, int, Tensor | None, Prompt | None], Recalled | None]


class Denoiser(Model):
    """The base class of models that are called at each step of sampling; see Model."""

    part: ClassVar[DenoiserPart]
    joins_halves: ClassVar[bool] = False  # on the CPU: run both halves of a guided picture as one batch
    config: DenoiserConfig

    def __init__(self, config: DenoiserConfig):
        super().__init__(config)
        self.conditioning_width = 0  # of `Conditioning.temb`
        # Returns the conditioning of a call if earlier calls have computed it; see `fastdiff.acceleration.recall`
        self.recall: Recall | None = None

    @property
    def embeds_prompt(self) -> bool:
        """Whether `embed` reads the prompt."""
        return False

    def _stack_projections(self, name: str, temb_channels: int, *, raw: bool = False) -> nn.Linear | None:
        """Stack the time projections of all blocks in one layer. Each block reads some of its outputs.

        `raw` selects the blocks that project the embedding itself, or those that project its activation.
        """
        widths: dict[str, int] = {}
        for path, block in self.named_modules():
            if isinstance(block, Conditioned) and block.raw == raw:
                start = self.conditioning_width
                self.conditioning_width += sum(block.projections.values())
                block.columns = slice(start, self.conditioning_width)
                widths |= {f"{path}.{layer}.": width for layer, width in block.projections.items()}
        if not widths:
            return None
        self.stacked[name] = widths
        return nn.Linear(temb_channels, sum(widths.values()))

    def conditioning(self, timesteps: Tensor, class_labels: Tensor | None = None) -> Conditioning:
        """Compute what depends on time and class only. A sampling loop does so once, before its first step.

        Args:
            timesteps: (M,).
            class_labels: as in `forward`, M labels or one for all.

        Raises:
            InputError: for labels that are missing, not supported or of another number.
        """
        raise NotImplementedError

    def embed(self, timesteps: Tensor, class_labels: Tensor | None, prompt: Prompt | None) -> Tensor:
        """Return `Conditioning.temb` (M, conditioning_width), the part that changes from step to step."""
        return self.conditioning(timesteps, class_labels).temb

    def project(self, prompt: Prompt) -> tuple[Tensor, ...]:
        """Return `Conditioning.text`, which is the same at each step. Only for models that read a text."""
        raise NotImplementedError

    def usual_conditioning(self, timesteps: Tensor, class_labels: Tensor | None = None) -> Conditioning:
        """Return `conditioning` with zeros for all other inputs of the model, for a trial run."""
        return self.conditioning(timesteps, class_labels)

    def predict(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the prediction (N, H, W, C_out), contiguous, for x (N, H, W, C_in).

        The conditioning has N entries, or one for all.
        """
        raise NotImplementedError

    def _run(self, sample: Tensor, timestep: Tensor | float, class_labels: Tensor | None = None) -> Tensor:
        """Check the inputs and predict. The sample and the prediction have diffusers' layout."""
        self._check_sample(sample)
        timestep = self._checked_timestep(timestep, len(sample))
        self._check_labels(len(sample), class_labels)
        return self._predicted(sample, timestep, class_labels)

    def _predicted(
        self, sample: Tensor, timestep: Tensor, class_labels: Tensor | None, prompt: Prompt | None = None, *extras: Any
    ) -> Tensor:
        """Predict from checked inputs. `extras` are passed on to `predict`."""
        x = self.channels_last(sample)
        known = None
        if self.recall is not None:
            known = self.recall(self, timestep, len(sample), class_labels, prompt)
        if known is not None:
            (prediction,) = self.graphed("step", self._run_known)(x, *known, *extras)
        else:
            timesteps = timestep.to(self.device).expand(len(sample))
            labels, prompts = (() if each is None else (each,) for each in (class_labels, prompt))
            (prediction,) = self.graphed("forward", self._run_whole)(x, timesteps, labels, prompts, *extras)
        return self.channels_first(prediction)

    def _run_whole(
        self, x: Tensor, timesteps: Tensor, labels: Given, prompts: tuple[Prompt, ...], *extras: Any
    ) -> tuple[Tensor]:
        """Predict as a function of tensors only, over (N, H, W, C)."""
        return self._run_step(x, self.conditioning(timesteps, labels[0] if labels else None, *prompts), *extras)

    def _run_known(
        self, x: Tensor, time: tuple[Tensor, Tensor], text: tuple[Tensor, ...], *extras: Any
    ) -> tuple[Tensor]:
        """Predict as `_run_whole` does, with a conditioning that is computed before."""
        return self._run_step(x, Conditioning(*time, text), *extras)

    def _run_step(self, x: Tensor, conditioning: Conditioning, *extras: Any) -> tuple[Tensor]:
        for name, source in self.sources.items():
            self.get_parameter(name).copy_(self.conversions[name].convert(source))
        return (self.predict(x.contiguous(), conditioning, *extras),)

    def channels_last(self, sample: Tensor) -> Tensor:
        """Return a view (N, H, W, C) of a sample in diffusers' layout (N, C, H, W)."""
        return sample.permute(0, 2, 3, 1)

    def channels_first(self, prediction: Tensor) -> Tensor:
        """Return a view of the output of `predict` in diffusers' layout (N, C_out, H, W)."""
        return prediction.permute(0, 3, 1, 2)

    def _checked_timestep(self, timestep: Tensor | float, count: int) -> Tensor:
        """Return the timestep of all pictures, or one for each of `count` pictures, on any device."""
        embeds = self.config.num_timestep_embeds
        if not isinstance(timestep, Tensor):
            number = as_float(timestep)
            if number is None or abs(number) > MOST_TIMESTEP:
                raise InputError(f"timestep: {shown(timestep)} is not a timestep; give a number as in training")
            timestep = torch.tensor(int(number))
        tensor("timestep", timestep, REAL if embeds is None else INDICES)
        if timestep.ndim > 1 or timestep.numel() not in (1, count):
            shape = tuple(timestep.shape)
            raise InputError(f"timestep: its shape is {shape} for {count} pictures; give one number, or one for each")
        if embeds is not None:
            within("timestep", timestep, 0, embeds - 1)
        return timestep

    def _check_sample(self, sample: Tensor) -> None:
        if not isinstance(sample, Tensor):
            raise InputError(f"sample: {shown(sample)} is not a tensor; give a torch.Tensor")
        if sample.layout != torch.strided or not sample.numel():
            raise InputError(
                f"sample: a {sample.layout} tensor of shape {tuple(sample.shape)}; give a dense, non-empty one"
            )
        channels, axes = self.config.sample_channels, self.config.AXES
        if sample.ndim != 2 + len(axes) or sample.shape[1] != channels:
            raise InputError(f"sample: expected (N, {channels}, {', '.join(axes)}), got {tuple(sample.shape)}")
        if (sample.dtype, sample.device) != (self.dtype, self.device):
            raise InputError(
                f"sample: {sample.dtype} on {sample.device}, but the model is {self.dtype} on {self.device}; "
                "move one of them with .to()"
            )
        if sample.requires_grad and torch.is_grad_enabled():
            raise InputError(
                "sample: it requires grad, and this model is for inference only; call it on sample.detach()"
            )
        with naming("sample"):
            self.config.check_size(*self.channels_last(sample).shape[1:3])

    def _check_labels(self, count: int, class_labels: Tensor | None) -> None:
        if (class_labels is None) == self.config.takes_labels:
            has = "needs class_labels" if class_labels is None else "takes no class_labels: it is unconditional"
            raise InputError(f"class_labels: this model {has}")
        if class_labels is None:
            return
        table, expected = self.config.label_table, self.config.label_shape
        if self.config.class_embed_type == "timestep":  # labels are embedded like timesteps, which may be in a table
            table = self.config.num_timestep_embeds
        in_memory = self.device.type != "meta"
        tensor("class_labels", class_labels, REAL if table is None else INDICES, in_memory=in_memory)
        beside("class_labels", class_labels, self.device)
        if table is not None:
            within("class_labels", class_labels, 0, table - 1)
        if class_labels.ndim == 0 or class_labels.shape[1:] != expected:
            raise InputError(f"class_labels: its shape is {tuple(class_labels.shape)}; it must be {('N', *expected)}")
        if len(class_labels) not in (1, count):
            raise InputError(f"class_labels: {len(class_labels)} given for {count} pictures; give one for each")
