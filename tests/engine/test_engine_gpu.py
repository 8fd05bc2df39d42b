"""Engine on a GPU: the graphs of shared steps give each request the pixels that it has alone."""

import random

import pytest

import fastdiff
from tests.engine.requests import PROMPTS, assert_same, drawing, options_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", [7, 8])
def test_requests_of_random_arrival_have_the_pixels_that_they_have_alone(text_folder, seed):
    dice, folder = random.Random(seed), text_folder("sd1")
    pipes = [fastdiff.Pipeline.from_pretrained(folder, device="cuda", scheduler=name) for name in ("ddim", "euler-a")]
    pipes.append(pipes[0].with_scheduler(fastdiff.Pipeline.from_pretrained(folder, scheduler="dpm++2m").scheduler))
    asked = [(dice.choice(pipes[::2]), options_of(dice)) for _ in range(24)]
    asked += [(pipes[1], options_of(dice)) for _ in range(12)]
    expected = [pipe(**options) for pipe, options in asked]
    futures: dict = {}
    with drawing(max_batch=8) as engine:

        def arrive(step=None) -> None:
            """Submit the next requests: none, one or two."""
            for _ in range(dice.randint(0, 2)):
                i = len(futures)
                if i < len(asked):
                    watch = arrive if i % 3 else None
                    futures[i] = engine.submit(asked[i][0], on_step=watch, **asked[i][1])

        engine.submit(pipes[0], prompt=PROMPTS[0], num_inference_steps=40, on_step=arrive).result()
        while len(futures) < len(asked):
            arrive()
    for i, future in futures.items():
        assert_same(future.result(), expected[i])
