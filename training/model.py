"""The denoisers of emoji64 (UNet2DModel) and emoji64-dit (DiTTransformer2DModel): initialisation and folders."""

import copy
import json
from pathlib import Path

import torch
from diffusers import DDIMPipeline, DDIMScheduler, DiTPipeline, DiTTransformer2DModel, ModelMixin, UNet2DModel
from torch import nn

from training.data import SIZE
from training.diffusion import SCHEDULER
from training.labels import Labels

SHAPES = {
    "unet": (48, 96, 128, 128),  # channels of the four levels
    "dit": (256, 6),  # width, blocks: 16 MiB less 2 KB in float16; every block embeds time and label itself
}
PATCH = 4
HEAD_WIDTH = 64
EMBEDDING_STD = 0.02  # time and label embeddings of a DiT
GUIDANCE_SCALE = {UNet2DModel: 4.0, DiTTransformer2DModel: 5.0}  # the best found by compare_sampling
DEFAULTS = {
    "num_inference_steps": 50,
    "scheduler": "ddim",
    "eta": 0.0,
    "use_clipped_model_output": True,
}


def build_model(kind: str, labels: Labels, shape: tuple[int, ...], dropout: float) -> ModelMixin:
    """Build a model with a class embedding per label and one for the null label; `kind` and `shape` as in SHAPES."""
    build = {"unet": build_unet, "dit": build_dit}[kind]
    return build(labels, *shape, dropout=dropout)


def build_unet(labels: Labels, *channels: int, dropout: float) -> UNet2DModel:
    unet = UNet2DModel(
        sample_size=SIZE,
        block_out_channels=channels,
        layers_per_block=2,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        attention_head_dim=32,
        norm_num_groups=16,
        num_class_embeds=len(labels.names) + 1,
        dropout=dropout,
    )
    _zero_residual_ends(unet)
    with torch.no_grad():
        unet.class_embedding.weight.copy_(_related_embeddings(labels, unet.class_embedding.embedding_dim))
    return unet


def build_dit(labels: Labels, width: int, blocks: int, *, dropout: float) -> DiTTransformer2DModel:
    """Build a DiTTransformer2DModel in which every block starts as the identity and the prediction as zero.

    Source: Peebles & Xie 2022 (arXiv 2212.09748), section 3.2, adaLN-Zero.
    """
    dit = DiTTransformer2DModel(
        sample_size=SIZE,
        patch_size=PATCH,
        in_channels=3,
        out_channels=3,
        num_attention_heads=width // HEAD_WIDTH,
        attention_head_dim=HEAD_WIDTH,
        num_layers=blocks,
        num_embeds_ada_norm=len(labels.names),  # diffusers adds the null label's row
        dropout=dropout,
    )
    for module in dit.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.flatten(1))
            nn.init.zeros_(module.bias)
    for block in dit.transformer_blocks:
        _start_ada_norm(block.norm1, labels)
    for module in (dit.proj_out_1, dit.proj_out_2):
        nn.init.zeros_(module.weight)
    return dit


def _start_ada_norm(norm: nn.Module, labels: Labels) -> None:
    emb = norm.emb
    emb.class_embedder.dropout_prob = 0.0  # else each block drops labels separately; the trainer drops them for all
    for linear in (emb.timestep_embedder.linear_1, emb.timestep_embedder.linear_2):
        nn.init.normal_(linear.weight, std=EMBEDDING_STD)
    table = emb.class_embedder.embedding_table.weight
    with torch.no_grad():
        table.copy_(EMBEDDING_STD * _related_embeddings(labels, table.shape[1]))
    nn.init.zeros_(norm.linear.weight)


def _zero_residual_ends(unet: UNet2DModel) -> None:
    """Make every residual block start as the identity, and the prediction as zero."""
    ends: list[nn.Module] = [unet.conv_out]
    for name, module in unet.named_modules():
        if name.endswith((".conv2", ".to_out.0")):
            ends.append(module)
    for module in ends:
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)


def _related_embeddings(labels: Labels, width: int) -> torch.Tensor:
    """Return (labels + 1, width): style + group + own vector, so labels that share a part start with similar rows."""
    vectors: dict[str, torch.Tensor] = {}

    def vector(part: str) -> torch.Tensor:
        return vectors.setdefault(part, torch.randn(width) / 3**0.5)

    group_of = {name: coarse for coarse, members in labels.groups.items() for name in members}
    rows = []
    for name in labels.names:
        style, group = group_of[name].split(" ")  # "noto animals"
        rows.append(vector(style) + vector(group) + vector(name.removeprefix(style)))
    return torch.stack([*rows, torch.zeros(width)])


def save_model(model: ModelMixin, labels: Labels, folder: Path) -> None:
    """Write the model in float16 as the folder of a diffusers pipeline, with labels and defaults in fastdiff.json."""
    model = copy.deepcopy(model).to("cpu", torch.float16).to(memory_format=torch.contiguous_format)
    model.register_to_config(dropout=0.0)
    scheduler = DDIMScheduler(**SCHEDULER)
    if isinstance(model, UNet2DModel):
        pipeline = DDIMPipeline(model, scheduler)
    else:
        pipeline = DiTPipeline(model, vae=None, scheduler=scheduler)
    pipeline.save_pretrained(folder)
    info = {
        "labels": labels.names,
        "null_label": labels.null_label,
        "label_groups": labels.groups,
        "replaced_labels": labels.replaced,
        "guidance_scale": GUIDANCE_SCALE[type(model)],
        **DEFAULTS,
    }
    (folder / "fastdiff.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


def load_model(folder: Path, device: torch.device | str) -> ModelMixin:
    """Load a model folder's denoiser in float32, for evaluation."""
    kind, component = (UNet2DModel, "unet") if (folder / "unet").is_dir() else (DiTTransformer2DModel, "transformer")
    return kind.from_pretrained(folder, subfolder=component, torch_dtype=torch.float32).to(device).eval()
