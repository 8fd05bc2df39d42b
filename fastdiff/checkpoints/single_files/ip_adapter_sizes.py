"""IP-Adapters by the names and shapes of their tensors (Ye et al. 2023, arXiv 2308.06721). Imports no torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fastdiff.checkpoints.configs.clip import CLIPVisionConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.single_files.kinds import BY_CONTEXT
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_LAYERS

IMAGE, LAYERS = "image_proj.", "ip_adapter."  # the prefixes of the two parts of a file
REMEDY = "give a plain or plus IP-Adapter"
_HEAD = 64  # the width of a head of a plus adapter's attentions; fixed in diffusers
# A pattern of keys -> the kind of adapter, for kinds that are not read
_REFUSED = {
    r"_lora\.(?:down|up)\.weight$": "an IP-Adapter FaceID, which reads embeddings of faces and brings a LoRA",
    r"^image_proj\.perceiver_resampler\.": "an IP-Adapter FaceID Plus, which reads embeddings of faces",
    r"^image_proj\.proj\.3\.": "an IP-Adapter Full, which has a token for each patch",
    r"^image_proj\.proj\.[02]\.": "an IP-Adapter FaceID, which reads embeddings of faces",
}
_PLAIN, _PLUS = f"{IMAGE}proj.weight", f"{IMAGE}latents"  # keys that only one kind has


@dataclass(frozen=True)
class IPAdapterSizes:
    """The sizes of an IP-Adapter."""

    source: str  # its name in errors
    kind: Literal["plain", "plus"]
    tokens: int  # for each picture
    image_width: int  # of what the image encoder gives
    text_width: int  # of the tokens
    width: int = 0  # of a plus adapter's own tokens, and of its attentions' heads together
    inner_width: int = 0
    mlp_width: int = 0
    depth: int = 0

    @property
    def heads(self) -> int:
        return self.inner_width // _HEAD

    def check_model(self, config: UNet2DConditionConfig) -> None:
        """Raise InputError if a U-Net reads a text of another width."""
        wanted = config.cross_width
        if self.text_width != wanted:
            theirs, ours = (
                f" ({BY_CONTEXT[width]})" if width in BY_CONTEXT else "" for width in (self.text_width, wanted)
            )
            raise InputError(
                f"{self.source}: its tokens have {self.text_width} channels{theirs}, and this model reads "
                f"{wanted}{ours}; give an IP-Adapter of this model"
            )

    def check_encoder(self, config: CLIPVisionConfig) -> None:
        """Raise InputError if an image encoder does not give what the IP-Adapter reads."""
        check_encoder(self.source, config, self.image_width, states=self.kind == "plus")


def check_encoder(source: str, config: CLIPVisionConfig, wanted: int, *, states: bool) -> None:
    """Raise InputError if an image encoder does not give what an IP-Adapter reads.

    source: the IP-Adapter. wanted: the channels that it reads. states: whether it reads hidden states.
    """
    width = config.hidden_size if states else config.projection_dim
    if width != wanted:
        raise InputError(
            f"image_encoder: it gives {width} channels, and {source} reads {wanted}; give the image encoder that it "
            "was trained with"
        )
    if config.num_channels != 3:
        raise InputError(f"image_encoder: it reads {config.num_channels} channels; give one that reads pictures")


def is_ip_adapter(keys: Mapping[str, object]) -> bool:
    """Return whether tensors of these names are in a file of an IP-Adapter, of any kind."""
    return any(key.startswith((IMAGE, LAYERS)) for key in keys)


def sizes_of(source: str, shapes: Mapping[str, tuple[int, ...]]) -> IPAdapterSizes:
    """Return the sizes of an IP-Adapter with tensors of these shapes, by their keys.

    Raises InputError, which names `source`, for what is no IP-Adapter, an IP-Adapter of another kind, and one that is
    damaged.
    """
    if not is_ip_adapter(shapes):
        raise InputError(f"{source} is no IP-Adapter: it has no image_proj and ip_adapter; {REMEDY}")
    for pattern, kind in _REFUSED.items():
        if any(re.search(pattern, key) for key in shapes if key.startswith((IMAGE, LAYERS))):
            raise InputError(f"{source} is {kind}; fastdiff does not run it; {REMEDY}")
    if _PLAIN not in shapes and _PLUS not in shapes:
        raise InputError(f"{source} is no IP-Adapter that fastdiff knows: it has no {_PLAIN} and no {_PLUS}; {REMEDY}")

    def size(key: str, dimension: int) -> int:
        shape = shapes.get(IMAGE + key, ())
        if len(shape) <= dimension or not math.prod(shape):
            raise InputError(
                f"{source} is damaged: its {IMAGE}{key} is missing or has another shape; download it again"
            )
        return shape[dimension]

    if _PLAIN in shapes:
        text_width = size("norm.weight", 0)
        tokens = max(1, size("proj.weight", 0) // text_width)
        return IPAdapterSizes(source, "plain", tokens, size("proj.weight", 1), text_width)
    layers = {match[1] for key in shapes if (match := re.match(r"image_proj\.layers\.(\d+)\.", key))}
    if len(layers) > MAX_LAYERS:
        raise InputError(f"{source}: it has {len(layers)} layers, and fastdiff takes {MAX_LAYERS}; {REMEDY}")
    inner = size("layers.0.0.to_q.weight", 0)
    if inner % _HEAD:
        raise InputError(f"{source}: its attentions have {inner} channels, which is no multiple of {_HEAD}; {REMEDY}")
    return IPAdapterSizes(
        source,
        "plus",
        tokens=size("latents", 1),
        image_width=size("proj_in.weight", 1),
        text_width=size("proj_out.weight", 0),
        width=size("latents", 2),
        inner_width=inner,
        mlp_width=size("layers.0.1.1.weight", 0),
        depth=len(layers),
    )
