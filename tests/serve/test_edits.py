"""Pictures of POST /v1/images/edits: image to image, and inpainting with OpenAI's masks."""

import base64
import io
import tempfile
from pathlib import Path

import openai
import pytest
from PIL import Image

from fastdiff import cli
from tests.serve.conftest import error_of, pictures_of, wait_until_empty

FIELDS = {"seed": 5, "num_inference_steps": 4, "size": "16x16"}


@pytest.fixture
def photo(png) -> bytes:
    image = Image.open(io.BytesIO(png("navy")))
    image.paste("orange", (4, 4, 12, 12))
    return file_of(image)


@pytest.fixture
def mask() -> bytes:
    """A mask that paints the left half anew."""
    image = Image.new("RGBA", (16, 16), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 8, 16))
    return file_of(image)


def file_of(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture
def sampled(sd1, tmp_path, monkeypatch):
    """Returns the file that `fastdiff sample` writes with pictures in the current folder."""
    (tmp_path / sd1.name).symlink_to(sd1)
    monkeypatch.chdir(tmp_path)

    def sample(files: dict[str, bytes], *flags: str) -> bytes:
        for name, data in files.items():
            Path(name).write_bytes(data)
        command = ["sample", "-m", sd1.name, "--device", "cpu", "--prompt", "a cat", "--seed", "5", "--steps", "4"]
        assert cli.main([*command, "--height", "16", "--width", "16", "-o", "out.png", "--overwrite", *flags]) == 0
        return Path("out.png").read_bytes()

    return sample


@pytest.mark.parametrize("strength", [None, 0.5])
def test_image_to_image_is_the_commands_byte_for_byte(served, photo, sampled, strength):
    own = {} if strength is None else {"strength": strength}
    flags = [] if strength is None else ["--strength", "0.5"]
    answer = served.edit({"image": ("photo.png", photo)}, **FIELDS, **own)
    assert pictures_of(answer) == [sampled({"photo.png": photo}, "--init-image", "photo.png", *flags)]
    assert answer.json()["usage"]["input_tokens_details"] == {"image_tokens": 1, "text_tokens": 2}


def test_a_mask_is_painted_anew_where_it_is_transparent(served, photo, mask, sampled):
    answer = served.edit({"image": ("photo.png", photo), "mask": ("m.png", mask)}, **FIELDS)
    white = Image.new("L", (16, 16))
    white.paste(255, (0, 0, 8, 16))
    names = ["--init-image", "photo.png", "--mask", "mask-m.png"]
    assert pictures_of(answer) == [sampled({"photo.png": photo, "mask-m.png": file_of(white)}, *names)]


def test_the_official_client_edits_and_streams(served, photo, mask):
    with openai.OpenAI(base_url=f"{served.server.address}/v1", api_key="none", max_retries=0) as client:
        asked = {"image": ("photo.png", photo), "mask": ("m.png", mask), "prompt": "a cat", "size": "16x16"}
        own = {"seed": 5, "num_inference_steps": 4}
        answer = client.images.edit(**asked, extra_body=own)
        events = [*client.images.edit(**asked, stream=True, partial_images=1, extra_body=own)]
    assert [each.type for each in events] == ["image_edit.partial_image", "image_edit.completed"]
    assert events[-1].b64_json == answer.data[0].b64_json
    for each in events:
        type(each).model_validate(each.model_dump(), strict=True)


def test_names_of_files_are_no_paths(served, photo):
    for name in ("../../etc/passwd", "/etc/passwd", "a\\b\\..", "x" * 300 + ".png", "..", ""):
        answer = served.edit({"image": (name or "a", photo)}, **FIELDS)
        recorded = answer.json()["data"][0]["settings"]["init_image"]
        assert "/" not in recorded and not recorded.startswith(".") and len(recorded) <= 80


WRONG = {
    "opaque": ({"mask": lambda png: png("black")}, {}, "mask", "no alpha channel"),
    "nothing": ({"mask": lambda png: png((0, 0, 0, 255), mode="RGBA")}, {}, "mask", "no pixel is transparent"),
    "size": ({"mask": lambda png: png((0, 0, 0, 0), (8, 16), "RGBA")}, {}, "mask", "8x16"),
    "text": ({"image": lambda png: b"hello"}, {}, "image", "not a picture"),
    "bomb": ({"image": lambda png: png("red", (17_000, 1))}, {}, "image", "16384"),
    "strength": ({}, {"strength": 2}, "strength", "from 0 to 1"),
    "none": ({}, {"strength": 0}, "strength", "none of 4 steps"),
    "unknown": ({}, {"strenght": 1}, "strenght", "did you mean strength?"),
    "fidelity": ({}, {"input_fidelity": "high"}, "input_fidelity", "not supported"),
    "number": ({}, {"n": "1e3"}, "n", "whole number"),
    "lora": ({}, {"loras": "../x"}, "loras", "not on offer"),
}


@pytest.mark.parametrize("files, fields, param, message", WRONG.values(), ids=WRONG)
def test_a_wrong_field_is_named(served, png, photo, files, fields, param, message):
    given = {"image": ("photo.png", photo)} | {name: (f"{name}.png", make(png)) for name, make in files.items()}
    error = error_of(served.edit(given, **{**FIELDS, **fields}))
    assert error["param"] == param and message in error["message"]
    assert "/tmp" not in error["message"] and "fastdiff-serve-" not in error["message"]
    wait_until_empty(served)


def test_no_file_of_a_client_stays(served, photo, mask, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = {"image": ("photo.png", photo), "mask": ("m.png", mask)}
    assert served.edit(files, **FIELDS).status_code == 200
    assert served.edit(files, **{**FIELDS, "strength": 0}).status_code == 400
    assert served.edit(files, **FIELDS, stream="true").status_code == 200
    wait_until_empty(served)
    assert [*tmp_path.iterdir()] == []


def test_forms_that_are_wrong(served, photo):
    post = served.http.post
    picture = ("photo.png", photo)
    for options, param in (
        ({"data": {"prompt": "a"}, "files": {"mask": picture}}, "image"),
        ({"files": [("image", picture), ("image[]", picture)], "data": {"prompt": "a"}}, "image"),
        ({"files": {"image": picture}}, "prompt"),
        ({"files": {"image": picture, "prompt": picture}}, "prompt"),
        ({"data": {"prompt": ["a", "b"]}, "files": {"image": picture}}, "prompt"),
        ({"data": {"prompt": "a", "image": "photo.png"}, "files": {"x": picture}}, "image"),
        ({"files": [("image[]", picture)] * 9, "data": {"prompt": "a"}}, None),
    ):
        answer = post("/v1/images/edits", **options)
        assert answer.status_code == 400 and error_of(answer)["param"] == param
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"", b"--x\r\n", b"nonsense", b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\n'):
        answer = post("/v1/images/edits", content=body, headers=headers)
        assert answer.status_code == 400
        error_of(answer)
    assert post("/v1/images/edits", content=b"x", headers={"content-type": "multipart/form-data"}).status_code == 400


def test_a_picture_as_a_list_and_several_results(served, photo):
    answer = served.http.post(
        "/v1/images/edits",
        data={"prompt": "a cat", "n": "2", "output_format": "webp", **{k: str(v) for k, v in FIELDS.items()}},
        files=[("image[]", ("photo.png", photo))],
    )
    formats = [Image.open(io.BytesIO(base64.b64decode(each["b64_json"]))).format for each in answer.json()["data"]]
    assert formats == ["WEBP", "WEBP"]
