"""A tiny ZImagePipeline of diffusers, with random weights."""

import diffusers
import torch
import transformers
from tokenizers import pre_tokenizers

TRANSFORMER = {
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "in_channels": 4,
    "cap_feat_dim": 24,
    "axes_dims": (4, 6, 6),
    "axes_lens": (160, 32, 32),
}
ENCODER = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VAE = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "sample_size": 16,
    "scaling_factor": 0.36,
    "shift_factor": 0.12,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> transformers.Qwen2Tokenizer:
    """Return a tokenizer of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = transformers.Qwen2Tokenizer(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = TEMPLATE
    return made


def pipeline(randomise, channels=4, **scheduler) -> diffusers.ZImagePipeline:
    """Return diffusers' pipeline. channels: of its latents; Z-Image has 16. scheduler: options of its scheduler."""
    words = tokenizer()
    encoder = transformers.Qwen3Model(transformers.Qwen3Config(vocab_size=len(words), **ENCODER))
    models = [
        diffusers.ZImageTransformer2DModel(**TRANSFORMER | {"in_channels": channels}),
        diffusers.AutoencoderKL(**VAE | {"latent_channels": channels}),
        encoder,
    ]
    for model in models:
        randomise(model)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1 and "norm" in name:
                    weight.add_(1)
    transformer, vae, encoder = models
    made = diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0} | scheduler),
        vae=vae,
        text_encoder=encoder,
        tokenizer=words,
        transformer=transformer,
    )
    made.set_progress_bar_config(disable=True)
    return made
