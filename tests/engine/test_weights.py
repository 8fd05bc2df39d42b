"""Requests whose model needs other weights: sets of LoRAs never mix, and none keeps another out."""

import random
import weakref

import pytest

import fastdiff
from fastdiff import InputError
from fastdiff.engine import Weights
from fastdiff.engine.weights import Applied, Wanted, admitted
from tests.adapters.formats import in_diffusers, random_loras, save
from tests.engine.requests import WAIT, Held, Steps, assert_same, drawing, options_of
from tests.support.text_pipelines import text_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("queue", "active", "room", "expected"),
    [
        ("1a 1a 2b", "", 9, [0, 1, 2]),
        ("1a 1a 2b", "", 2, [0, 1]),
        ("1a 1b 1a 2b", "", 9, [0, 2, 3]),  # a switch serves all that wait
        ("1b 1a 2b 2a", "1a 1a", 9, [2]),  # the young a does not overtake b
        ("1a 2a 1a", "1a", 9, [0, 1, 2]),
        ("1a", "", 0, []),
    ],
)
def test_requests_begin_oldest_first_and_a_model_has_one_set(queue, active, room, expected):
    """Each request is its model and its set of weights."""
    wanted = [Wanted(*each) for each in queue.split()]
    assert admitted(wanted, [Wanted(*each) for each in active.split()], room) == expected


class Model:
    pass


def test_weights_are_applied_when_they_change_and_again_after_an_error():
    applied, model, seen = Applied(), Model(), []

    def fails():
        seen.append("fails")
        raise RuntimeError("no room")

    first, second, broken = (Weights(1, lambda: seen.append(1)), Weights(2, lambda: seen.append(2)), Weights(3, fails))
    for weights in (first, first, second, first):
        applied.apply(model, weights)
    assert seen == [1, 2, 1]
    with pytest.raises(RuntimeError):
        applied.apply(model, broken)
    applied.apply(model, first)  # the error may have left anything
    applied.apply(model, None)  # what it draws with may change the model
    applied.apply(model, first)
    assert seen == [1, 2, 1, "fails", 1, 1]


def test_applied_weights_keep_no_model_alive():
    applied, model = Applied(), Model()
    applied.apply(model, Weights(1, model.__init__))  # it refers to the model
    there = weakref.ref(model)
    del model
    assert there() is None


@pytest.fixture(scope="module")
def with_loras(text_folder, tmp_path_factory):
    """Return a pipeline with two LoRAs."""
    pipe, folder = fastdiff.Pipeline.from_pretrained(text_folder("sd1"), scheduler="ddim"), tmp_path_factory.mktemp("l")
    for name, seed in (("one", 1), ("two", 2)):
        loras = random_loras(text_pipeline("sd1"), 4, seed)
        pipe.load_lora_weights(save(folder / f"{name}.safetensors", in_diffusers(loras)), name)
    return pipe


def sets_of(pipe) -> list[Weights]:
    """Return two sets of LoRAs, and the model without LoRAs."""

    def use(names: list[str], weights: list[float]):
        pipe.enable_lora()
        pipe.set_adapters(names, weights)

    return [
        Weights(("one", 1.0), lambda: use(["one"], [1.0])),
        Weights(("one", 0.5, "two", 0.5), lambda: use(["one", "two"], [0.5, 0.5])),
        Weights("plain", lambda: pipe.disable_lora()),
    ]


def test_requests_with_sets_of_loras_get_the_pictures_that_they_get_alone(with_loras, monkeypatch):
    pipe, dice, steps = with_loras, random.Random(3), Steps(monkeypatch)
    asked = [(options_of(dice), dice.choice(sets_of(pipe))) for _ in range(14)]
    expected = []
    for options, weights in asked:
        weights.apply()
        expected.append(pipe(**options))
    with drawing(max_batch=4, max_requests=5) as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        futures = [engine.call(pipe, lambda o=options: pipe(**o), weights=weights) for options, weights in asked]
        held.gate.set()
    for future, output in zip(futures, expected, strict=True):
        assert_same(future.result(), output)
    assert max(steps.sizes) > 1


def test_a_set_that_waits_is_not_overtaken_by_younger_requests(pipe):
    """The set that is drawn gets new requests all the time. The other one begins when those that ran before end."""
    begun, sets = [], [Weights(name, lambda name=name: begun.append(name)) for name in "ab"]

    def draws(name: str, more: int = 0):
        def function():
            begun.append(name)
            for _ in pipe.stream(prompt="a cat", num_inference_steps=4):
                if more:
                    engine.call(pipe, draws("young", more - 1), weights=sets[0])
            return name

        return function

    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        old = [engine.call(pipe, draws("old", 1), weights=sets[0]) for _ in range(2)]
        other = engine.call(pipe, draws("other"), weights=sets[1])
        held.gate.set()
        assert [each.result(WAIT) for each in (*old, other)] == ["old", "old", "other"]
    assert begun == ["a", "old", "old", "b", "other", "a"] + ["young"] * 8


def test_an_error_while_weights_are_applied_is_of_that_request(pipe):
    seen = []

    def fails():
        raise InputError("lora: it has another rank")

    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        wrong = engine.call(pipe, lambda: seen.append("drawn"), weights=Weights("wrong", fails))
        good = engine.call(pipe, lambda: "drawn", weights=Weights("good", lambda: seen.append("applied")))
        held.gate.set()
    with pytest.raises(InputError, match="another rank"):
        wrong.result(WAIT)
    assert good.result(WAIT) == "drawn" and seen == ["applied"]


def test_a_cancelled_request_applies_nothing(pipe):
    seen = []
    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        engine.call(pipe, lambda: None, weights=Weights("a", lambda: seen.append("a"))).cancel()
        held.gate.set()
    assert not seen


@pytest.mark.parametrize(
    ("weights", "message"), [("a", "weights: 'a' has the wrong"), (Weights([], print), "hashable")]
)
def test_wrong_weights_are_named(pipe, weights, message):
    with drawing() as engine, pytest.raises(InputError, match=message):
        engine.call(pipe, lambda: None, weights=weights)
