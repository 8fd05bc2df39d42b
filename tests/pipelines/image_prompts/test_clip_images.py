"""CLIPImageProcessor, compared with transformers' class for PIL."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from fastdiff import InputError
from fastdiff.pipelines.clip_images import CLIPImageProcessor


def picture(width, height, mode="RGB"):
    levels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(levels).resize((width, height)).convert(mode)


@pytest.mark.parametrize(
    ("size", "width", "height"),
    [(224, 224, 224), (224, 300, 301), (224, 97, 40), (224, 31, 500), (224, 224, 225), (30, 301, 64), (336, 512, 512)],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK"])
def test_numbers_are_those_of_transformers(size, width, height, mode):
    image = picture(width, height, mode)
    theirs = CLIPImageProcessorPil(size=size, crop_size=size)(image, return_tensors="pt").pixel_values
    ours = CLIPImageProcessor(size)(image)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)


def test_pictures_of_several_sizes_and_bytes():
    images = [picture(60, 30), picture(31, 95)]
    processor = CLIPImageProcessor(24)
    together = processor([images[0], np.asarray(images[1])])
    assert together.shape == (2, 3, 24, 24)
    assert all(torch.equal(each, processor(image)[0]) for each, image in zip(together, images, strict=True))


WRONG = {
    "nothing": None,
    "path": "cat.png",
    "none": [],
    "a-number": [picture(8, 8), 1],
    "floats": np.zeros((8, 8, 3)),
    "empty": np.zeros((0, 8, 3), np.uint8),
}


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
def test_anything_else_is_one_line(given):
    with pytest.raises(InputError, match=r"^ip_adapter_image: ") as error:
        CLIPImageProcessor()(given, "ip_adapter_image")
    assert "\n" not in str(error.value)
