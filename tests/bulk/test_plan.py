"""Plans: the same request always gives the same shards."""

from dataclasses import replace

import pytest

from fastdiff.bulk.plan import Plan
from fastdiff.errors import InputError
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import find_model


def test_a_plan_is_cut_into_shards_of_fixed_pictures(make_plan):
    plan = make_plan()
    assert [(shard.name, shard.first, len(shard.cells)) for shard in plan.shards] == [
        ("000000", 0, 6),
        ("000001", 6, 6),
        ("000002", 12, 6),
        ("000003", 18, 2),
    ]
    assert [cell for shard in plan.shards for cell in shard.cells] == list(plan.run.cells)
    assert plan.shards[1].key(2) == "000008"


def test_the_batch_size_bears_on_no_plan(make_plan):
    plan = make_plan(batch_size=1)
    assert plan.record == make_plan().record and plan.run.batch_size == 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "seeds"),
        ({"num_images": 19}, "pictures"),
        ({"num_inference_steps": 3}, "steps"),
        ({"shard_size": 5}, "shard-size"),
        ({"format": "npz"}, "format"),
        ({"scheduler": "ddpm"}, "scheduler"),
        ({"seed": tuple(reversed(range(20))), "num_images": None}, "order"),
    ],
)
def test_all_else_does(make_plan, change, name):
    ours, theirs = make_plan(**change).record, make_plan().record
    assert ours[name] != theirs[name]


@pytest.mark.parametrize(
    ("size", "count", "shard", "batch"),
    [(32, 50_000, 512, 512), (32, 5000, 40, 512), (32, 20, 8, 512), (256, 50_000, 416, 32), (1024, 200, 4, 4)],
)
def test_sizes_suit_the_pictures(model, size, count, shard, batch):
    request = Request(model=str(model), num_images=count, height=size, width=size)
    plan = Plan.make(request, find_model(request))
    assert (plan.shard_size, plan.run.batch_size) == (shard, batch)


def test_without_labels_all_of_a_model_are_drawn(make_plan, labelled):
    plan = make_plan(labelled, num_images=2)
    assert [(cell.label, cell.seed) for cell in plan.run.cells] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "random"}, "seed random: a resumed run would draw other pictures"),
        ({"prompt": ("a cat",)}, "prompt: .* has no text encoder"),
        ({"label": (1,)}, "has no labels"),
    ],
)
def test_refusals(make_plan, change, message):
    with pytest.raises(InputError, match=message):
        make_plan(**change)


@pytest.mark.parametrize("of_rows", [False, True])
def test_weighted_prompts_are_read_before_anything_is_drawn(tmp_path, of_rows):
    prompts = ("a cat", "(a dog:1.2.3)")
    (tmp_path / "spec.csv").write_text("prompt\n" + "\n".join(prompts))
    request = Request(model="emoji-sd", prompt_syntax="weighted", prompt=() if of_rows else prompts)
    spec = str(tmp_path / "spec.csv") if of_rows else None
    with pytest.raises(InputError, match=r"prompt: the weight .* is not a number; .* \(in .\(a dog:1\.2\.3\).\)"):
        Plan.make(request, find_model(request), spec=spec)
    plan = Plan.make(replace(request, prompt_syntax=None), find_model(request), spec=spec)
    assert [cell.prompt for cell in plan.run.cells] == list(prompts)
    request = replace(request, negative_prompt="a AND b", prompt=() if of_rows else prompts[:1])
    (tmp_path / "spec.csv").write_text("prompt\na cat")
    with pytest.raises(InputError, match="negative-prompt: AND combines several prompts"):
        Plan.make(request, find_model(request), spec=spec)


@pytest.mark.parametrize("of_rows", [False, True])
def test_prompts_of_too_many_chunks_are_found_before_anything_is_drawn(tmp_path, of_rows):
    fits, longer = ("a " + "BREAK a " * count for count in (63, 64))
    (tmp_path / "spec.csv").write_text(f"prompt\na cat\n{fits}\n{longer}")
    request = Request(model="emoji-sd", prompt_syntax="weighted", prompt=() if of_rows else (fits, longer))
    spec, card = str(tmp_path / "spec.csv") if of_rows else None, find_model(request)
    with pytest.raises(InputError, match=r"prompt: it has 65 chunks of 30 tokens; give at most 64 \(in 'a BREAK a "):
        Plan.make(request, card, spec=spec)
    of_steps = Request(model="emoji-sd", prompt_syntax="weighted", prompt=("a", f"[a:{longer}:3]"))
    Plan.make(replace(of_steps, num_inference_steps=3), card)
    with pytest.raises(InputError, match="it has 65 chunks"):
        Plan.make(replace(of_steps, num_inference_steps=4), card)
    with pytest.raises(InputError, match=r"it has 65 chunks of 30 tokens; give at most 64$"):
        Plan.make(Request(model="emoji-sd", prompt_syntax="weighted", prompt=("a",), negative_prompt=longer), card)


def test_too_many_shards(make_plan, monkeypatch):
    monkeypatch.setattr("fastdiff.bulk.plan.MOST_SHARDS", 3)
    with pytest.raises(InputError, match="shard-size 6: more than 3 shards; use a larger size"):
        make_plan()


def test_planners_are_refused(save_planner):
    _, folder = save_planner("DDPM")
    request = Request(model=str(folder))
    with pytest.raises(InputError, match="bulk cannot draw trajectories"):
        Plan.make(request, find_model(request))


def test_a_shard_is_drawn_as_a_run_of_its_own(make_plan):
    plan = make_plan()
    assert plan.run_of(plan.shards[3]) == replace(plan.run, cells=plan.run.cells[18:])
