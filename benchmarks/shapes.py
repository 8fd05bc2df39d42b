"""The shapes of the measured operations, taken from real models, by workload name."""

from typing import Any

# workload -> N, H = W, C (two: with a skip connection) of a U-Net's norm in 32 groups, in bfloat16
GROUP_NORMS = {
    "ddpm256_b8-C128-H256": (8, 256, (128,)),
    "ddpm256_b8-C128-H128": (8, 128, (128,)),
    "ddpm256_b8-C256-H64": (8, 64, (256,)),
    "ddpm256_b8-C256+256-H64": (8, 64, (256, 256)),
    "ddpm256_b8-C512-H16": (8, 16, (512,)),
    "ddpm256_b1-C128-H256": (1, 256, (128,)),
    "ddpm32_b512-C128-H32": (512, 32, (128,)),
    "ddpm32_b64-C128-H32": (64, 32, (128,)),
    "ddpm32_b64-C256-H16": (64, 16, (256,)),
    "ddpm32_b1-C256-H16": (1, 16, (256,)),
    "sd15_b2-C320-H64": (2, 64, (320,)),
}
# workload -> N, queries, keys, heads, head width, options of attention. "bias" stands for a tensor (N, keys), "lengths"
# for as many keys less in the first picture, and "key_heads" for the heads of k and v
ATTENTIONS: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    "ddpm256_b1-L256-d512": (1, 256, 256, 1, 512, {}),
    "ddpm256_b8-L256-d512": (8, 256, 256, 1, 512, {}),
    "ddpm32_b1-L256-d256": (1, 256, 256, 1, 256, {}),
    "ddpm32_b64-L256-d256": (64, 256, 256, 1, 256, {}),
    "emoji64_b64-L256-d32": (64, 256, 256, 4, 32, {}),
    "sd15_b2-L4096-d40": (2, 4096, 4096, 8, 40, {}),
    "sd15_b2-L4096-keys77-d40": (2, 4096, 77, 8, 40, {}),
    "sd15_b2-L4096-keys77-d40-masked": (2, 4096, 77, 8, 40, {"bias": True}),
    "sd15_b2-L1024-d80": (2, 1024, 1024, 8, 80, {}),
    "sd15_b2-L256-d160": (2, 256, 256, 8, 160, {}),
    "sdxl_b2-L4096-d64": (2, 4096, 4096, 10, 64, {}),
    "sdxl_b2-L1024-d64": (2, 1024, 1024, 20, 64, {}),
    "sdxl_b2-L4096-keys77-d64": (2, 4096, 77, 10, 64, {}),
    "sdxl_b2-L1024-keys77-d64": (2, 1024, 77, 20, 64, {}),
    "clip_b2-L77-d64-causal": (2, 77, 77, 12, 64, {"causal": True}),
    "dit_b2-L256-d72": (2, 256, 256, 16, 72, {}),
    "dit_b32-L256-d72": (32, 256, 256, 16, 72, {}),
    "z-image-1024-d128": (1, 4160, 4160, 30, 128, {}),
    "z-image-1024-guided-d128": (2, 4192, 4192, 30, 128, {}),
    "z-image-1024-guided-d128-lengths": (2, 4192, 4192, 30, 128, {"lengths": 32}),
    "qwen3-L128-d128-causal-grouped": (1, 128, 128, 32, 128, {"causal": True, "key_heads": 8}),
    "qwen3-L512-d128-causal-grouped": (1, 512, 512, 32, 128, {"causal": True, "key_heads": 8}),
    "long_b1-L8192-d64": (1, 8192, 8192, 8, 64, {}),
    "long_b1-L8192-d64-causal": (1, 8192, 8192, 8, 64, {"causal": True}),
    "long_b1-L16384-d64": (1, 16384, 16384, 8, 64, {}),
}
# tokens of self-attention: one picture, 8 heads of width 64
ATTENTION_LENGTHS = (512, 2048, 8192, 16384)
# workload -> N, H = W
DENOISES = {"ddpm32_b1": (1, 32), "ddpm32_b64": (64, 32), "ddpm32_b512": (512, 32), "ddpm256_b8": (8, 256)}
# workload -> N, H = W, input channels, output channels, kernel, options of conv2d; "temb" and "residual" stand for
# tensors of fitting size
CONVOLUTIONS: dict[str, tuple[int, int, tuple[int, ...], int, int, dict[str, Any]]] = {
    "sd_b2-C320-H128": (2, 128, (320,), 320, 3, {}),
    "sd_b2-C640-H64": (2, 64, (640,), 640, 3, {}),
    "sd_b2-C1280-H32": (2, 32, (1280,), 1280, 3, {}),
    "sd15_b2-C320-H64": (2, 64, (320,), 320, 3, {}),
    "sd15_b2-C640-H32": (2, 32, (640,), 640, 3, {}),
    "sd15_b2-C1280-H16": (2, 16, (1280,), 1280, 3, {}),
    "sd15_b2-C1280-H8": (2, 8, (1280,), 1280, 3, {}),
    "ddpm32_b64-C128-H32": (64, 32, (128,), 128, 3, {}),
    "ddpm32_b64-C256-H16": (64, 16, (256,), 256, 3, {}),
    "ddpm256_b1-C128-H256": (1, 256, (128,), 128, 3, {}),
    "ddpm256_b8-C128-H256": (8, 256, (128,), 128, 3, {}),
    "ddpm256_b8-C256-H64": (8, 64, (256,), 256, 3, {}),
    "ddpm256_b8-C512-H16": (8, 16, (512,), 512, 3, {}),
    "ddpm32_b1-C256-H16": (1, 16, (256,), 256, 3, {}),
    "ddpm32_b1-C128-H32-temb": (1, 32, (128,), 128, 3, {"temb": True}),
    "ddpm32_b512-C128-H32-temb": (512, 32, (128,), 128, 3, {"temb": True}),
    "ddpm32_b512-C128-H32-residual": (512, 32, (128,), 128, 3, {"residual": True}),
    "ddpm256_b8-C128-H256-residual": (8, 256, (128,), 128, 3, {"residual": True}),
    "ddpm256_b8-C256-H256-temb": (8, 256, (256,), 128, 3, {"temb": True}),
    "ddpm256_b8-C128-H256-down": (8, 256, (128,), 128, 3, {"stride": 2, "padding": (0, 1, 0, 1)}),
    "ddpm256_b8-C256-H64-up": (8, 64, (256,), 256, 3, {"upsample": True}),
    "ddpm256_b8-C128+128-H256-shortcut": (8, 256, (128, 128), 128, 1, {}),
    "ddpm256_b8-C3-H256-first": (8, 256, (3,), 128, 3, {}),
    "ddpm256_b8-C128-H256-last": (8, 256, (128,), 3, 3, {}),
}
# 3x3 convolutions for the sm_90 kernel, the generic kernel and cuDNN: batches, input channels, H = W, output channels
HOPPER_SQUARES = (
    ((1, 8), 128, 256, 128), ((1, 8), 256, 256, 128), ((1, 8), 128, 128, 128), ((1, 8), 256, 128, 128),
    ((1, 2), 320, 128, 320), ((1, 2), 640, 128, 320), ((1, 2), 960, 128, 320), ((1, 64), 48, 64, 48),
    ((1, 64), 144, 64, 48), ((1, 8), 256, 64, 256), ((1, 8), 512, 64, 256), ((2, 16), 320, 64, 320),
    ((1, 2), 640, 64, 640), ((1, 64), 96, 32, 96), ((1, 64, 512), 128, 32, 128), ((1, 8), 256, 32, 256),
    ((1, 64, 512), 256, 32, 128), ((1, 64), 224, 32, 96), ((1, 64, 512), 384, 32, 128), ((1, 8), 512, 32, 256),
    ((2, 16), 640, 32, 640), ((2,), 1280, 32, 1280), ((1, 64), 128, 16, 128), ((1, 64, 512), 256, 16, 256),
    ((1, 8), 512, 16, 512), ((1, 64, 512), 512, 16, 256), ((1, 8), 1024, 16, 512), ((1, 2, 16), 1280, 16, 1280),
    ((2, 16), 2560, 16, 1280),
)  # fmt: skip
# The same with a shortcut of two tensors: batches, channels, H = W, channels of the shortcut.
HOPPER_SHORTCUTS = (
    ((1, 8), 128, 256, (128, 128)), ((1, 8), 128, 128, (128, 128)), ((1, 2), 320, 128, (640, 320)),
    ((1, 64), 48, 64, (48, 48)), ((1, 8), 256, 64, (256, 256)), ((2, 16), 320, 64, (320, 320)),
    ((1, 2), 640, 64, (1280, 640)), ((1, 64), 96, 32, (96, 96)), ((1, 64, 512), 128, 32, (128, 128)),
    ((1, 8), 256, 32, (256, 256)), ((2, 16), 640, 32, (1280, 640)), ((2,), 1280, 32, (1280, 1280)),
    ((1, 64), 128, 16, (128, 128)), ((1, 64, 512), 256, 16, (256, 256)), ((1, 8), 512, 16, (512, 512)),
    ((2, 16), 1280, 16, (1280, 1280)),
)  # fmt: skip
# The same after nearest 2x upsampling: batches, channels, H = W of the input.
HOPPER_UPSAMPLED = (
    ((1, 8), 128, 128), ((1, 8), 256, 64), ((1, 2), 640, 64), ((1, 8), 256, 32), ((2, 16), 640, 32), ((2,), 1280, 32),
    ((1, 64), 128, 16), ((1, 64, 512), 256, 16), ((2, 16), 1280, 16), ((1, 64, 512), 256, 8), ((2, 16), 1280, 8),
)  # fmt: skip
# workload -> N, height, width, input channels, output channels, options; "shortcut" gives the channels of a shortcut
HOPPER_CONVOLUTIONS: dict[str, tuple[int, int, int, tuple[int, ...], int, dict[str, Any]]] = {
    **{
        f"hopper-N{n}-C{c}-H{height}-K{out}": (n, height, height, (c,), out, {})
        for batches, c, height, out in HOPPER_SQUARES
        for n in batches
    },
    **{
        f"hopper-N{n}-C{c}-H{height}-shortcut-C{first}+{second}": (
            n, height, height, (c,), c, {"shortcut": (first, second)},
        )
        for batches, c, height, (first, second) in HOPPER_SHORTCUTS
        for n in batches
    },
    **{
        f"hopper-N{n}-C{c}-H{height}-up": (n, height, height, (c,), c, {"upsample": True})
        for batches, c, height in HOPPER_UPSAMPLED
        for n in batches
    },
    "hopper-N2-C320-H104-W152-odd": (2, 104, 152, (320,), 320, {}),
    "hopper-N2-C640-H52-W76-odd": (2, 52, 76, (640,), 640, {}),
    "hopper-N8-C128-H256-down": (8, 256, 256, (128,), 128, {"stride": 2, "padding": (0, 1, 0, 1)}),
    "hopper-N64-C128-H32-down": (64, 32, 32, (128,), 128, {"stride": 2, "padding": (0, 1, 0, 1)}),
    "hopper-N2-C320-H64-down": (2, 64, 64, (320,), 320, {"stride": 2}),
}  # fmt: skip
# The same in fp8, and also in int8 without a shortcut: the levels of SDXL, SD 1.5 and ddpm256, and the first and last
# convolutions of some resnets, in two or three batch sizes.
CONVOLUTIONS_8BIT: dict[str, tuple[int, int, int, tuple[int, ...], int, dict[str, Any]]] = {
    "-".join((f"{precision}-N{n}-C{'+'.join(map(str, channels))}-H{height}-K{out}", *options)): (
        n, height, height, channels, out, options,
    )
    for batches, channels, height, out, options in (
        ((1, 2, 8), (320,), 128, 320, {}), ((1, 2, 8), (640,), 64, 640, {}), ((1, 2, 8), (1280,), 32, 1280, {}),
        ((2, 16), (320,), 64, 320, {}), ((2, 16), (640,), 32, 640, {}),
        ((1, 8), (128,), 256, 128, {}), ((1, 8), (128,), 128, 128, {}), ((1, 8), (256,), 64, 256, {}),
        ((1, 8), (256,), 32, 256, {}), ((1, 8), (512,), 16, 512, {}), ((1, 64), (128,), 32, 128, {}),
        ((1, 64), (256,), 16, 256, {}),
        ((1, 2), (640, 320), 128, 320, {}), ((1, 2), (320,), 128, 320, {"shortcut": (640, 320)}),
        ((1, 2), (1280, 640), 64, 640, {}),
        ((1, 2), (640,), 64, 640, {"shortcut": (1280, 640)}), ((1, 2), (1280, 1280), 32, 1280, {}),
        ((1, 2), (1280,), 32, 1280, {"shortcut": (1280, 1280)}), ((1, 8), (128, 128), 256, 128, {}),
        ((1, 8), (128,), 256, 128, {"shortcut": (128, 128)}),
        ((1, 8), (128,), 128, 128, {"upsample": True}), ((1, 8), (256,), 64, 256, {"upsample": True}),
        ((1, 8), (256,), 32, 256, {"upsample": True}), ((1, 2), (640,), 64, 640, {"upsample": True}),
        ((1, 2), (1280,), 32, 1280, {"upsample": True}), ((2, 16), (640,), 32, 640, {"upsample": True}),
        ((2, 16), (1280,), 16, 1280, {"upsample": True}),
    )
    for n in batches
    for precision in (("fp8",) if "shortcut" in options else ("fp8", "int8"))
}  # fmt: skip
# workload -> N, L, input channels, output channels of a planner's Conv1dBlock: 5 taps, GroupNorm in 8 groups, Mish
CONV1D_BLOCKS = {
    **{
        f"hopper32_b{n}-C{channels}-L{length}": (n, length, channels, out_channels)
        for n in (1, 64, 1024)
        for length, channels, out_channels in ((32, 14, 32), (32, 32, 32), (16, 64, 64), (8, 128, 128), (4, 256, 256))
    },
    **{
        f"hopper128_b{n}-C{channels}-L{length}": (n, length, channels, channels)
        for n in (1, 64)
        for length, channels in ((128, 32), (64, 128), (32, 256))
    },
}
# workload -> N, L, C_in, C_out, options of linear; "gate" and "residual" stand for tensors of fitting size
GATED = {"gate": True, "residual": True}


def of_transformer(
    level: str, n: int, tokens: int, channels: int
) -> dict[str, tuple[int, int, int, int, dict[str, Any]]]:
    """Return the products of a transformer block of a text U-Net that `linear` computes."""
    return {
        f"{level}-qkv": (n, tokens, channels, 3 * channels, {}),
        f"{level}-out": (n, tokens, channels, channels, {}),
        f"{level}-ff": (n, tokens, 4 * channels, channels, {"residual": True}),
    }


LINEARS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "dit_b2-qkv": (2, 256, 1152, 3456, {}),
    "dit_b2-out": (2, 256, 1152, 1152, GATED),
    "dit_b2-fc1": (2, 256, 1152, 4608, {"activation": "gelu_tanh"}),
    "dit_b2-fc2": (2, 256, 4608, 1152, GATED),
    "dit_b2-out-alone": (2, 256, 1152, 1152, {}),
    "dit_b2-fc2-alone": (2, 256, 4608, 1152, {}),
    "dit_b32-qkv": (32, 256, 1152, 3456, {}),
    "dit_b32-qkv-rms": (32, 256, 1152, 3456, {"rms_norm": True}),
    "dit_b32-out": (32, 256, 1152, 1152, GATED),
    "dit_b32-fc1": (32, 256, 1152, 4608, {"activation": "gelu_tanh"}),
    "dit_b32-fc2": (32, 256, 4608, 1152, GATED),
    "ddpm32_b512-qkv": (512, 256, 256, 768, {}),
    "ddpm32_b1-qkv": (1, 256, 256, 768, {}),
    "ddpm256_b8-qkv": (8, 256, 512, 1536, {}),
    "ddpm256_b1-qkv": (1, 256, 512, 1536, {}),
    "dit_b32-out-alone": (32, 256, 1152, 1152, {}),
    "dit_b32-fc2-alone": (32, 256, 4608, 1152, {}),
    **of_transformer("sd15_b2-L4096", 2, 4096, 320),
    **of_transformer("sd15_b2-L1024", 2, 1024, 640),
    **of_transformer("sd15_b2-L256", 2, 256, 1280),
    **of_transformer("sdxl_b2-L4096", 2, 4096, 640),
    **of_transformer("sdxl_b2-L1024", 2, 1024, 1280),
    "z-image-1024-qkv": (1, 4160, 3840, 11520, {}),
    "z-image-1024-out": (1, 4160, 3840, 3840, {}),
    "z-image-1024-w2": (1, 4160, 10240, 3840, {}),
    "qwen3-L128-qkv": (1, 128, 2560, 6144, {}),
    "qwen3-L128-out": (1, 128, 4096, 2560, {}),
    "qwen3-L128-down": (1, 128, 9728, 2560, {}),
}
# workload -> N, L, C_in, C_out
SWIGLUS = {
    "dit_b2": (2, 256, 1152, 3072),
    "dit_b32": (32, 256, 1152, 3072),
    "z-image-1024": (1, 4160, 3840, 10240),
    "qwen3-L128": (1, 128, 2560, 9728),
}
GEGLUS = {
    "sd15_b2-L4096": (2, 4096, 320, 1280),
    "sd15_b2-L1024": (2, 1024, 640, 2560),
    "sd15_b2-L256": (2, 256, 1280, 5120),
    "sd15_b2-L64": (2, 64, 1280, 5120),
    "sdxl_b2-L4096": (2, 4096, 640, 2560),
    "sdxl_b2-L1024": (2, 1024, 1280, 5120),
}
# workload -> tokens (N, L, C) or pictures (N, H, W, C)
TO_FP8 = {
    "dit_b32-L256-C1152": (32, 256, 1152),
    "dit_b32-L256-C4608": (32, 256, 4608),
    "sdxl_b2-L4096-C640": (2, 4096, 640),
    "sdxl_b2-H128-C320": (2, 128, 128, 320),
    "ddpm256_b8-H256-C128": (8, 256, 256, 128),
    "ddpm256_b8-H16-C512": (8, 16, 16, 512),
}
# workload -> N, L, heads of queries, heads of keys, channels of a head, halves?
ROTARIES = {
    "z-image-1024": (1, 4160, 30, 30, 128, False),
    "z-image-512": (1, 1088, 30, 30, 128, False),
    "qwen3-L128": (1, 128, 32, 8, 128, True),
}
# workload -> N, L, C, names of tensors that are given to layer_norm besides x, and "rms" for RMSNorm
LAYER_NORMS = {
    "dit_b2-modulated": (2, 256, 1152, "scale shift"),
    "dit_b2-residual-modulated": (2, 256, 1152, "residual scale shift"),
    "dit_b32-modulated": (32, 256, 1152, "scale shift"),
    "dit_b32-residual-modulated": (32, 256, 1152, "residual scale shift"),
    "dit_b32-residual-rms": (32, 256, 1152, "rms residual"),
    "sd15_b2-L4096-C320": (2, 4096, 320, ""),
    "z-image-1024-rms-weight": (1, 4160, 3840, "rms weight"),
    "z-image-1024-rms-gated": (1, 4160, 3840, "rms weight residual gate scale"),
    "z-image-1024-rms-twice": (1, 4160, 3840, "rms weight residual branch_norm gate scale"),
    "qwen3-L128-rms-residual": (1, 128, 2560, "rms weight residual"),
}
