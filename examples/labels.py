"""Draw pictures of labels, and watch a run step by step."""

import argparse
from pathlib import Path

import fastdiff


def main(out: str = ".", steps: int = 10) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    pipe = fastdiff.Pipeline.from_pretrained("emoji64", device="cpu")

    # two labels x two seeds; "noto animals" is a group, whose labels take turns from seed to seed
    labels = ["noto animals", "twemoji flags"]
    images = pipe(class_labels=labels, num_images=2, seed=7, num_inference_steps=steps).images
    for i, image in enumerate(images):
        path = folder / f"label-{i}.png"
        image.save(path)
        print(f"{labels[i // 2]}, seed {7 + i % 2}: {path}")

    # the same seed alone has the same bits as in the batch
    alone = pipe(class_labels="twemoji flags", seed=8, num_inference_steps=steps).images[0]
    print("the last picture alone is equal:", alone.tobytes() == images[-1].tobytes())

    for step in pipe.stream(class_labels="noto birds", num_inference_steps=steps):
        step.preview()[0].save(folder / "preview.png")  # leave the loop to cancel the run
        print(f"step {step.index + 1} of {step.num_steps}")
    step.images[0].save(folder / "noto-birds.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=10)
    main(**vars(parser.parse_args()))
