"""The kinds of option values and their bounds. See `fastdiff.schema`.

The bounds are larger than any model needs, and small enough that a value within them costs no time. They limit what a
config can cost on its own. `weight_files.check_fit` compares a config with its weights.
"""

from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import BeforeValidator

from fastdiff.schema import Wanted

MAX_LABELS = 100_000  # listed by name; ImageNet-21k has 21,841
MAX_TRAIN_STEPS = 100_000  # a schedule has a row for each; models have 1,000, and a few have 4,000 or 10,000
MAX_SIDE = 2**14  # pixels of a sample_size; 8k pictures are 7,680 wide
MAX_CHANNELS = 2**16  # of a layer; the widest layer of SD3's transformer has 9,728
MAX_LAYERS = 1024  # of a transformer; DiT-XL has 28
MAX_STAGE_LAYERS = 64  # per stage of a U-Net or VAE; models have 1 to 4
MAX_LEVELS = 12  # of a U-Net or VAE, each half the size of the one before; models for 256 pixels have 6 or 7
MAX_PROMPT = 10_000  # characters; CLIP reads about 300, and a PNG must hold all of them
MAX_PICTURES = 50_000  # per label or prompt; FID is computed on this many
MAX_SEED = 2**32 - 1  # a seed is one 32-bit word of Philox's key


def _in_small_letters(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


PositiveNumber = Annotated[float, Interval(gt=0)]
NotNegative = Annotated[float, Interval(ge=0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]

# Kinds for models
Channels = Annotated[int, Interval(ge=1, le=MAX_CHANNELS)]
Side = Annotated[int, Interval(ge=1, le=MAX_SIDE)]
Layers = Annotated[int, Interval(ge=1, le=MAX_LAYERS)]
StageLayers = Annotated[int, Interval(ge=1, le=MAX_STAGE_LAYERS)]
Widths = Annotated[tuple[Channels, ...], Len(1, MAX_LEVELS)]  # one per level
BlockTypes = Annotated[tuple[str, ...], Len(1, MAX_LEVELS)]  # names of diffusers' classes
FrequencyShift = Annotated[float, Interval(ge=-MAX_CHANNELS, le=MAX_CHANNELS)]
TrainSteps = Annotated[int, Interval(ge=1, le=MAX_TRAIN_STEPS)]
Activation = Annotated[Literal["silu", "swish", "mish", "gelu", "relu"], BeforeValidator(_in_small_letters)]


# Options of diffusers' classes that fastdiff does not run. The value that switches one off is the only one
Off = Annotated[Literal[False], Wanted("false, the only value that fastdiff runs")]
NotGiven = Annotated[None, Wanted("null, the only value that fastdiff runs")]


def canonical(activation: str) -> str:
    """Return the canonical name of an Activation. "swish" is another name of "silu"."""
    return "silu" if activation == "swish" else activation


Precision = Literal["full", "int8", "fp8"]  # of weights: the dtype's, or 8 bits; fp8 also for activations
PredictionType = Literal["epsilon", "v_prediction"]  # what the models in single files predict

# Kinds for pictures and trajectories
Horizon = Annotated[int, Interval(ge=1, le=2**16)]
Label = Annotated[int, Interval(ge=0, le=MAX_LABELS)]
Pixels = Annotated[int, Interval(ge=1, le=2**16)]  # a picture's height or width
Seed = Annotated[int, Interval(ge=0, le=MAX_SEED)]
Prompt = Annotated[str, Len(0, MAX_PROMPT), Wanted(f"a string of up to {MAX_PROMPT} characters of Unicode")]
Pictures = Annotated[int, Interval(ge=1, le=MAX_PICTURES)]  # how many pictures
Radius = Annotated[float, Interval(ge=0, le=MAX_SIDE)]  # of a mask's blur, in pixels
Margin = Annotated[int, Interval(ge=0, le=MAX_SIDE)]  # around a mask, in pixels
MAX_UPSCALE = 8  # sides become so many times longer
Upscale = Annotated[float, Interval(gt=1, le=MAX_UPSCALE), Wanted(f"a number greater than 1 and at most {MAX_UPSCALE}")]
UpscaleMode = Literal["pixels", "latent"]  # what is enlarged
Steps = Annotated[int, Interval(ge=1)]  # at most the training steps, which the scheduler checks
