"""CLIPVisionModelWithProjection: the image encoder of CLIP (Radford et al. 2021, arXiv 2103.00020).

Tokens are (1, L, C): a class token, then the patches of a picture row by row. Pictures run one at a time, so that their
bits do not depend on the batch. The layers are the same as in the text encoders of `clip.py`, without a causal mask.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.clip import CLIPVisionConfig
from fastdiff.errors import InputError
from fastdiff.execution.cpu_workers import map_pictures
from fastdiff.execution.tensors import FLOATS, tensor
from fastdiff.kernels.linear import linear
from fastdiff.models.blocks.embeddings import normed
from fastdiff.models.clip import Stream, encoder_layers, stacked_projections
from fastdiff.models.model import Model, takes_options
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked


@read_by_name
class CLIPVisionModelOutput(NamedTuple):
    """The output of CLIPVisionModelWithProjection, like transformers' class of this name."""

    image_embeds: Tensor  # (N, projection_dim), the projection of the normalised class token
    last_hidden_state: Tensor  # (N, L, C), without a norm
    hidden_states: tuple[Tensor, ...] | None = None  # (N, L, C) each: normalised embeddings, then layers' outputs


class CLIPVisionEmbeddings(nn.Module):
    """The class token and the patches with their positions; transformers' class of this name."""

    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        self.side, self.patch_size = config.side, config.patch_size
        self.class_embedding = nn.Parameter(torch.randn(config.hidden_size))
        size = config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, config.hidden_size, size, size, bias=False)
        self.position_embedding = nn.Embedding(config.side**2 + 1, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(1, H, W, C_in) -> (1, side^2 + 1, C). Pixels that fill no patch are left out."""
        side, size = self.side, self.patch_size
        x = x[:, : side * size, : side * size]
        patches = x.reshape(1, side, size, side, size, -1).transpose(2, 3).reshape(1, side**2, -1)
        weight = self.patch_embedding.weight.permute(0, 2, 3, 1).flatten(1)  # a view of channels-last memory
        positions = self.position_embedding.weight[None]
        tokens = linear(patches, weight, residual=positions[:, 1:])
        return torch.cat([self.class_embedding + positions[:, :1], tokens], dim=1)


class CLIPVisionModelWithProjection(Model):
    """The image encoder of CLIP with a projection of its class token: the image encoder of IP-Adapters.

    It takes the config, weights and call of transformers' CLIPVisionModelWithProjection, for inference only. See Model
    for how to build it. A picture has the same bits in any batch. ::

        encoder = CLIPVisionModelWithProjection.from_pretrained("path/to/folder", subfolder="image_encoder")
        embeds = encoder(pixel_values).image_embeds
    """

    config: CLIPVisionConfig
    whole = ("visual_projection.", "embeddings.")
    part = registry.IMAGE_ENCODER

    @takes_options
    def __init__(self, config: CLIPVisionConfig):
        super().__init__(config)
        self.embeddings = CLIPVisionEmbeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)  # spelt as in transformers
        self.encoder = encoder_layers(config, causal=False)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.visual_projection = nn.Linear(config.hidden_size, config.projection_dim, bias=False)
        self.stacked = stacked_projections(config)
        self._lay_out()

    def saved_key(self, key: str) -> str:
        return key if key.startswith("visual_projection.") else self.config.KEY_PREFIX + key

    def forward(
        self,
        pixel_values: Tensor,
        interpolate_pos_encoding: Literal[False] = False,
        output_attentions: Literal[False] | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Encode pictures. Arguments and output match transformers' model.

        Args:
            pixel_values: (N, num_channels, image_size, image_size), normalised, of any float dtype.
            interpolate_pos_encoding: not supported: it must be False.
            output_attentions: not supported: it must be None or False.
            output_hidden_states: whether the output includes hidden_states.
            return_dict: whether to return a named tuple instead of a plain one.

        Returns:
            CLIPVisionModelOutput. A plain tuple leaves out None.

        Raises:
            InputError: for pixel_values of another dtype or shape, and for an argument that is not supported.
        """
        if output_attentions:
            raise InputError("output_attentions: fastdiff's attention returns no weights; leave it out")
        if checked("interpolate_pos_encoding", interpolate_pos_encoding, bool):
            raise InputError("interpolate_pos_encoding: pictures have the encoder's own size; leave it out")
        checked("output_hidden_states", output_hidden_states, bool | None)
        checked("return_dict", return_dict, bool)
        self._check_pixels(pixel_values)
        embeds, *hidden = self._run(pixel_values, self.config.num_hidden_layers)
        output = CLIPVisionModelOutput(embeds, hidden[-1], tuple(hidden) if output_hidden_states else None)
        return output if return_dict else tuple(each for each in output if each is not None)

    def penultimate_states(self, pixel_values: Tensor) -> Tensor:
        """Return the input of the last layer, (N, L, C): `hidden_states[-2]`, without running that layer.

        Raises InputError for `pixel_values` as `forward` does.
        """
        self._check_pixels(pixel_values)
        return self._run(pixel_values, self.config.num_hidden_layers - 1)[-1]

    def _run(self, pixel_values: Tensor, layers: int) -> list[Tensor]:
        encode = self.graphed(("encode", layers), partial(self._encode, layers))
        pixels = pixel_values.to(self.device, self.dtype).permute(0, 2, 3, 1).contiguous()
        return [torch.cat(each) for each in zip(*map_pictures(encode, pixels), strict=True)]

    @torch.no_grad()
    def _encode(self, layers: int, x: Tensor) -> tuple[Tensor, ...]:
        """(1, H, W, C_in) -> the projected class token (1, projection_dim) after so many layers, and the hidden states.

        The hidden states (1, L, C) are the input of each of these layers, and the output of the last one.
        """
        stream, hidden = Stream(normed(self.embeddings(x), self.pre_layrnorm)), []
        for layer in cast(nn.ModuleList, self.encoder["layers"])[:layers]:
            stream, before = layer(stream)
            hidden.append(before)
        last = stream.x if stream.branch is None else stream.x + stream.branch
        pooled = normed(last[:, :1], self.post_layernorm)
        return linear(pooled, self.visual_projection.weight)[:, 0], *hidden, last

    def _check_pixels(self, pixel_values: Any) -> None:
        tensor("pixel_values", pixel_values, FLOATS)
        size = self.config.image_size
        wanted = self.config.num_channels, size, size
        if pixel_values.ndim != 4 or not len(pixel_values) or tuple(pixel_values.shape[1:]) != wanted:
            raise InputError(
                f"pixel_values: its shape is {tuple(pixel_values.shape)}; it must be (N, {', '.join(map(str, wanted))})"
            )
