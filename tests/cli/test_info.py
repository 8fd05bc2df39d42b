"""`fastdiff info`: the settings in a PNG."""

import json

from PIL import Image

from fastdiff.requests import png


def test_info_prints_the_settings(fastdiff, tmp_path, refused):
    record = {
        "num_inference_steps": 2, "scheduler": "ddim", "guidance_scale": 2.0, "eta": 0.0, "model": "emoji64",
        "seed": 7, "label": "a\x1b[31m b", "width": 1, "height": 1, "versions": {"fastdiff": "0.1.0"},
    }  # fmt: skip
    (tmp_path / "x.png").write_bytes(png.encode(Image.new("L", (1, 1)), record))
    done = fastdiff("info", "x.png")
    assert done.returncode == 0 and "\x1b" not in done.stdout, "a file must not control the terminal"
    assert done.stdout.startswith("a\\x1b[31m b\nSteps: 2, Sampler: DDIM, CFG scale: 2.0, Seed: 7,")
    assert "\nlabel: a\\x1b[31m b\n" in done.stdout and "\nseed: 7\n" in done.stdout
    texts = json.loads(fastdiff("info", "--json", "x.png").stdout)
    assert texts["fastdiff"] == record | {"schema": 1, "numerics": png.NUMERICS}
    assert texts["parameters"].startswith("a\x1b[31m b\nSteps: 2")
    Image.new("L", (1, 1)).save(tmp_path / "bare.png")
    refused(fastdiff("info", "bare.png"), r"bare\.png holds no settings; give a PNG")
