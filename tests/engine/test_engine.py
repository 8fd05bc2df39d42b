"""Engine: requests of random arrival get the pictures that they get alone, wherever they share a step."""

import itertools
import random
from concurrent.futures import CancelledError
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch

import fastdiff
from fastdiff import InputError, NonFiniteError
from fastdiff.diffusion.loop import Loop
from fastdiff.diffusion.shared_steps import Company, waited
from fastdiff.engine import Engine
from tests.engine.requests import PROMPTS, SIZES, WAIT, Held, Steps, assert_same, close, drawing, options_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_requests_of_random_arrival_get_the_pictures_that_they_get_alone(pipe, monkeypatch):
    dice, steps = random.Random(7), Steps(monkeypatch)
    asked = [options_of(dice) for _ in range(24)]
    expected = [pipe(**options) for options in asked]
    cancelled = {3, 11, 17}
    futures: dict = {}
    with drawing(max_batch=4, max_requests=9) as engine:

        def arrive(count: int) -> None:
            for _ in range(count):
                i = len(futures)
                if i < len(asked):
                    futures[i] = engine.submit(pipe, on_step=lambda step: arrive(dice.randint(0, 2)), **asked[i])
                    if i in cancelled:
                        futures[i].cancel()

        engine.submit(pipe, on_step=lambda step: arrive(3), **options_of(dice)).result()
        while len(futures) < len(asked):
            arrive(1)
    for i, future in futures.items():
        if i in cancelled:
            assert future.cancelled()
        else:
            assert_same(future.result(), expected[i])
    assert max(steps.sizes) > 1 and len(set(steps.keys)) > 2


def test_an_operation_whose_bits_depend_on_the_batch_is_noticed(pipe, monkeypatch):
    """Steps run as one batch, as on a GPU, by an operation that mixes the pictures."""
    Steps(monkeypatch, as_graph=True)
    usual = pipe.denoiser.predict

    def mixed(x, *rest):
        return usual(x + 1e-3 * x.mean(), *rest)

    options = [{"prompt": prompt, "seed": i, "num_inference_steps": 3} for i, prompt in enumerate(PROMPTS)]
    monkeypatch.setattr(pipe.denoiser, "predict", mixed)
    monkeypatch.setattr(Loop, "step_alone", Loop.step_as_graph)
    alone = [pipe(**each, output_type="latent").images for each in options]
    with drawing() as engine:
        together = [engine.submit(pipe, **each, output_type="latent") for each in options]
    assert not all(torch.equal(future.result().images, each) for future, each in zip(together, alone, strict=True))


@pytest.mark.parametrize("scheduler", ["ddim", "dpm++2m", "euler-a"])
def test_one_batch_of_rows_at_steps_of_their_own(scheduler, text_folder, monkeypatch):
    """The graph of a GPU, run without a graph: each row has its own schedule, step, text, scale, seed and history."""
    pipe = fastdiff.Pipeline.from_pretrained(text_folder("sdxl"), device="cpu", scheduler=scheduler)
    steps = Steps(monkeypatch, as_graph=True)
    monkeypatch.setattr(Loop, "step_alone", Loop.step_as_graph)
    options = [
        {
            "prompt": prompt,
            "seed": i,
            "num_inference_steps": 2 + 2 * i,
            "guidance_scale": 2.0 + i,
            "batch_size": 1 + i % 2,
        }
        for i, prompt in enumerate(PROMPTS)
    ]
    alone = [pipe(**each, output_type="latent").images for each in options]
    together: list = []

    def arrive(step=None) -> None:
        """Let one more request begin, a step after the one before."""
        if len(together) < len(options):
            together.append(engine.submit(pipe, on_step=arrive, **options[len(together)], output_type="latent"))

    with drawing() as engine:
        arrive()
        while len(together) < len(options):
            together[-1].result()
    assert max(steps.sizes) > 2
    for future, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(future.result().images, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_keys_take_turns(pipe, monkeypatch):
    steps = Steps(monkeypatch)
    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        for height, width in SIZES[:2]:
            for seed in range(3):
                engine.submit(pipe, prompt="a cat", seed=seed, num_inference_steps=4, height=height, width=width)
        held.gate.set()
    assert steps.sizes == [1] + [3] * 8
    assert all(now != following for now, following in itertools.pairwise(steps.keys[1:]))


def test_a_request_that_fails_fails_alone(pipe, monkeypatch):
    options = {"prompt": "a cat", "num_inference_steps": 3, "height": 16, "width": 16}
    expected = pipe(**options, seed=1)
    bad = torch.full((1, 4, 8, 8), float("nan"))
    with drawing() as engine:
        good = engine.submit(pipe, **options, seed=1)
        wrong = engine.submit(pipe, **options, guidance_scale=-1)
        nan = engine.submit(pipe, **options, latents=bad)
        also_good = engine.submit(pipe, **options, seed=1)
    for future in (good, also_good):
        assert_same(future.result(), expected)
    with pytest.raises(InputError, match="guidance_scale"):
        wrong.result()
    with pytest.raises(NonFiniteError):
        nan.result()


def test_a_step_that_fails_is_tried_for_each_request_alone(pipe, monkeypatch):
    options = {"prompt": "a cat", "num_inference_steps": 2}
    expected, usual = pipe(**options, seed=1), Company.take

    def fails(company, asked, *rest):
        if len(asked) > 1:
            raise RuntimeError("too many")
        return usual(company, asked, *rest)

    monkeypatch.setattr(Company, "take", fails)
    with drawing() as engine:
        futures = [engine.submit(pipe, **options, seed=1) for _ in range(3)]
    for future in futures:
        assert_same(future.result(), expected)


def test_a_cancelled_request_ends_before_its_next_step(pipe):
    seen, futures = list[int](), []

    def after(step):
        seen.append(step.index)
        if step.index == 1:
            futures[0].cancel()

    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        futures.append(engine.submit(pipe, on_step=after, prompt="a cat", num_inference_steps=6))
        held.gate.set()
    assert seen == [0, 1]
    with pytest.raises(CancelledError):
        futures[0].result()


def test_closing(pipe):
    engine = Engine()
    held = Held(engine, pipe, num_inference_steps=3)
    queued = engine.submit(pipe, prompt="a cat", num_inference_steps=3)
    queued.add_done_callback(lambda _: held.gate.set())  # cancelled by `close`
    close(engine, cancel=True)
    assert queued.cancelled() and held.future.cancelled()
    with pytest.raises(InputError, match="closed"):
        engine.submit(pipe, prompt="a cat")


def test_weights_that_change_meanwhile_are_noticed(pipe, monkeypatch):
    """A request never gets a step with the weights of another request."""
    state = ["first"]
    monkeypatch.setattr(type(pipe.denoiser), "weights_state", property(lambda model: state[0]))
    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=3)
        state[0] = "second"  # the held request asks for its next step with these, and others come with the first
        held.gate.set()
        assert held.future.result(WAIT)
        held = Held(engine, pipe, num_inference_steps=3)
        other = engine.submit(
            pipe, prompt="a cat", num_inference_steps=2, on_step=lambda step: state.insert(0, "third")
        )
        held.gate.set()
        with pytest.raises(InputError, match="weights changed"):
            held.future.result(WAIT)
        assert other.result(WAIT)


def test_generators_with_and_without_noise_in_the_steps(pipe):
    """A run that draws no noise and a run whose generator draws it never share a step."""
    options = {"prompt": "a cat", "num_inference_steps": 3}
    expected = [pipe(**options, eta=eta, generator=torch.Generator().manual_seed(5)) for eta in (0.0, 1.0)]
    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        futures = [
            engine.submit(pipe, **options, eta=eta, generator=torch.Generator().manual_seed(5)) for eta in (0.0, 1.0)
        ]
        held.gate.set()
    for future, output in zip(futures, expected, strict=True):
        assert_same(future.result(), output)


def test_a_request_cannot_close_the_engine(pipe):
    with drawing() as engine:
        closing = engine.submit(pipe, prompt="a cat", num_inference_steps=1, on_step=lambda step: engine.close())
        with pytest.raises(InputError, match="cannot close it"):
            closing.result(WAIT)


def test_our_own_mistake_ends_all_requests(pipe, monkeypatch):
    engine = Engine()
    held = Held(engine, pipe, num_inference_steps=3)
    others = [engine.submit(pipe, prompt="a cat") for _ in range(2)]
    monkeypatch.setattr("fastdiff.engine.engine.next_turn", lambda *_: 1 / 0)
    held.gate.set()
    for future in (held.future, *others):
        with pytest.raises(ZeroDivisionError):
            future.result(WAIT)
    with pytest.raises(InputError, match="closed"):
        engine.submit(pipe, prompt="a cat")


def test_an_offloaded_pipeline_is_refused(pipe, monkeypatch):
    monkeypatch.setattr(type(pipe), "is_offloaded", property(lambda self: True))
    with drawing() as engine, pytest.raises(InputError, match="pipe: its models are offloaded"):
        engine.submit(pipe, prompt="a cat")


@pytest.mark.parametrize(("name", "value"), [("max_batch", 0), ("max_requests", "many"), ("max_batch", 1.5)])
def test_wrong_numbers_are_named(name, value):
    with pytest.raises(InputError, match=name):
        Engine(**{name: value})


def test_what_is_not_a_pipeline_is_named():
    with drawing() as engine, pytest.raises(InputError, match="pipe: 'sd15'"):
        engine.submit("sd15")


def test_a_function_shares_steps_and_its_result_is_the_future_s(pipe, monkeypatch):
    """A function may draw step by step, and more than once."""
    steps = Steps(monkeypatch)
    options = [{"prompt": prompt, "seed": 2, "num_inference_steps": 3} for prompt in PROMPTS[:2]]
    expected = [pipe(**each) for each in options]
    user, seen = ContextVar("user"), []
    user.set("ann")

    def function():
        for each in options:
            for step in pipe.stream(**each):
                seen.append(step.index)
            yield step

    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        future = engine.call(pipe, lambda: (user.get(), *function()))
        plain = engine.submit(pipe, **options[0])
        held.gate.set()
    name, *ours = future.result()
    assert name == "ann" and seen == [0, 1, 2] * 2
    for output, wanted in zip((*ours, plain.result()), (*expected, expected[0]), strict=True):
        assert_same(output, wanted)
    assert steps.sizes == [1, 2, 2, 2, 1, 1, 1]


def test_a_cancelled_function_ends_before_its_next_step(pipe):
    seen, futures = [], []

    def function():
        try:
            for step in pipe.stream(prompt="a cat", num_inference_steps=6):
                seen.append(step.index)
                if step.index == 1:
                    futures[0].cancel()
        finally:
            seen.append("ended")

    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        futures.append(engine.call(pipe, function))
        held.gate.set()
    assert seen == [0, 1, "ended"]


def test_what_is_not_a_function_is_named(pipe):
    with drawing() as engine, pytest.raises(InputError, match="function: 'a cat' is not callable"):
        engine.call(pipe, "a cat")


def test_a_request_knows_how_long_it_has_waited_for_others(pipe, monkeypatch):
    """By a clock on which a step takes 5 seconds, and nothing else any time."""
    now, take = [0.0], Company.take

    def slow(*args):
        now[0] += 5
        return take(*args)

    monkeypatch.setattr(Company, "take", slow)
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    for name in ("engine", "request"):
        monkeypatch.setattr(f"fastdiff.engine.{name}.time", clock)
    asked, seen = {"num_inference_steps": 3, "prompt": "a cat"}, ([], [], [])
    with drawing(max_batch=1) as engine:
        alone, first, second = (lambda step, each=each: each.append(waited.get()) for each in seen)
        engine.submit(pipe, on_step=alone, **asked).result()
        held = Held(engine, pipe, num_inference_steps=1)
        both = [engine.submit(pipe, on_step=note, **asked) for note in (first, second)]
        held.gate.set()
        for future in both:
            future.result()
    assert seen == ([0, 0, 0], [0, 0, 5], [15, 20, 20])  # the older request takes all its steps first; 5 are decodings
