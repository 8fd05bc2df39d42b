"""ControlNets: SDXL with one, Stable Diffusion 1.5 with two; fastdiff beside diffusers, eager and under torch.compile.

    python benchmarks/pictures_in/bench_control.py [WORKLOAD ...] [--save [DIR]] [--budget SECONDS] [--dtype DTYPE]

The workloads run as in `bench_pictures_in.py`, and a row has the same results. There is one more way, `accelerate`:
diffusers' pipeline after `fastdiff.accelerate`. `compile` compiles the U-Net and the ControlNets.

`--tiny` tries the benchmark on tiny models and few steps, on any machine.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.pictures_in import control_pipelines
from benchmarks.pictures_in.bench_pictures_in import Workload, measure, photographs

SCALES = [0.8, 0.6]  # of two ControlNets


def main() -> None:
    measure("control", WORKLOADS, control_pipelines.WAYS)


def one(pipe: Any, size: int, given: Mapping[str, Any]) -> Any:
    return pipe(**given, image=photographs(size)[0]).images


def two(pipe: Any, size: int, given: Mapping[str, Any]) -> Any:
    return pipe(**given, image=photographs(size)[:2], controlnet_conditioning_scale=SCALES).images


WORKLOADS = {
    "sdxl-one-controlnet": Workload("sdxl-control", 30, one, one, lambda steps: steps, 60, 150),
    "sd15-two-controlnets": Workload("sd15-two-controls", 30, two, two, lambda steps: steps, 35, 80),
}

if __name__ == "__main__":
    main()
