"""Compare a model in fastdiff with the same model in diffusers: load and run diffusers' side, and measure errors."""

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import fastdiff
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.configs.z_image import ZImageTransformer2DConfig
from fastdiff.checkpoints.single_files.reading import is_single_file
from fastdiff.errors import InputError, in_one_line
from fastdiff.extras import import_diffusers
from fastdiff.requests.request import Request

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch import dtype as Dtype

    from fastdiff.models.coding import Autoencoder
    from fastdiff.models.denoiser import Denoiser

FORWARD_TOLERANCE = 1e-4  # for one forward pass
FINAL_TOLERANCE = 1e-3  # for the picture after all steps, in [-1, 1], or for the trajectory
SEED = 0
TRAIN_STEPS = 1000  # for a model without a scheduler, and of Z-Image
CAPTION_TOKENS = 100  # of a random caption


@dataclass(frozen=True)
class Comparison:
    """One check: the largest difference between fastdiff and diffusers, and how large it may be."""

    what: str
    error: float  # max |fastdiff - diffusers|
    largest: float  # max |diffusers|
    tolerance: float  # absolute; relative to `largest` if that is over 1

    @property
    def allowed(self) -> float:
        return self.tolerance * max(1.0, self.largest)

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # NaN does not pass


@dataclass(frozen=True)
class Verification:
    """All comparisons of a model."""

    model: str
    device: str
    versions: Mapping[str, str]  # of fastdiff, and of the libraries that it is compared with
    comparisons: Sequence[Comparison]
    loras: Sequence[str] = ()  # a line for each LoRA: how diffusers' side has got it

    @classmethod
    def of(
        cls,
        model: str,
        device: "Device",
        libraries: Sequence[ModuleType],
        made: Sequence[Comparison],
        loras: Sequence[str] = (),
    ) -> "Verification":
        """Return the verification of a model. `made`: its comparisons with these libraries."""
        versions = {library.__name__: library.__version__ for library in (fastdiff, *libraries)}
        return cls(model, str(device), versions, made, loras)

    @property
    def passed(self) -> bool:
        return all(comparison.passed for comparison in self.comparisons)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        comparisons = [
            vars(comparison) | {"allowed": comparison.allowed, "passed": comparison.passed}
            for comparison in self.comparisons
        ]
        return {
            "model": self.model,
            "device": self.device,
            "versions": self.versions,
            "passed": self.passed,
            "comparisons": comparisons,
        } | ({"loras": list(self.loras)} if self.loras else {})


def import_verified(purpose: str = "verify") -> ModuleType:
    """Import diffusers with logging turned off. Raises InputError, which names `purpose`, if it is not installed."""
    diffusers = import_diffusers(purpose)
    diffusers.utils.logging.set_verbosity(logging.CRITICAL)  # its errors say what it would log
    diffusers.utils.logging.disable_progress_bar()
    return diffusers


def explained(name: str, make: Callable[[], Verification]) -> Verification:
    """Return the result of `make`. If the device fails or memory runs out, raise an error of one line."""
    from fastdiff.execution.devices import naming_lost_device
    from fastdiff.execution.memory import or_explain

    with naming_lost_device():
        return or_explain(
            make,
            f"out of memory: verify loads {name} twice, for fastdiff and for diffusers, in float32; free memory on "
            "the device or give another one, such as --device cpu",
        )


def load(
    kind: Any, folder: Path, variant: str | None, dtype: "Dtype | None" = None, *, low_cpu_mem_usage: bool = False
) -> Any:
    """Load a model of diffusers' class `kind` on the CPU, in float32 or another dtype.

    Raises InputError if diffusers cannot load it.
    """
    import torch

    dtype = dtype or torch.float32
    options = {"variant": variant, "torch_dtype": dtype, "low_cpu_mem_usage": low_cpu_mem_usage}
    with refusals(f"diffusers cannot load {folder}"):
        model = kind.from_pretrained(folder, local_files_only=True, **options)
        return model.to(dtype).eval()  # tensors of a sharded checkpoint keep their own dtype without it


def load_single_file(kind: Any, path: Path, config: Path, **options: Any) -> Any:
    """Load a pipeline or a model of diffusers' class `kind` from a single file, in float32 on the CPU.

    config: the folder of the configs. options: of `from_single_file`. Raises InputError if diffusers cannot load it.
    """
    import torch

    options = {"torch_dtype": torch.float32} | options | {"config": str(config), "local_files_only": True}
    with refusals(f"diffusers cannot load {path}"):
        return kind.from_single_file(str(path), **options)


def lone_model(request: Request) -> Path | None:
    """Return the folder of a model without a pipeline, or None if `request` names a pipeline or a single file."""
    if is_single_file(request.model):
        return None
    folder = hub.resolve(request.model, revision=request.revision, variant=request.variant)
    return None if (folder / "model_index.json").is_file() else folder


def check_inputs(command: str, name: str, config: DenoiserConfig) -> None:
    """Raise InputError if `command` cannot make the labels of a model."""
    if config.class_embed_type is not None:
        raise InputError(f"{name}: {command} cannot make labels for class_embed_type {config.class_embed_type}")


@contextlib.contextmanager
def refusals(problem: str) -> Iterator[None]:
    """Turn any exception of diffusers into an InputError of one line that begins with `problem`.

    Out-of-memory errors and GPU failures pass through, because they are no fault of the model's files.
    """
    from fastdiff.execution.devices import is_lost
    from fastdiff.execution.memory import is_out_of_memory

    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or is_lost(error):
            raise
        raise InputError(f"{problem} ({in_one_line(error)}); save the model again with diffusers") from None


def noise(config: DenoiserConfig, count: int, size: tuple[int, int] | None = None) -> "Tensor":
    """Return starting noise in diffusers' layout, (N, C, H, W) or (N, C, L), float32 on the CPU.

    `size` is the height and width of a sample (default: the model's usual size).
    """
    import torch

    sides = (size or config.usual_size)[-len(config.AXES) :]
    return torch.randn(count, config.sample_channels, *sides, generator=torch.Generator().manual_seed(SEED))


def compare(what: str, ours: "Tensor", theirs: "Tensor", tolerance: float) -> Comparison:
    error = (ours.double() - theirs.to(ours.device).double()).abs().max().item()
    return Comparison(what, error, theirs.abs().max().item(), tolerance)


def compare_ids(what: str, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Comparison:
    """Compare token ids of fastdiff with ids of transformers, of several texts.

    The error is the number of ids that differ.
    """
    wrong = sum(sum(map(operator.ne, *pair)) + abs(len(pair[0]) - len(pair[1])) for pair in pairs)
    return Comparison(what, wrong, max(max(ids) for _, ids in pairs), tolerance=0.0)


def compare_pictures(what: str, name: str, ours: Any, theirs: Any, draw: Callable[[Any], "Tensor"]) -> Comparison:
    """Compare the pictures that `draw` makes with our pipeline and with diffusers', in [0, 1]. `name`: of the model."""
    import torch

    found = draw(ours)
    with torch.inference_mode(), refusals(f"diffusers cannot run {name}"):
        expected = draw(theirs)
    return compare(what, 2 * found - 1, 2 * expected - 1, FINAL_TOLERANCE)


def predict(model: Any, x_t: "Tensor", t: "Tensor", classes: "Tensor | None", **prompt: Any) -> "Tensor":
    """Return the output of a model of fastdiff or diffusers. `classes` None: call it without class labels.

    Z-Image gets each picture (C, H, W) as a latent of one frame, and its captions as `cap_feats`.
    """
    if "cap_feats" in prompt:
        import torch

        given = [*x_t[:, :, None]], (TRAIN_STEPS - t) / TRAIN_STEPS, [*prompt["cap_feats"]]
        return torch.stack(model(*given, return_dict=False)[0])[:, :, 0]
    labels = {} if classes is None else {"class_labels": classes}
    return model(x_t, t, **labels, **prompt).sample


def random_prompt(config: DenoiserConfig, count: int, device: "Device") -> dict[str, Any]:
    """Return arguments of a call: random prompt embeddings and added conditions, if the model takes them."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    if isinstance(config, ZImageTransformer2DConfig):
        captions = torch.randn(count, CAPTION_TOKENS, config.cap_feat_dim, generator=generator)
        return {"cap_feats": (*captions.to(device),)}
    shapes = config.prompt_shapes.items()
    given = {name: torch.randn(count, *shape, generator=generator).to(device) for name, shape in shapes}
    text = {name: given.pop(name) for name in ("encoder_hidden_states",) if name in given}
    return text | ({"added_cond_kwargs": given} if given else {})


def forwards(
    name: str,
    ours: "Denoiser",
    theirs: Any,
    steps: int,
    choices: Sequence[int] = (),
    what: str = "forward",
    prompt: Mapping[str, Any] | None = None,
) -> Iterator[Comparison]:
    """Compare forward passes at five of the training timesteps, and at each of them for each label.

    Args:
        steps: the number of training timesteps.
        choices: the labels; none for a model without labels.
        what: the name of the comparison.
        prompt: prompt arguments of the call, for a batch of two. Default: random embeddings if the model takes any.
    """
    import torch

    x_t, prompt = noise(ours.config, 2).to(ours.device), prompt or random_prompt(ours.config, 2, ours.device)
    for t in sorted({(steps - 1) * quarter // 4 for quarter in range(5)}):
        for label in choices or (None,):
            classes = None if label is None else torch.full((2,), label, device=ours.device)
            given = x_t, torch.full((2,), t, device=ours.device), classes
            with torch.inference_mode():
                output = predict(ours, *given, **prompt)
                with refusals(f"diffusers cannot run {name}"):
                    expected = predict(theirs, *given, **prompt)
            of_label = "" if label is None else f" label={label}"
            yield compare(f"{what} t={t}{of_label}", output, expected, FORWARD_TOLERANCE)


def halves(name: str, config: DenoiserConfig, ours: "Autoencoder", theirs: Any) -> Iterator[Comparison]:
    """Compare the decoder and the encoder of a VAE, each on noise."""
    import torch

    z = noise(config, 2)[:, : ours.config.latent_channels].to(ours.device)
    sides = (ours.config.scale * side for side in z.shape[2:])
    x = torch.randn(2, ours.config.in_channels, *sides, generator=torch.Generator().manual_seed(SEED)).to(ours.device)
    with torch.inference_mode(), refusals(f"diffusers cannot run the VAE of {name}"):
        expected, (their_latents,) = theirs.decode(z).sample, theirs.encode(x, return_dict=False)
    (sample,), (latents,) = ours.decode(z), ours.encode(x)
    yield compare("VAE decode", sample, expected, FORWARD_TOLERANCE)
    # an AutoencoderTiny returns latents, an AutoencoderKL a distribution of latents
    found, wanted = (getattr(each, "parameters", each) for each in (latents, their_latents))
    yield compare("VAE encode", found, wanted, FORWARD_TOLERANCE)
