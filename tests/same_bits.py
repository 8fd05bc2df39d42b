"""Draw the same pictures with the working tree's code and another commit's, and compare them bit for bit.

    python -m tests.same_bits --base REV

REV is a commit or the folder of another checkout. Each side draws in its own interpreter, which runs this file over
that side's fastdiff (`--draw`), so the runs use only public names that both sides have. A run with a model that REV
does not have is reported as new and not compared. On a GPU every run is drawn in every dtype and through CUDA graphs.
Bits are only equal on the same machine: they depend on the type of CPU and GPU.

Exit codes: 0 if all runs that both sides have are equal; 1 if some differ or fail; 2 if there is no such REV.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import fastdiff

ROOT = Path(__file__).resolve().parents[1]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
STEPS = 4  # a GPU runs the first eagerly and captures the second, so the rest are replays
PICTURES = 8 if ON_GPU else 2  # per label, unless the run says otherwise


def unet(down: str = "DownBlock2D AttnDownBlock2D", up: str = "AttnUpBlock2D UpBlock2D", **options) -> dict[str, Any]:
    kinds = {"down_block_types": tuple(down.split()), "up_block_types": tuple(up.split())}
    return {"sample_size": 16, "block_out_channels": (32, 64)} | kinds | options


def dit(heads: int, head_width: int, **options) -> dict[str, Any]:
    sizes = {"num_attention_heads": heads, "attention_head_dim": head_width, "num_layers": 2, "num_embeds_ada_norm": 20}
    return {"sample_size": 16} | sizes | options


DDPM = {"attention_head_dim": None, "downsample_padding": 0, "flip_sin_to_cos": False, "freq_shift": 1}
UNETS = {
    "ddpm": unet(
        "DownBlock2D AttnDownBlock2D DownBlock2D",
        "UpBlock2D AttnUpBlock2D UpBlock2D",
        **DDPM | {"sample_size": 32, "block_out_channels": (64, 128, 128), "norm_eps": 1e-6},
    ),
    "latents": unet(block_out_channels=(224, 448), in_channels=4, out_channels=4),  # norm groups of 7 and 14 channels
    "skip": unet("AttnSkipDownBlock2D SkipDownBlock2D", "SkipUpBlock2D AttnSkipUpBlock2D"),
    "k": unet("KDownBlock2D KDownBlock2D", "KUpBlock2D KUpBlock2D", act_fn="gelu"),
    "resnet": unet("ResnetDownsampleBlock2D AttnDownBlock2D", "AttnUpBlock2D ResnetUpsampleBlock2D"),
    "scale-shift": unet(resnet_time_scale_shift="scale_shift", attn_norm_num_groups=4),
    "mish-classes": unet(act_fn="mish", num_class_embeds=4),
    "class-numbers": unet(class_embed_type="timestep", center_input_sample=True),
    "fourier": unet(time_embedding_type="fourier", add_attention=False),
}
DITS = {
    "dit-pixels": dit(6, 64, in_channels=3, out_channels=6, patch_size=4),
    "dit-latents": dit(2, 72, out_channels=8),
    "dit-odd": dit(3, 12, sample_size=14, norm_elementwise_affine=True, activation_fn="gelu"),
}
PLANNER = {
    "block_out_channels": (32, 64, 128),
    "in_channels": 14,
    "out_channels": 14,
    "down_block_types": ("DownResnetBlock1D",) * 3,
    "up_block_types": ("UpResnetBlock1D",) * 2,
    "mid_block_type": "MidResTemporalBlock1D",
    "out_block_type": "OutConv1DBlock",
    "use_timestep_embedding": True,
    "act_fn": "mish",
}
VALUES = {
    "up_block_types": (),
    "mid_block_type": "ValueFunctionMidBlock1D",
    "out_block_type": "ValueFunction",
    "downsample_each_block": True,
}
PLANNERS = {
    "planner": PLANNER | {"time_embedding_type": "positional", "flip_sin_to_cos": False, "freq_shift": 1},
    "planner-fourier": PLANNER,
    "values": PLANNER | VALUES,
}
CROSS = "CrossAttnDownBlock2D DownBlock2D", "UpBlock2D CrossAttnUpBlock2D"
TEXT_UNETS = {  # for text of width 48
    "sd": unet(*CROSS, block_out_channels=(80, 160), cross_attention_dim=48, attention_head_dim=2, norm_num_groups=8),
    "sdxl": unet(
        "DownBlock2D CrossAttnDownBlock2D",
        "CrossAttnUpBlock2D UpBlock2D",
        cross_attention_dim=48,
        attention_head_dim=2,
        use_linear_projection=True,
        transformer_layers_per_block=2,
        addition_embed_type="text_time",
        addition_time_embed_dim=16,
        projection_class_embeddings_input_dim=32 + 6 * 16,
    ),
}
TEXT_UNETS = {name: {"in_channels": 4, "out_channels": 4} | config for name, config in TEXT_UNETS.items()}
TWO = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
VAES = {"vae": TWO | {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}}
ENCODERS = {"clip": {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4}}
MODELS = {
    "UNet2DModel": UNETS,
    "DiTTransformer2DModel": DITS,
    "UNet1DModel": PLANNERS,
    "UNet2DConditionModel": TEXT_UNETS,
    "AutoencoderKL": VAES,
    "CLIPTextModel": ENCODERS,
}
VELOCITY = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
THRESHOLDING = {"thresholding": True, "dynamic_thresholding_ratio": 0.8, "sample_max_value": 3.0}
UNCLIPPED = {"clip_sample": False}
LEARNED = {"variance_type": "learned_range"}
OBSERVED = {0: [0.5, -1.0, 0.25] * 3, 31: [1.0, -0.5]}
EACH_ITS_OWN = {"class_labels": [7, 3, None], "seed": [1, 1, 2], "batch_size": 3}


@dataclass(frozen=True)
class Run:
    """A model, its scheduler, and the options for drawing."""

    model: str  # a name in MODELS, or a bundled model
    scheduler: str | None = None  # a name in SCHEDULERS; None for the bundled model's own
    config: dict[str, Any] = field(default_factory=dict)  # the scheduler's
    options: dict[str, Any] = field(default_factory=dict)  # options of the call or of each step, or the command's flags
    way: str = "pipeline"  # a name in WAYS
    half: bool = False  # small enough for 16 bits on a CPU too


RUNS = {
    "emoji64": Run("emoji64", options={"class_labels": ["twemoji fruit", 3], "num_inference_steps": 3}),
    "emoji64-ddpm-group": Run("emoji64", "ddpm", options={"class_labels": "noto food", "seed": [5, 6, 2**32 - 1]}),
    "emoji64-command": Run("emoji64", options={"label": "noto fruit", "seed": "3,9", "steps": 3}, way="command"),
    "emoji64-dit": Run("emoji64-dit", options={"class_labels": [3, None], "guidance_scale": 2.5}),
    "emoji64-dit-eta": Run("emoji64-dit", options={"class_labels": 7, "guidance_scale": 1.0, "eta": 1.0}),
    "ddpm": Run("ddpm", "ddpm"),
    "ddpm-generator": Run("ddpm", "ddpm", UNCLIPPED, {"generator": 7}),
    "ddpm-thresholding": Run("ddpm", "ddim", THRESHOLDING, {"num_images": 1}),
    "ddpm-loop": Run("ddpm", "ddim", UNCLIPPED, {"eta": 0.5}, way="loop"),
    "latents": Run("latents", "ddim", UNCLIPPED, {"num_inference_steps": 2}),
    "skip-eta": Run("skip", "ddim", UNCLIPPED, {"eta": 1.0, "seed": 11}, half=True),
    "k-velocity": Run("k", "ddpm", VELOCITY, half=True),
    "resnet-velocity": Run("resnet", "ddim", VELOCITY, {"height": 24, "width": 16}),
    "scale-shift-clipped": Run("scale-shift", "ddim", options={"use_clipped_model_output": True, "eta": 0.3}),
    "mish-classes": Run("mish-classes", "ddpm", {"variance_type": "fixed_large"}, {"class_labels": [0, 3]}),
    "class-numbers": Run("class-numbers", "ddim", options={"class_labels": torch.tensor([10.0, 400.0])}),
    "fourier": Run("fourier", "ddim", UNCLIPPED | {"timestep_spacing": "trailing"}),  # the model divides by t > 0
    "dit-learned": Run("dit-pixels", "ddpm", UNCLIPPED | LEARNED, EACH_ITS_OWN | {"guidance_scale": 2.0}),
    "dit-learned-loop": Run("dit-pixels", "ddpm", LEARNED, way="loop", half=True),
    "dit-latents": Run("dit-latents", "ddim", UNCLIPPED, {"class_labels": 5, "guidance_scale": 4.0}),
    "dit-odd": Run("dit-odd", "ddim", options={"class_labels": [0, 19], "eta": 0.5}, half=True),
    "planner": Run("planner", "ddpm", options={"horizon": 32, "seed": 4}, half=True),
    "planner-conditions": Run("planner", "ddim", UNCLIPPED, {"horizon": 32, "conditions": OBSERVED, "eta": 0.5}),
    "planner-sorted": Run("planner-fourier", "ddpm", options={"horizon": 32, "num_images": 5, "sort_by_value": True}),
    "sd": Run("sd", "pndm", {"skip_prk_steps": True}, way="text", half=True),
    "sd-velocity-rescaled": Run("sd", "ddim", UNCLIPPED | VELOCITY, {"eta": 0.5, "guidance_rescale": 0.7}, way="text"),
    "sdxl": Run("sdxl", "euler", options={"height": 24, "width": 40}, way="text"),
    "sdxl-stochastic": Run("sdxl", "dpm++", {"algorithm_type": "sde-dpmsolver++"}, way="text"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same_bits", description=__doc__.partition("\n")[0])
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--base", metavar="REV", help="commit or folder of a checkout to compare with")
    chosen.add_argument("--draw", type=Path, metavar="OUT.json", help="draw with one side's code; used by --base")
    args = parser.parse_args()
    if args.draw:
        draw(args.draw)
        return 0
    from benchmarks.harness.checkouts import checkout, commit  # the other side may not have it

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        try:
            base = stack.enter_context(checkout(args.base, Path(folder, "checkout")))
        except (LookupError, OSError) as error:
            parser.error(f"--base {args.base} is neither a folder of a checkout nor a commit; git says: {error}")
        device = torch.cuda.get_device_name() if ON_GPU else f"CPU, {torch.get_num_threads()} threads"
        print(f"{device}; torch {torch.__version__}; base {commit(base)}, working tree {commit(ROOT)}", flush=True)
        return compare(*(drawn_by(side, Path(folder, name)) for name, side in (("base", base), ("tree", ROOT))))


def drawn_by(side: Path, folder: Path) -> dict[str, dict[str, str]]:
    """Draw every run with the code in `side`, and return what `draw` writes to `folder`, by run."""
    folder.mkdir()
    path = os.pathsep.join(filter(None, [str(side), os.environ.get("PYTHONPATH")]))
    # a safe path excludes this file's folder, whose kernels/ would shadow Hugging Face's package
    environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--draw", str(folder / "runs.json")]
    print(f"drawing with {side}", file=sys.stderr)
    code = subprocess.run(command, cwd=side, env=environment).returncode
    if code:
        raise SystemExit(f"drawing with {side} ended with code {code}")  # exits with 1
    return json.loads((folder / "runs.json").read_text())


def compare(base: dict[str, dict[str, str]], tree: dict[str, dict[str, str]]) -> int:
    """Print a row per run, and return the exit code."""
    width, different = max(map(len, tree)), 0
    new = [name for name, ours in tree.items() if "unknown" in base[name] and "sha256" in ours]
    for name, ours in tree.items():
        theirs = base[name]
        equal = "sha256" in ours and ours["sha256"] == theirs.get("sha256")
        different += not equal and name not in new
        verdict = "equal" if equal else f"DIFFERENT  {difference(theirs, ours)}"
        verdict = f"new  the base has {theirs['unknown']}" if name in new else verdict
        print(f"{name:<{width}}  {ours.get('sha256', '-')[:12]:<12}  {verdict}")
    compared = len(tree) - len(new)
    summary = f"{different} of {compared} runs differ" if different else f"all {compared} runs are equal"
    print(f"{summary}; {len(new)} are new and were not compared" if new else summary)
    return int(different > 0)


class UnknownError(Exception):
    """This side's fastdiff does not have the model."""


def difference(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """Describe how two runs differ."""
    sides = ("base", theirs), ("tree", ours)
    failed = [f"{side} failed: {run['error']}" for side, run in sides if "error" in run]
    failed += [f"{side} has {run['unknown']}" for side, run in sides if "unknown" in run]
    if failed:
        return "; ".join(failed)
    before, after = torch.load(theirs["file"]), torch.load(ours["file"])
    if [(each.shape, each.dtype) for each in before] != [(each.shape, each.dtype) for each in after]:
        return "in number, shape or dtype"
    largest = max((a.double() - b.double()).abs().max().item() for a, b in zip(before, after, strict=True))
    return f"max |difference| {largest:.1e}"


def draw(out: Path) -> None:
    """Draw every run with the current folder's fastdiff; write hashes to `out`, and tensors next to it."""
    package = Path(fastdiff.__file__).parent
    assert package.parent.samefile(Path.cwd()), f"{package} is not the fastdiff of {Path.cwd()}"
    runs: dict[str, dict[str, str]] = {}
    for name, run in RUNS.items():
        for dtype in ("float32", "bfloat16", "float16") if ON_GPU or run.half else ("float32",):
            start = time.perf_counter()
            runs[f"{name} {dtype}"] = draw_run(run, dtype, out.with_name(f"{name}-{dtype}.pt"))
            print(f"{name} {dtype}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    out.write_text(json.dumps(runs))


def draw_run(run: Run, dtype: str, file: Path) -> dict[str, str]:
    """Return the hash of a run's bits and the `file` with them, or the error, which must not stop the other runs."""
    try:
        tensors = [tensor.cpu().contiguous() for tensor in WAYS[run.way](run, dtype)]
    except UnknownError as error:
        return {"unknown": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    torch.save(tensors, file)
    bits = hashlib.sha256()
    for tensor in tensors:
        bits.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        bits.update(tensor.view(torch.uint8).numpy().tobytes())
    return {"sha256": bits.hexdigest(), "file": str(file)}


def pipeline(run: Run, dtype: str) -> Iterator[Tensor]:
    """Yield the states of every step and the pictures, and on a GPU the pictures again, all through CUDA graphs.

    A planner yields trajectories instead of pictures, and their values if the run sorts by value.
    """
    if any(run.model in configs for configs in MODELS.values()):
        companion = {"value_function": random_model("values", dtype)} if "sort_by_value" in run.options else {}
        name = "TrajectoryPipeline" if run.model in MODELS["UNet1DModel"] else "LabelPipeline"
        kind = getattr(fastdiff, name, fastdiff.Pipeline)  # older commits have only Pipeline
        pipe = kind(random_model(run.model, dtype), scheduler(run), **companion)
    else:
        pipe = fastdiff.Pipeline.from_pretrained(run.model, device=DEVICE, dtype=dtype, scheduler=run.scheduler)
    options = {"num_inference_steps": STEPS, "num_images": PICTURES, "output_type": "pt"} | run.options
    for step in pipe.stream(**options | noise_source(run)):
        yield from (step.x_t, step.x0)
    last = step.trajectories if step.images is None else (step.images,)
    again = pipe(**options | noise_source(run), return_dict=False) if ON_GPU else ()
    yield from (tensor for tensor in (*last, *again) if tensor is not None)


def text(run: Run, dtype: str) -> Iterator[Tensor]:
    """Yield an encoder's prompt embeddings, then the states of every step and the pictures that they guide."""
    if not hasattr(fastdiff, "TextToImagePipeline"):
        raise UnknownError("no TextToImagePipeline")
    tokens = torch.randint(0, 99, (4, 12), generator=torch.Generator().manual_seed(0))
    texts = random_model("clip", dtype).prompt_embeds(tokens.to(DEVICE))
    yield texts
    pipe = fastdiff.TextToImagePipeline(random_model(run.model, dtype), scheduler(run), random_model("vae", dtype))
    given = {"prompt_embeds": texts[:2], "negative_prompt_embeds": texts[2:]}
    if run.model == "sdxl":
        given |= {"pooled_prompt_embeds": texts[:2, 0, :32], "negative_pooled_prompt_embeds": texts[2:, 0, :32]}
    options = {"num_inference_steps": STEPS, "guidance_scale": 5.0, "output_type": "pt"} | run.options
    options["num_images_per_prompt"] = PICTURES // 2
    for step in pipe.stream(**given, **options):
        yield from (step.x_t, step.x0)
    yield from (step.images, *(pipe(**given, **options, return_dict=False) if ON_GPU else ()))


def loop(run: Run, dtype: str) -> Iterator[Tensor]:
    """Yield predictions and states of a hand-written loop as in diffusers, over tensors in the model's dtype."""
    model, steps = random_model(run.model, dtype), scheduler(run)
    generator = torch.Generator().manual_seed(0)
    shape = PICTURES, model.config.in_channels, model.config.sample_size, model.config.sample_size
    x_t = torch.randn(shape, generator=generator).to(DEVICE, model.dtype)
    labels = (torch.arange(PICTURES, device=DEVICE),) if run.model in DITS else ()
    steps.set_timesteps(STEPS)
    for t in steps.timesteps:
        output = model(x_t, t, *labels).sample
        x_t, x0 = steps.step(output, t, x_t, generator=generator, return_dict=False, **run.options)
        yield from (output, x_t, x0)


def command(run: Run, dtype: str) -> Iterator[Tensor]:
    """Yield the pixels of the PNG files that `fastdiff sample` writes."""
    with tempfile.TemporaryDirectory() as folder:
        flags = run.options | {"model": run.model, "dtype": dtype, "device": DEVICE, "out": folder}
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        done = subprocess.run([sys.executable, "-m", "fastdiff", "sample", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        for path in sorted(Path(folder).glob("*.png")):
            yield torch.from_numpy(np.array(Image.open(path)))


WAYS = {"pipeline": pipeline, "text": text, "loop": loop, "command": command}
SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "pndm": "PNDMScheduler",
}


def scheduler(run: Run):
    return getattr(fastdiff, SCHEDULERS[run.scheduler])(**run.config)


def noise_source(run: Run) -> dict[str, torch.Generator]:
    """Return a new generator if the run has a seed for one."""
    return {"generator": torch.Generator().manual_seed(run.options["generator"])} if "generator" in run.options else {}


def random_model(name: str, dtype: str) -> nn.Module:
    """Build a model without zero parameters and norm weights of 1. A parameter's values depend only on its name.

    Raises UnknownError if this side's fastdiff does not have the model.
    """
    class_name = next(class_name for class_name, configs in MODELS.items() if name in configs)
    if not hasattr(fastdiff, class_name):
        raise UnknownError(f"no {class_name}")
    model = getattr(fastdiff, class_name).from_config(MODELS[class_name][name])
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(path.encode())))
            if parameter.ndim > 1:  # keeps the scale, so the scheduler clips little and 16 bits suffice
                parameter.copy_(values * (parameter.shape[0] / parameter.numel()) ** 0.5)
            else:
                parameter.copy_(0.1 * values + path.endswith("weight"))
    return model.to(DEVICE, getattr(torch, dtype))


if __name__ == "__main__":
    sys.exit(main())
