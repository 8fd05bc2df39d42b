"""Notices that a run prints before it draws."""

from dataclasses import replace

import pytest
from PIL import Image

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run
from fastdiff.runs.notices import EMPTY, find_notices, find_source_notices

LONG = "the photo of the cat riding the photo of the astronaut riding the photo of the cat of the ocean of the cat"


@pytest.fixture
def run(text_folder):
    card = ModelCard.read("sd", text_folder("sd1"))
    return lambda **asked: Run.prepare(Request(**{"prompt": ("a cat",), **asked}), card, COMMAND)


def test_there_is_nothing_to_say_as_a_rule(run):
    assert find_notices(run(negative_prompt="fog")) == find_notices(run()) == []
    emoji64 = ModelCard.read("emoji64", hub.bundled_models()["emoji64"])
    assert find_notices(Run.prepare(Request(), emoji64, COMMAND)) == []


def test_an_empty_prompt_is_said_once(run):
    assert find_notices(run(prompt=("",))) == [EMPTY]
    assert find_notices(run(prompt=("a cat", " ", ""), seed=(1, 2))) == [EMPTY]


def test_a_negative_prompt_that_counts_for_nothing(run):
    drawn = run(negative_prompt=LONG, guidance_scale=0.5)
    assert find_notices(drawn) == ["negative prompt: no effect, because cfg-scale 0.5 is no guidance"]
    drawn = run(negative_prompt="fog")
    lcm = replace(drawn, card=replace(drawn.card, config=replace(drawn.card.config, time_cond_proj_dim=8)))
    assert find_notices(lcm) == [
        "negative prompt: no effect, because sd takes the guidance scale as an input and has no unconditional half"
    ]
    assert find_notices(run(negative_prompt="", guidance_scale=1.0)) == []


def test_each_end_that_is_cut_is_quoted_once(run, text_folder):
    lines = find_notices(run(prompt=(LONG, "a cat", f"a {LONG}"), negative_prompt=LONG, seed=(1, 2)))
    start = "longer than the 24 tokens that the model reads; cut: "
    assert [line.partition(start)[0] for line in lines] == ["prompt: ", "prompt: ", "negative prompt: "]
    assert all(line.endswith(" of the cat'") for line in lines)
    sdxl = Run.prepare(Request(prompt=(LONG,)), ModelCard.read("sdxl", text_folder("sdxl")), COMMAND)
    assert find_notices(sdxl) == lines[:1]


def test_a_tokenizer_that_is_missing_is_refused(run, tmp_path):
    drawn = run()
    with pytest.raises(InputError, match=r"has neither tokenizer\.json nor vocab\.json"):
        find_notices(replace(drawn, card=replace(drawn.card, folder=tmp_path)))


def test_a_picture_of_other_numerics(run, tmp_path):
    request = run().request
    for numerics, count in ((png.NUMERICS, 0), (png.NUMERICS + 1, 1)):
        path = tmp_path / f"{numerics}.png"
        size = {"width": 1, "height": 1}
        record = (
            request.as_record()
            | size
            | {"seed": 1, "prompt": "a cat", "versions": {"fastdiff": "0"}, "numerics": numerics}
        )
        path.write_bytes(png.encode(Image.new("RGB", (1, 1)), record))
        assert len(find_source_notices(Recorded.read(str(path)), request)) == count
    assert find_source_notices(None, request) == []


def test_a_lora_tag_is_named_once_and_drawn_as_text(run):
    tag = "<lora:add_detail:0.8>"
    drawn = run(prompt=(f"a cat {tag}", f"{tag}<lora:b:1>"))
    notice = "it is drawn as text; give its file with --lora, and --prompt-syntax weighted"
    assert find_notices(drawn)[0] == f"prompt: '{tag}' and 1 more: {notice}"
    assert drawn.request.prompt[0] == f"a cat {tag}"
    assert find_notices(run(negative_prompt=tag))[0] == f"prompt: '{tag}': {notice}"
    assert find_notices(run(prompt=("a <lora> of 1 < 2",))) == []
