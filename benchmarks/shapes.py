"""The models and shapes that are measured: real ones, by the names of the results."""

DDPM32 = {  # google/ddpm-cifar10-32
    "sample_size": 32,
    "block_out_channels": (128, 256, 256, 256),
    "layers_per_block": 2,
    "attention_head_dim": None,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "norm_eps": 1e-6,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
}
DDPM256 = DDPM32 | {  # google/ddpm-celebahq-256
    "sample_size": 256,
    "block_out_channels": (128, 128, 256, 256, 512, 512),
    "down_block_types": ("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
}
EMOJI64 = {  # the bundled model
    "sample_size": 64,
    "block_out_channels": (64, 64, 128, 128),
    "layers_per_block": 2,
    "attention_head_dim": 32,
    "num_class_embeds": 37,
    "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
}

# workload -> config, batch, GFLOP of one forward (None: not counted)
UNETS_GPU = {
    "ddpm32_b1": (DDPM32, 1, 12.4),
    "ddpm32_b64": (DDPM32, 64, 796),
    "ddpm32_b512": (DDPM32, 512, 6371),
    "ddpm256_b1": (DDPM256, 1, 497),
    "ddpm256_b8": (DDPM256, 8, 3976),
}
UNETS_CPU = {
    "emoji64_b1": (EMOJI64, 1, None),
    "emoji64_b8": (EMOJI64, 8, None),
    "ddpm32_b1": (DDPM32, 1, 12.4),
}
