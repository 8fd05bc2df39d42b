"""The kinds of value that options take, and the most that each may ask for: see `fastdiff.schema`.

The bounds are more than any model needs, and little enough to be had in no time. They bound what a config costs by
itself. What it costs together with its weights is bounded by these: see `weight_files.check_fit`.
"""

from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import BeforeValidator

from fastdiff.schema import Wanted

MAX_LABELS = 100_000  # each is listed by name: ImageNet-21k has 21,841
MAX_TRAIN_STEPS = 100_000  # a schedule has a row for each: models have 1,000, a few 4,000 or 10,000
MAX_SIDE = 2**14  # pixels of a sample_size: pictures of 8k are 7,680 wide
MAX_CHANNELS = 2**16  # of a layer: the widest of SD3's transformer has 9,728
MAX_LAYERS = 1024  # of a transformer: DiT-XL has 28
MAX_STAGE_LAYERS = 64  # of a stage of a U-Net or a VAE: models have 1 to 4
MAX_LEVELS = 12  # of a U-Net or a VAE, each of half the size of the one before: 256 pixels have 6 or 7
MAX_PROMPT = 10_000  # characters: CLIP reads some 300, and a PNG must hold all of them
MAX_PICTURES = 50_000  # of a label or prompt: as many as FID is computed on
MAX_SEED = 2**32 - 1  # a seed is one 32-bit word of Philox's key


def _in_small_letters(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


PositiveNumber = Annotated[float, Interval(gt=0)]
NotNegative = Annotated[float, Interval(ge=0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]

# Of models
Channels = Annotated[int, Interval(ge=1, le=MAX_CHANNELS)]
Side = Annotated[int, Interval(ge=1, le=MAX_SIDE)]
Layers = Annotated[int, Interval(ge=1, le=MAX_LAYERS)]
StageLayers = Annotated[int, Interval(ge=1, le=MAX_STAGE_LAYERS)]
Widths = Annotated[tuple[Channels, ...], Len(1, MAX_LEVELS)]  # of the levels
BlockTypes = Annotated[tuple[str, ...], Len(1, MAX_LEVELS)]  # diffusers' classes
FrequencyShift = Annotated[float, Interval(ge=-MAX_CHANNELS, le=MAX_CHANNELS)]
TrainSteps = Annotated[int, Interval(ge=1, le=MAX_TRAIN_STEPS)]
Activation = Annotated[Literal["silu", "swish", "mish", "gelu", "relu"], BeforeValidator(_in_small_letters)]


def canonical(activation: str) -> str:
    """Return the one name of an Activation that has two."""
    return "silu" if activation == "swish" else activation


Precision = Literal["full", "int8", "fp8"]  # of weights: that of the dtype, or 8 bits; in fp8 of activations too

# Of pictures and trajectories
Horizon = Annotated[int, Interval(ge=1, le=2**16)]
Label = Annotated[int, Interval(ge=0, le=MAX_LABELS)]
Pixels = Annotated[int, Interval(ge=1, le=2**16)]  # of a picture's side
Seed = Annotated[int, Interval(ge=0, le=MAX_SEED)]
Prompt = Annotated[str, Len(0, MAX_PROMPT), Wanted(f"a text of up to {MAX_PROMPT} characters of Unicode")]
Pictures = Annotated[int, Interval(ge=1, le=MAX_PICTURES)]  # how many
Steps = Annotated[int, Interval(ge=1)]  # at most those of the training
