"""Completion of requests: the defaults of a model, the pictures of a request, and requests that a model refuses."""

from dataclasses import replace

import pytest

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_PICTURES, MAX_SEED
from fastdiff.requests.completion import Cell, complete
from fastdiff.requests.defaults import COMMAND, LIBRARY, PAGE
from fastdiff.requests.request import Request

EMOJI64 = ModelCard.read("emoji64", hub.bundled_models()["emoji64"])
UNCONDITIONAL = replace(EMOJI64, config=replace(EMOJI64.config, num_class_embeds=None), info=ModelInfo())
UNNAMED = replace(EMOJI64, info=ModelInfo())  # 217 labels without names, none of them the null label


def test_a_model_completes_what_is_left_open():
    request, cells = complete(Request(), EMOJI64, COMMAND)
    info = EMOJI64.info
    assert request.num_inference_steps == info.num_inference_steps and request.scheduler == "ddim"
    assert request.guidance_scale == info.guidance_scale
    assert (request.eta, request.use_clipped_model_output) == (0.0, True)
    groups = list(info.label_groups)
    assert request.label == (groups[0], groups[11], groups[22], groups[33]) and request.seed == (0,)
    indices = [info.label_index(label) for label in request.label]
    assert cells == [Cell(0, index, EMOJI64.label_name(index)) for index in indices]


def test_the_labels_of_a_group_take_turns_from_seed_to_seed():
    request, cells = complete(Request(label=("noto animals",), seed=(5, 6, 11)), EMOJI64, COMMAND)
    choices = EMOJI64.info.label_choices("noto animals")
    assert request.label == ("noto animals",)
    assert [(cell.seed, cell.label) for cell in cells] == [(5, choices[5]), (6, choices[0]), (11, choices[5])]
    assert cells[1].label_name == EMOJI64.label_name(choices[0])


def test_a_model_that_says_nothing_has_the_defaults():
    request, cells = complete(Request(), UNCONDITIONAL, COMMAND)
    assert (request.num_inference_steps, request.scheduler, request.guidance_scale) == (50, "ddim", 1.0)
    assert (request.eta, request.use_clipped_model_output) == (0.0, False)
    assert request.label == () and cells == [Cell(seed, None, None) for seed in range(4)]


def test_labels_without_names_are_spread_and_recorded_by_index():
    def labels(card):
        request, cells = complete(Request(), card, COMMAND)
        assert request.label == tuple(dict.fromkeys(cell.label for cell in cells))
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
    assert complete(Request(**asked), EMOJI64, COMMAND)[0].seed == seeds


def test_a_random_seed_leaves_room_for_all_pictures(monkeypatch):
    monkeypatch.setattr("secrets.randbelow", lambda limit: limit - 1)
    assert complete(Request(seed="random", num_images=3), EMOJI64, COMMAND)[0].seed == (
        MAX_SEED - 2,
        MAX_SEED - 1,
        MAX_SEED,
    )


@pytest.mark.parametrize(
    ("asked", "card", "message"),
    [
        ({"num_inference_steps": 1001}, EMOJI64, "steps 1001: emoji64 was trained with 1000 steps; use 1 to 1000"),
        ({"label": ("notto food",)}, EMOJI64, "did you mean noto food"),
        ({"label": ("217",)}, EMOJI64, "label 217 is out of range"),
        ({"label": ("fluent-3d hearts", "0")}, EMOJI64, "a label is given twice"),
        ({"label": (0,)}, UNCONDITIONAL, "label 0: emoji64 has no labels; leave it out"),
        ({"guidance_scale": 3.0}, UNCONDITIONAL, r"cfg-scale 3\.0: emoji64 has no null label"),
        ({"guidance_scale": 3.0}, UNNAMED, "has no null label, which guidance needs"),
        ({"seed": MAX_SEED, "num_images": 2}, EMOJI64, "seed 4294967295: 2 pictures would exceed the last seed"),
        ({"seed": (1, 2), "num_images": 3}, EMOJI64, "num-images 3: the list has 2 seeds"),
        ({"scheduler": "ddpm", "eta": 0.0}, EMOJI64, "eta 0.0 is an option of ddim and tcd; leave it out"),
        (
            {"scheduler": "ddpm", "use_clipped_model_output": True},
            EMOJI64,
            "use_clipped_model_output True is an option of ddim",
        ),
        ({"num_images": MAX_PICTURES}, EMOJI64, "4 labels x 50000 seeds are too many"),
    ],
    ids=lambda value: value.name if isinstance(value, ModelCard) else str(value),
)
def test_what_a_model_cannot_do_is_refused(asked, card, message):
    with pytest.raises(InputError, match=message):
        complete(Request(**asked), card, COMMAND)


def test_ddpm_has_no_options_of_ddim():
    request, _ = complete(Request(scheduler="ddpm"), EMOJI64, COMMAND)
    assert (request.eta, request.use_clipped_model_output, request.num_inference_steps) == (None, None, 50)


def test_the_eta_of_tcd_is_its_own_and_not_ddims(text_card):
    """diffusers' DDPMPipeline leaves eta to the scheduler, and its text to image pipelines pass 0."""
    of_ddim = replace(UNCONDITIONAL, info=ModelInfo(scheduler="ddim", eta=0.7))
    of_tcd = replace(UNCONDITIONAL, info=ModelInfo(scheduler="tcd", eta=0.7))
    for card, expected in ((of_ddim, 0.3), (of_tcd, 0.7), (text_card, 0.0)):
        request, _ = complete(Request(scheduler="tcd", prompt=("a cat",) if card.reads_text else ()), card, COMMAND)
        assert (request.eta, request.use_clipped_model_output) == (expected, None)
        asked = replace(request, eta=0.5)
        assert complete(asked, card, COMMAND)[0].eta == 0.5
    assert complete(Request(), of_ddim, COMMAND)[0].eta == 0.7


def test_default_steps_fit_a_model_of_fewer_training_steps():
    assert complete(Request(), replace(UNCONDITIONAL, num_train_timesteps=10), COMMAND)[0].num_inference_steps == 10


def test_a_folder_of_the_hub_cache_gives_the_commit(tmp_path):
    card = replace(EMOJI64, folder=tmp_path / "snapshots" / "0123abc")
    assert complete(Request(revision="main"), card, COMMAND)[0].revision == "0123abc"


@pytest.fixture
def text_card(text_folder):
    return ModelCard.read("sd1", text_folder("sd1"))


def test_guidance_of_the_whole_run_is_not_recorded(text_card):
    def interval(**asked):
        record = complete(Request(prompt=("a",), **asked), text_card, COMMAND)[0].as_record()
        return record.get("guidance_start"), record.get("guidance_stop")

    assert interval() == interval(guidance_start=0.0, guidance_stop=1.0) == (None, None)
    assert interval(guidance_start=0.2) == (0.2, None)
    assert interval(guidance_stop=0.0) == (None, 0.0)


def test_the_usual_prompt_syntax_is_not_recorded(text_card):
    def syntax(**asked):
        record = complete(Request(prompt=("a",), **asked), text_card, COMMAND)[0].as_record()
        return record.get("prompt_syntax"), record.get("emphasis")

    assert syntax() == syntax(prompt_syntax="plain") == (None, None)
    assert syntax(prompt_syntax="weighted", emphasis="original") == ("weighted", None)
    assert syntax(prompt_syntax="weighted", emphasis="no-norm") == ("weighted", "no-norm")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"emphasis": "no-norm", "prompt_syntax": None}, "emphasis no-norm: plain prompts have none"),
    ],
)
def test_weighted_prompts_that_cannot_be_read(text_card, asked, message):
    with pytest.raises(InputError, match=message):
        complete(Request(**{"prompt": ("a",), "prompt_syntax": "weighted"} | asked), text_card, COMMAND)


def test_pictures_are_prompts_by_seeds_with_diffusers_defaults(text_card):
    request, cells = complete(Request(prompt=("a", ""), seed=(7, 8), clip_skip=0), text_card, COMMAND)
    assert cells == [Cell(seed, None, None, prompt) for prompt in ("a", "") for seed in (7, 8)]
    assert (request.num_inference_steps, request.guidance_scale, request.scheduler) == (50, 7.5, "pndm")
    assert (request.height, request.width, request.clip_skip, request.label) == (16, 16, None, ())
    assert complete(Request(prompt=("a",), seed=3), text_card, COMMAND)[0].seed == (3,), "one picture of a prompt"
    assert complete(Request(prompt=("a",), num_images=2), text_card, COMMAND)[0].seed == (0, 1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "prompt: sd1 draws from text"),
        ({"label": (0,), "prompt": ("a",)}, "label 0: sd1 draws from prompts; leave it out"),
        ({"prompt": ("a",), "clip_skip": 4}, "clip-skip 4: .* at most 3 layers"),
        ({"prompt": ("a",), "guidance_start": 0.6, "guidance_stop": 0.5}, "guidance-stop 0.5: it is before .* 0.6"),
        ({"prompt": ("a",), "width": 31}, "height 16, width 31: both must be multiples of 2"),
        ({"prompt": tuple(map(str, range(300))), "num_images": 200}, "300 prompts x 200 seeds are too many"),
    ],
    ids=["none", "with-label", "clip-skip", "interval", "size", "too-many"],
)
def test_prompts_that_cannot_be_drawn(text_card, asked, message):
    with pytest.raises(InputError, match=message):
        complete(Request(**asked), text_card, COMMAND)


EXAMPLES = ("cat face", "rocket", "ghost", "key", "tree", "bus")


@pytest.fixture
def exemplary(text_card):
    """A model that reads text and gives six prompts as examples."""
    return replace(text_card, info=replace(text_card.info, prompts=EXAMPLES))


@pytest.mark.parametrize(
    ("defaults", "asked", "prompts", "seeds"),
    [
        (COMMAND, {}, EXAMPLES[:4], (0,)),
        (COMMAND, {"seed": 7, "num_images": 2}, EXAMPLES[:4], (7, 8)),
        (COMMAND, {"prompt": ("a",)}, ("a",), (0,)),
        (PAGE, {}, EXAMPLES[:1], (0,)),
    ],
    ids=["command", "command-with-seeds", "a-prompt", "page"],
)
def test_a_models_first_prompts_are_drawn_where_none_is_given(exemplary, defaults, asked, prompts, seeds):
    request, cells = complete(Request(**asked), exemplary, defaults)
    assert (request.prompt, request.seed) == (prompts, seeds)
    assert cells == [Cell(seed, None, None, prompt) for prompt in prompts for seed in seeds]


def test_one_example_has_the_commands_pictures(exemplary):
    one = replace(exemplary, info=replace(exemplary.info, prompts=EXAMPLES[:1]))
    assert complete(Request(), one, COMMAND)[0].seed == (0, 1, 2, 3)
    with pytest.raises(InputError, match="4 prompts x 50000 seeds are too many"):
        complete(Request(num_images=50_000), exemplary, COMMAND)


def test_python_is_given_its_prompts(exemplary):
    with pytest.raises(InputError, match="prompt: sd1 draws from text"):
        complete(Request(), exemplary, LIBRARY)


def test_a_folder_without_text_encoders_needs_python(text_card):
    classes = {name: kind for name, kind in text_card.classes.items() if "tokenizer" not in name}
    with pytest.raises(InputError, match="sd1 has no text encoder; pass prompt_embeds in Python instead"):
        complete(Request(prompt=("a",)), replace(text_card, classes=classes), COMMAND)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": ("a",)}, "prompt: emoji64 has no text encoder; leave it out, or give a --label"),
        ({"negative_prompt": ""}, "negative-prompt: emoji64 has no text encoder"),
        ({"clip_skip": 0}, "clip-skip: emoji64 has no text encoder"),
        ({"guidance_stop": 0.5}, "guidance-stop: emoji64 has no text encoder"),
    ],
)
def test_a_model_of_labels_takes_no_prompts(asked, message):
    with pytest.raises(InputError, match=message):
        complete(Request(**asked), EMOJI64, COMMAND)


def test_a_size_is_the_requests_or_the_models():
    def size(card, **asked):
        request, _ = complete(Request(**asked), card, COMMAND)
        return request.height, request.width

    nameless = replace(EMOJI64, config=replace(EMOJI64.config, sample_size=None))
    assert size(EMOJI64) == (64, 64) and size(EMOJI64, width=80) == (64, 80)
    assert size(nameless, height=64, width=72) == (64, 72)
    wide = replace(EMOJI64, config=replace(EMOJI64.config, sample_size=(32, 48)))
    assert size(wide) == (32, 48) and size(wide, height=64) == (64, 48)
    with pytest.raises(InputError, match="width, height: emoji64 has no default size; give both"):
        size(nameless, height=64)
    with pytest.raises(InputError, match="height 65, width 64: both must be multiples of 8"):
        size(EMOJI64, height=65)
