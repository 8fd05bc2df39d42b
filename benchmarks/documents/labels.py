"""Labels of the workloads that the tables of the documents show."""

MODELS = {
    "ddpm32_b1": "ddpm-cifar10-32, 1",
    "ddpm32_b64": "ddpm-cifar10-32, 64",
    "ddpm32_b512": "ddpm-cifar10-32, 512",
    "ddpm256_b1": "ddpm-celebahq-256, 1",
    "ddpm256_b8": "ddpm-celebahq-256, 8",
    "emoji64_b1": "emoji64, 1",
    "emoji64_b64": "emoji64, 64",
    "emoji64-dit_b1": "emoji64-dit, 1",
    "emoji64-dit_b64": "emoji64-dit, 64",
    "emoji-sd_b1": "emoji-sd, 1",
    "emoji-sd_b64": "emoji-sd, 64",
    "dit_b2": "DiT-XL/2-256, 2",
    "dit_b32": "DiT-XL/2-256, 32",
    "sd15_b2": "Stable Diffusion 1.5, 2",
    "sd15_b16": "Stable Diffusion 1.5, 16",
    "sdxl_b2": "Stable Diffusion XL, 2",
}
SHORT = ("ddpm256_b8", "emoji64_b64", "dit_b2", "sd15_b2", "sdxl_b2")
PLANNERS = {
    f"hopper{horizon}_b{batch}{suffix}": f"horizon {horizon}, {batch}{', float32' if suffix else ''}"
    for suffix in ("", "_fp32")
    for horizon, batch in ((32, 1), (32, 64), (32, 1024), (128, 1), (128, 64))
}
VAES = {"decode-512-b1-bf16": "512x512, 1", "decode-1024-b1-bf16": "1024x1024, 1"}
PICTURES = {
    "sd15-fastdiff": "Stable Diffusion 1.5",
    "sd15-accelerate": "diffusers with `fastdiff.accelerate`",
    "sd15-compile": "diffusers under torch.compile",
    "sd15-eager": "diffusers, eager",
    "sdxl-fastdiff": "Stable Diffusion XL",
    "sdxl-offload": "with `offload=True`",
    "sdxl-compile": "diffusers under torch.compile",
    "sdxl-eager": "diffusers, eager",
    "sdxl-eager-offload": "diffusers, `enable_model_cpu_offload`",
}
AIMS = {  # ms, of the workloads that have one
    "ddpm32_b1": 0.40, "ddpm32_b64": 1.55, "ddpm32_b512": 10.5, "ddpm256_b1": 1.3, "ddpm256_b8": 7.3,
    "emoji64_b1": 0.35, "emoji64_b64": 2.1, "emoji64-dit_b1": 0.25, "dit_b2": 1.3, "dit_b32": 12.8, "sd15_b2": 3.2,
    "sd15_b16": 21.0, "sdxl_b2": 22.0,
}  # fmt: skip
CPU = {
    f"{name}_t{threads}": f"{label}, {'one thread' if threads == 1 else 'two threads'}"
    for name, label in {
        "emoji64_b1": "emoji64, 1",
        "emoji64_b2": "emoji64, 2",
        "emoji64_b8": "emoji64, 8",
        "emoji-sd_b2": "emoji-sd, 2",
    }.items()
    for threads in (2, 1)
}
CPU_PEERS = {
    "fastdiff": "fastdiff",
    "compile": "torch.compile",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "channels_last": "eager, channels-last",
    "eager": "eager",
}
CPU_CLASSES = ("convolutions", "products", "norms", "attention", "activations", "copies", "others", "rest")
FIRST_PICTURE = {"cold": "cold", "warmed": "warmed", "again": "again", "warm": "`fastdiff warm`"}
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
