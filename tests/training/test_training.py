"""Training of emoji64: labels from names, random draws, shifts, learning rate, resuming, and evaluation."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler

sys.path.insert(0, str(Path(__file__).parents[2]))  # training/ is not installed

from training import labels as label_table
from training.data import SIZE, Augmenter, load
from training.diffusion import SCHEDULER, Diffusion, cumulative, picture_distribution, stratified_draw
from training.evaluate import LabelledModel, kernel_distance
from training.labels import SHORT_GROUPS, SUBGROUPS, make_labels, subgroup_of
from training.model import build_dit, load_model
from training.neighbours import nearest
from training.train_emoji64 import Trainer, parse_arguments, rate_factor, run


@pytest.mark.parametrize(
    ("group", "name", "subgroup"),
    [
        pytest.param("Animals & Nature", "cat", "four-legged animals", id="rest of the group"),
        pytest.param("Animals & Nature", "cat face", "animal faces", id="pattern"),
        pytest.param("People & Body", "woman cook: dark skin tone", "workers", id="skin tone not looked at"),
        pytest.param("People & Body", "family: man, girl", "couples and families", id="only the word before the colon"),
        pytest.param("Travel & Places", "two o’clock", "clocks", id="curly apostrophe"),
        pytest.param("Activities", "flag: in hole", "balls and sports", id="a flag outside Flags"),
    ],
)
def test_subgroup_of(group, name, subgroup):
    assert subgroup_of(group, name) == subgroup


def test_every_group_ends_with_the_rest():
    assert SUBGROUPS.keys() == SHORT_GROUPS.keys()
    assert all(list(table.values())[-1] == ["*"] for table in SUBGROUPS.values())


def test_small_subgroups_fold_and_a_lone_one_trains_the_null_label():
    names = ["cat face"] * 12 + ["cat"] * 12 + ["bee"] * 3 + ["flag: Chad"] * 9
    groups = ["Animals & Nature"] * 27 + ["Flags"] * 9
    made = make_labels(["noto"] * 36, groups, names, [True] * 36)
    assert made.names == ("noto animal faces", "noto four-legged animals")
    assert made.groups == {"noto animals": made.names}
    assert made.of_picture == (0,) * 12 + (1,) * 15 + (made.null_label,) * 9


def test_labels_are_counted_on_training_pictures_alone():
    made = make_labels(["noto"] * 12, ["Flags"] * 12, ["flag: Chad"] * 12, [True] * 9 + [False] * 3)
    assert made.names == ()


@pytest.mark.parametrize("count", [1, 7, 256], ids=["one", "odd", "batch"])
def test_stratified_draw_takes_each_index_as_often_as_its_share(count):
    torch.manual_seed(0)
    weights = torch.tensor([5.0, 0.0, 1.0, 2.5])
    drawn = stratified_draw(cumulative(weights), count).bincount(minlength=4)
    share = count * weights / weights.sum()
    assert drawn.sum() == count
    assert drawn[1] == 0
    assert ((drawn - share).abs() < 2).all()


def test_timesteps_follow_their_density_in_random_order():
    torch.manual_seed(0)
    diffusion = Diffusion("cpu")
    t = diffusion.draw_t(1000)
    expected = torch.searchsorted(diffusion.t_cumulative, (torch.arange(1000) + 0.5) / 1000)
    assert (t.sort().values - expected).abs().max() <= 10
    assert not torch.equal(t, t.sort().values)


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_the_loss_is_the_error_on_the_velocity_of_diffusers(error):
    torch.manual_seed(0)
    x_0, noise = torch.randn(2, 3, 3, 4, 4)
    t = torch.tensor([0, 500, 999])
    v = DDIMScheduler(**SCHEDULER).get_velocity(x_0, noise, t)
    loss = Diffusion("cpu").loss(lambda *_, **__: SimpleNamespace(sample=v + error), x_0, t, t, noise)
    torch.testing.assert_close(loss, torch.full((3,), error**2))


def test_a_label_is_drawn_as_the_square_root_of_its_count():
    distribution = picture_distribution(torch.tensor([0] * 4 + [1] * 16))
    torch.testing.assert_close(distribution[3], torch.tensor(1 / 3))


def test_augmented_pictures_are_whole():
    torch.manual_seed(0)
    images = torch.zeros(1, 3, SIZE, SIZE, dtype=torch.uint8)  # a black tile, so everything white is the frame
    batch = Augmenter(images)(torch.zeros(64, dtype=torch.int64))
    sides = (batch[:, 0] < 128).any(dim=1).sum(dim=1)
    areas = (batch[:, 0] < 128).sum(dim=(1, 2))
    assert torch.equal(areas, sides**2)
    for rows, side in zip((batch[:, 0] < 128).any(dim=2), sides, strict=True):
        first, *_, last = rows.nonzero().flatten().tolist()
        assert last - first + 1 == side, "a shift over the margin comes in again on the other side"
    assert set(sides.tolist()) == {58, 59, 60, 61, 62, 64}
    assert (sides == SIZE).float().mean() == pytest.approx(0.5, abs=0.2)


def test_learning_rate_warms_up_holds_and_falls():
    factors = [rate_factor(step, 2000) for step in range(2000)]
    assert factors[0] == pytest.approx(1 / 300)
    assert set(factors[300:1501]) == {1.0}
    assert factors[1750] == pytest.approx(1 / 2)
    assert factors[-1] == pytest.approx(1 / 500)


@pytest.fixture
def small_data(tmp_path, monkeypatch) -> Path:
    """A file with eight pictures in two labels, two of them for validation."""
    monkeypatch.setattr(label_table, "MIN_PICTURES", 2)
    images = np.random.default_rng(0).integers(0, 256, (8, SIZE, SIZE, 3), dtype=np.uint8)
    names = np.array(["cat", "cat face", "dog", "dog face"] * 2)
    fixed = {"style_names": np.array(["noto"]), "group_names": np.array(list(SHORT_GROUPS))}
    group = np.full(8, list(SHORT_GROUPS).index("Animals & Nature"), np.uint8)
    validation = np.arange(8) >= 6
    path = tmp_path / "pictures.npz"
    np.savez(path, images=images, style=np.zeros(8, np.uint8), group=group, name=names, validation=validation, **fixed)
    return path


SHAPES = {"unet": ("16", "16", "32", "32"), "dit": ("64", "1")}


def arguments(model: str, data: Path, out: Path, *more: str):
    small = ["--shape", *SHAPES[model], "--batch", "2", "--steps", "4", "--report-every", "100", "--device", "cpu"]
    return parse_arguments(["--model", model, "--data", str(data), "--out", str(out), *small, *more])


@pytest.mark.parametrize("model", ["dit", pytest.param("unet", marks=pytest.mark.slow)])
def test_a_resumed_run_makes_the_same_steps(model, small_data, tmp_path, monkeypatch):
    monkeypatch.setattr("training.train_emoji64.report", lambda *_: None)
    whole = run(arguments(model, small_data, tmp_path / "whole"))
    train, _, labels = load(small_data, "cpu")
    halted = Trainer(arguments(model, small_data, tmp_path / "halted"), train, labels)
    (tmp_path / "halted").mkdir()
    halted.train_step()
    halted.train_step()
    halted.save(tmp_path / "halted" / "checkpoint.pt")
    resumed = run(arguments(model, small_data, tmp_path / "halted"))
    assert resumed.step == whole.step == 4
    for kind in ("model", "ema"):
        expected, actual = getattr(whole, kind).state_dict(), getattr(resumed, kind).state_dict()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert any(not torch.equal(p, q) for p, q in zip(whole.model.parameters(), whole.ema.parameters(), strict=True))
    written, kept = load_model(tmp_path / "whole" / "model", "cpu").state_dict(), whole.ema.state_dict()
    assert all(torch.equal(written[key], kept[key].half().float()) for key in kept)


@pytest.mark.parametrize("model", SHAPES)
def test_minutes_end_a_run_with_a_checkpoint_and_a_model(model, small_data, tmp_path):
    trainer = run(arguments(model, small_data, tmp_path / "out", "--minutes", "0"))
    assert trainer.step == 0
    assert (tmp_path / "out" / "checkpoint.pt").exists()
    folder = tmp_path / "out" / "model"
    assert (folder / "fastdiff.json").exists()
    written, kept = load_model(folder, "cpu").state_dict(), trainer.ema.state_dict()
    assert all(torch.equal(written[key], kept[key].half().float()) for key in kept)


def test_a_new_dit_predicts_zero_and_drops_no_labels_of_its_own():
    torch.manual_seed(0)
    labels = make_labels(["noto"] * 20, ["Flags"] * 20, ["flag: Chad"] * 20, [True] * 20)
    dit = build_dit(labels, 64, 2, dropout=0.0)  # in training mode
    x_t, t = torch.randn(2, 3, SIZE, SIZE), torch.tensor([0, 999])
    assert not dit(x_t, t, class_labels=torch.tensor([0, labels.null_label])).sample.any()
    for block in dit.transformer_blocks:
        embedded = [
            block.norm1.emb(t, torch.zeros(2, dtype=torch.int64), hidden_dtype=torch.float32) for _ in range(50)
        ]
        assert all(torch.equal(each, embedded[0]) for each in embedded)


def test_nearest_finds_a_shifted_copy():
    generator = torch.Generator().manual_seed(0)
    images = torch.full((3, 3, SIZE, SIZE), 255, dtype=torch.uint8)
    images[:, :, 20:40, 20:40] = torch.randint(0, 256, (3, 3, 20, 20), generator=generator, dtype=torch.uint8)
    augmenter = Augmenter(images)
    copy = augmenter.frames[3, 1].roll((2, 1), dims=(1, 2))  # picture 1 at 60 px
    found = nearest(copy[None], augmenter)
    assert found.index.tolist() == [1]
    assert found.distance.item() < 0.5


def test_kernel_distance_is_unbiased_and_sees_a_shift():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 400, 8, generator=generator)
    assert abs(kernel_distance(a, b)) < 0.1
    assert kernel_distance(a, b + 1) > 1


def test_seeds_take_finer_labels_as_often_as_the_pictures():
    model = LabelledModel(None, ("a", "b", "c"), {"old": (0, 2)}, 3, {})
    taken = [model.label_of("old", seed, [30, 99, 10]) for seed in range(40)]
    assert taken.count(0) == pytest.approx(30, abs=1)
    assert taken.count(2) == pytest.approx(10, abs=1)
