"""fastdiff.draw_many."""

import pytest

import fastdiff

pytestmark = pytest.mark.usefixtures("one_thread")  # as a worker has


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_it_draws_as_the_command_does(labelled, tmp_path, make_plan, worker, digests, capfd):
    options = {"num_inference_steps": 2, "dtype": "float32", "shard_size": 6, "workers": 1, "device": "cpu"}
    made = fastdiff.draw_many(
        labelled, tmp_path / "out", label=[2, "0"], num_images=4, seed=3, progress=False, **options
    )
    assert (made.folder, made.pictures, made.given_up) == (tmp_path / "out", 8, {})
    assert not capfd.readouterr().err
    worker(make_plan(labelled, label=(2, 0), seed=3, num_images=4), tmp_path / "alone").work()
    assert digests(tmp_path / "out") == digests(tmp_path / "alone")


def test_what_cannot_be_drawn_is_an_input_error(model, tmp_path, capfd):
    with pytest.raises(fastdiff.InputError, match="steps: 0 is not a whole number"):
        fastdiff.draw_many(model, tmp_path / "out", num_inference_steps=0)
    assert "steps: 0" in capfd.readouterr().err
    with pytest.raises(fastdiff.InputError, match="unrecognized arguments: --steeps=3"):
        fastdiff.draw_many(model, tmp_path / "out", steeps=3, progress=False)
