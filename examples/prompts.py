"""Draw pictures of prompts: several seeds, a negative prompt, another sampler."""

import argparse
from pathlib import Path

import fastdiff


def main(out: str = ".", steps: int = 10) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    pipe = fastdiff.Pipeline.from_pretrained("emoji-sd", device="cpu")

    prompts = ["green dog", "rocket, flat emoji"]
    images = pipe(prompts, num_images_per_prompt=2, seed=7, num_inference_steps=steps).images
    for i, image in enumerate(images):
        path = folder / f"prompt-{i}.png"
        image.save(path)
        print(f"{prompts[i // 2]}, seed {7 + i % 2}: {path}")

    # the same words without what is in the negative prompt, with more guidance
    image = pipe("cat face", negative_prompt="flat emoji", guidance_scale=6.0, num_inference_steps=steps).images[0]
    image.save(folder / "cat-face.png")

    # a sampler of another name needs a pipeline of its own
    pipe = fastdiff.Pipeline.from_pretrained("emoji-sd", scheduler="euler-a", device="cpu")
    pipe("cat face", num_inference_steps=steps).images[0].save(folder / "cat-face-euler-a.png")
    print(f"two more in {folder}, the second by {pipe.scheduler_name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=10)
    main(**vars(parser.parse_args()))
