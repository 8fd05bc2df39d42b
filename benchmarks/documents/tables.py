"""Every table of the documents, by the name in its markers."""

from collections.abc import Mapping
from typing import Any

from benchmarks.documents.labels import (
    AIMS,
    CPU,
    CPU_CLASSES,
    CPU_PEERS,
    FIRST_PICTURE,
    MODELS,
    PICTURES,
    PLANNERS,
    SHORT,
    TRITONS,
    VAES,
)
from benchmarks.documents.table import Cell, Column, Table


def of(key: str, factor: float = 1.0) -> Cell:
    """Return the cell of a row's key, multiplied by a factor where the row has one."""
    return lambda row: None if row.get(key) is None else row[key] * factor


def percent(key: str) -> Cell:
    return lambda row: None if row.get(key) is None else f"{100 * row[key]:.1f} %"


def error(key: str) -> Cell:
    """Return the cell of an error relative to the largest output: in percent, or as a power of ten if it is tiny."""
    return lambda row: row.get(key) and (f"{row[key]:.0e}" if row[key] < 1e-4 else f"{100 * row[key]:.1f} %")


def by_triton(version: str, key: str) -> Cell:
    return lambda row: row["of"].get(version, {}).get(key)


def times(unit: str, *who: str, factor: float = 1.0) -> list[Column]:
    """Return a column for the time of each of `who`; the least of a row is bold."""
    return [Column(HEADINGS[name], of(f"{name}_{unit}", factor), least_is_bold=True) for name in who]


HEADINGS = {
    "fastdiff": "fastdiff", "accelerate": "`accelerate`", "compile": "torch.compile", "eager": "eager",
    "hopper": "sm_90 kernel",
    "kernel": "generic kernel", "cudnn": "cuDNN", "flash": "flash", "library": "library", "plain": "bias alone",
    "naive": "naive", "torch": "torch", "diffusers": "diffusers", "bf16": "bfloat16", "to_fp8": "`to_fp8` alone",
    "unfused": "unfused", "int8": "int8", "fp8": "fp8", "torchao_fp8": "torchao fp8",
}  # fmt: skip
PEERS = "fastdiff", "compile", "eager"
CONTROL_PEERS = "fastdiff", "accelerate", "compile", "eager"
US = 1e3  # from ms
SHARE = Column("share of the limit", percent("share"))
TFLOPS, TBPS = Column("TFLOP/s", of("tflops")), Column("TB/s", of("tbps"))


def operation(source: str, *who: str, extra: tuple[Column, ...] = (TFLOPS, SHARE), **options: Any) -> Table:
    """Return the table of an operation's times in microseconds."""
    return Table(source, [*times("ms", *who, factor=US), *extra], **options)


def forwards(drawn: str, labels: Mapping[str, str], first: str) -> Table:
    """Return the table of whole models: a forward, what is `drawn` per second, and the errors."""
    rates = [Column(f"{drawn}/s, {HEADINGS[who]}", of(f"{who}_{drawn}_s")) for who in PEERS]
    errors = [Column("error", error("max_abs_err")), Column("eager's error", error("eager_err"))]
    return Table("models", [*times("ms", *PEERS), *rates, *errors], labels, first)


def gigabytes(key: str) -> Cell:
    return of(key, 1e-9)


TABLES: dict[str, Table] = {
    "speed": Table("models", times("ms", *PEERS), {name: MODELS[name] for name in SHORT}, "model, batch"),
    "models": forwards("pictures", MODELS, "model, batch"),
    "vae": Table(
        "autoencoder",
        [*times("ms", *PEERS), Column("error", error("max_abs_err")), Column("eager's error", error("eager_err"))],
        VAES,
        "decoded picture, batch",
    ),
    "planners": forwards("plans", PLANNERS, "policy, batch"),
    "aims": Table(
        "models",
        [
            Column("aim", lambda row: AIMS.get(row["workload"])),
            Column("fastdiff", of("fastdiff_ms")),
            Column("torch.compile", of("compile_ms")),
            Column("lower bound", of("floor_ms")),
        ],
        {name: MODELS[name] for name in AIMS},
        "model, batch",
    ),
    "first-results": Table(
        "models",
        [
            Column("fastdiff, s", of("first_result_s")),
            Column("torch.compile, s", of("compile_first_s")),
            Column("another size, s", of("new_resolution_s")),
        ],
        MODELS,
        "model, batch",
        chosen=lambda row: row.get("first_result_s") is not None,
    ),
    "memory": Table(
        "models",
        [
            Column("weights, GB", gigabytes("weights_bytes")),
            Column("fastdiff, GB", gigabytes("peak_bytes")),
            Column("torch.compile, GB", gigabytes("compile_peak_bytes")),
            Column("eager, GB", gigabytes("eager_peak_bytes")),
        ],
        MODELS,
        "model, batch",
        chosen=lambda row: row.get("weights_bytes") is not None,
    ),
    "models-cpu": Table("models_cpu", times("ms", "fastdiff", "eager"), MODELS, "model, batch"),
    "cpu": Table(
        "cpu",
        [
            *(Column(label, of(f"{name}_ms"), least_is_bold=True) for name, label in CPU_PEERS.items()),
            Column("fastdiff, bfloat16", of("bfloat16_ms")),
            Column("load", of("load")),
        ],
        CPU,
        "model, batch",
    ),
    "cpu-first": Table(
        "cpu",
        [
            *(Column(label, of(f"{name}_first_s")) for name, label in CPU_PEERS.items()),
            Column("export to ONNX", of("export_s")),
        ],
        {name: label for name, label in CPU.items() if name.endswith("t2")},
        "model, batch",
    ),
    "cpu-busy": Table(
        "cpu",
        [
            Column("fastdiff", of("fastdiff_busy_ms")),
            Column("fastdiff, torch's waits", of("spinning_busy_ms")),
            *(Column(CPU_PEERS[name], of(f"{name}_busy_ms")) for name in list(CPU_PEERS)[1:]),
            Column("without it, fastdiff", of("fastdiff_ms")),
            Column("without it, fastdiff, torch's waits", of("spinning_ms")),
        ],
        {name: label for name, label in CPU.items() if name.endswith("t2")},
        "model, batch",
    ),
    "cpu-profile": Table(
        "cpu",
        [Column("forward", of("profile_whole_ms"))]
        + [Column(name, of(f"profile_{name}_ms")) for name in CPU_CLASSES],
        CPU,
        "model, batch",
    ),
    "profile": Table(
        "profile_models",
        [Column("forward", of("replay_us"))]
        + [
            Column(name, of(f"{name}_us"))
            for name in ("convolutions", "norms", "attention", "products", "others", "gaps", "overlap")
        ],
        MODELS,
        "model, batch",
    ),
    "tritons": Table(
        "tritons",
        [
            *(Column(version, by_triton(version, "hopper_ms")) for version in TRITONS),
            *(Column(f"{version}, without", by_triton(version, "without_ms")) for version in ("3.6.0", "3.7.1")),
        ],
        MODELS,
        "model, batch",
        joined_by="triton",
    ),
    "tritons-first": Table(
        "tritons",
        [Column(version, by_triton(version, "first_result_s")) for version in TRITONS],
        {f"first result of {name}": MODELS[name] for name in ("ddpm32_b1", "sd15_b2")},
        "model, batch",
        joined_by="triton",
    ),
    "plans": Table(
        "tritons",
        [Column(f"gain in {version}", by_triton(version, "gain")) for version in ("3.7.1", "3.9.0")],
        first="plan",
        joined_by="triton",
        chosen=lambda row: row["workload"] not in MODELS and "first" not in row["workload"],
    ),
    "text-to-image": Table(
        "text_to_image",
        [
            Column("a picture, s", of("picture_s")),
            Column("memory, GB", gigabytes("peak_bytes")),
            Column("first picture, s", of("first_picture_s"), digits=2),
            Column("error", percent("picture_err")),
            Column("another size, s", of("new_size_s"), digits=2),
            Column("another batch, s", of("new_batch_s"), digits=2),
        ],
        PICTURES,
        "",
    ),
    "first-picture": Table(
        "first_picture",
        [
            Column(f"{heading}, {version}", by_triton(version, key))
            for key, heading in FIRST_PICTURE.items()
            for version in ("3.6.0", "3.7.1")
        ],
        {"sd15": "Stable Diffusion 1.5", "sdxl": "Stable Diffusion XL"},
        "",
        joined_by="triton",
    ),
    "single-file": Table(
        "single_file",
        [
            Column("the file, GB", of("gigabytes")),
            Column("first process, s", of("cold")),
            Column("later, s", of("again")),
            Column("host memory, GB", of("memory")),
        ],
        {"sdxl": "Stable Diffusion XL"},
        "",
    ),
    "z-image-step": Table(
        "z_image",
        [
            Column("bfloat16, ms", of("bf16_ms")),
            Column("products and attention alone, ms", of("floor_ms")),
            Column("fp8, ms", of("fp8_ms")),
            Column("error, fp8", percent("fp8_err")),
            Column("PSNR, fp8, dB", of("fp8_psnr")),
        ],
        {"step": "a step at 1024x1024"},
        "",
    ),
    "z-image-png": Table(
        "z_image",
        [Column("bfloat16, s", of("bf16_s")), Column("fp8, s", of("fp8_s"))],
        {"png": "prompt to PNG, nine steps"},
        "",
    ),
    "pictures-in": Table(
        "pictures_in",
        [
            *(Column(f"{HEADINGS[who]}, s", of(f"{who}_s"), least_is_bold=True) for who in PEERS),
            *(Column(f"a step, {HEADINGS[who]}, ms", of(f"{who}_step_ms")) for who in PEERS),
            *(Column(f"error, {HEADINGS[who]}", percent(f"{who}_err"), digits=2) for who in PEERS if who != "eager"),
        ],
        {
            "sd15-image-to-image-b4": "Stable Diffusion 1.5, image to image, 4 pictures",
            "sdxl-inpainting": "Stable Diffusion XL, inpainting",
            "sd15-hires-1536": "Stable Diffusion 1.5, 768x768, then 1536x1536",
            "sd15-prompt-to-png": "Stable Diffusion 1.5, prompt to PNG, 20 steps",
        },
        "",
    ),
    "control": Table(
        "control",
        [
            *(Column(f"{HEADINGS[who]}, s", of(f"{who}_s"), least_is_bold=True) for who in CONTROL_PEERS),
            *(Column(f"a step, {HEADINGS[who]}, ms", of(f"{who}_step_ms")) for who in CONTROL_PEERS),
            *(Column(f"error, {HEADINGS[who]}", percent(f"{who}_err"), digits=2) for who in CONTROL_PEERS[:3]),
        ],
        {
            "sdxl-one-controlnet": "Stable Diffusion XL, one ControlNet",
            "sd15-two-controlnets": "Stable Diffusion 1.5, two ControlNets",
        },
        "",
    ),
    "text-to-image-cpu": Table(
        "text_to_image_cpu",
        [
            Column(f"{what}, {who}", of(f"{what}{suffix}_ms"))
            for what in ("picture", "forward", "decode", "command")
            for who, suffix in (("fastdiff", ""), ("diffusers", "_diffusers"))
        ],
        first="model",
    ),
    "precision": Table(
        "precision",
        [
            *times("ms", "fastdiff", "int8", "fp8", "compile", "torchao_fp8"),
            Column("weights, GB", gigabytes("fastdiff_weights")),
            Column("in 8 bits", gigabytes("int8_weights")),
            Column("memory, GB", gigabytes("fastdiff_peak")),
            Column("int8", gigabytes("int8_peak")),
            Column("fp8", gigabytes("fp8_peak")),
        ],
        {name: MODELS[name] for name in ("sdxl_b2", "sd15_b16", "dit_b2", "dit_b32", "ddpm256_b8")},
        "model, batch",
    ),
    "precision-errors": Table(
        "precision",
        [
            Column(HEADINGS[who] if who != "fastdiff" else "bfloat16", percent(f"{who}_err"))
            for who in ("fastdiff", "int8", "fp8", "compile", "torchao_fp8")
        ],
        {name: MODELS[name] for name in ("sdxl_b2", "sd15_b16", "dit_b2", "dit_b32", "ddpm256_b8")},
        "model, batch",
    ),
    "bulk": Table(
        "bulk",
        [
            Column("pictures/s", of("pictures_s")),
            Column("GPU busy", percent("busy")),
            Column("first shard, s", of("first_s")),
            Column("of twice one card", percent("of_linear")),
        ],
        first="model, way, cards",
    ),
    "page": Table(
        "page",
        [
            Column("users", of("users")),
            Column("pictures/s", of("pictures_s")),
            Column("first preview, s", of("first_s")),
            Column("wait, s", of("wait_s")),
            Column("longest wait, s", of("longest_s")),
        ],
        first="models",
    ),
    "conv2d": operation("conv2d", *PEERS, chosen=lambda row: not row["workload"].startswith("hopper")),
    "conv2d-plans": Table(
        "conv2d",
        [*times("ms", "hopper", "kernel", factor=US), Column("gain", of("gain"))],
        chosen=lambda row: row["workload"].startswith("hopper"),
    ),
    "conv2d-8bit": Table(
        "conv2d_8bit",
        [
            *times("ms", "hopper", "kernel", "bf16", factor=US),
            Column("gain", of("gain")),
            Column("over bfloat16", of("over_bf16")),
        ],
    ),
    "linear": operation("linear", *PEERS, "hopper", "kernel", "plain"),
    "linear-8bit": Table("linear_8bit", times("ms", "hopper", "kernel", "bf16", factor=US)),
    "attention": operation("attention", "hopper", "kernel", "cudnn", "flash", "compile"),
    "attention-lengths": Table(
        "attention_lengths",
        [
            *times("ms", "naive", "fastdiff", "torch"),
            *(
                Column(f"{who}, MB", of(f"{who}_bytes", 1e-6))
                for who in ("naive", "fastdiff", "torch")
            ),
        ],
    ),
    "group-norm": operation("group_norm", *PEERS, extra=(TBPS, SHARE)),
    "layer-norm": operation("layer_norm", *PEERS, extra=(TBPS, SHARE)),
    "denoise": operation("denoise", *PEERS, "diffusers", extra=()),
    "scale-input": operation("scale_input", *PEERS, extra=(TBPS, SHARE)),
    "geglu": operation("geglu", *PEERS, "hopper", "kernel"),
    "swiglu": operation("swiglu", *PEERS, "hopper", "kernel"),
    "merge-lora": Table("merge_lora", times("ms", "fastdiff", "eager")),
    "from-int8": operation("from_int8", *PEERS, extra=(TBPS, SHARE)),
    "to-fp8": operation("to_fp8", *PEERS, extra=(TBPS, SHARE)),
    "block": Table("block", [*times("us", "fastdiff", "unfused", "compile", "eager"), Column("gain", of("gain"))]),
}  # fmt: skip
