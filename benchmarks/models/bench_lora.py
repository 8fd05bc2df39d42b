"""Two LoRAs of rank 32 on the U-Net of Stable Diffusion XL, against diffusers + peft, eager and under torch.compile.

    python benchmarks/models/bench_lora.py [WORKLOAD ...] [--save [DIR]]

The U-Net has random weights in bfloat16 and computes both halves of a guided picture of 1024x1024. Each LoRA changes
all projections of all attentions and feed-forward layers. `eager`, `compile` and `hotswap` are diffusers + peft. The
last two compile the transformer blocks alone, by diffusers' `compile_repeated_blocks`: torch.compile of the whole U-Net
and its recompilations take more than seven minutes. `hotswap` is diffusers' `enable_lora_hotswap`.

    plain      ms of a step without a LoRA, before and after the others are measured
    step       ms of a step with two
    first      seconds of the first step with both, which compiles
    weights    ms until new weights of both count in a finished step, less the time of that step
    replace    the same after both are replaced by two other files, which are in memory
    memory     GB of GPU memory that the two LoRAs take, with the copy of the weights that they change
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

import fastdiff
from benchmarks.harness.reports import chosen, needs_gpu, report
from benchmarks.models import stable_diffusion as sd
from fastdiff.models import classes  # noqa: F401  # the classes that `model_like` knows
from fastdiff.models.live import model_like
from fastdiff.tuning.timing import DEVICE

RANK, ROUNDS, STEPS = 32, 7, 10
torch._dynamo.config.recompile_limit = 64  # of a function; torch runs it eagerly from then on
ENDS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2")
NAMES = ("a", "b")

State = dict[str, Tensor]


def main() -> None:
    needs_gpu()
    report("lora", rows(chosen(dict.fromkeys(("fastdiff", "eager", "compile", "hotswap")))), by=("workload",))


def rows(workloads: list[str]) -> Iterator[dict[str, Any]]:
    unet = random_model(diffusers.UNet2DConditionModel, sd.SDXL)
    loras = [random_lora(unet, seed) for seed in range(4)]
    for workload in workloads:
        measure = of_fastdiff if workload == "fastdiff" else of_diffusers
        yield {"workload": workload, **measure(workload, unet, loras)}
        gc.collect()  # the memory of the next row is measured


@torch.no_grad()
def random_model(kind: Any, config: dict[str, Any]) -> Any:
    with DEVICE:  # the CPU takes long to draw the numbers of a large model
        return kind(**config).to(torch.bfloat16).eval()


def random_lora(unet: nn.Module, seed: int) -> State:
    """Return a LoRA of all projections in float16, by diffusers' names."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    state: State = {}
    for name, module in unet.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(ENDS) and ".attentions." in name:
            outputs, inputs = module.weight.shape
            down = torch.randn(RANK, inputs, device=DEVICE, generator=generator) / inputs**0.5
            up = torch.randn(outputs, RANK, device=DEVICE, generator=generator) / (10 * RANK**0.5)
            state |= {f"unet.{name}.lora_A.weight": down.half(), f"unet.{name}.lora_B.weight": up.half()}
    return state


def of_fastdiff(workload: str, unet: Any, loras: list[State]) -> dict[str, float]:
    ours = model_like(unet, "unet")
    vae = model_like(random_model(diffusers.AutoencoderKL, sd.SDXL_VAE), "vae")
    pipe = fastdiff.TextToImagePipeline(ours, diffusers.EulerDiscreteScheduler(**sd.SDXL_SCHEDULER), vae)
    prompt = {name: torch.randn(1, 77, 2048, device=DEVICE) for name in ("prompt_embeds", "negative_prompt_embeds")}
    prompt |= {f"{name}pooled_prompt_embeds": torch.randn(1, 1280, device=DEVICE) for name in ("", "negative_")}

    def run(steps: int) -> Tensor:
        return pipe(**prompt, num_inference_steps=steps, seed=1, output_type="latent").images

    def step() -> float:
        """Return the ms of a step, by two runs of different lengths."""
        short, long = seconds(lambda: run(2)), seconds(lambda: run(2 + STEPS))
        return 1e3 * (long - short) / STEPS

    for _ in range(3):
        run(2)
    plain_picture, plain = run(4), [step() for _ in range(ROUNDS)]
    before = torch.cuda.memory_allocated()
    for name, lora in zip(NAMES, loras, strict=False):
        pipe.load_lora_weights(lora, adapter_name=name)
    memory = torch.cuda.memory_allocated() - before
    graphs = [id(graph) for each in ours._graphs.values() for graph in each._graphs.values()]
    first = seconds(lambda: (pipe.set_adapters(list(NAMES), [0.7, 0.4]), run(2)))
    weights = iter(range(1, 100))
    changes = median(lambda: 1e3 * seconds(lambda: pipe.set_adapters(list(NAMES), [0.01 * next(weights), 0.5])))
    found = {"step": median(step), "first": first, "weights": changes}

    def replace() -> None:
        for name, lora in zip(NAMES, loras[2:], strict=True):
            pipe.load_lora_weights(lora, adapter_name=name, hotswap=True)

    found["replace"] = 1e3 * seconds(replace)
    assert graphs == [id(graph) for each in ours._graphs.values() for graph in each._graphs.values()]
    pipe.unload_lora_weights()
    assert torch.equal(run(4), plain_picture)
    plain += [step() for _ in range(ROUNDS)]
    return {"plain": statistics.median(plain)} | found | {"memory": memory / 1e9}


def of_diffusers(workload: str, unet: Any, loras: list[State]) -> dict[str, float]:
    x = torch.randn(2, 4, 128, 128, device=DEVICE, dtype=torch.bfloat16)
    text = torch.randn(2, 77, 2048, device=DEVICE, dtype=torch.bfloat16)
    added = {"text_embeds": torch.randn(2, 1280, device=DEVICE, dtype=torch.bfloat16)}
    added["time_ids"] = torch.tensor([[1024, 1024, 0, 0, 1024, 1024]] * 2, device=DEVICE)

    @torch.no_grad()
    def run() -> None:
        unet(x, torch.tensor(500.0, device=DEVICE), text, added_cond_kwargs=added, return_dict=False)

    def step() -> float:
        return 1e3 * seconds(lambda: [run() for _ in range(STEPS)]) / STEPS

    if workload != "eager":
        torch._dynamo.reset()
        unet.compile_repeated_blocks()
    run()
    plain = [step() for _ in range(ROUNDS)]
    if workload == "hotswap":
        unet.enable_lora_hotswap(target_rank=RANK)
    before = torch.cuda.memory_allocated()
    for name, lora in zip(NAMES, loras, strict=False):
        unet.load_lora_adapter(dict(lora), prefix="unet", adapter_name=name)
    memory = torch.cuda.memory_allocated() - before
    unet.set_adapters(list(NAMES), [0.7, 0.4])
    found = {"first": seconds(run), "step": median(step)}

    def change() -> None:
        unet.set_adapters(list(NAMES), [0.3, 0.9])
        run()

    def replace() -> None:
        if workload != "hotswap":
            unet.unload_lora()
        for name, lora in zip(NAMES, loras[2:], strict=True):
            unet.load_lora_adapter(dict(lora), prefix="unet", adapter_name=name, hotswap=workload == "hotswap")
        unet.set_adapters(list(NAMES), [0.7, 0.4])
        run()

    found["weights"] = 1e3 * seconds(change) - found["step"]
    found["replace"] = 1e3 * seconds(replace) - found["step"]
    unet.unload_lora()
    plain += [step() for _ in range(ROUNDS)]
    for module in unet.modules():
        module._compiled_call_impl = None
    return {"plain": statistics.median(plain)} | found | {"memory": memory / 1e9}


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds until the GPU has finished a call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(ROUNDS))


if __name__ == "__main__":
    main()
