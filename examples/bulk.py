"""Draw many pictures into a folder by worker processes, and go on where a run was ended."""

import argparse
import json
from pathlib import Path

import fastdiff


def main(out: str = "many", num_images: int = 2, steps: int = 4) -> None:
    options = {
        "label": ["noto birds", "twemoji flags"],
        "num_images": num_images,
        "num_inference_steps": steps,
        "shard_size": 2,  # pictures that a worker claims and commits together
        "workers": 2,
        "device": "cpu",
        "progress": False,
    }
    made = fastdiff.draw_many("emoji64", out, **options)
    print(f"{made.pictures} pictures in {made.folder}, {len(made.given_up)} shards given up")
    for path in sorted(Path(out, "shards").glob("*.json")):
        print(path.name, json.dumps(json.loads(path.read_text()))[:90], "...")

    again = fastdiff.draw_many("emoji64", out, **options)  # the same call: everything is there
    print(f"again: {again.pictures} pictures")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="many", help="folder of the pictures")
    parser.add_argument("--num-images", type=int, default=2, help="pictures of each label")
    parser.add_argument("--steps", type=int, default=4)
    main(**vars(parser.parse_args()))
