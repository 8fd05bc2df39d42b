"""The U-Net and the text encoder of emoji-sd: initialisation, and measurements of several sizes.

The seconds, measured by evaluation/sizes.py, are the minimum of five rounds for one picture of 20 guided steps, prompt
and decode included, by fastdiff in float32 on two CPU cores. The MiB are those of the whole float16 folder, with a text
encoder of 1.59 million parameters and the VAE (2.79 million, or 3.51 with three halvings). The limit is 24 MiB.

| latents | channels           | U-Net, million parameters | MiB   | seconds |
|---------|--------------------|---------------------------|-------|---------|
| 32x32x4 | (64, 128, 128)     |                      6.77 | 21.44 |    0.56 |
| 32x32x4 | (64, 96, 128, 128) |                      7.29 | 22.43 |    0.50 |
| 32x32x4 | (96, 128, 128)     |                      7.58 | 22.97 |    0.64 |
| 32x32x4 | (96, 96, 128, 128) |                      8.10 | 23.96 |    0.57 |
| 32x32x4 | (64, 96, 128, 160) |                      8.61 | 24.94 |    0.50 |
| 16x16x8 | (64, 128, 128)     |                      5.97 | 21.29 |    0.28 |
| 16x16x8 | (96, 128, 128)     |                      7.12 | 23.48 |    0.33 |
| 16x16x8 | (96, 128, 160)     |                      8.46 | 26.03 |    0.34 |
| 16x16x8 | (96, 160)          |                      7.31 | 23.82 |    0.34 |
| 16x16x8 | (128, 128)         |                      6.86 | 22.96 |    0.37 |
| 16x16x8 | (128, 192)         |                     11.10 | 31.06 |    0.44 |
| 16x16x8 | (128, 192, 256)    |                     18.96 | 46.05 |    0.51 |

The width is limited by the bytes, not by the seconds. The lowest level, 4x4, sees the whole picture at once.
"""

from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from fastdiff.text.tokenizer import CLIPTokenizer

CHANNELS = (64, 96, 128, 128)
HEAD_WIDTH = 32
READING_SIZES = (16, 8)  # sides of the levels with cross attention; at 4x4 the middle block has it
TEXT_WIDTH, TEXT_LAYERS = 160, 3
DROPOUT = 0.1


def build_unet(
    channels: tuple[int, ...], latent_channels: int, latent_size: int, text_width: int
) -> UNet2DConditionModel:
    """Build a U-Net whose residual blocks start as the identity and whose prediction starts as zero."""
    reads = [latent_size >> level in READING_SIZES for level in range(len(channels))]
    unet = UNet2DConditionModel(
        sample_size=latent_size,
        in_channels=latent_channels,
        out_channels=latent_channels,
        block_out_channels=channels,
        layers_per_block=1,
        down_block_types=["CrossAttnDownBlock2D" if read else "DownBlock2D" for read in reads],
        up_block_types=["CrossAttnUpBlock2D" if read else "UpBlock2D" for read in reversed(reads)],
        cross_attention_dim=text_width,
        attention_head_dim=[width // HEAD_WIDTH for width in channels],  # number of heads, not their width
        norm_num_groups=16,
        use_linear_projection=True,
        dropout=DROPOUT,
    )
    for name, module in unet.named_modules():
        if name.endswith((".conv2", ".proj_out")) or name == "conv_out":
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return unet


def build_text_encoder(tokenizer: CLIPTokenizer, width: int = TEXT_WIDTH, layers: int = TEXT_LAYERS) -> CLIPTextModel:
    """Build a CLIPTextModel for the tokenizer's vocabulary and length."""
    config = CLIPTextConfig(
        vocab_size=tokenizer.size,
        max_position_embeddings=tokenizer.length,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_WIDTH,
        bos_token_id=tokenizer.start,
        eos_token_id=tokenizer.end,
        pad_token_id=tokenizer.pad,
    )
    return CLIPTextModel(config)


class Denoiser(nn.Module):
    """Text encoder and U-Net as one module: one optimiser, one moving average, one checkpoint."""

    def __init__(self, unet: UNet2DConditionModel, text_encoder: CLIPTextModel):
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder

    def forward(self, x_t: Tensor, t: Tensor, tokens: Tensor) -> Tensor:
        """Predict v (N, C, H, W) from x_t (N, C, H, W), t (N,) and tokens (N, L)."""
        text = self.text_encoder(tokens).last_hidden_state  # (N, L, width)
        return self.unet(x_t, t, text).sample


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
