"""Model: the base class of all models. It builds, loads and lays out a model, and runs it through CUDA graphs."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fastdiff.arguments import by_name, mapping, optional, renamed, text
from fastdiff.arguments import path as checked_path
from fastdiff.checkpoints import hub, weight_files, weights
from fastdiff.checkpoints.configs.model import ModelConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.loading import REFUSED, Load, check_foreign, chosen_device, chosen_dtype
from fastdiff.checkpoints.names import extensions_of
from fastdiff.checkpoints.quantisation import Origin, formats
from fastdiff.checkpoints.registry import ModelPart
from fastdiff.checkpoints.saving import HUB_OPTIONS, divided
from fastdiff.checkpoints.single_files.cards import place_of_part
from fastdiff.checkpoints.single_files.tensors import OTHER_SIZE, check_shapes, read_part, read_shapes
from fastdiff.errors import InputError
from fastdiff.execution.devices import check_precision, check_weights_dtype, on_meta, resolve_device, resolve_dtype
from fastdiff.execution.replaying.cpu_programs import Programmed
from fastdiff.execution.replaying.cuda_graphs import CAPACITY, Graphed
from fastdiff.execution.replaying.trees import Function, Plainly
from fastdiff.kernels.host.compiling import get_ready
from fastdiff.kernels.host.weights import Quantised
from fastdiff.kernels.plans.tuning import table_in_use
from fastdiff.kinds import Precision
from fastdiff.models.blocks.protocols import MergingLike
from fastdiff.models.surface import Surface
from fastdiff.refused import REFUSED_CLASSES
from fastdiff.schema import checked, option_names, signature

AnyModel = TypeVar("AnyModel", bound="Model")

CONFIG_NAME = Surface.config_name

# Arguments of `from_pretrained` of diffusers' and transformers' models alone, and what to do instead
REFUSED_BY_MODELS = {
    "config": "give the options that differ as arguments of their own",
    "dduf_entries": "fastdiff reads folders; unpack the file first",
    "flashpack_kwargs": "fastdiff reads safetensors and .bin only",
    "from_flax": "fastdiff reads weights of PyTorch only",
    "ignore_mismatched_sizes": "weights of another shape are always an error; give the config that fits them",
    "parallel_config": "a model runs on one GPU; leave it out",
    "state_dict": "build the model with from_config, and call load_state_dict",
}


def takes_options(init: Callable[..., None]) -> Callable[..., None]:
    """Tell type checkers that a model is built from diffusers' arguments, which `_Building` makes a config of."""
    return init


class _Building(type):
    """The class of model classes: calling one builds a model from diffusers' arguments, by position or by name."""

    part: ModelPart
    from_config: Callable[..., Any]

    if not TYPE_CHECKING:  # type checkers read `__init__`, which says that the result is of the class

        def __call__(cls, *args: Any, **options: Any) -> Any:
            if len(args) == 1 and isinstance(args[0], ModelConfig):
                return super().__call__(*args)
            if cls.part.library == "transformers":
                return cls.from_config(*args, source=cls.__name__, **options)
            given = by_name(option_names(cls.part.config), args, options, cls.__name__)
            return cls.from_config(given, source=cls.__name__)


class Model(Surface, metaclass=_Building):
    """The base class of all models: a model of diffusers or transformers, for inference.

    A model takes the same config.json, weights and call as the class of the same name in diffusers or transformers.
    Build it with `from_pretrained`, or with `from_config` for random weights. Its parameters do not require grad, and
    it computes in channels-last memory. On a GPU, the second call with the same shapes is captured as a CUDA graph,
    which later calls replay. Set `use_graphs` to False to switch this off.
    """

    whole: ClassVar[tuple[str, ...]] = ()  # name prefixes of the layers that int8 and fp8 do not quantise
    part: ClassVar[ModelPart]  # the place in a pipeline, with class names and config
    other_size: ClassVar[str] = OTHER_SIZE  # the end of the error for a single file of another size
    classes: ClassVar[dict[str, type["Model"]]] = {}  # the subclasses by name, once their modules are imported

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Model.classes[cls.__name__] = cls
        if hasattr(cls, "part") and cls.part.library == "diffusers":
            options = cls.part.config
            cls.__signature__ = signature(options, option_names(options))  # type: ignore[attr-defined]

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.use_graphs = True  # on a GPU
        self.most_graphs = CAPACITY  # of a function, on a GPU
        # our prefix -> the prefixes of diffusers' layers that it stacks, with the share of the outputs that each has
        self.stacked: dict[str, dict[str, int]] = {}
        # our name -> how to make it from diffusers' parameter, if their forms differ
        self.conversions: Mapping[str, weights.Conversion] = {}
        # our name -> diffusers' live parameter, if a conversion of it must follow its changes
        self.sources: Mapping[str, Tensor] = {}
        self.merging: MergingLike | None = None  # once an adapter has been loaded
        self.origin: Origin | None = None  # of weights in 8 bits
        self.casts = 0  # how often the dtype has changed
        self.times_changed = 0  # how often tokens were added to a text encoder or taken away
        self.is_shared = False  # whether the weights are also the memory of another model's parameters
        self._graphs: dict[Hashable, Graphed | Programmed] = {}
        self._plain_place: tuple[dict[str, nn.Parameter | None], str] | None = None  # where `_plain` is

    def _lay_out(self) -> None:
        """Lay the weights out as kernels read them, and freeze them."""
        for parameter in self.parameters():
            if parameter.requires_grad_(False).ndim > 2 or not parameter.is_contiguous():
                parameter.data = weights.laid_out(parameter.data, torch.channels_last)

    @classmethod
    def from_config(
        cls: type[AnyModel],
        config: Any = None,
        return_unused_kwargs: bool = False,
        *,
        source: str = "config",
        **kwargs: Any,
    ) -> AnyModel:
        """Build a model with random weights.

        Args:
            config: a mapping with the keys of diffusers' config.json, a config of this class, or one of transformers.
            return_unused_kwargs: whether to return a tuple of the model and the kwargs that are not options.
            source: the name of the config in errors.
            kwargs: options that override the config.

        Raises:
            InputError: names the bad option.
        """
        unused = {name: kwargs[name] for name in kwargs.keys() - {*option_names(cls.part.config)}}
        if checked("return_unused_kwargs", return_unused_kwargs, bool):
            model = cls.from_config(config, source=source, **{name: kwargs[name] for name in kwargs.keys() - unused})
            return model, unused  # type: ignore[return-value]  # as in diffusers
        if kwargs or not isinstance(config, cls.part.config):
            config = {
                **mapping("config", config.to_diff_dict() if hasattr(config, "to_diff_dict") else config),
                **kwargs,
            }
            config = cls.part.config.from_mapping(config, source)
        try:
            model = cls(config).eval()
        except (ValueError, ZeroDivisionError) as error:  # torch's own: groups that do not divide a width...
            raise InputError(f"{source}: {error}; correct this option of the model's config") from None
        model._check_built(source)
        return model

    def _check_built(self, source: str) -> None:
        """Raise InputError that begins with `source` if the model's options do not fit together."""

    @classmethod
    def from_pretrained(
        cls: type[AnyModel],
        pretrained_model_name_or_path: str | Path | None = None,
        *,
        subfolder: str | None = None,
        variant: str | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        device_map: Any = None,
        precision: Precision = "full",
        use_safetensors: bool | None = None,
        **kwargs: Any,
    ) -> AnyModel:
        """Load a model's config and weights.

        Args:
            pretrained_model_name_or_path: a folder saved by diffusers or transformers, the name of a bundled model, or
                a hub id.
            subfolder: the part of a pipeline's folder. The default is the class's own, such as `unet`, if it exists.
            variant: of the weight files, such as `fp16`.
            dtype: of activations and weights. The default is float32; "auto" is bfloat16 on a GPU.
            torch_dtype: the older name of `dtype`.
            device: where the model runs. The default is the CPU.
            device_map: one device for the whole model, as `device`; "auto" is a GPU if there is one.
            precision: `full` keeps all weights in `dtype`. `int8` keeps most of them in 8 bits: half the memory of
                16 bits, at the cost of rounding (see `fastdiff.checkpoints.quantisation`). `fp8` also multiplies in 8
                bits, and needs a GPU of sm_89 or later.
            use_safetensors: True reads safetensors alone, False .bin alone. The default prefers safetensors.
            kwargs: options of the hub (`cache_dir`, `force_download`, `local_files_only`, `revision`, `token`), and
                options that override the config. Other arguments of diffusers' `from_pretrained` are accepted
                if they change nothing, as `low_cpu_mem_usage`, and refused otherwise.

        Raises:
            InputError: for a bad folder, config, weight file or argument.
            NonFiniteError: for NaN or infinity in the weights.
        """
        name = renamed("pretrained_model_name_or_path", pretrained_model_name_or_path, "name_or_path", kwargs)
        load = _own_load(chosen_device(device, device_map), dtype, torch_dtype, precision)
        optional(text, "subfolder", subfolder)
        hub_options, foreign = divided(kwargs, HUB_OPTIONS)
        changes, foreign = divided(foreign, option_names(cls.part.config))
        check_foreign(foreign, REFUSED | REFUSED_BY_MODELS)
        hub_options |= {"variant": variant, "use_safetensors": use_safetensors}
        folder = hub.resolve_part(name, cls.part, subfolder, **hub_options)
        load = replace(load, variant=variant, extensions=extensions_of(use_safetensors))
        return cls.from_folder(folder, load, changes)

    @classmethod
    def from_single_file(
        cls: type[AnyModel],
        pretrained_model_link_or_path_or_dict: str | Path | None = None,
        *,
        config: str | Path | None = None,
        extract_ema: bool = False,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        precision: Precision = "full",
        **kwargs: Any,
    ) -> AnyModel:
        """Load a model from a safetensors file with the names of LDM or OpenCLIP, whole or with this part alone.

        Args:
            pretrained_model_link_or_path_or_dict: the file. Nothing is downloaded.
            config: a folder in diffusers' layout, of the model or of its pipeline, for models of other sizes.
            extract_ema: take the moving averages of the U-Net's weights, if the file has both.
            dtype: of activations and weights, as in `from_pretrained`, and so are the other arguments.
            torch_dtype: the older name of `dtype`.
            device: see `dtype`.
            precision: see `dtype`.
            kwargs: options that override the config, and arguments of diffusers that change nothing, as in
                `from_pretrained`.

        Raises:
            InputError: for a file that does not hold the model, and for wrong arguments.
            NonFiniteError: for NaN or infinity in the weights.
        """
        path = Path(checked_path("pretrained_model_link_or_path_or_dict", pretrained_model_link_or_path_or_dict))
        optional(checked_path, "config", config)
        changes, foreign = divided(kwargs, option_names(cls.part.config))
        check_foreign(foreign, REFUSED | REFUSED_BY_MODELS)
        ema = checked("extract_ema", extract_ema, bool)
        return cls.from_file(path, _own_load(device, dtype, torch_dtype, precision), config, changes, ema=ema)

    @classmethod
    def from_file(
        cls: type[AnyModel], path: Path, load: Load, config: Any, changes: Mapping[str, Any], *, ema: bool
    ) -> AnyModel:
        """Load a model from a single file. Arguments and errors are as in `from_single_file`."""
        folder, inside = place_of_part(path, cls.part, config, ema=ema)
        return cls.from_folder(folder, load, changes, inside)

    @classmethod
    def folders(cls, subfolder: str | None) -> tuple[str, ...]:
        return (subfolder,) if subfolder else (cls.part.name, "")

    @classmethod
    def from_folder(
        cls: type[AnyModel],
        folder: Path,
        load: Load,
        changes: Mapping[str, Any] = MappingProxyType({}),
        inside: weight_files.InFile | None = None,
    ) -> AnyModel:
        """Load a model from the folder that holds its config.json and weights. Raises as `from_pretrained`.

        changes: options that override the config.
        inside: where the weights are, if they are in a single file. The folder then holds the config alone.
        """
        path = folder / CONFIG_NAME
        config = read_json(path)
        if config.get("_class_name", cls.part.class_name) not in cls.part.classes:
            reason = REFUSED_CLASSES.get(str(config["_class_name"]))
            if reason is not None:
                raise InputError(f"{path} describes a {config['_class_name']}: {reason}")
            raise InputError(
                f"{path} describes a {config['_class_name']}, but {cls.part.class_name} is wanted; give another folder"
            )
        options = cls.part.config.from_mapping({**config, **changes}, path)
        source = str(folder)
        if inside is None:
            weight_files.check_fit(options, folder, load.variant, path, load.extensions)
        else:
            source = f"{inside.path}: its {cls.part.name} does not fit {path}"
            stored = read_shapes(inside, options)
            weight_files.check_shapes(options, stored, source, remedy=cls.other_size)
        if load.home.type == "cuda":
            get_ready()  # in parallel with reading and moving weights
        with on_meta():
            model = cls.from_config(options, source=str(path))
        if inside is not None:
            check_shapes(stored, weights.diffusers_shapes(model), source, cls.other_size)
            source = str(inside.path)
        state, in_8_bits = _read(options, folder, load, inside), formats(model, load.precision)
        weights.load_weights(model, state, source=source, dtype=load.dtype, device=load.home, in_8_bits=in_8_bits)
        if in_8_bits:
            there = inside and inside._replace(path=inside.path.absolute())
            model.origin = Origin(partial(_read, options, folder.absolute(), load, there), load.home)
        return model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, and of biases and norms. Weights may be in 8 bits."""
        return self._plain.dtype

    @property
    def device(self) -> torch.device:
        return self._plain.device

    @property
    def weights_state(self) -> Hashable:
        """Identify what adapters have made of the weights. Equal states of one model mean equal weights."""
        return None if self.merging is None else self.merging.state

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
        """Return `function`, run through CUDA graphs on a GPU and through programs on the CPU, if `use_graphs` is set.

        `function` takes tensors and runs this model. `name` identifies everything else that its result depends on.
        """
        if not self.use_graphs:
            return Plainly(function)
        key = name, table_in_use()  # a graph keeps the tiles that it was captured with
        if key not in self._graphs:
            is_cuda = self.device.type == "cuda"
            self._graphs[key] = Graphed(function) if is_cuda else Programmed(function, packs=not self.is_shared)
        if isinstance(graphed := self._graphs[key], Graphed):
            graphed.most = self.most_graphs
        return graphed

    def release_graphs(self) -> None:
        """Free all CUDA graphs and their memory. They are captured again when needed."""
        self._graphs.clear()

    def _apply(self, *args: Any, **kwargs: Any) -> "Model":
        self.release_graphs()  # they hold the parameters' old addresses
        dtype = self.dtype
        super()._apply(*args, **kwargs)
        self.casts += self.dtype != dtype
        self._lay_out()  # the layout may depend on dtype and device
        if self.merging is not None:
            self.merging.follow_dtype()
        if self.device.type == "cuda":
            get_ready()
        return self

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the weights by our names, as `torch.nn.Module.state_dict` does: those that were loaded, not merged."""
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        return state if self.merging is None else self.merging.as_loaded(state, prefix)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights by our names, as `torch.nn.Module.load_state_dict` does. InputError if adapters are loaded."""
        if self.merging is not None:
            raise InputError("load_state_dict: adapters have changed the model; load the weights into a new model")
        self.release_graphs()  # `assign` replaces the parameters that they read
        return super().load_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_graphs": {}}  # a copy of the model makes its own


def _own_load(device: Any, dtype: Any, torch_dtype: Any, precision: Precision) -> Load:
    """Return the options of loading one model. As in diffusers, the defaults are the CPU and float32."""
    device = resolve_device("cpu" if device is None else device)
    asked = torch.float32 if dtype is None and torch_dtype is None else chosen_dtype(dtype, torch_dtype)
    dtype = resolve_dtype(asked, device) if isinstance(asked, str) else asked
    check_weights_dtype(dtype)
    checked("precision", precision, Precision)
    check_precision(precision, device)
    return Load(device, dtype, precision=precision)


def _read(config: ModelConfig, folder: Path, load: Load, inside: weight_files.InFile | None) -> dict[str, Tensor]:
    """Return the weights of a folder, or of a part of a single file, by diffusers' keys."""
    if inside is not None:
        return read_part(inside, config)
    state = weights.load_state_dict(folder, load.variant, config.LIBRARY, load.extensions)
    return weight_files.own_keys(weights.without_ip_adapters(state), config)
