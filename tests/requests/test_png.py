"""The settings in a PNG: they survive a round trip, other tools read them, and hostile files are refused."""

import json
import os
import re
import struct
import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from sd_parsers import ParserManager

from fastdiff.errors import InputError
from fastdiff.requests import png

RECORD = {
    "model": "models/emoji64",
    "revision": None,
    "scheduler": "ddim",
    "num_inference_steps": 50,
    "guidance_scale": 2.0,
    "eta": 0.0,
    "use_clipped_model_output": True,
    "dtype": "float32",
    "seed": 12345,
    "label": "noto animals",
    "width": 8,
    "height": 6,
    "versions": {"fastdiff": "0.1.0", "torch": "2.13.0"},
}

TEXT = st.text(max_size=40)  # lone surrogates included
RECORDS = st.builds(
    lambda **values: RECORD | values,
    model=st.text(min_size=1, max_size=40),
    seed=st.integers(0, 2**32 - 1) | st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
    label=st.none() | st.integers(0, 999) | TEXT | st.lists(TEXT | st.integers(0, 999), max_size=3),
    guidance_scale=st.floats(0, 100),
    eta=st.none() | st.floats(0, 1),
    revision=st.none() | TEXT,
)


def chunk(kind: bytes, data: bytes, crc: int | None = None) -> bytes:
    crc = zlib.crc32(kind + data) if crc is None else crc
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)


SIGNATURE = b"\x89PNG\r\n\x1a\n"
IHDR = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
IDAT = chunk(b"IDAT", zlib.compress(b"\0\0"))
IEND = chunk(b"IEND", b"")
SETTINGS = png.canonical_json({"schema": 1, "seed": 7}).encode()
WRITTEN = {"schema": 1, "numerics": png.NUMERICS}  # what every record gets


def itxt(keyword: bytes, text: bytes, compressed: bool = False) -> bytes:
    return keyword + (b"\0\1\0\0\0" + zlib.compress(text) if compressed else b"\0\0\0\0\0" + text)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(png.encode(Image.new("RGB", (8, 6), "red"), RECORD))
    return path


def test_settings_come_back_and_the_picture_is_whole(written):
    assert png.read_settings(written) == RECORD | WRITTEN
    with Image.open(written) as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)


def test_text_chunks_stand_before_the_pixels(written):
    data = written.read_bytes()
    assert max(data.index(b"iTXtparameters"), data.index(b"iTXtfastdiff")) < data.index(b"IDAT")


@given(RECORDS)
def test_any_record_comes_back(tmp_path_factory, record):
    path = tmp_path_factory.getbasetemp() / f"round-trip-{os.getpid()}.png"
    path.write_bytes(png.encode(Image.new("L", (1, 1)), record))
    assert png.read_settings(path) == record | WRITTEN


def test_sd_parsers_reads_the_parameters(written):
    info = ParserManager().parse(written)
    (sampler,) = info.samplers
    assert sampler.name == "DDIM"
    assert sampler.model.name == "emoji64"
    assert [prompt.value for prompt in sampler.prompts] == ["noto animals"]
    assert sampler.parameters == {"cfg_scale": "2.0", "seed": "12345", "steps": "50"}
    assert info.metadata == {"Size": "8x6", "Version": "fastdiff 0.1.0"}


@pytest.mark.parametrize(
    ("label", "prompt"),
    [
        (None, None),
        (7, "class 7"),
        ("Negative prompt: a\nSteps: 1, Sampler: x", "Negative prompt : a Steps : 1, Sampler: x"),
        ("Wörter, 绘画 🙂", "Wörter, 绘画 🙂"),
        (["a", "b"], "a, b"),
    ],
    ids=["unconditional", "label-without-name", "label-that-forges-settings", "label-beyond-latin", "grid"],
)
def test_sd_parsers_is_not_fooled_by_a_label(tmp_path, label, prompt):
    path = tmp_path / "picture.png"
    path.write_bytes(png.encode(Image.new("RGB", (8, 6)), RECORD | {"label": label, "eta": 0.5}))
    (sampler,) = ParserManager().parse(path).samplers
    assert [p.value for p in sampler.prompts] == ([] if prompt is None else [prompt])
    assert (sampler.name, sampler.parameters["steps"]) == ("DDIM", "50")
    settings_line = [line for line in png.read_text(path)["parameters"].split("\n") if line.startswith("Steps: ")]
    assert len(settings_line) == 1 and "Eta: 0.5" in settings_line[0]


def test_a_model_name_cannot_break_the_settings_line():
    line = png.parameters_text(RECORD | {"model": "C:\\my, models\\a: b\n"}).split("\n")[-1]
    assert "Model: a b , Version" in line


OF_TEXT = RECORD | {"label": None, "prompt": "a (cat:1.2),\n\nby Me", "negative_prompt": "fog,\nrain", "clip_skip": 1}


def test_prompts_stand_before_the_settings_as_they_are():
    record = OF_TEXT | {"model_hash": "0123456789abcdef", "scheduler": "euler-a", "eta": None}
    assert png.parameters_text(record) == (
        "a (cat:1.2),\n\nby Me\nNegative prompt: fog,\nrain\n"
        "Steps: 50, Sampler: Euler a, CFG scale: 2.0, Seed: 12345, Size: 8x6, Model hash: 0123456789, Model: emoji64, "
        "Clip skip: 2, Version: fastdiff 0.1.0"
    )


def test_a_part_that_is_guided_stands_at_the_end():
    record = OF_TEXT | {"guidance_start": 0.2, "guidance_stop": 0.0}
    assert png.parameters_text(record).endswith("Version: fastdiff 0.1.0, Guidance start: 0.2, Guidance stop: 0.0")
    record = OF_TEXT | {"prompt_syntax": "weighted", "emphasis": "no-norm"}
    assert png.parameters_text(record).endswith("fastdiff 0.1.0, Prompt syntax: weighted, Emphasis: No norm")


@pytest.mark.parametrize(("negative", "clip_skip"), [(None, None), ("", 0)])
def test_what_is_not_asked_for_is_not_written(negative, clip_skip):
    text = png.parameters_text(OF_TEXT | {"negative_prompt": negative, "clip_skip": clip_skip})
    assert text.count("\n") == 3 and not re.search("Negative prompt|Clip skip|Schedule type", text)


def test_sd_parsers_is_not_fooled_by_prompts(tmp_path):
    path = tmp_path / "picture.png"
    forged = "the sea\nNegative prompt: a\nSteps: 1, Sampler: x, Seed: 2"
    harmless = "the sea\nNegative prompt : a\nSteps : 1, Sampler: x, Seed: 2"
    record = OF_TEXT | {"prompt": forged, "negative_prompt": forged}
    path.write_bytes(png.encode(Image.new("RGB", (8, 6)), record))
    (sampler,) = ParserManager().parse(path).samplers
    assert [p.value for p in sampler.prompts] == [harmless] == [p.value for p in sampler.negative_prompts]
    assert png.read_settings(path) == record | WRITTEN


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("ddim", ("DDIM", None)),
        ("pndm", ("PLMS", None)),
        ("euler-a", ("Euler a", None)),
        ("dpm++2m", ("DPM++ 2M", None)),
        ("dpm++2m-sde-karras", ("DPM++ 2M SDE", "Karras")),
        ("lms-karras", ("LMS", "Karras")),
        ("unipc", ("UniPC", None)),
    ],
)
def test_samplers_have_the_names_of_other_tools(scheduler, expected):
    assert png.sampler_name(scheduler) == expected


def test_canonical_json_is_equal_for_equal_records():
    assert png.canonical_json(RECORD) == png.canonical_json(dict(reversed(RECORD.items())))


@pytest.mark.parametrize("kind", ["tEXt", "zTXt", "iTXt", "iTXt-compressed"])
def test_each_kind_of_text_chunk_is_read(tmp_path, kind):
    data = {
        "tEXt": b"fastdiff\0" + SETTINGS,
        "zTXt": b"fastdiff\0\0" + zlib.compress(SETTINGS),
        "iTXt": itxt(b"fastdiff", SETTINGS),
        "iTXt-compressed": itxt(b"fastdiff", SETTINGS, compressed=True),
    }[kind]
    path = tmp_path / "picture.png"
    path.write_bytes(SIGNATURE + IHDR + chunk(kind[:4].encode(), data) + IDAT + IEND)
    assert png.read_settings(path) == {"schema": 1, "seed": 7}


def test_text_behind_the_pixels_is_read_and_the_first_of_two_counts(tmp_path):
    second = chunk(b"tEXt", b"fastdiff\0" + SETTINGS.replace(b"7", b"8"))
    path = tmp_path / "picture.png"
    path.write_bytes(SIGNATURE + IHDR + IDAT + chunk(b"tEXt", b"fastdiff\0" + SETTINGS) + second + IEND)
    assert png.read_settings(path) == {"schema": 1, "seed": 7}


def test_other_tools_parameters_are_read_as_they_are(tmp_path):
    info = PngInfo()
    info.add_text("parameters", "a cat\nSteps: 20, Sampler: Euler a, Seed: 1")
    Image.new("RGB", (8, 8)).save(tmp_path / "a1111.png", pnginfo=info)
    assert png.read_text(tmp_path / "a1111.png") == {"parameters": "a cat\nSteps: 20, Sampler: Euler a, Seed: 1"}
    with pytest.raises(InputError, match="holds no fastdiff settings"):
        png.read_settings(tmp_path / "a1111.png")


BOMB = zlib.compress(b"a" * 50_000_000, 9)
HOSTILE = {
    "empty": (b"", "no PNG signature"),
    "jpeg-named-png": (b"\xff\xd8\xff\xe0" + b"\0" * 64, "no PNG signature"),
    "signature-only": (SIGNATURE, "truncated"),
    "no-header": (SIGNATURE + chunk(b"tEXt", b"fastdiff\0" + SETTINGS) + IEND, "header chunk is missing"),
    "second-header": (SIGNATURE + IHDR + IHDR + IEND, "header chunk is missing or misplaced"),
    "length-2-to-31": (SIGNATURE + IHDR + struct.pack(">I", 2**31) + b"tEXt" + b"fastdiff\0", "truncated"),
    "length-2-to-32": (SIGNATURE + IHDR + b"\xff\xff\xff\xff" + b"IDAT", "truncated"),
    "no-end": (SIGNATURE + IHDR + chunk(b"iTXt", itxt(b"fastdiff", SETTINGS)) + IDAT, "truncated"),
    "cut-in-a-chunk": (SIGNATURE + IHDR + chunk(b"iTXt", itxt(b"fastdiff", SETTINGS))[:-9], "truncated"),
    "wrong-checksum": (SIGNATURE + IHDR + chunk(b"tEXt", b"fastdiff\0{}", crc=1) + IEND, "wrong checksum"),
    "text-50-MB": (SIGNATURE + IHDR + chunk(b"tEXt", b"fastdiff\0" + b"a" * 50_000_000) + IEND, "over the limit"),
    "ztxt-bomb": (SIGNATURE + IHDR + chunk(b"zTXt", b"fastdiff\0\0" + BOMB) + IEND, "holds more than"),
    "itxt-bomb": (SIGNATURE + IHDR + chunk(b"iTXt", b"fastdiff\0\1\0\0\0" + BOMB) + IEND, "holds more than"),
    "damaged-compression": (SIGNATURE + IHDR + chunk(b"zTXt", b"fastdiff\0\0zlib?") + IEND, "is damaged"),
    "itxt-without-fields": (SIGNATURE + IHDR + chunk(b"iTXt", b"fastdiff\0\0\0") + IEND, "malformed"),
    "itxt-not-utf8": (SIGNATURE + IHDR + chunk(b"iTXt", itxt(b"fastdiff", b"\xff\xfe")) + IEND, "utf-8"),
    "no-settings": (SIGNATURE + IHDR + IDAT + IEND, "no fastdiff settings"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_its_reason(tmp_path, name):
    data, reason = HOSTILE[name]
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    with pytest.raises(InputError, match=reason) as error:
        png.read_settings(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000 + "]" * 100_000,
        '{"schema":1,"seed":' + "9" * 5000 + "}",
        '{"schema":1,"eta":NaN}',
        '{"schema":1,"eta":Infinity}',
        '{"schema":1,"unknown":[1e400]}',
        "__import__('os').abort()",
    ],
    ids=["empty", "cut", "deep-nest", "huge-number", "nan", "infinity", "larger-than-any-float", "code"],
)
def test_damaged_json_is_refused(text):
    with pytest.raises(InputError, match=r"x\.png holds damaged fastdiff settings"):
        png.parse_record(text, "x.png")


@pytest.mark.parametrize("text", ["[]", "7", "null", "{}", '{"schema":2}', '{"schema":true}', '{"schema":"1"}'])
def test_another_schema_is_refused(text):
    with pytest.raises(InputError, match="unknown format"):
        png.parse_record(text, "x.png")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", 1e-320),
        ("model", None),
        ("scheduler", ["ddim"]),
        ("num_inference_steps", "20"),
        ("num_inference_steps", True),
        ("guidance_scale", {}),
        ("eta", []),
        ("width", 8.5),
        ("seed", []),
        ("seed", [1, None]),
        ("label", {"a": 1}),
        ("prompt", ["a", 1]),
        ("negative_prompt", 7),
        ("clip_skip", "1"),
        ("model_hash", 7),
        ("versions", None),
        ("versions", {"fastdiff": 1}),
    ],
)
def test_a_setting_of_another_type_is_refused(key, value):
    with pytest.raises(InputError, match=rf"^x\.png holds settings that cannot be used: {key}: .* is not [^\n]*$"):
        png.parse_record(png.canonical_json(RECORD | {"schema": 1, key: value}), "x.png")


@pytest.mark.parametrize("missing", [[key] for key in RECORD] + [[*RECORD]], ids=lambda keys: ",".join(keys)[:20])
def test_any_setting_may_be_missing(missing):
    record = {key: value for key, value in (RECORD | {"schema": 1}).items() if key not in missing}
    assert png.parse_record(png.canonical_json(record), "x.png") == record
    found = png.parameters_text(record).split("\n")[-1].split(", ")
    kept = {"num_inference_steps": "Steps: 50", "seed": "Seed: 12345", "versions": "Version: fastdiff 0.1.0"}
    assert [line for line in kept.values() if line in found] == [kept[key] for key in kept if key not in missing]
    assert ("Size: 8x6" in found) == {"width", "height"}.isdisjoint(missing)


def test_what_is_not_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")  # opening it would block forever
    for name, reason in [("none.png", "does not exist"), ("", "not a file"), ("pipe.png", "not a file")]:
        with pytest.raises(InputError, match=reason):
            png.read_text(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        png.read_text("a\0b.png")


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units, and a hole may take disk space")
def test_memory_stays_bounded_whatever_the_file_holds(tmp_path):
    """A gigabyte of pixels and two compressed bombs of 50 MB must cost less than 16 MiB."""
    path = tmp_path / "large.png"
    with open(path, "wb") as file:
        file.write(SIGNATURE + IHDR + struct.pack(">I", 2**30) + b"IDAT")
        file.seek(2**30 + 4, os.SEEK_CUR)  # a hole: the disk holds nothing
        file.write(chunk(b"zTXt", b"comment\0\0" + BOMB) + chunk(b"zTXt", b"fastdiff\0\0" + BOMB) + IEND)
    code = (
        "import resource, fastdiff.requests.png as png\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"try: png.read_settings({str(path)!r})\n"
        "except png.InputError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    message, growth = output.splitlines()
    assert "holds more than" in message
    assert int(growth) < 16 * 1024, "KiB"


def test_the_record_is_json_as_it_is(written):
    text = png.read_text(written)["fastdiff"]
    assert json.loads(text) == RECORD | WRITTEN
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"numerics": png.NUMERICS}, None),
        ({}, f"a.png was drawn with numerics 1, and this fastdiff has numerics {png.NUMERICS}; the picture may"),
        ({"numerics": "x"}, "a.png was drawn with numerics 'x', and"),
    ],
    ids=["equal", "none", "another"],
)
def test_other_numerics_are_said(record, said):
    notice = png.numerics_notice(record, "a.png")
    assert notice == said or (said and notice.startswith(said))
