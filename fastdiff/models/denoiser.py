"""What the denoisers share: how they are built and loaded, what they refuse, and how they run through CUDA graphs."""

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fastdiff.checkpoints import hub, weights
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.json_files import from_mapping, read_json
from fastdiff.checkpoints.registry import DenoiserPart
from fastdiff.errors import InputError
from fastdiff.execution.cuda_graphs import Graphed, Outputs

ROWS = 32  # of timesteps that are embedded together: products of one shape give a row the same bits in any company

Model = TypeVar("Model", bound="Denoiser")


class Conditioning(NamedTuple):
    """What a denoiser knows of time and class, a row for each picture or label."""

    temb: Tensor  # (rows, width) what every block reads, side by side
    timesteps: Tensor  # (rows,)

    def of(self, rows: Tensor) -> "Conditioning":
        """The rows with these indices (N,), in this order."""
        return Conditioning(self.temb[rows], self.timesteps[rows])


def in_rows(x: Tensor) -> tuple[Tensor, ...]:
    """x (rows, ...) in parts of ROWS rows; the last one is filled up with its last row."""
    return torch.cat([x, x[-1:].expand(-len(x) % ROWS, *x.shape[1:])]).split(ROWS)


class Denoiser(nn.Module):
    """A model of diffusers for inference: the same configs, weights and call, channels-last inside.

    Build it with `from_config` (random weights) or `from_pretrained`. Its parameters do not require grad.
    """

    part: ClassVar[DenoiserPart]  # its place in a pipeline, its class names and its config
    conditioning_width: int  # of a row of its Conditioning

    def __init__(self, config: DenoiserConfig):
        super().__init__()
        self.config = config
        self.use_graphs = True  # on a GPU
        self._graphs: dict[Hashable, Graphed] = {}

    def conditioning(self, timesteps: Tensor, class_labels: Tensor | None = None) -> Conditioning:
        """Everything that depends on time and class alone: made once, before a sampling loop.

        Args: timesteps (rows,); class_labels as in `forward`, for each row.
        """
        raise NotImplementedError

    def predict(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """x (N, H, W, C_in) contiguous -> (N, H, W, C_out), under the conditioning of N rows, or of one for all."""
        raise NotImplementedError

    @classmethod
    def from_config(cls: type[Model], config: Mapping[str, Any] | DenoiserConfig, source: str = "config") -> Model:
        """A model with random weights from a mapping with diffusers' keys. InputError names a bad option."""
        if not isinstance(config, cls.part.config):
            config = from_mapping(cls.part.config, config, source)
        try:
            return cls(config).eval()
        except (ValueError, ZeroDivisionError) as error:  # torch's own: groups that do not divide a width...
            raise InputError(f"{source}: {error}; correct this option of the model's config") from None

    @classmethod
    def from_pretrained(
        cls: type[Model],
        name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        variant: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        **hub_options,
    ) -> Model:
        """Config and weights from a folder that diffusers saved, a bundled name, or a hub id.

        `subfolder` is the part of a pipeline folder (default: `unet` or `transformer`, where there is one).
        `hub_options` are `revision`, `token` and `local_files_only`. Raises InputError for a bad folder, config or
        weights file, NonFiniteError for NaN or infinity in the weights.
        """
        root = hub.resolve(name_or_path, variant=variant, **hub_options)
        folder = root / subfolder if subfolder else hub.component_folder(root, cls.part.name)
        return cls.from_folder(folder, variant=variant, dtype=dtype, device=device)

    @classmethod
    def from_folder(
        cls: type[Model], folder: Path, *, variant: str | None, dtype: torch.dtype, device: str | torch.device
    ) -> Model:
        """Config and weights from the very folder that holds them. Raises as `from_pretrained`."""
        path = folder / "config.json"
        config = read_json(path)
        if config.get("_class_name", cls.part.class_name) not in cls.part.classes:
            raise InputError(f"{path} describes a {config['_class_name']}; {cls.part.class_name} is supported")
        with torch.device("meta"):
            model = cls.from_config(config, source=str(path))
        state = weights.load_state_dict(folder, variant=variant)
        weights.load_weights(model, state, source=str(folder), dtype=dtype, device=device)
        return model

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations: biases and norms are kept in it, whatever the dtype of the weights."""
        return next(parameter for parameter in self.parameters() if parameter.ndim == 1).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _run(self, sample: Tensor, timestep: Tensor | float, class_labels: Tensor | None) -> Tensor:
        """`forward` without its names: sample (N, C_in, H, W) -> (N, C_out, H, W)."""
        self._check_sample(sample)
        timestep = timestep if isinstance(timestep, Tensor) else int(timestep)
        timesteps = torch.as_tensor(timestep, device=self.device).expand(len(sample))
        labels = () if class_labels is None else (class_labels,)
        (prediction,) = self.graphed("forward", self._run_graphed)(sample.permute(0, 2, 3, 1), timesteps, *labels)
        return prediction.permute(0, 3, 1, 2)

    def _run_graphed(self, x: Tensor, timesteps: Tensor, class_labels: Tensor | None = None) -> tuple[Tensor]:
        """`_run` as a function of tensors, over (N, H, W, C)."""
        return (self.predict(x.contiguous(), self.conditioning(timesteps, class_labels)),)

    def graphed(self, name: Hashable, function: Callable[..., Outputs]) -> Callable[..., Outputs]:
        """`function` of tensors, which runs this model, through CUDA graphs where there can be any.

        `name` stands for all that the function depends on besides its arguments and the model.
        """
        if self.device.type != "cuda" or not self.use_graphs:
            return function
        return self._graphs.setdefault(name, Graphed(function))

    def _apply(self, *args, **kwargs):
        self._graphs.clear()  # they read the parameters where these were
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_graphs": {}}  # a copy of the model makes its own

    def _check_sample(self, sample: Tensor) -> None:
        if sample.ndim != 4 or sample.shape[1] != self.config.in_channels:
            raise InputError(f"sample: expected (N, {self.config.in_channels}, H, W), got {tuple(sample.shape)}")
        if (sample.dtype, sample.device) != (self.dtype, self.device):
            raise InputError(
                f"sample: {sample.dtype} on {sample.device}, but the model is {self.dtype} on {self.device}; "
                "move one of them with .to()"
            )
        if sample.requires_grad and torch.is_grad_enabled():
            raise InputError(
                "sample: it requires grad, and this model is for inference only; call it on sample.detach()"
            )
        self.config.check_size(*sample.shape[2:])

    def _check_labels(self, timesteps: Tensor, class_labels: Tensor | None) -> None:
        if (class_labels is None) == self.config.takes_labels:
            has = "needs class_labels" if class_labels is None else "takes no class_labels: it is unconditional"
            raise InputError(f"class_labels: this model {has}")
        if class_labels is not None and len(class_labels) not in (1, len(timesteps)):
            raise InputError(
                f"class_labels: {len(class_labels)} given for {len(timesteps)} pictures; give one for each"
            )
