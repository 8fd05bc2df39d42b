"""The ways to run a model's denoiser that `fastdiff bench` compares: fastdiff, diffusers, and diffusers compiled.

All have the same weights, dtype and inputs. On a GPU diffusers' model is channels-last, as fastdiff's always is.
"""

import gc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastdiff.checkpoints import hub, registry
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import begin_sha256, begin_weights_hash
from fastdiff.checkpoints.single_files.cards import FileOptions, names_file, place_of_part
from fastdiff.checkpoints.weight_files import InFile
from fastdiff.errors import InputError
from fastdiff.models.classes import model_class
from fastdiff.models.denoiser import Denoiser
from fastdiff.requests.request import Request
from fastdiff.tuning.forwards import in_dtype
from fastdiff.verification.comparisons import (
    TRAIN_STEPS,
    check_inputs,
    load,
    load_single_file,
    noise,
    predict,
    random_prompt,
)

FASTDIFF, EAGER, COMPILED = "fastdiff", "diffusers", "torch.compile"
CALLS = 3  # the first compiles, the second captures, the third replays

Inputs = tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]  # sample, timesteps, labels, prompt arguments


@dataclass(frozen=True)
class Subject:
    """The denoiser to measure: where it is, and what it takes."""

    name: str
    folder: Path  # of the denoiser's own config, and of its weights unless they are `inside` a single file
    part: registry.DenoiserPart
    config: DenoiserConfig
    scale: int = 1  # pixels of a picture for one of the denoiser's, in height and in width
    num_train_timesteps: int = TRAIN_STEPS
    inside: InFile | None = None

    @classmethod
    def find(cls, request: Request) -> "Subject":
        """Find the denoiser of a pipeline's folder or of a single file, or a single model.

        Raises InputError if fastdiff cannot run it.
        """
        root, inside = _place(request)
        if (root / "model_index.json").is_file():
            card = ModelCard.read(request.model, root)
            folder = hub.component_folder(root, card.denoiser.name)
            found = cls(card.name, folder, card.denoiser, card.config, card.scale, card.num_train_timesteps, inside)
        else:
            path = root / "config.json"
            part = registry.read_denoiser_part(path)
            found = cls(request.model, root, part, part.config.from_mapping(read_json(path), path), inside=inside)
        check_inputs("bench", found.name, found.config)
        return found

    def size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Return the height and width of a sample for those of a picture (default: the trained size).

        Raises InputError for a size that the model cannot draw.
        """
        usual = self.config.trained_size or self.config.usual_size
        if self.config.of_trajectories:
            if height is not None or width is not None:
                raise InputError(f"height, width: {self.name} plans trajectories, which have neither; leave them out")
            return usual
        height, width = height or usual[0] * self.scale, width or usual[1] * self.scale
        self.config.check_size(height, width, self.scale)
        return height // self.scale, width // self.scale

    def inputs(self, count: int, size: tuple[int, int], device: torch.device) -> Inputs:
        """Return the arguments of a call in float32, the same in every run: noise, and label 0 or a random prompt."""
        timesteps = torch.full((count,), (self.num_train_timesteps - 1) // 2, device=device)
        labels = torch.zeros(count, dtype=torch.int64, device=device) if self.config.takes_labels else None
        return (
            noise(self.config, count, size).to(device),
            timesteps,
            labels,
            random_prompt(self.config, count, device),
        )

    def exact(self, inputs: Inputs, diffusers: ModuleType, how: Load) -> Tensor:
        """Return diffusers' output in float32 for inputs in float32."""
        return call_of(self._theirs(diffusers, how, torch.float32), inputs)().float()

    def build(self, who: str, how: Load, diffusers: ModuleType | None) -> Any:
        """Load the model as `who` runs it. Raises InputError if the library cannot load it."""
        if who == FASTDIFF:
            return model_class(self.part, Denoiser).from_folder(self.folder, how, inside=self.inside)
        assert diffusers is not None
        theirs = self._theirs(diffusers, how, how.dtype)
        if how.device.type == "cuda":
            theirs = theirs.to(memory_format=torch.channels_last)
        return compile_diffusers(theirs) if who == COMPILED else theirs

    def _theirs(self, diffusers: ModuleType, how: Load, dtype: torch.dtype) -> Any:
        kind = getattr(diffusers, self.part.class_name)
        if self.inside is not None:
            theirs = load_single_file(kind, self.inside.path, self.folder, torch_dtype=dtype)
            return theirs.eval().to(how.device)
        return load(kind, self.folder, how.variant, dtype, low_cpu_mem_usage=True).to(how.device)

    def begin_hash(self, variant: str | None) -> "Future[str]":
        """Begin to compute the SHA-256 of the weights, or of the whole single file. As `model_hash.begin_hash`."""
        if self.inside is not None:
            return begin_sha256([self.inside.path])
        return begin_weights_hash(self.folder, variant)


def _place(request: Request) -> tuple[Path, InFile | None]:
    """Return the folder of a model, and for a single file the place of its U-Net. The folder then has the configs."""
    options = FileOptions(request.config)
    if not names_file(request.model, options, revision=request.revision, variant=request.variant):
        return hub.resolve(request.model, revision=request.revision, variant=request.variant), None
    folder, inside = place_of_part(request.model, registry.UNET_CONDITION, request.config)
    return (folder.parent if (folder.parent / "model_index.json").is_file() else folder), inside


def call_of(model: Any, inputs: Inputs) -> Callable[[], Tensor]:
    """Return a forward of `inputs`, rounded to the model's dtype."""
    x, timesteps, labels, prompt = in_dtype(inputs, model.dtype)

    def call() -> Tensor:
        with torch.inference_mode():
            return predict(model, x, timesteps, labels, **prompt)

    return call


def compile_diffusers(theirs: Any) -> Any:
    """Return diffusers' model under torch.compile, set up for speed as diffusers' manual says."""
    torch.compiler.reset()
    if hasattr(theirs, "fuse_qkv_projections"):  # diffusers' DiT has no such method
        theirs.fuse_qkv_projections()
    whole = type(theirs).__name__ != "ZImageTransformer2DModel"  # it enters `torch.device` as a context
    return torch.compile(theirs, mode="reduce-overhead", fullgraph=whole)


def error_of(output: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a fraction of the largest expected output."""
    return ((output.float() - expected).abs().max() / expected.abs().max()).item()


def held_bytes(call: Callable[[], object]) -> int:
    """Return the peak of the bytes that torch's allocator reserves while `call` is repeated, after warm-up calls."""
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # keeps the memory of CUDA graphs
    torch.cuda.reset_peak_memory_stats()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


def reserved_bytes() -> int:
    """Return the bytes that torch's allocator reserves on the GPU, without those that nothing uses."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
