"""Flags and PNG settings under one set of rules, and the choices that a model completes."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.checkpoints.registry import SCHEDULERS
from fastdiff.diffusion import schedulers
from fastdiff.errors import InputError
from fastdiff.execution import devices
from fastdiff.requests import png
from fastdiff.requests.request import DTYPES, MAX_PICTURES, MAX_SEED, ModelCard, Request, complete, parse_seed

EMOJI64 = ModelCard.read("emoji64", hub.bundled_models()["emoji64"])
UNCONDITIONAL = replace(EMOJI64, config=replace(EMOJI64.config, num_class_embeds=None), info=ModelInfo())
UNNAMED = replace(EMOJI64, info=ModelInfo())  # 217 labels without names, none of them the null label

SEEDS = st.integers(0, MAX_SEED)


@given(SEEDS)
def test_one_seed(seed):
    assert parse_seed(str(seed)) == seed


@given(st.lists(st.tuples(st.integers(0, MAX_SEED - 50), st.integers(0, 50)), min_size=2, max_size=6))
def test_a_list_of_seeds_and_ranges_is_used_as_it_is(ranges):
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    assert parse_seed(text) == tuple(first + i for first, more in ranges for i in range(more + 1))


@given(st.text(alphabet="0123456789,- eE+._x٣", max_size=12))
def test_any_other_text_is_refused_or_understood_in_bounds(text):
    try:
        seed = Request(seed=parse_seed(text)).seed
    except InputError as error:
        assert str(error).startswith("seed ") and "\n" not in str(error)
    else:
        assert all(0 <= value <= MAX_SEED for value in (seed if isinstance(seed, tuple) else (seed,)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
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
    with pytest.raises(InputError, match=r"^seed "):
        Request.from_flags({"seed": text})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": ""}, "model '': give a bundled name"),
        ({"model": "a\0b"}, "model a"),
        ({"model": None}, "model None"),
        ({"scheduler": "euler"}, "scheduler euler: give ddim or ddpm"),
        ({"num_inference_steps": 0}, "steps 0: give a whole number of at least 1"),
        ({"num_inference_steps": True}, "steps True"),
        ({"num_inference_steps": 2.0}, r"steps 2\.0"),
        ({"eta": 1.5}, r"eta 1\.5: give a number from 0 to 1"),
        ({"eta": float("nan")}, "eta nan"),
        ({"guidance_scale": -1.0}, "cfg-scale -1.0: give a number of at least 0"),
        ({"guidance_scale": float("inf")}, "cfg-scale inf"),
        ({"dtype": "int8"}, "dtype int8: give one of auto, float32"),
        ({"dtype": ["auto"]}, r"dtype \['auto'\]"),
        ({"use_clipped_model_output": 1}, "use_clipped_model_output 1: give true or false"),
        ({"label": ([],)}, "label"),
        ({"label": (-1,)}, "label"),
        ({"seed": (1, 1)}, r"seed \(1, 1\): .* different"),
        ({"seed": (True,)}, "seed"),
        ({"seed": ()}, "seed"),
        ({"num_images": 0}, "num-images 0: give a whole number from 1 to 50000"),
        ({"num_images": 10**9}, "num-images 1000000000"),
        ({"revision": 7}, "revision 7"),
        ({"variant": ""}, "variant ''"),
        ({"model": ["x" * 500]}, r"model .{0,90}\.\.\.: give"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(f"{k}-{v!r:.20}" for k, v in value.items()),
)
def test_a_rule_names_the_value_and_the_remedy(values, message):
    with pytest.raises(InputError, match=message):
        Request(**values)


def test_a_model_completes_what_is_left_open():
    request, cells = complete(Request(), EMOJI64)
    info = EMOJI64.info
    assert request.num_inference_steps == info.num_inference_steps and request.scheduler == "ddim"
    assert request.guidance_scale == info.guidance_scale
    assert (request.eta, request.use_clipped_model_output) == (0.0, True)
    groups = list(info.label_groups)
    assert request.label == (groups[0], groups[11], groups[22], groups[33]) and request.seed == (0,)
    assert cells == [(0, info.label_index(label)) for label in request.label]


def test_the_labels_of_a_group_take_turns_from_seed_to_seed():
    request, cells = complete(Request(label=("noto animals",), seed=(5, 6, 11)), EMOJI64)
    choices = EMOJI64.info.label_choices("noto animals")
    assert request.label == ("noto animals",)
    assert cells == [(5, choices[5]), (6, choices[0]), (11, choices[5])]


def test_a_model_that_says_nothing_has_the_defaults():
    request, cells = complete(Request(), UNCONDITIONAL)
    assert (request.num_inference_steps, request.scheduler, request.guidance_scale) == (50, "ddim", 1.0)
    assert (request.eta, request.use_clipped_model_output) == (0.0, False)
    assert request.label == () and cells == [(0, None), (1, None), (2, None), (3, None)]


def test_labels_without_names_are_spread_and_recorded_by_index():
    def labels(card):
        request, cells = complete(Request(), card)
        assert request.label == tuple(dict.fromkeys(label for _, label in cells))
        return request.label

    last = UNNAMED.labels[-1]
    assert labels(UNNAMED) == (0, last // 3, 2 * last // 3, last)
    assert labels(replace(UNNAMED, config=replace(UNNAMED.config, num_class_embeds=2))) == (0, 1)
    assert labels(replace(UNNAMED, config=replace(UNNAMED.config, num_class_embeds=1))) == (0,)
    assert labels(replace(UNNAMED, info=ModelInfo(null_label=0)))[0] == 1


@pytest.mark.parametrize(
    ("asked", "seeds"),
    [
        ({"label": ("noto food",)}, (0, 1, 2, 3)),
        ({"label": (0, 1)}, (0, 1)),
        ({"label": (0, 1, 2)}, (0,)),
        ({"num_images": 3}, (0, 1, 2)),
        ({"seed": 7, "num_images": 2}, (7, 8)),
        ({"seed": (9, 2)}, (9, 2)),
        ({"seed": (9, 2), "num_images": 2}, (9, 2)),
        ({"seed": MAX_SEED, "num_images": 1}, (MAX_SEED,)),
    ],
    ids=str,
)
def test_the_seeds_of_a_label(asked, seeds):
    assert complete(Request(**asked), EMOJI64)[0].seed == seeds


def test_a_random_seed_leaves_room_for_all_pictures(monkeypatch):
    monkeypatch.setattr("secrets.randbelow", lambda limit: limit - 1)
    assert complete(Request(seed="random", num_images=3), EMOJI64)[0].seed == (MAX_SEED - 2, MAX_SEED - 1, MAX_SEED)


@pytest.mark.parametrize(
    ("asked", "card", "message"),
    [
        ({"num_inference_steps": 1001}, EMOJI64, "steps 1001: emoji64 was trained with 1000 steps; give .* 1 to 1000"),
        ({"label": ("notto food",)}, EMOJI64, "did you mean noto food"),
        ({"label": ("217",)}, EMOJI64, "label 217 is out of range"),
        ({"label": ("fluent-3d hearts", "0")}, EMOJI64, "a label is given twice"),
        ({"label": (0,)}, UNCONDITIONAL, "label 0: emoji64 has no labels; leave it out"),
        ({"guidance_scale": 3.0}, UNCONDITIONAL, r"cfg-scale 3\.0: emoji64 has no null label"),
        ({"guidance_scale": 3.0}, UNNAMED, "has no null label to guide with"),
        ({"seed": MAX_SEED, "num_images": 2}, EMOJI64, "seed 4294967295: 2 pictures would pass the last seed"),
        ({"seed": (1, 2), "num_images": 3}, EMOJI64, "num-images 3: the list has 2 seeds"),
        ({"scheduler": "ddpm", "eta": 0.0}, EMOJI64, "eta 0.0 is an option of ddim"),
        ({"num_images": MAX_PICTURES}, EMOJI64, "4 labels x 50000 seeds are too many"),
    ],
    ids=lambda value: value.name if isinstance(value, ModelCard) else str(value),
)
def test_what_a_model_cannot_do_is_refused(asked, card, message):
    with pytest.raises(InputError, match=message):
        complete(Request(**asked), card)


def test_ddpm_has_no_options_of_ddim():
    request, _ = complete(Request(scheduler="ddpm"), EMOJI64)
    assert (request.eta, request.use_clipped_model_output, request.num_inference_steps) == (None, None, 50)


def test_default_steps_fit_a_model_of_fewer_training_steps():
    assert complete(Request(), replace(UNCONDITIONAL, num_train_timesteps=10))[0].num_inference_steps == 10


def test_a_folder_of_the_hub_cache_gives_the_commit(tmp_path):
    card = replace(EMOJI64, folder=tmp_path / "snapshots" / "0123abc")
    assert complete(Request(revision="main"), card)[0].revision == "0123abc"


def record_of(request: Request, **own) -> dict:
    versions = {"fastdiff": "0.1.0"}
    return request.as_record() | {"width": 1, "height": 1, "versions": versions, "seed": 0, "label": None} | own


def write_png(folder, record: dict) -> str:
    path = folder / "source.png"
    path.write_bytes(png.encode(Image.new("L", (1, 1)), record))
    return str(path)


@given(
    request=st.builds(
        Request,
        scheduler=st.sampled_from([None, "ddim", "ddpm"]),
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
    assume(request.scheduler != "ddpm" or request.eta is None)
    assume(isinstance(request.seed, tuple) or request.seed < MAX_SEED - 4)
    done, _ = complete(request, EMOJI64)
    if as_grid:
        wanted, own = done, {"seed": list(done.seed), "label": list(done.label)}
    else:
        wanted = replace(done, seed=done.seed[-1:], label=done.label[-1:])
        own = {"seed": done.seed[-1], "label": done.label[-1]}
    source = write_png(tmp_path_factory.getbasetemp(), record_of(done, **own))
    assert complete(Request.from_flags({}, source), EMOJI64)[0] == wanted


RECORDED = complete(Request(num_inference_steps=7, eta=0.5, guidance_scale=3.0), EMOJI64)[0]


def test_flags_win_over_a_png(tmp_path):
    source = write_png(tmp_path, record_of(RECORDED, seed=41, label="noto food"))
    flags = {"num_inference_steps": 9, "seed": None, "label": ["noto flags", "3"], "overwrite": True, "source": source}
    request = Request.from_flags(flags, source)
    assert (request.num_inference_steps, request.label, request.seed) == (9, ("noto flags", "3"), (41,))
    assert (request.eta, request.guidance_scale) == (0.5, 3.0)


def test_more_pictures_of_a_png_count_on_from_its_seed(tmp_path):
    source = write_png(tmp_path, record_of(RECORDED, seed=41))
    assert complete(Request.from_flags({"num_images": 3}, source), EMOJI64)[0].seed == (41, 42, 43)
    assert complete(Request.from_flags({"num_images": 2, "seed": "5"}, source), EMOJI64)[0].seed == (5, 6)
    assert complete(Request.from_flags({"seed": "5,9"}, source), EMOJI64)[0].seed == (5, 9)


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
    ],
    ids=str,
)
def test_settings_of_a_png_are_held_to_the_rules_of_flags(tmp_path, own):
    path = tmp_path / "hostile.png"
    info = PngInfo()
    info.add_itxt("fastdiff", png.canonical_json({"schema": 1, **record_of(RECORDED), **own}))
    Image.new("L", (1, 1)).save(path, pnginfo=info)
    with pytest.raises(InputError, match=r"hostile\.png holds settings that cannot be used: "):
        Request.from_flags({}, str(path))


def test_a_folder_without_configs_has_no_card(tmp_path):
    with pytest.raises(InputError, match=r"model_index\.json does not exist"):
        ModelCard.read("x", tmp_path)


def test_the_pipeline_has_the_same_choices():
    """They are written twice: this module must not import torch."""
    assert ("auto", *devices.DTYPES) == DTYPES
    assert tuple(sorted(schedulers.SCHEDULERS)) == tuple(sorted(SCHEDULERS))
