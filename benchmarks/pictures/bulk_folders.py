"""The models of `bench_bulk.py`: their folders and their tasks.

python benchmarks/pictures/bulk_folders.py {ddpm32,sd15,sdxl} FOLDER        saves one with random weights
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness.reports import environment

PROMPT = "a photograph of an astronaut riding a horse"


@dataclass(frozen=True)
class Task:
    """The pictures to draw with one model."""

    pictures: int  # per GPU, by fastdiff: about 20 s on an H200; whole batches, since another size compiles again
    batch: int
    steps: int
    guidance: float = 1.0
    labels: int = 0  # a class-conditional model's labels; the null label follows them
    prompt: str | None = None


TASKS = {
    "ddpm32": Task(12_288, 512, 50),
    "emoji64": Task(3_876, 204, 50, guidance=4.0, labels=216),
    "sd15": Task(96, 8, 50, guidance=7.5, prompt=PROMPT),
    "sdxl": Task(24, 4, 30, guidance=5.0, prompt=PROMPT),
}


def folder_of(name: str, root: Path) -> Path:
    """Return a model's folder; save the model to `root` unless it is bundled."""
    if name == "emoji64":
        from fastdiff.checkpoints import hub

        return hub.bundled_models()[name]
    subprocess.run([sys.executable, __file__, name, root], env=environment(), check=True)  # frees its GPU memory
    return root


def save(name: str, folder: Path) -> None:
    """Save a model with random weights."""
    if name != "ddpm32":
        from benchmarks.pictures.text_folders import save_folder

        save_folder(name, folder, lambda pipe, latents: latents)
        return
    import diffusers

    from fastdiff.tuning.models import DDPM32

    torch.manual_seed(0)
    pipe = diffusers.DDIMPipeline(unet=diffusers.UNet2DModel(**DDPM32), scheduler=diffusers.DDIMScheduler())
    pipe.save_pretrained(folder)


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
