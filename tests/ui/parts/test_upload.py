"""Settings from an uploaded PNG. Hostile files are refused with a message that names the file, not its path."""

import json
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.ui.drawing import Drawn, draw, prepare
from fastdiff.ui.inputs.uploaded import uploaded_path
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.parts.upload import build_upload, read_record
from tests.requests.foreign_pictures import exif_picture, png_picture

LIMITS = Limits()
SIGNATURE = b"\x89PNG\r\n\x1a\n"
RECORD = {
    "schema": png.SCHEMA,
    "numerics": png.NUMERICS,
    "model": "emoji64",
    "label": "noto animals",
    "seed": 7,
    "num_inference_steps": 2,
    "scheduler": "ddim",
    "eta": 0.25,
    "guidance_scale": 3.0,
    "width": 64,
    "height": 72,
}


def chunk(kind: bytes, data: bytes, length: int | None = None, checksum: int | None = None) -> bytes:
    length = len(data) if length is None else length
    checksum = zlib.crc32(kind + data) if checksum is None else checksum
    return struct.pack(">I", length) + kind + data + struct.pack(">I", checksum)


def header(width: int = 1, height: int = 1) -> bytes:
    return SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))


def text(record, kind: bytes = b"iTXt") -> bytes:
    content = record if isinstance(record, bytes) else json.dumps(record).encode()
    return chunk(kind, b"fastdiff\0\0\0\0\0" + content)


END = chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")


@pytest.fixture
def upload(tmp_path):
    def write(data: bytes, name: str = "picture.png") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


def test_a_picture_of_ours_comes_back(shared, tmp_path):
    options = UncheckedRequest(label="noto birds", seed=9, steps=2, guidance_scale=1.5, eta=0.5, width=72)
    *_, (_, [drawn]) = draw(prepare(options, shared, LIMITS), shared, tmp_path)
    record = read_record(drawn.path, LIMITS)
    assert {key: drawn.record[key] for key in record} == record
    again = {"label": record["label"], "seed": record["seed"], "steps": record["num_inference_steps"]}
    again |= {key: record[key] for key in ("model", "scheduler", "eta", "guidance_scale", "width", "height")}
    run = prepare(UncheckedRequest(**again), shared, LIMITS)
    assert run.request == prepare(options, shared, LIMITS).request


def test_a_grid_gives_its_first_picture(upload):
    grid = RECORD | {"seed": [3, 4], "label": ["noto animals", "noto food"], "width": 300}
    record = read_record(upload(header() + text(grid) + END), LIMITS)
    assert (record["seed"], record["label"], record["grid_of"]) == (3, "noto animals", 4)
    assert "width" not in record


def test_a_grid_of_a_run_gives_all_its_pictures(upload):
    grid = RECORD | {"seed": [3, 4, 5], "label": ["noto animals"], "picture_width": 64, "picture_height": 64}
    record = read_record(upload(header() + text(grid) + END), LIMITS)
    assert (record["seed"], record["label"], record["num_images"]) == (3, "noto animals", 3)
    record = read_record(upload(header() + text(grid | {"seed": list(range(33))}) + END), LIMITS)
    assert "num_images" not in record and record["grid_of"] == 33


def test_a_grid_is_as_large_as_it_likes_and_its_pictures_are_not(upload):
    grid = RECORD | {"seed": [3], "label": ["noto animals", "noto food"], "width": 3000, "height": 100}
    grid |= {"picture_width": 72, "picture_height": 64}
    record = read_record(upload(header() + text(grid) + END), LIMITS)
    assert (record["width"], record["height"], record["grid_of"]) == (72, 64, 2)
    with pytest.raises(InputError, match="an invalid size"):
        read_record(upload(header() + text(grid | {"picture_width": 1032}) + END), LIMITS)


def test_a_picture_of_a_prompt_comes_back(shared, tmp_path):
    options = UncheckedRequest(
        model="./text/sd1", prompt="the cat", negative_prompt="ocean", clip_skip=1, seed=9, steps=2
    )
    *_, (_, [drawn]) = draw(prepare(options, shared, LIMITS), shared, tmp_path)
    record = read_record(drawn.path, LIMITS)
    assert {key: drawn.record[key] for key in record} == record
    again = prepare(UncheckedRequest.from_record(record), shared, LIMITS)
    assert again.request == prepare(options, shared, LIMITS).request


def test_a_grid_of_prompts_gives_its_first_picture(upload):
    grid = RECORD | {"seed": [3, 4], "label": [None], "prompt": ["a cat", "a dog"], "width": 300}
    del grid["label"]
    record = read_record(upload(header() + text(grid) + END), LIMITS)
    assert (record["seed"], record["label"], record["prompt"]) == (3, None, "a cat")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "is not a PNG", id="empty"),
        pytest.param(b"GIF89a", "is not a PNG", id="GIF"),
        pytest.param(b"<svg onload='alert(1)'/>", "is not a PNG", id="SVG"),
        pytest.param(b"SIMPLE  =                    T", "is not a PNG", id="FITS"),
        pytest.param(b"8BPS\0\1", "is not a PNG", id="PSD"),
        pytest.param(SIGNATURE, "is not a PNG", id="signature alone"),
        pytest.param(header(10_000, 10_000) + END, "10000x10000 pixels", id="bomb of 100 Mpx"),
        pytest.param(header(2**31 - 1, 2**31 - 1) + END, "pixels", id="bomb of 2^62 px"),
        pytest.param(header() + END, "holds no fastdiff settings", id="no settings"),
        pytest.param(header() + END + text(RECORD), "holds no fastdiff settings", id="settings behind the end"),
        pytest.param(header() + text(RECORD)[:-20], "truncated", id="truncated"),
        pytest.param(header() + chunk(b"iTXt", b"x", length=2**31), "truncated", id="chunk length 2^31"),
        pytest.param(header() + chunk(b"iTXt", b"fastdiff\0", checksum=0) + END, "wrong checksum", id="bad CRC"),
        pytest.param(header() + text(b" " * (50 * 2**20)) + END, "over the limit", id="iTXt of 50 MB"),
        pytest.param(
            header() + chunk(b"zTXt", b"fastdiff\0\0" + zlib.compress(b" " * (50 * 2**20))) + END,
            "more than 1048576 bytes",
            id="zTXt that unfolds to 50 MB",
        ),
        pytest.param(header() + text(b"{") + END, "damaged", id="broken JSON"),
        pytest.param(header() + text(b"[" * 100_000) + END, "damaged", id="deep nesting"),
        pytest.param(header() + text(b'{"schema":1,"seed":' + b"9" * 5000 + b"}") + END, "damaged", id="huge number"),
        pytest.param(header() + text(b'{"schema":1,"eta":NaN}') + END, "damaged", id="NaN"),
        pytest.param(header() + text(RECORD | {"schema": 2}) + END, "unknown format", id="a newer schema"),
        pytest.param(header() + text(RECORD | {"seed": "__import__('os')"}) + END, "cannot be used: seed", id="code"),
        pytest.param(header() + text(RECORD | {"seed": -1}) + END, "cannot be used: seed", id="seed -1"),
        pytest.param(header() + text(RECORD | {"model": ["x"]}) + END, "cannot be used: model", id="list as model"),
        pytest.param(header() + text(RECORD | {"label": {}}) + END, "cannot be used: label", id="object as label"),
        pytest.param(header() + text(RECORD | {"prompt": "x" * 10_001}) + END, "cannot be used: prompt", id="prompt"),
        pytest.param(header() + text(RECORD | {"width": "64"}) + END, "cannot be used: width", id="width as text"),
        pytest.param(header() + text(RECORD | {"height": 10**9}) + END, "cannot be used: height", id="height of 10^9"),
    ],
)
def test_refused_files(upload, data, message):
    path = upload(data)
    with pytest.raises(InputError, match=message) as refusal:
        read_record(path, LIMITS)
    assert "picture.png" in str(refusal.value)
    assert str(path.parent) not in str(refusal.value)


def test_an_animated_png_of_ours_is_read(upload):
    data = header() + chunk(b"acTL", struct.pack(">II", 2, 0)) + text(RECORD) + END
    assert read_record(upload(data), LIMITS)["seed"] == 7


def test_pictures_themselves_are_not_decoded(upload, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *args, **kw: pytest.fail("pixels were decoded"))
    assert read_record(upload(header() + text(RECORD) + END), LIMITS)["eta"] == 0.25


def test_only_uploaded_files_are_read(upload_folder):
    path = upload_folder / "0123" / "a.png"
    path.parent.mkdir()
    path.write_bytes(SIGNATURE)
    assert uploaded_path({"path": str(path)}) == path
    (path.parent / "link.png").symlink_to("/etc/passwd")
    refused = [
        {"path": "/etc/passwd"},
        {"path": str(upload_folder / "0123" / ".." / "0123" / "a.png")},
        {"path": str(path.parent / "link.png")},
        {"path": str(path.parent / "gone.png")},
        {"path": str(path.parent)},
        {"path": "http://127.0.0.1/a.png"},
        {"path": "a\0.png"},
        {"path": 7},
        {},
        [],
        None,
    ]
    for payload in refused:
        with pytest.raises(InputError, match="upload: "):
            uploaded_path(payload)


def test_a_session_picture_is_no_upload(upload_folder):
    picture = upload_folder / "pictures" / "token" / "run" / "a.png"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(SIGNATURE)
    with pytest.raises(InputError, match="was not uploaded"):
        uploaded_path({"path": str(picture)})


def test_the_upload_takes_pictures_only():
    assert build_upload().file_types == [".png", ".jpg", ".jpeg", ".webp"]


def test_png_reader_and_header_check_agree_on_ours(upload, shared):
    image = Image.new("RGB", (8, 16))
    record = RECORD | {"versions": {"fastdiff": "0"}}
    path = upload(png.encode(image, record))
    assert read_record(path, LIMITS)["height"] == 72


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({}, "Loaded the settings of mine.png<", id="all of it"),
        pytest.param({"use_clipped_model_output": False}, "not restored: use_clipped_model_output", id="no field"),
        pytest.param(
            {"seed": [3, 5], "label": ["noto birds"]},
            "Loaded the settings of the first of 2 pictures in mine.png<",
            id="grid",
        ),
        pytest.param({"seed": [3, 4], "label": ["noto birds"]}, "Loaded the settings of mine.png<", id="grid of a run"),
        pytest.param({"axes": {"x": {"name": "eta", "values": [1]}}}, "mine.png: axis x: name: 'eta'", id="axes"),
        pytest.param({"model": "./gone"}, "Model './gone' is unknown", id="model"),
        pytest.param({"model": "<img src=x>"}, "Model '&lt;img src=x&gt;' is unknown", id="markup"),
        pytest.param({"label": "noto cars"}, "Label 'noto cars' is not a label", id="label"),
        pytest.param({"label": 216}, "Label 216 is not available in this form", id="null label"),
        pytest.param({"label": None}, "Label None is not available in this form", id="no label"),
        pytest.param(
            {"model": "./text/sd1", "label": None, "prompt": "a", "negative_prompt": "", "scheduler": "ddim"},
            "not restored: use_clipped_model_output and negative_prompt<",
            id="an empty negative prompt",
        ),
        pytest.param({"height": 70}, "Height 70, width 64: both must be", id="size"),
        pytest.param({"num_inference_steps": 2000}, "Steps: 2000 is not a whole number from 1 to 1000", id="steps"),
        pytest.param({"seed": 2**32}, "mine.png holds settings that cannot be used: seed", id="seed"),
    ],
)
def test_what_the_page_says_of_a_restored_picture(visit, change, message):
    page = visit()
    data = header() + text(RECORD | {"use_clipped_model_output": True} | change) + END
    (path,) = page.http.post("/gradio_api/upload", files={"files": ("mine.png", data)}).json()
    file = {"path": path, "meta": {"_type": "gradio.FileData"}}
    result = page.restore(file)
    assert result["success"]
    assert message in "".join(map(str, result["output"]["data"]))


@pytest.mark.parametrize("theirs", [None, 1, png.NUMERICS + 1])
def test_a_picture_of_other_numerics_is_restored_with_a_notice(visit, theirs):
    record = RECORD | {"numerics": theirs}
    if theirs is None:  # fastdiff before it wrote the number
        del record["numerics"]
    said = restored(visit(), header() + text(record) + END, "mine.png")
    known = (
        f"mine.png was drawn with numerics {theirs or 1}, and this fastdiff has numerics {png.NUMERICS}; the picture"
    )
    assert f"Loaded the settings of mine.png; {known} may differ in its last bits<" in said


def test_a_picture_of_the_same_numerics_is_restored_without_a_notice(visit):
    said = restored(visit(), header() + text(RECORD) + END, "mine.png")
    assert "Loaded the settings of mine.png<" in said and "numerics" not in said


def restored(page, data: bytes, name: str = "theirs.png") -> str:
    """Drop a file onto the page, and return all new values as a text."""
    (path,) = page.http.post("/gradio_api/upload", files={"files": (name, data)}).json()
    result = page.restore({"path": path, "meta": {"_type": "gradio.FileData"}})
    assert result["success"]
    return "".join(map(str, result["output"]["data"]))


SETTINGS = "Steps: 7, Sampler: {}, CFG scale: 2.5, Seed: 99, Size: {}, Denoising strength: 0.4"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        pytest.param(
            f"the cat\nNegative prompt: blurry\n{SETTINGS.format('Euler a', '64x72')}",
            "Loaded from theirs.png (made by AUTOMATIC1111): Prompt, Negative prompt, Steps, Guidance, Seed, Width, "
            "Height, Scheduler; chose ./text/sd1, because emoji64 reads no prompts; "
            "not supported by ./text/sd1: Denoising strength<",
            id="a prompt",
        ),
        pytest.param(
            f"noto birds\n{SETTINGS.format('DPM adaptive', '63x64')}",
            "Loaded from theirs.png (made by AUTOMATIC1111): Prompt, Steps, Guidance, Seed, Height; "
            "not supported by emoji64: Width, Scheduler, Denoising strength<",
            id="a label, an unknown sampler and an odd size",
        ),
        pytest.param(
            f"the (cat:1.2) <lora:ink:0.8>\n{SETTINGS.format('Euler a', '64x72')}, Hires upscale: 1.5, "
            "Hires upscaler: 4x-UltraSharp",
            "Prompt, Steps, Guidance, Seed, Width, Height, Upscale, Upscale strength, Upscale mode, Prompt syntax, "
            "Scheduler; chose ./text/sd1, because emoji64 reads no prompts; not supported by ./text/sd1: "
            "Hires upscaler, Hires steps; not here: the LoRA ink<",
            id="hires fix and a LoRA",
        ),
        pytest.param("a cat", "theirs.png holds no settings that fastdiff knows; drop the file that", id="no settings"),
    ],
)
def test_a_png_of_another_tool_fills_what_it_can_and_says_what_it_could_not(visit, parameters, message):
    assert message in restored(visit(), png_picture({"parameters": parameters}))


@pytest.mark.parametrize("form", ["JPEG", "WEBP"])
def test_a_photo_of_another_tool_chooses_a_model_that_reads_text(visit, form):
    said = restored(visit(), exif_picture(f"the dog\n{SETTINGS.format('Heun', '64x64')}", form), f"a.{form.lower()}")
    assert "because emoji64 reads no prompts" in said and "'the dog'" in said


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(exif_picture("a cat", "JPEG"), "theirs.png holds no settings that", id="no settings"),
        pytest.param(b"\xff\xd8\xff\xe0JFIF", "theirs.png is damaged, or its settings are; save", id="damaged"),
        pytest.param(b"GIF89a", "theirs.png is not a PNG, JPEG or WebP file; drop a PNG, JPEG or WebP", id="GIF"),
        pytest.param(
            header(10_000, 10_000) + END, "theirs.png is too large (10000x10000 pixels); drop", id="too large"
        ),
    ],
)
def test_a_file_without_settings_is_refused(visit, data, message):
    said = restored(visit(), data)
    assert message in said and "/tmp" not in said


@pytest.mark.parametrize("button", ["DrawTab.use", "CompareTab.send"])
@pytest.mark.parametrize("theirs", [png.NUMERICS, png.NUMERICS + 1])
def test_the_settings_of_a_picture_of_the_page_come_with_the_same_notice(tmp_path, unserved_page, button, theirs):
    path = tmp_path / "mine.png"
    path.write_bytes(header() + text(RECORD | {"numerics": theirs}) + END)
    page = unserved_page()
    page.choose(button, Drawn(path, RECORD))
    said = page.press(button)
    assert "seed 7" in said
    assert (f"mine.png was drawn with numerics {theirs}, and" in said) is (theirs != png.NUMERICS)


def test_a_picture_of_the_page_that_is_gone_is_named_without_its_folder(tmp_path, unserved_page):
    page = unserved_page()
    page.choose("DrawTab.use", Drawn(tmp_path / "mine.png", RECORD))
    said = page.press("DrawTab.use")
    assert "mine.png does not exist" in said and str(tmp_path) not in said
