"""fastdiff.draw_many: what it refuses. test_processes draws with it."""

import pytest

import fastdiff


def test_what_is_done_comes_at_once(labelled, tmp_path, make_plan, worker, capfd):
    """Every option arrives: otherwise the plan would differ."""
    plan = make_plan(labelled, label=(2, 0), seed=3, num_images=4, scheduler="ddpm")
    worker(plan, tmp_path / "out").work()
    options = {"num_inference_steps": 2, "dtype": "float32", "shard_size": 6, "scheduler": "ddpm", "verify": True}
    made = fastdiff.draw_many(
        labelled, tmp_path / "out", label=[2, "0"], num_images=4, seed=3, progress=False, **options
    )
    assert (made.folder, made.pictures, made.given_up) == (tmp_path / "out", 8, {})
    assert not capfd.readouterr().err


def test_what_cannot_be_drawn_is_an_input_error(model, tmp_path, capfd):
    with pytest.raises(fastdiff.InputError, match="steps: 0 is not a whole number"):
        fastdiff.draw_many(model, tmp_path / "out", num_inference_steps=0)
    assert "steps: 0" in capfd.readouterr().err
    for value in ("a\ud800", "a\0b"):
        with pytest.raises(fastdiff.InputError, match=r"'--negative-prompt=a.* holds .*; remove it"):
            fastdiff.draw_many(model, tmp_path / "out", negative_prompt=value)
    with pytest.raises(fastdiff.InputError, match="unrecognized arguments: --steeps=3"):
        fastdiff.draw_many(model, tmp_path / "out", steeps=3, progress=False)
