"""Model, the base of all: how they are built, loaded and laid out, how they run through CUDA graphs."""

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fastdiff.arguments import mapping, optional, text
from fastdiff.checkpoints import hub, weight_files, weights
from fastdiff.checkpoints.configs.model import ModelConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.quantisation import formats
from fastdiff.checkpoints.registry import ModelPart
from fastdiff.errors import InputError
from fastdiff.execution.cuda_graphs import Function, Graphed
from fastdiff.execution.devices import check_precision, check_weights_dtype, on_meta, resolve_device
from fastdiff.kernels.host.compiling import get_ready
from fastdiff.kernels.host.weights import Quantised
from fastdiff.kinds import Precision
from fastdiff.schema import checked

AnyModel = TypeVar("AnyModel", bound="Model")


class Model(nn.Module):
    """A model of diffusers or transformers for inference: the same configs, weights and call, channels-last inside.

    Build it with `from_config` (random weights) or `from_pretrained`. Its parameters do not require grad.
    """

    whole: ClassVar[tuple[str, ...]] = ()  # beginnings of the names of layers that int8 and fp8 leave as they are
    part: ClassVar[ModelPart]  # its place in a pipeline, its class names and its config
    classes: ClassVar[dict[str, type["Model"]]] = {}  # the subclasses by name, once their modules are imported

    def __init_subclass__(cls) -> None:
        Model.classes[cls.__name__] = cls

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.use_graphs = True  # on a GPU
        # our prefix -> those of diffusers' layers that it stacks, and outputs of each
        self.stacked: dict[str, dict[str, int]] = {}
        self.conversions: Mapping[str, weights.Conversion] = {}  # by our name, of parameters of another form
        self.sources: Mapping[str, Tensor] = {}  # diffusers' own of those, where ours must follow their changes
        self._graphs: dict[Hashable, Graphed] = {}

    def _lay_out(self) -> None:
        """Lay the weights out as kernels read them; they are for inference only."""
        for parameter in self.parameters():
            parameter.data = weights.laid_out(parameter.data, torch.channels_last)
        self.requires_grad_(False)

    @classmethod
    def from_config(cls: type[AnyModel], config: Mapping[str, Any] | ModelConfig, source: str = "config") -> AnyModel:
        """A model with random weights from a mapping with diffusers' keys. InputError names a bad option."""
        if not isinstance(config, cls.part.config):
            config = cls.part.config.from_mapping(mapping("config", config), source)
        try:
            return cls(config).eval()
        except (ValueError, ZeroDivisionError) as error:  # torch's own: groups that do not divide a width...
            raise InputError(f"{source}: {error}; correct this option of the model's config") from None

    @classmethod
    def from_pretrained(
        cls: type[AnyModel],
        name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        variant: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        precision: Precision = "full",
        **hub_options: Any,
    ) -> AnyModel:
        """Config and weights from a folder that diffusers saved, a bundled name, or a hub id.

        `subfolder` is the part of a pipeline folder (default: that of the class, such as `unet`, where there is one).
        `precision` int8 keeps weights in 8 bits: half the memory of 16, and an error (see checkpoints.quantisation).
        fp8 does too, and multiplies in 8 bits, on a GPU of sm_89 or later.
        `hub_options` are `revision`, `token` and `local_files_only`. Raises InputError for a bad folder, config or
        weights file, NonFiniteError for NaN or infinity in the weights.
        """
        device = resolve_device(device)
        check_weights_dtype(dtype)
        optional(text, "subfolder", subfolder)
        checked("precision", precision, Precision)
        check_precision(precision, device)
        root = hub.resolve(name_or_path, variant=variant, **hub_options)
        folder = root / subfolder if subfolder else hub.component_folder(root, cls.part.name)
        return cls.from_folder(folder, Load(device, dtype, variant, precision))

    @classmethod
    def from_folder(cls: type[AnyModel], folder: Path, load: Load) -> AnyModel:
        """Config and weights from the very folder that holds them. Raises as `from_pretrained`."""
        path = folder / "config.json"
        config = read_json(path)
        if config.get("_class_name", cls.part.class_name) not in cls.part.classes:
            raise InputError(f"{path} describes a {config['_class_name']}; {cls.part.class_name} is supported")
        options = cls.part.config.from_mapping(config, path)
        weight_files.check_fit(options, folder, load.variant, path)
        _prepare_kernels(load.home)
        with on_meta():
            model = cls.from_config(options, source=str(path))
        state = weights.load_state_dict(folder, load.variant, options.LIBRARY)
        state = weight_files.without_prefix(state, options.KEY_PREFIX)
        in_8_bits = formats(model, load.precision)
        weights.load_weights(model, state, source=str(folder), dtype=load.dtype, device=load.home, in_8_bits=in_8_bits)
        return model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, biases and norms. The weights may have another one."""
        owners = (module for module in self.modules() if not isinstance(module, Quantised))  # whose factors are float32
        return next(
            parameter for owner in owners for parameter in owner.parameters(recurse=False) if parameter.ndim == 1
        ).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def graphed(self, name: Hashable, function: Function) -> Callable[..., Any]:
        """Return `function` of tensors, which runs this model, through CUDA graphs where there can be any.

        `name` stands for all that the function depends on besides its arguments and the model.
        """
        if self.device.type != "cuda" or not self.use_graphs:
            return function
        return self._graphs.setdefault(name, Graphed(function))

    def release_graphs(self) -> None:
        """Let the CUDA graphs go, and the memory that they hold; they are made anew when they are needed."""
        self._graphs.clear()

    def _apply(self, *args: Any, **kwargs: Any) -> "Model":
        self.release_graphs()  # they read the parameters where these were
        super()._apply(*args, **kwargs)
        self._lay_out()  # which another dtype or device may ask otherwise
        _prepare_kernels(self.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_graphs": {}}  # a copy of the model makes its own


def _prepare_kernels(device: torch.device) -> None:
    """Begin what the first kernel on this device will wait for, while weights are read and moved."""
    if device.type == "cuda":
        get_ready()
