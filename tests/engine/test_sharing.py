"""Engine: decoding and steps with ControlNets are shared, and rows are not joined again."""

import pytest
import torch

from fastdiff.diffusion import shared_steps
from fastdiff.diffusion.conditioning import ConditioningTable, Entries
from fastdiff.diffusion.conditions import Conditions
from fastdiff.diffusion.loop import Loop
from fastdiff.diffusion.shared_steps import AskedDecode, decode_together
from tests.engine.requests import PROMPTS, Held, Steps, drawing
from tests.parity.image_starts.pictures import picture
from tests.support.text_pipelines import tiny_controlnet

pytestmark = pytest.mark.usefixtures("one_thread")


def test_finished_latents_are_decoded_together(pipe, monkeypatch):
    steps = Steps(monkeypatch)
    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        for seed in range(3):
            engine.submit(pipe, prompt="a cat", seed=seed, num_inference_steps=2)
        engine.submit(pipe, prompt="a cat", num_inference_steps=2, height=16, width=24)
        engine.submit(pipe, prompt="a cat", num_inference_steps=2, output_type="latent")
        held.gate.set()
    assert sorted(steps.decodes) == [1, 1, 3] and engine.stats().decodes == 3


def test_latents_are_decoded_in_few_sizes():
    sizes = []

    def decode(latents):
        sizes.append(len(latents))
        return 2 * latents

    parts = torch.arange(39.0).view(39, 1, 1, 1).split([3, 4, 32])
    found = decode_together([AskedDecode(None, decode, part) for part in parts])
    assert sizes == [16, 16, 4, 2, 1]
    assert all(torch.equal(ours.result, 2 * part) for ours, part in zip(found, parts, strict=True))


def drawn_as_one_batch(pipe, options, monkeypatch) -> tuple[Steps, list, list]:
    """Return the shared steps, and the latents of requests together and alone, all by the graph of a GPU."""
    monkeypatch.setattr(Loop, "step_alone", Loop.step_as_graph)
    alone = [pipe(**each, output_type="latent").images for each in options]
    steps = Steps(monkeypatch, as_graph=True)
    with drawing() as engine:
        held = Held(engine, pipe, **{**options[0], "num_inference_steps": 1})
        together = [engine.submit(pipe, **each, output_type="latent") for each in options]
        held.gate.set()
    return steps, [future.result().images for future in together], alone


@pytest.mark.parametrize(
    "options",
    [{}, {"guess_mode": True}, pytest.param({"guidance_scale": 1.0}, marks=pytest.mark.slow)],
    ids=["usual", "guess", "unguided"],
)
def test_steps_with_the_same_controlnets_are_shared(options, pipe, monkeypatch):
    """A ControlNet with another scale is not shared, and neither are steps at which other ControlNets are on."""
    nets = [tiny_controlnet("sd1", seed) for seed in (4, 5)]
    controlled = pipe.with_parts(controlnet=nets)
    asked = [
        {
            "prompt": prompt,
            "seed": i,
            "num_inference_steps": 2 + 2 * (i % 2),
            "image": [picture(i), picture(9 + i)],
            "control_guidance_end": [1.0, 0.5],
            "controlnet_conditioning_scale": [1.0, 0.5 if i == 3 else 1.0],
        }
        | options
        for i, prompt in enumerate(PROMPTS)
    ]
    steps, together, alone = drawn_as_one_batch(controlled, asked, monkeypatch)
    # Both are on for one step of the first and third request, and for two of the others. Then one is on alone.
    assert steps.sizes == [1, 3, 1, 2, 1, 1, 2, 2]
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


class Embedding:
    """A model whose conditioning says which timestep and label it is of."""

    conditioning_width, dtype, device, embeds_prompt = 4, torch.float32, torch.device("cpu"), False

    def embed(self, timesteps, labels, prompt):
        return 10.0 * timesteps[:, None] + labels[:, None] + torch.arange(4) / 8


@pytest.mark.parametrize("entries", [[2, 0], [1, 1, 0, 2, 1]], ids=["gathered-once", "more-than-conditions"])
def test_entries_of_the_table_follow_its_chunks(entries):
    conditions = Conditions(torch.tensor([3, 5, 7]), torch.zeros(1, dtype=torch.int64))
    table, wanted = ConditioningTable(Embedding(), torch.arange(70), conditions, chunk=32), torch.tensor(entries)
    given = Entries(wanted)
    for step, most, count in ((0, 1, 1), (30, 8, 2), (32, 8, 8), (69, 8, 1), (5, 1, 1)):
        temb, timesteps = table.of(step, given, most)
        for j in range(count):
            assert torch.equal(temb[:, j], table.at(step + j).temb[wanted])
        assert timesteps.tolist() == [[*range(step, step + count)]] * len(entries)


def test_rows_that_go_on_together_are_not_joined_again(pipe, monkeypatch):
    """The second and the third step of two requests join nothing."""
    counts, usual, take = [], shared_steps._Batch._join, shared_steps._Batch._take
    monkeypatch.setattr(shared_steps._Batch, "_join", lambda *args, **how: counts.append(1) or usual(*args, **how))

    def counted(batch, asked, *rest, **how):
        counts.clear()
        take(batch, asked, *rest, **how)
        of_steps.append((len(asked), len(counts)))

    of_steps: list[tuple[int, int]] = []
    monkeypatch.setattr(shared_steps._Batch, "_take", counted)
    options = [{"prompt": prompt, "seed": i, "num_inference_steps": 3} for i, prompt in enumerate(PROMPTS[:2])]
    drawn_as_one_batch(pipe, options, monkeypatch)
    assert of_steps[-2:] == [(2, 0), (2, 0)] and of_steps[-3][1] > 1


def test_rows_that_a_callback_changes_are_joined_again(pipe, monkeypatch):
    def halved(pipe, step, timestep, tensors):
        return {"latents": tensors["latents"] / 2}

    options = [
        {"prompt": prompt, "seed": i, "num_inference_steps": 3, "callback_on_step_end": halved}
        for i, prompt in enumerate(PROMPTS[:2])
    ]
    steps, together, alone = drawn_as_one_batch(pipe, options, monkeypatch)
    assert max(steps.sizes) == 2
    for ours, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
