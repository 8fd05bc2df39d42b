"""PIL images of every mode become pictures, and broken ones are errors of one line."""

import io

import numpy as np
import pytest
from PIL import Image

from fastdiff import InputError
from fastdiff.pipelines.masks import binary, read_masks
from fastdiff.pipelines.pil_images import as_rgb, upright
from tests.parity.image_starts.pictures import picture

ORIENTATION = 274  # the EXIF tag


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(content):
    return Image.open(io.BytesIO(content))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_modes(mode):
    found = as_rgb(picture().convert(mode))
    assert found.mode == "RGB" and found.size == (20, 16)
    levels = np.asarray(found, dtype=int) - np.asarray(picture().convert(mode).convert("RGB"), dtype=int)
    assert not levels.any()


def test_16_bits_become_8():
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    for image in (
        Image.fromarray(levels),
        Image.fromarray(levels.astype(np.int32)),
        opened(saved(Image.fromarray(levels), "PNG")),
    ):
        assert np.array_equal(np.asarray(as_rgb(image))[..., 0], np.arange(256).reshape(16, 16))
        assert np.array_equal(np.asarray(upright(image, "mask_image")), np.arange(256).reshape(16, 16))


def test_exif_turns_a_picture_upright():
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # the camera lay on its side
    turned = as_rgb(opened(saved(picture(), "PNG", exif=exif)))
    assert turned.size == (16, 20)
    assert np.array_equal(np.asarray(turned), np.asarray(picture().rotate(-90, expand=True)))


def test_an_animation_is_its_current_picture():
    file = saved(picture(0), "GIF", save_all=True, append_images=[picture(1)])
    second = opened(file)
    second.seek(1)
    assert not np.array_equal(np.asarray(as_rgb(opened(file))), np.asarray(as_rgb(second)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_truncated_files_are_one_line(kind, share):
    content = saved(picture(width=200, height=160), kind)
    try:
        broken = opened(content[: int(share * len(content))])
    except OSError:
        return  # PIL itself notices
    with pytest.raises(InputError, match=r"^image: its data cannot be read \(.*\); save it again$") as error:
        as_rgb(broken)
    assert "\n" not in str(error.value)


def test_a_closed_file_is_one_line():
    image = opened(saved(picture(), "PNG"))
    image.fp.close()
    with pytest.raises(InputError, match=r"^mask_image: its data cannot be read"):
        upright(image, "mask_image")


def test_a_bomb_is_refused_before_it_is_read():
    image = opened(saved(Image.new("1", (20_000, 3)), "PNG"))
    with pytest.raises(InputError, match=r"^image: it is 3 x 20000, and each side must be at most 16384; make it smal"):
        as_rgb(image)


def test_masks_of_any_mode_are_read_without_a_warning(recwarn):
    levels = np.repeat(np.array([0, 255], np.uint8), 8)[None].repeat(16, 0)
    image = Image.fromarray(levels)
    palette = saved(image.convert("RGB").quantize(2), "PNG", transparency=bytes([0, 128]))
    lab = Image.merge("LAB", (image, *[Image.new("L", image.size, 128)] * 2))
    for mask in (image, opened(palette), opened(saved(lab, "TIFF")), image.convert("CMYK")):
        for blur in (0.0, 0.1):
            found = binary(read_masks(mask, blur), (16, 16))
            assert np.array_equal(found[0, 0].numpy(), levels / 255), (mask.mode, blur)
    assert not recwarn


def test_a_palette_with_alphas_is_read_without_a_warning(recwarn, tmp_path):
    levels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    image = Image.fromarray(levels).quantize(7)
    image.save(tmp_path / "a.png", transparency=bytes(range(7)))
    wanted = np.asarray(image.convert("RGB"))
    with Image.open(tmp_path / "a.png") as opened:
        assert np.array_equal(np.asarray(as_rgb(opened)), wanted)
    assert not recwarn
