"""Requests from flags and from PNG settings, checked by one set of rules."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.execution import devices
from fastdiff.kinds import MAX_SEED
from fastdiff.requests import png, prompt_file
from fastdiff.requests.completion import complete
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import DTYPES, Request, parse_seed

EMOJI64 = ModelCard.read("emoji64", hub.bundled_models()["emoji64"])

SEEDS = st.integers(0, MAX_SEED)


@given(SEEDS)
def test_one_seed(seed):
    assert parse_seed(str(seed)) == seed


@given(st.lists(st.tuples(st.integers(0, MAX_SEED - 50), st.integers(0, 50)), min_size=2, max_size=6))
def test_a_list_of_seeds_and_ranges_is_used_as_it_is(ranges):
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    assert parse_seed(text) == tuple(first + i for first, more in ranges for i in range(more + 1))


def test_minus_one_is_a_random_seed():
    assert parse_seed("-1") == parse_seed("random") == "random"


@given(st.text(alphabet="0123456789,- eE+._x٣", max_size=12))
def test_any_other_text_is_refused_or_understood_in_bounds(text):
    try:
        seed = Request(seed=parse_seed(text)).seed
    except InputError as error:
        assert str(error).startswith("seed: ") and "\n" not in str(error)
    else:
        seeds = seed if isinstance(seed, tuple) else (seed,)
        assert text == "-1" or all(0 <= value <= MAX_SEED for value in seeds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-2",
        "4294967296",
        "9999999999999999999",
        "1e3",
        "0x10",
        "1.5",
        "٣",
        "1,",
        ",",
        "5-",
        "5-3",
        "1,1",
        "1-3,2",
        "0-4294967295",
        "Random",
        " 7",
        "7\n",
    ],
)
def test_a_bad_seed_is_refused(text):
    with pytest.raises(InputError, match=r"^seed: "):
        Request.from_flags({"seed": text})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": ""}, "model: '' is not a bundled name"),
        ({"model": "a\0b"}, "model: 'a"),
        ({"model": None}, "model: None"),
        ({"scheduler": "eular"}, "scheduler: 'eular' is not one of ddim, ddpm, euler"),
        ({"num_inference_steps": 0}, "steps: 0 is not a whole number of at least 1"),
        ({"num_inference_steps": True}, "steps: True"),
        ({"num_inference_steps": 2.0}, r"steps: 2\.0"),
        ({"eta": 1.5}, r"eta: 1\.5 is not a number from 0 to 1"),
        ({"eta": float("nan")}, "eta: nan"),
        ({"guidance_scale": -1.0}, "cfg-scale: -1.0 is not a number of at least 0"),
        ({"guidance_scale": float("inf")}, "cfg-scale: inf"),
        ({"dtype": "int8"}, "dtype: 'int8' is not one of auto, float32"),
        ({"dtype": ["auto"]}, r"dtype: \['auto'\]"),
        ({"use_clipped_model_output": 1}, "use_clipped_model_output: 1 is not true or false"),
        ({"label": ([],)}, "label"),
        ({"label": (-1,)}, "label"),
        ({"seed": (1, 1)}, r"seed: \(1, 1\) .* different"),
        ({"seed": (True,)}, "seed"),
        ({"seed": ()}, "seed"),
        ({"prompt": "a"}, "prompt: 'a' is not a list of up to 50000 texts"),
        ({"prompt": (7,)}, "prompt: "),
        ({"negative_prompt": "\ud800"}, "negative-prompt: .* is not a string of up to 10000 characters of Unicode"),
        ({"guidance_start": 1.5}, "guidance-start: 1.5 is not a number from 0 to 1"),
        ({"clip_skip": -1}, "clip-skip: -1 is not a whole number from 0"),
        ({"height": 0}, "height: 0 is not a whole number from 1 to 65536"),
        ({"width": 2.0}, r"width: 2\.0"),
        ({"num_images": 0}, "num-images: 0 is not a whole number from 1 to 50000"),
        ({"num_images": 10**9}, "num-images: 1000000000"),
        ({"revision": 7}, "revision: 7"),
        ({"variant": ""}, "variant: ''"),
        ({"revision": "../../../w"}, r"revision: '\.\./\.\./\.\./w' is not a branch, tag or commit of the hub"),
        ({"revision": "/etc/passwd"}, "revision"),
        ({"revision": "a/../b"}, "revision"),
        ({"variant": "x/../../../w"}, r"variant: 'x/\.\./\.\./\.\./w' is not a variant of the weights such as fp16"),
        ({"variant": "x\\w"}, "variant"),
        ({"variant": "**"}, r"variant: '\*\*'"),
        ({"variant": "fp1?"}, "variant"),
        ({"variant": "fp1[6]"}, "variant"),
        ({"variant": ".."}, "variant"),
        ({"model": ["x" * 500]}, r"model: .{0,90}\.\.\. is not"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(f"{k}-{v!r:.20}" for k, v in value.items()),
)
def test_a_rule_names_the_value_and_the_remedy(values, message):
    with pytest.raises(InputError, match=message):
        Request(**values)


def record_of(request: Request, **own) -> dict:
    versions = {"fastdiff": "0.1.0"}
    size = {"width": request.width or 64, "height": request.height or 64}
    return request.as_record() | size | {"versions": versions, "seed": 0, "label": None} | own


def write_png(folder, record: dict) -> Recorded:
    path = folder / "source.png"
    path.write_bytes(png.encode(Image.new("L", (1, 1)), record))
    return Recorded.read(str(path))


@given(
    request=st.builds(
        Request,
        scheduler=st.sampled_from([None, "ddim", "ddpm", "euler-a"]),
        num_inference_steps=st.none() | st.integers(1, 1000),
        eta=st.none() | st.floats(0, 1),
        guidance_scale=st.none() | st.floats(0, 50),
        dtype=st.sampled_from(["auto", "float16"]),
        label=st.lists(st.integers(0, 35), unique=True, max_size=4).map(tuple),
        seed=SEEDS | st.lists(SEEDS, unique=True, min_size=1, max_size=4).map(tuple),
    ),
    as_grid=st.booleans(),
)
def test_what_is_recorded_asks_for_the_same_again(tmp_path_factory, request, as_grid):
    assume(request.scheduler in (None, "ddim") or request.eta is None)
    assume(isinstance(request.seed, tuple) or request.seed < MAX_SEED - 4)
    done, _ = complete(request, EMOJI64, COMMAND)
    if as_grid:
        wanted, own = done, {"seed": list(done.seed), "label": list(done.label)}
    else:
        wanted = replace(done, seed=done.seed[-1:], label=done.label[-1:])
        own = {"seed": done.seed[-1], "label": done.label[-1]}
    source = write_png(tmp_path_factory.getbasetemp(), record_of(done, **own))
    assert complete(Request.from_flags({}, source), EMOJI64, COMMAND)[0] == wanted


RECORDED = complete(Request(num_inference_steps=7, eta=0.5, guidance_scale=3.0), EMOJI64, COMMAND)[0]


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        ({}, "emoji-sd"),
        ({"prompt": ["a cat"]}, "emoji-sd"),
        ({"label": ["noto birds"]}, "emoji64"),
        ({"label": ["noto birds"], "model": "emoji64-dit"}, "emoji64-dit"),
    ],
    ids=str,
)
def test_labels_and_prompts_have_models_of_their_own(flags, model):
    assert Request.from_flags(flags).model == model


def test_flags_win_over_a_png(tmp_path):
    source = write_png(tmp_path, record_of(RECORDED, seed=41, label="noto food"))
    flags = {"num_inference_steps": 9, "seed": None, "label": ["noto flags", "3"], "overwrite": True, "source": source}
    request = Request.from_flags(flags, source)
    assert (request.num_inference_steps, request.label, request.seed) == (9, ("noto flags", "3"), (41,))
    assert (request.eta, request.guidance_scale) == (0.5, 3.0)


def test_more_pictures_of_a_png_count_on_from_its_seed(tmp_path):
    source = write_png(tmp_path, record_of(RECORDED, seed=41))
    assert complete(Request.from_flags({"num_images": 3}, source), EMOJI64, COMMAND)[0].seed == (41, 42, 43)
    assert complete(Request.from_flags({"num_images": 2, "seed": "5"}, source), EMOJI64, COMMAND)[0].seed == (5, 6)
    assert complete(Request.from_flags({"seed": "5,9"}, source), EMOJI64, COMMAND)[0].seed == (5, 9)


def test_what_hangs_on_a_replaced_value_is_dropped(tmp_path):
    recorded = replace(RECORDED, model="org/name", revision="0123abc", variant="fp16")
    source = write_png(tmp_path, record_of(recorded))
    other = Request.from_flags({"model": "emoji64", "scheduler": "ddpm"}, source)
    assert (other.revision, other.variant, other.eta, other.use_clipped_model_output) == (None, None, None, None)
    same = Request.from_flags({"model": "org/name", "scheduler": "ddim"}, source)
    assert (same.revision, same.variant, same.eta) == ("0123abc", "fp16", 0.5)


@pytest.mark.parametrize(
    "own",
    [
        {"seed": -1},
        {"seed": "random"},
        {"seed": [1, 1]},
        {"seed": 2**40},
        {"seed": True},
        {"label": {"a": 1}},
        {"label": [[1]]},
        {"model": 7},
        {"model": None},
        {"num_inference_steps": "50"},
        {"eta": [0]},
        {"dtype": "__import__('os')"},
        {"prompt": {"a": 1}},
        {"prompt": [["a"]]},
        {"prompt": "a" * 10_001},
        {"negative_prompt": 7},
        {"clip_skip": "1"},
        {"height": "64"},
        {"width": 2**17},
    ],
    ids=str,
)
def test_settings_of_a_png_are_held_to_the_rules_of_flags(tmp_path, own):
    path = tmp_path / "hostile.png"
    info = PngInfo()
    info.add_itxt("fastdiff", png.canonical_json({"schema": 1, **record_of(RECORDED), **own}))
    Image.new("L", (1, 1)).save(path, pnginfo=info)
    with pytest.raises(InputError, match=r"hostile\.png holds settings that cannot be used: "):
        Request.from_flags({}, Recorded.read(str(path)))


def test_a_folder_without_configs_has_no_card(tmp_path):
    with pytest.raises(InputError, match=r"model_index\.json does not exist"):
        ModelCard.read("x", tmp_path)


def test_the_pipeline_has_the_same_choices():
    """The names are written twice, because the request module must not import torch."""
    assert ("auto", *devices.DTYPES) == DTYPES


@pytest.mark.parametrize("variant", ["x/../../../w", "**", "fp*"])
def test_a_png_names_no_files_outside_of_the_model(tmp_path, variant):
    source = write_png(tmp_path, record_of(RECORDED, variant=variant))
    with pytest.raises(InputError, match="holds settings that cannot be used: variant"):
        Request.from_flags({}, source)


def test_prompts_of_flags_and_of_a_file_come_in_that_order(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffein Hügel\r\n\n \t\n  the sea \n雪".encode())
    flags = {"prompt": ["a", ""], "prompt_file": str(path), "label": None}
    assert Request.from_flags(flags).prompt == ("a", "", "ein Hügel", "  the sea ", "雪")
    assert Request.from_flags({"prompt_file": str(path)}).prompt == ("ein Hügel", "  the sea ", "雪")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "has no prompts"),
        (b" \n\r\n", "has no prompts"),
        (b"\xff\xfea\0", "is not UTF-8 text"),
    ],
)
def test_a_prompt_file_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"^prompt-file {path} {message}"):
        Request.from_flags({"prompt_file": str(path)})


def test_a_prompt_file_is_read_in_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_file, "MAX_BYTES", 3)
    (tmp_path / "a.txt").write_text("abcd")
    with pytest.raises(InputError, match="give fewer prompts"):
        Request.from_flags({"prompt_file": str(tmp_path / "a.txt")})
    with pytest.raises(InputError, match="cannot be read"):
        Request.from_flags({"prompt_file": "a\0b"})


@pytest.fixture
def styles_file(tmp_path) -> str:
    path = tmp_path / "styles.csv"
    path.write_text('name,prompt,negative_prompt\nfoggy,"{prompt} in the fog",sun\ndark,at night,\n')
    return str(path)


def test_styles_change_each_prompt_of_flags_and_of_a_png(tmp_path, styles_file):
    flags = {"styles": styles_file, "style": ["foggy", "dark"]}
    (tmp_path / "more.txt").write_text("a hill\n")
    asked = Request.from_flags({**flags, "prompt": ["the sea"], "prompt_file": str(tmp_path / "more.txt")})
    assert asked.prompt == ("the sea in the fog, at night", "a hill in the fog, at night")
    assert asked.negative_prompt == "sun"
    source = write_png(tmp_path, record_of(OF_TEXT, prompt="the sea"))
    again = Request.from_flags({**flags, "negative_prompt": "rain"}, source)
    assert (again.prompt, again.negative_prompt) == (("the sea in the fog, at night",), "rain, sun")
    plain = Request.from_flags({**flags, "style": ["dark"], "prompt": ["x"]})
    assert plain.negative_prompt is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"style": ["foggy"]}, r"^style 'foggy': give the file that has it with --styles FILE$"),
        ({"styles": True, "prompt": ["x"]}, r"^styles .*: give --style NAME too; the names are foggy, dark$"),
        ({"styles": True, "style": ["dark"]}, r"^style 'dark' changes a prompt, and there is none"),
        ({"styles": True, "style": ["dark"], "label": ["cat"]}, r"^style 'dark' changes a prompt, and there is none"),
        ({"styles": True, "style": ["Dark"], "prompt": ["x"]}, r"did you mean dark\?$"),
    ],
)
def test_a_style_needs_its_file_and_a_prompt(styles_file, flags, message):
    with pytest.raises(InputError, match=message):
        Request.from_flags(flags | ({"styles": styles_file} if "styles" in flags else {}))


OF_TEXT = replace(RECORDED, label=(), prompt=("the sea", "a hill"), negative_prompt="fog", clip_skip=1, height=24)


def test_prompts_of_a_png_give_way_to_labels_and_labels_to_prompts(tmp_path):
    source = write_png(tmp_path, record_of(OF_TEXT, prompt="the sea"))
    again = Request.from_flags({}, source)
    assert (again.prompt, again.negative_prompt, again.clip_skip) == (("the sea",), "fog", 1)
    assert (again.height, again.width) == (24, 64)
    assert Request.from_flags({"prompt": ["x"]}, source).negative_prompt == "fog"
    other = Request.from_flags({"label": ["0"]}, source)
    assert (other.label, other.prompt, other.negative_prompt, other.clip_skip) == (("0",), (), None, None)
    source = write_png(tmp_path, record_of(RECORDED, label="noto food"))
    other = Request.from_flags({"prompt": ["x"]}, source)
    assert (other.label, other.prompt) == ((), ("x",))


def test_the_size_of_a_png_is_its_pictures_and_hangs_on_the_model(tmp_path):
    def size(flags, **own):
        request = Request.from_flags(flags, write_png(tmp_path, record_of(OF_TEXT, **{"prompt": "a", **own})))
        return request.height, request.width

    assert size({}) == (24, 64) and size({"width": 80}) == (24, 80)
    assert size({"model": "another"}) == (None, None)
    grid = {"seed": [1, 2], "prompt": ["a"], "width": 300, "height": 400}
    assert size({}, **grid) == (None, None), "an old grid has no picture size"
    assert size({}, **grid, picture_width=32, picture_height=40) == (40, 32)
    assert size({}, horizon=8) == (None, None), "the size of a trajectory's plot"


def test_a_record_says_of_the_precision_only_that_it_is_another():
    assert "precision" not in Request().as_record()
    record = Request(precision="int8").as_record()
    assert record["precision"] == "int8" and Request.from_record(record, "it").precision == "int8"
    with pytest.raises(InputError, match="precision: 'fp4' is not one of full, int8, fp8"):
        Request.from_record(record | {"precision": "fp4"}, "it")


def test_records_of_labels_say_nothing_of_prompts():
    assert not {"prompt", "negative_prompt", "clip_skip", "height"} & RECORDED.as_record().keys()
    assert OF_TEXT.as_record().items() >= {"negative_prompt": "fog", "clip_skip": 1}.items()
