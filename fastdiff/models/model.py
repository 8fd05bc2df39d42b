"""Model: the base class of all models. It builds, loads and lays out a model, and runs it through CUDA graphs."""

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
from fastdiff.execution.cuda_graphs import Function, Graphed, Ungraphed
from fastdiff.execution.devices import check_precision, check_weights_dtype, on_meta, resolve_device
from fastdiff.kernels.host.compiling import get_ready
from fastdiff.kernels.host.weights import Quantised
from fastdiff.kinds import Precision
from fastdiff.models.surface import Surface
from fastdiff.schema import checked

AnyModel = TypeVar("AnyModel", bound="Model")


class Model(Surface):
    """The base class of all models: a model of diffusers or transformers, for inference.

    A model takes the same config.json, weights and call as the class of the same name in diffusers or transformers.
    Build it with `from_pretrained`, or with `from_config` for random weights. Its parameters do not require grad, and
    it computes in channels-last memory. On a GPU, the second call with the same shapes is captured as a CUDA graph,
    which later calls replay. Set `use_graphs` to False to switch this off.
    """

    whole: ClassVar[tuple[str, ...]] = ()  # name prefixes of the layers that int8 and fp8 do not quantise
    part: ClassVar[ModelPart]  # the place in a pipeline, with class names and config
    classes: ClassVar[dict[str, type["Model"]]] = {}  # the subclasses by name, once their modules are imported

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Model.classes[cls.__name__] = cls

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.use_graphs = True  # on a GPU
        # our prefix -> the prefixes of diffusers' layers that it stacks, with the share of the outputs that each has
        self.stacked: dict[str, dict[str, int]] = {}
        # our name -> how to make it from diffusers' parameter, if their forms differ
        self.conversions: Mapping[str, weights.Conversion] = {}
        # our name -> diffusers' live parameter, if a conversion of it must follow its changes
        self.sources: Mapping[str, Tensor] = {}
        self._graphs: dict[Hashable, Graphed] = {}
        self._plain_place: tuple[dict[str, nn.Parameter | None], str] | None = None  # where `_plain` is

    def _lay_out(self) -> None:
        """Lay the weights out as kernels read them, and freeze them."""
        for parameter in self.parameters():
            parameter.data = weights.laid_out(parameter.data, torch.channels_last)
        self.requires_grad_(False)

    @classmethod
    def from_config(cls: type[AnyModel], config: Mapping[str, Any] | ModelConfig, source: str = "config") -> AnyModel:
        """Build a model with random weights.

        Args:
            config: a mapping with the keys of diffusers' config.json, or a config of this class.
            source: the name of the config in errors.

        Raises:
            InputError: names the bad option.
        """
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
        """Load a model's config and weights.

        Args:
            name_or_path: a folder saved by diffusers or transformers, the name of a bundled model, or a hub id.
            subfolder: the part of a pipeline's folder. The default is the class's own, such as `unet`, if it exists.
            variant: of the weight files, such as `fp16`.
            dtype: of activations and weights.
            device: where the model runs.
            precision: `full` keeps all weights in `dtype`. `int8` keeps most of them in 8 bits: half the memory of
                16 bits, at the cost of rounding (see `fastdiff.checkpoints.quantisation`). `fp8` also multiplies in 8
                bits, and needs a GPU of sm_89 or later.
            hub_options: `revision`, `token` and `local_files_only`, as in diffusers.

        Raises:
            InputError: for a bad folder, config or weight file.
            NonFiniteError: for NaN or infinity in the weights.
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
        """Load a model from the folder that holds its config.json and weights. Raises as `from_pretrained`."""
        path = folder / "config.json"
        config = read_json(path)
        if config.get("_class_name", cls.part.class_name) not in cls.part.classes:
            raise InputError(
                f"{path} describes a {config['_class_name']}, but {cls.part.class_name} is wanted; give another folder"
            )
        options = cls.part.config.from_mapping(config, path)
        weight_files.check_fit(options, folder, load.variant, path, load.extensions)
        _prepare_kernels(load.home)
        with on_meta():
            model = cls.from_config(options, source=str(path))
        state = weights.load_state_dict(folder, load.variant, options.LIBRARY, load.extensions)
        state = weight_files.without_prefix(state, options.KEY_PREFIX)
        in_8_bits = formats(model, load.precision)
        weights.load_weights(model, state, source=str(folder), dtype=load.dtype, device=load.home, in_8_bits=in_8_bits)
        return model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, and of biases and norms. Weights may be in 8 bits."""
        return self._plain.dtype

    @property
    def device(self) -> torch.device:
        return self._plain.device

    @property
    def _plain(self) -> Tensor:
        """A bias or the weight of a norm. Its place is looked up once, because each call reads it several times."""
        if self._plain_place is None:
            # the factors of Quantised weights are always float32
            owners = (module for module in self.modules() if not isinstance(module, Quantised))
            self._plain_place = next(
                (owner._parameters, name)
                for owner in owners
                for name, parameter in owner.named_parameters(recurse=False)
                if parameter.ndim == 1
            )
        parameters, name = self._plain_place
        parameter = parameters[name]
        assert parameter is not None
        return parameter

    def graphed(self, name: Hashable, function: Function) -> Callable[..., Any]:
        """Return `function`, run through CUDA graphs if the model is on a GPU and `use_graphs` is set.

        `function` takes tensors and runs this model. `name` identifies everything else that its result depends on.
        """
        if self.device.type != "cuda" or not self.use_graphs:
            return Ungraphed(function)
        return self._graphs.setdefault(name, Graphed(function))

    def release_graphs(self) -> None:
        """Free all CUDA graphs and their memory. They are captured again when needed."""
        self._graphs.clear()

    def _apply(self, *args: Any, **kwargs: Any) -> "Model":
        self.release_graphs()  # they hold the parameters' old addresses
        super()._apply(*args, **kwargs)
        self._lay_out()  # the layout may depend on dtype and device
        _prepare_kernels(self.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_graphs": {}}  # a copy of the model makes its own


def _prepare_kernels(device: torch.device) -> None:
    """Start what the first kernel on this device needs, in parallel with reading and moving weights."""
    if device.type == "cuda":
        get_ready()
