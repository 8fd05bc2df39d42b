"""Named cases of command lines, arguments of the library, and PNGs."""

from tests.fuzz.cases import Case
from tests.fuzz.named.making import DONE, REFUSED, Named, call, everywhere, flags

COMMAND: Named = {
    "labels of one file name": (
        [
            Case(
                "attention",
                (
                    ("option", "fastdiff.json", "labels", '["c", "c++", "😀"]'),
                    ("option", "fastdiff.json", "label_groups", "{}"),
                ),
                "command",
                "sample",
                (("--label", "c"), ("--label", "c++"), ("--label", "😀")),
            )
        ],
        DONE,
    ),
    "a group and its member": flags(("--label", "pets"), ("--label", "cat"), ends=DONE),
    "a long label": flags(("--label", "long")),
    "a folder of 300 letters": flags(("--out", "300 letters")),
    "a PNG of 300 letters": ([Case("attention", (("settings", "model", "long text"),), "command", "info")], DONE),
    **{
        f"{flag} of half a surrogate pair": flags((flag, "half a surrogate pair"))
        for flag in ("--out", "--grid", "--prompt-file", "--label")
    },
    **{
        f"{flag} of bytes": flags((flag, "surrogate"), ends=ends)
        for flag, ends in (("--out", DONE), ("--grid", REFUSED))
    },
    "a seed of 5,000 digits": flags(("--seed", "5,000 digits")),
    "a wide range of seeds": flags(("--seed", "a wide range")),
    "a count of 5,000 digits": flags(("--num-images", "5,000 digits")),
    "--seed=--": flags(("--seed", "--")),
}
LIBRARY: Named = {
    f"{name}={value}": call("library", "pipeline", **{name: value})
    for name, value in {
        "class_labels": "1.9",
        "height": "0",
        "latents": "complex",
        "guidance_scale": "-5",
        "seed": "10^5000",
        "num_images": "10^400",
        "eta": "nan",
        "batch_size": "10^9",
        "num_inference_steps": "10^400",
        "generator": "x",
    }.items()
} | {
    "latents of another height": call("library", "pipeline", latents="other size", height="8"),
    "output_type=None": call("library", "pipeline", DONE, output_type="None"),
    "dtype=torch.int8": call("library", "load", dtype="torch.int8"),
    "dtype=torch.int8 of a model": call("library", "load model", dtype="torch.int8"),
    "variant=path": call("library", "load", variant="path"),
    "revision=10^5000": call("library", "load", revision="10^5000"),
    "subfolder=NUL": call("library", "load model", subfolder="NUL"),
    "timestep=None": call("library", "model", timestep="None"),
    "weights whose sums overflow": everywhere(
        "attention",
        ("tensor", "unet/diffusion_pytorch_model.safetensors", "large", "525"),
        ends=DONE,
        doors=(("library", "model"),),
    ),
    "num_images=10^5000 of the page": call("page", "generate", num_images="10^5000"),
    "scheduler=tensor of the page": call("page", "generate", scheduler="tensor"),
}
PNG: Named = {
    f"a PNG {how}": (
        [Case("attention", (("chunk", how),), *door) for door in (("command", "info"), ("page", "upload"))],
        DONE if how == "whole" else REFUSED,
    )
    for how in ("whole", "checksum", "length", "no UTF-8", "bomb", "long")
}
NAMED: Named = COMMAND | LIBRARY | PNG
