"""Requests of tiny pipelines, and engines that must end."""

import random
import threading
from contextlib import contextmanager
from functools import partial

import numpy as np

from fastdiff.diffusion.shared_steps import AskedDecode, Company
from fastdiff.engine import Engine

PROMPTS = ("a cat", "the photo of a cat riding", "an astronaut", "a cat 's photo")
SIZES = ((16, 16), (16, 24), (32, 16))
WAIT = 60  # seconds, at most


def options_of(random: random.Random) -> dict:
    """Return the options of a request."""
    height, width = random.choice(SIZES)
    options = {
        "prompt": random.choice(PROMPTS),
        "num_inference_steps": random.randint(1, 6),
        "seed": random.randint(0, 9),
        "guidance_scale": random.choice([1.0, 3.0, 7.5]),
        "height": height,
        "width": width,
    }
    if random.random() < 0.3:
        options |= {"negative_prompt": random.choice(PROMPTS), "batch_size": random.choice([1, 2])}
    return options


def pixels(output) -> list[np.ndarray]:
    return [np.asarray(image) for image in output.images]


def assert_same(output, expected) -> None:
    for ours, theirs in zip(pixels(output), pixels(expected), strict=True):
        assert np.array_equal(ours, theirs)


@contextmanager
def drawing(**options):
    """Yield an engine; fail if it does not end."""
    engine = Engine(**options)
    yield engine
    close(engine)


def close(engine: Engine, **options) -> None:
    closing = threading.Thread(target=lambda: engine.close(**options), daemon=True)
    closing.start()
    closing.join(WAIT)
    assert not closing.is_alive()


class Steps:
    """Records which requests take a step together."""

    def __init__(self, monkeypatch, as_graph: bool = False):
        self.sizes: list[int] = []
        self.keys: list = []
        self.decodes: list[int] = []  # requests that decode together
        take = Company.take

        def recorded(company, asked, size, goes_on):
            assert len({each.key for each in asked}) == 1 and size >= sum(each.pictures for each in asked)
            if isinstance(asked[0], AskedDecode):
                self.decodes.append(len(asked))
                return take(company, asked, size, goes_on)
            self.sizes.append(len(asked))
            self.keys.append(asked[0].key)
            made = (company.as_graph if as_graph else partial(take, company))(asked, size, goes_on)
            self.sizes += [len(asked)] * (made[0].steps - 1)
            self.keys += [asked[0].key] * (made[0].steps - 1)
            return made

        monkeypatch.setattr(Company, "take", recorded)


class Held:
    """A request that holds the turn after its first step until it is let go."""

    def __init__(self, engine, pipe, **options):
        self.begun, self.gate = threading.Event(), threading.Event()
        self.future = engine.submit(pipe, on_step=self.wait, **{"prompt": "a cat", **options})
        assert self.begun.wait(WAIT)

    def wait(self, step) -> None:
        self.begun.set()
        assert self.gate.wait(WAIT)
