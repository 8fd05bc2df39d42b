"""The conditioning table: its chunks and their entries."""

import pytest
import torch

from fastdiff import DiTTransformer2DModel
from fastdiff.diffusion import conditioning
from fastdiff.diffusion.conditions import Conditions
from fastdiff.models.blocks.conditioning import Conditioning, Prompt

TINY = {
    "sample_size": 8,
    "in_channels": 3,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_embeds_ada_norm": 20,
}
CONDITIONS = Conditions(torch.tensor([0, 5, 19]), torch.arange(3))


@pytest.fixture
def denoiser(randomise):
    return randomise(DiTTransformer2DModel.from_config(TINY))


def test_a_chunk_of_the_table_keeps_to_its_bytes(denoiser, monkeypatch):
    made = []
    make_table = conditioning.make_table
    monkeypatch.setattr(conditioning, "make_table", lambda *args: made.append(make_table(*args)) or made[-1])
    monkeypatch.setattr(conditioning, "TABLE_BYTES", 40 * 3 * 4 * denoiser.conditioning_width)
    table = conditioning.ConditioningTable(denoiser, torch.arange(50), CONDITIONS)
    temb = torch.stack([table.at(step).temb for step in range(50)])
    assert [chunk.shape[1] for chunk in made] == [32, 18]
    assert max(chunk.nbytes for chunk in made) <= conditioning.TABLE_BYTES
    assert torch.equal(temb[33, 1], denoiser.conditioning(torch.arange(32, 64), torch.full((32,), 5)).temb[1])


def test_a_timestep_keeps_its_place_in_its_group_wherever_a_chunk_begins(denoiser, monkeypatch):
    """A timestep's position in its group affects its bits, and the number of conditions affects the chunk length."""
    groups, embed = [], denoiser.embed
    monkeypatch.setattr(denoiser, "embed", lambda group, *rest: groups.append(group) or embed(group, *rest))
    conditioning.make_table(denoiser, torch.arange(50), CONDITIONS, range(40, 50))
    assert len(groups) == len(CONDITIONS)
    assert all(group.tolist() == [*range(32, 50), *[49] * 14] for group in groups)


def test_a_step_has_an_entry_for_each_condition_and_its_own_timestep(denoiser):
    table = conditioning.ConditioningTable(denoiser, torch.tensor([7, 3]), CONDITIONS)
    for step, timestep in enumerate((7, 3)):
        found = table.at(step)
        assert found.temb.shape == (3, denoiser.conditioning_width)
        assert found.timesteps.tolist() == [timestep] * 3


def test_pictures_choose_their_conditions():
    """`of` selects the same entries of every field."""
    entries = Conditioning(torch.arange(6.0).reshape(3, 2), torch.tensor([1, 2, 3]))
    chosen = entries.of(torch.tensor([2, 0, 0, 1]))
    assert chosen.temb.tolist() == [[4, 5], [0, 1], [0, 1], [2, 3]]
    assert chosen.timesteps.tolist() == [3, 1, 1, 2]


class Embedding:
    """A model that embeds the timestep, and perhaps the prompt too."""

    conditioning_width, dtype, device = 2, torch.float32, torch.device("cpu")

    def __init__(self, embeds_prompt):
        self.embeds_prompt, self.calls = embeds_prompt, 0

    def embed(self, timesteps, labels, prompt):
        self.calls += 1
        told = prompt.text[:, 0] if self.embeds_prompt else torch.zeros(len(timesteps), 2)
        return timesteps[:, None] + told

    def project(self, prompt):
        return (prompt.text,)


@pytest.mark.parametrize(("embeds_prompt", "calls"), [(False, 1), (True, 3)])
def test_conditions_share_a_row_if_the_time_alone_is_embedded(embeds_prompt, calls):
    text = torch.tensor([[[0.1, 0.2]], [[0.3, 0.4]], [[0.5, 0.6]]])
    conditions = Conditions(None, torch.arange(3), prompt=Prompt(text))
    denoiser = Embedding(embeds_prompt)
    table = conditioning.ConditioningTable(denoiser, torch.tensor([7, 3]), conditions)
    expected = 3 + (text[:, 0] if embeds_prompt else torch.zeros(3, 2))
    assert torch.equal(table.at(1).temb, expected)
    assert torch.equal(table.of(1, conditioning.Entries(torch.tensor([2, 0])))[0][:, 0], expected[[2, 0]])
    assert denoiser.calls == calls
