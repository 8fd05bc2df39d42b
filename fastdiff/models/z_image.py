"""ZImageTransformer2DModel: the single-stream transformer of Z-Image (arXiv 2511.22699).

Tokens are (N, L, C): the patches of a picture, then its caption. Both are padded to multiples of 32 with learned
tokens, which all tokens attend to. Only pictures of one size and captions of one padded length run together, so a batch
adds no padding of its own.

What does not change from step to step is computed before the loop: `refine` makes the tokens of captions, `positions`
the tables of the rotary embedding, and `embed` the scales and gates of all blocks for all timesteps. `predict` is a
step.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.arguments import as_float, shown
from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.z_image import AXES, ZImageTransformer2DConfig
from fastdiff.errors import InputError
from fastdiff.execution.cpu_workers import map_pictures
from fastdiff.execution.tensors import FLOATS, REAL, tensor
from fastdiff.kernels.linear import linear
from fastdiff.models.blocks.conditioning import Conditioning, Prompt, in_groups
from fastdiff.models.blocks.embeddings import Timesteps, each_through
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.dit import Transformer2DModelOutput
from fastdiff.models.model import takes_options
from fastdiff.models.rms_norm import RMSNorm
from fastdiff.models.rotary import axis_tables
from fastdiff.models.z_image_blocks import Stream, ZImageTransformerBlock, joined, patched
from fastdiff.schema import checked

MULTIPLE = 32  # of the tokens of a picture, and of a caption
TIME_WIDTH, TIME_HIDDEN = 256, 1024  # of the time embedding
TRAIN_STEPS = 1000  # the timestep of noise

_OMNI = "Z-Image-Omni, which reads pictures too, is not supported"
_REFUSED = {
    "controlnet_block_samples": "ControlNets of Z-Image are not supported",
    "siglip_feats": _OMNI,
    "image_noise_mask": _OMNI,
}


def rounded_up(count: int) -> int:
    """Return the number of tokens with the padding that is attended."""
    return count + -count % MULTIPLE


class ZImageTransformer2DModel(Denoiser):
    """The transformer denoiser of Z-Image and Z-Image-Turbo, which reads a caption's states of Qwen3.

    It takes the config, weights and call of diffusers' ZImageTransformer2DModel, for inference only. See Model for how
    to build it. A picture has the same bits alone and beside pictures of other sizes and captions. ::

        model = ZImageTransformer2DModel.from_pretrained("Z-Image-Turbo", device="cuda", dtype=torch.bfloat16)
        (prediction,) = model([latents], t, [states]).sample
    """

    config: ZImageTransformer2DConfig
    whole = ("all_x_embedder.", "all_final_layer.", "t_embedder.", "cap_embedder.", "modulation.")
    part = registry.Z_IMAGE

    @takes_options
    def __init__(self, config: ZImageTransformer2DConfig):
        super().__init__(config)
        dim, time = config.dim, config.time_channels
        sizes = {f"{side}-{frames}": side**2 * frames * config.in_channels for side, frames in config.patches}
        self.all_x_embedder = nn.ModuleDict({name: nn.Linear(size, dim) for name, size in sizes.items()})
        self.all_final_layer = nn.ModuleDict({name: _last_layer(config, size) for name, size in sizes.items()})
        self.noise_refiner, self.context_refiner, self.layers = (
            nn.ModuleList(ZImageTransformerBlock(config) for _ in range(count))
            for count in (config.n_refiner_layers, config.n_refiner_layers, config.n_layers)
        )
        self.time_proj = Timesteps(TIME_WIDTH, flip_sin_to_cos=True, freq_shift=0)
        layers = {"0": nn.Linear(TIME_WIDTH, TIME_HIDDEN), "2": nn.Linear(TIME_HIDDEN, time)}
        self.t_embedder = nn.ModuleDict({"mlp": nn.ModuleDict(layers)})
        norm, project = RMSNorm(config.cap_feat_dim, config.norm_eps), nn.Linear(config.cap_feat_dim, dim)
        self.cap_embedder = nn.ModuleDict({"0": norm, "1": project})
        self.x_pad_token, self.cap_pad_token = (nn.Parameter(torch.zeros(1, dim)) for _ in range(2))

        blocks = [f"noise_refiner.{i}." for i in range(config.n_refiner_layers)]
        blocks += [f"layers.{i}." for i in range(config.n_layers)]
        self.modulation = nn.Linear(time, len(blocks) * 4 * dim)
        self._columns = [4 * dim] * len(blocks) + [dim] * len(sizes)
        self.conditioning_width = sum(self._columns)
        self.stacked = {"modulation.": {f"{path}adaLN_modulation.0.": 1 for path in blocks}}
        for path in [*blocks, *(f"context_refiner.{i}." for i in range(config.n_refiner_layers))]:
            mlp = f"{path}feed_forward."
            self.stacked[f"{mlp}w13."] = {f"{mlp}w1.": 1, f"{mlp}w3.": 1}
        self._lay_out()

    def forward(
        self,
        x: Sequence[Tensor],
        t: Tensor,
        cap_feats: Sequence[Tensor],
        return_dict: bool = True,
        controlnet_block_samples: None = None,
        siglip_feats: None = None,
        image_noise_mask: None = None,
        patch_size: int = 2,
        f_patch_size: int = 1,
        joint_attention_kwargs: None = None,
    ) -> Transformer2DModelOutput | tuple[list[Tensor]]:
        """Predict at one timestep. Arguments and output match diffusers' model.

        Args:
            x: N latents (C_in, F, H, W) in the model's dtype, on its device. Sizes may differ.
            t: one time, or one for each picture, from 0 for noise to 1 for a picture: (1000 - timestep) / 1000.
            cap_feats: N captions (L, cap_feat_dim) in the model's dtype, on its device. Lengths may differ.
            return_dict: whether to return a Transformer2DModelOutput instead of a tuple.
            controlnet_block_samples: not supported: it must be None.
            siglip_feats: not supported: it must be None.
            image_noise_mask: not supported: it must be None.
            patch_size: height and width of a patch, one of all_patch_size.
            f_patch_size: its frames, as the config has them for this patch_size.
            joint_attention_kwargs: not supported: it must be None or empty.

        Returns:
            Transformer2DModelOutput whose `sample` is a list of N predictions (C_in, F, H, W), or a tuple of it.

        Raises:
            InputError: for an argument that the model does not take.
        """
        given = {"controlnet_block_samples": controlnet_block_samples, "siglip_feats": siglip_feats}
        for name, value in (given | {"image_noise_mask": image_noise_mask}).items():
            if value is not None:
                raise InputError(f"{name}: {_REFUSED[name]}; leave it out")
        if not isinstance(joint_attention_kwargs, dict | None) or joint_attention_kwargs:
            raise InputError("joint_attention_kwargs: attention processors are not supported; leave them out")
        checked("return_dict", return_dict, bool)
        patch = (patch_size, f_patch_size)
        if patch not in self.config.patches:
            known = ", ".join(f"{side} and {frames}" for side, frames in self.config.patches)
            raise InputError(f"patch_size, f_patch_size: {shown(patch)}; the model has {known}")
        latents = self._checked_latents(x, patch)
        captions = self._checked_captions(cap_feats, len(latents))
        self._check_positions(latents, captions, patch)
        times = self._checked_time(t, len(latents))
        predictions = self._predict_each(latents, times, captions, patch)
        return Transformer2DModelOutput(cast(Any, predictions)) if return_dict else (predictions,)

    @torch.no_grad()
    def _predict_each(
        self, latents: list[Tensor], times: Tensor, captions: list[Tensor], patch: tuple[int, int]
    ) -> list[Tensor]:
        """Return a prediction (C_in, F, H, W) for each checked latent."""
        temb, tokens = self._embed(times.to(self.device).expand(len(latents))), self.refine(captions)
        step = self.graphed(("step", patch), partial(self._step, patch))
        predictions: dict[int, Tensor] = {}
        for places in _grouped([(len(c), x.shape) for c, x in zip(tokens, latents, strict=True)]):
            x = torch.stack([latents[i] for i in places]).permute(0, 2, 3, 4, 1)
            caption = torch.stack([tokens[i] for i in places])
            _, frames, height, width, _ = x.shape
            cos, sin = self.positions(caption.shape[1], frames, height, width, patch)
            tables = (each.expand(len(places), -1, -1) for each in (cos, sin))
            made = self._together(step, x.contiguous(), temb[places], caption, *tables)
            predictions |= dict(zip(places, made.permute(0, 4, 1, 2, 3), strict=True))
        return [predictions[i] for i in range(len(latents))]

    @torch.no_grad()
    def embed(self, timesteps: Tensor, class_labels: Tensor | None = None, prompt: Prompt | None = None) -> Tensor:
        """Return the scales and gates of all blocks at timesteps (M,), 1000 for noise: (M, conditioning_width)."""
        return self._embed((TRAIN_STEPS - timesteps) / TRAIN_STEPS)

    def _embed(self, times: Tensor) -> Tensor:
        """As `embed`, at times `t` of `forward`."""
        return torch.cat([self._modulate(group) for group in in_groups(times)])[: len(times)]

    def _modulate(self, t: Tensor) -> Tensor:
        """(M,) -> (M, conditioning_width): the columns of each block, then the scales of the last layers."""
        first, second = cast("list[nn.Linear]", cast(nn.ModuleDict, self.t_embedder["mlp"]).values())
        waves = self.time_proj(t * self.config.t_scale).to(self.dtype)
        emb = each_through(F.silu(each_through(waves, first)), second)
        scale, gate = each_through(emb, self.modulation).unflatten(1, (-1, 2, self.config.dim)).unbind(2)
        columns = torch.stack((scale, gate.tanh()), dim=2).flatten(1)
        layers = [self._of_patch(self.all_final_layer, patch) for patch in self.config.patches]
        last = [each_through(F.silu(emb), layer["adaLN_modulation"]["1"]) for layer in layers]
        return torch.cat([columns, *last], dim=1)

    @torch.no_grad()
    def refine(self, captions: Sequence[Tensor]) -> list[Tensor]:
        """Return the tokens of each caption: (L, cap_feat_dim) -> (L', dim), where L' is L and its padding.

        They are the same at each step.
        """
        refine = self.graphed("refine", self._refine)
        refined: dict[int, Tensor] = {}
        for places in _grouped([rounded_up(len(each)) for each in captions]):
            length = rounded_up(len(captions[places[0]]))
            stacked = torch.stack([F.pad(captions[i], (0, 0, 0, length - len(captions[i]))) for i in places])
            counts = torch.tensor([len(captions[i]) for i in places], device=self.device)
            is_padding = torch.arange(length, device=self.device) >= counts[:, None]
            tables = (each.expand(len(places), -1, -1) for each in self._tables(_line(length, self.device)))
            made = self._together(refine, stacked, is_padding, *tables)
            refined |= dict(zip(places, made, strict=True))
        return [refined[i] for i in range(len(captions))]

    def _refine(self, captions: Tensor, is_padding: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(N, L, cap_feat_dim), (N, L) bool -> (N, L, C)."""
        norm, project = cast(RMSNorm, self.cap_embedder["0"]), cast(nn.Linear, self.cap_embedder["1"])
        tokens = linear(norm(captions), project.weight, project.bias)
        stream = Stream(torch.where(is_padding[..., None], self.cap_pad_token, tokens))
        for block in self.context_refiner:
            stream = block(stream, cos, sin)
        return stream.total()

    def positions(
        self, caption: int, frames: int, height: int, width: int, patch: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the tables of the rotary embedding of a picture and its caption, (1, L, d / 2) float32 each.

        Args:
            caption: the length of the caption's tokens, with their padding.
            frames, height, width: of the latent.
            patch: the side and the frames of a patch. Default: the first of the config's.
        """
        side, depth = patch or self.config.patches[0]
        sizes = (frames // depth, height // side, width // side)
        rows = [torch.arange(size, device=self.device) for size in sizes]
        rows[0] = rows[0] + caption + 1
        picture = torch.cartesian_prod(*rows)
        padding = picture.new_zeros(-len(picture) % MULTIPLE, len(sizes))
        return self._tables(torch.cat([picture, padding, _line(caption, self.device)]))

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(L, axes) -> (1, L, d / 2) float32 twice."""
        cos, sin = axis_tables(positions, self.config.axes_dims, self.config.rope_theta)
        return cos[None], sin[None]

    @torch.no_grad()
    def predict(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the velocity of the flow (N, H, W, C_in) for x (N, H, W, C_in): minus the output of `forward`.

        `conditioning.temb` is of `embed`, and `conditioning.text` of `project`.
        """
        return self._step(self.config.patches[0], x[:, None], conditioning.temb, *conditioning.text)[:, 0].neg()

    @torch.no_grad()
    def project(self, prompt: Prompt) -> tuple[Tensor, ...]:
        """Return the caption tokens, (M, L', C), the tables of their positions, and perhaps numbers of tokens.

        Shorter captions are padded, and the attention does not read the padding. If captions differ in length, the last
        tensor is the number of tokens of each picture, (M,) int32.

        Args:
            prompt: `text` has the states of captions, (M, most, cap_feat_dim). `added` has the length of each, (M,),
                and the size (2,) of the latents, the same for all; both are on the host.
        """
        lengths, sizes = (each.tolist() for each in prompt.added)
        height, width = sizes[0]
        tokens = self.refine([text[:length] for text, length in zip(prompt.text, lengths, strict=True)])
        tables = [self.positions(len(each), 1, height, width) for each in tokens]
        longest = max(map(len, tokens))
        spare = [longest - len(each) for each in tokens]
        filled = torch.stack([F.pad(each, (0, 0, 0, more)) for each, more in zip(tokens, spare, strict=True)])
        cos, sin = (
            torch.cat([F.pad(table[i], (0, 0, 0, more)) for table, more in zip(tables, spare, strict=True)])
            for i in range(2)
        )
        if not any(spare):
            return filled, cos, sin
        counts = [cos.shape[1] - more for more in spare]
        return filled, cos, sin, torch.tensor(counts, dtype=torch.int32, device=self.device)

    def _step(
        self, patch: tuple[int, int], x: Tensor, temb: Tensor, caption: Tensor, cos: Tensor, sin: Tensor, *seen: Tensor
    ) -> Tensor:
        """Predict for x (N, F, H, W, C_in), whose N pictures have captions (N, L', C) of one length.

        seen: the tokens of each picture that are attended to, (N,) int32, where some captions are padded.
        """
        parts = temb.split(self._columns, dim=1)
        first, blocks = len(self.noise_refiner), len(self.noise_refiner) + len(self.layers)
        patches = patched(x, patch)
        tokens = self._embedded(patches, patch)
        stream, length, count = Stream(tokens), tokens.shape[1], patches.shape[1]
        for block, modulation in zip(self.noise_refiner, parts[:first], strict=True):
            stream = block(stream, cos[:, :length], sin[:, :length], modulation)
        stream = Stream(torch.cat([stream.total(), caption], dim=1))
        for block, modulation in zip(self.layers, parts[first:blocks], strict=True):
            stream = block(stream, cos, sin, modulation, *seen)
        tokens = stream.head(count).scaled(parts[blocks + self.config.patches.index(patch)])
        out = cast(nn.Linear, self._of_patch(self.all_final_layer, patch)["linear"])
        return joined(linear(tokens, out.weight, out.bias), x.shape, patch)

    def _embedded(self, patches: Tensor, patch: tuple[int, int]) -> Tensor:
        """(N, L, values) -> (N, L', C): the tokens of patches, then of padding."""
        layer = self._of_patch(self.all_x_embedder, patch)
        tokens = linear(patches, layer.weight, layer.bias)
        return torch.cat([tokens, self.x_pad_token.expand(len(tokens), -tokens.shape[1] % MULTIPLE, -1)], dim=1)

    @staticmethod
    def _of_patch(layers: nn.ModuleDict, patch: tuple[int, int]) -> Any:
        side, frames = patch
        return layers[f"{side}-{frames}"]

    def _together(self, function: Callable[..., Tensor], *batches: Tensor) -> Tensor:
        """Return `function` of batches (N, ...). On the CPU each picture is computed alone, for the same bits."""
        if self.device.type != "cpu":
            return function(*batches)
        return torch.cat([*map_pictures(function, *batches)])

    def _checked_latents(self, x: Any, patch: tuple[int, int]) -> list[Tensor]:
        latents = _items("x", x, "latents (C, F, H, W)")
        if any(isinstance(each, list | tuple) for each in latents):
            raise InputError(f"x: a list of pictures for each prompt, but {_OMNI}; give a latent for each prompt")
        side, depth = patch
        for i, latent in enumerate(latents):
            self._check_input(f"x[{i}]", latent, (self.config.in_channels, "F", "H", "W"))
            _, frames, height, width = latent.shape
            if frames % depth or height % side or width % side:
                raise InputError(
                    f"x[{i}]: {frames} frames of {height} x {width}; frames must be a multiple of {depth}, and both "
                    f"sides of {side}"
                )
        return latents

    def _checked_captions(self, cap_feats: Any, count: int) -> list[Tensor]:
        captions = _items("cap_feats", cap_feats, "captions (L, cap_feat_dim)")
        if any(isinstance(each, list | tuple) for each in captions):
            raise InputError(f"cap_feats: a list of captions for each picture, but {_OMNI}; give one for each picture")
        if len(captions) != count:
            raise InputError(f"cap_feats: {len(captions)} captions for {count} pictures; give one for each picture")
        for i, caption in enumerate(captions):
            self._check_input(f"cap_feats[{i}]", caption, ("L", self.config.cap_feat_dim))
        return captions

    def _check_input(self, name: str, value: Any, shape: tuple[int | str, ...]) -> None:
        """Raise InputError unless `value` is a tensor of the model's dtype and of this shape; names fit any size."""
        tensor(name, value, FLOATS)
        sizes = zip(shape, value.shape, strict=False)
        fits = value.ndim == len(shape) and all(isinstance(wanted, str) or wanted == size for wanted, size in sizes)
        if not fits or not value.numel():
            raise InputError(f"{name}: expected ({', '.join(map(str, shape))}), got {tuple(value.shape)}")
        if (value.dtype, value.device) != (self.dtype, self.device):
            raise InputError(
                f"{name}: {value.dtype} on {value.device}, but the model is {self.dtype} on {self.device}; move one of "
                "them with .to()"
            )
        if value.requires_grad and torch.is_grad_enabled():
            raise InputError(f"{name}: it requires grad, and this model is for inference only; call it on detach()")

    def _check_positions(self, latents: list[Tensor], captions: list[Tensor], patch: tuple[int, int]) -> None:
        """Raise InputError for a caption or a picture that is too large for the positions of the config."""
        (side, depth), (most, rows, columns) = patch, self.config.axes_lens
        for i, (latent, caption) in enumerate(zip(latents, captions, strict=True)):
            _, frames, height, width = latent.shape
            if rounded_up(len(caption)) + frames // depth >= most:
                raise InputError(
                    f"cap_feats[{i}]: {len(caption)} tokens, beside {frames} frames, go beyond the {most} positions of "
                    "axes_lens; give a shorter caption"
                )
            if height > rows * side or width > columns * side:
                raise InputError(
                    f"x[{i}]: {height} x {width} is larger than {rows * side} x {columns * side}, which axes_lens "
                    "allows; give a smaller latent"
                )

    @staticmethod
    def _checked_time(t: Any, count: int) -> Tensor:
        number = None if isinstance(t, Tensor) else as_float(t)
        times = torch.tensor(number) if number is not None else tensor("t", t, REAL)
        if times.ndim > 1 or times.numel() not in (1, count):
            raise InputError(f"t: its shape is {tuple(times.shape)} for {count} pictures; give one, or one for each")
        return times.reshape(-1)


def _last_layer(config: ZImageTransformer2DConfig, size: int) -> nn.ModuleDict:
    """Return the layers that make patches of `size` values from tokens; diffusers' FinalLayer."""
    scale = nn.ModuleDict({"1": nn.Linear(config.time_channels, config.dim)})
    return nn.ModuleDict({"linear": nn.Linear(config.dim, size), "adaLN_modulation": scale})


def _items(name: str, given: Any, wanted: str) -> list[Any]:
    """Return a list, or a tensor as the list of its items."""
    items = given.unbind() if isinstance(given, Tensor) and given.ndim else given
    if not isinstance(items, list | tuple) or not items:
        raise InputError(f"{name}: {shown(given)} is not a list of {wanted}; give one for each picture")
    return [*items]


def _grouped(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the places of each key, in the order of its first place."""
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return [*places.values()]


def _line(length: int, device: torch.device) -> Tensor:
    """Return the positions (L, axes) of a caption of L tokens, with their padding: they count from 1."""
    return F.pad(torch.arange(1, length + 1, device=device)[:, None], (0, AXES - 1))
