"""Workers on a GPU: the same bits for any batch size and number of shards, and a GPU that stays busy."""

import json
import warnings

import pytest
import torch

from fastdiff.bulk.fingerprint import take_fingerprint
from fastdiff.bulk.folder import Folder
from fastdiff.bulk.plan import Plan
from fastdiff.bulk.stopping import Stop
from fastdiff.bulk.worker import Worker
from fastdiff.checkpoints.model_hash import begin_files_hash
from fastdiff.pipelines import load_pipeline
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Records, draw, find_model, wait_for_pictures

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def pipe():
    request = Request(model="emoji64")
    return load_pipeline(find_model(request), request, "cuda")


@pytest.fixture
def draw_all(pipe, tmp_path):
    """Draws emoji64 into a new folder and returns it."""

    def run(name: str, **sizes) -> Folder:
        request = Request(model="emoji64", num_images=8, num_inference_steps=10)
        plan = Plan.make(request, find_model(request), **sizes)
        folder = Folder(tmp_path / name, "png")
        fingerprint = take_fingerprint(pipe, begin_files_hash(plan.run.card, None).result())
        assert fingerprint["CUDA"] and fingerprint["cuDNN"] and "NVIDIA" in str(fingerprint["device"])
        folder.open(plan, fingerprint)
        Worker(plan, folder, pipe, fingerprint, Stop()).work()
        return folder

    return run


def test_the_same_bits_in_batches_and_shards_of_any_size(draw_all, digests):
    expected = draw_all("a", shard_size=64, batch_size=64)
    ours = {path.rsplit("/")[-1]: pixels for path, pixels in digests(expected.path).items()}
    assert len(ours) > 64
    for name, sizes in {"b": {"shard_size": 64, "batch_size": 7}, "c": {"shard_size": 30, "batch_size": 32}}.items():
        other = digests(draw_all(name, **sizes).path)
        assert {path.rsplit("/")[-1]: pixels for path, pixels in other.items()} == ours


def test_the_steps_are_timed_by_the_gpu(draw_all):
    folder = draw_all("a", shard_size=64, batch_size=64)
    record = json.loads((folder.shards / "000001.json").read_text())
    assert 0 < record["gpu_seconds"] < record["seconds"]


def test_a_batch_is_begun_without_waiting_for_the_gpu(pipe):
    """Nothing synchronizes once the graph is captured. The pictures equal those of a run that waits."""
    request = Request(model="emoji64", num_images=4, num_inference_steps=10)
    run = Plan.make(request, find_model(request), shard_size=8, batch_size=8).run
    records = Records(run, pipe)
    first = [each for at in draw(run, pipe, records) for each in at.finished]
    usual = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as waited:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            batches = [at for at in draw(run, pipe, records, wait=False) if at.ended]
        finally:
            torch.cuda.set_sync_debug_mode(usual)
    assert not [f"{each.filename}:{each.lineno}" for each in waited if "called a synchronizing" in str(each.message)]
    later = [each for at in batches for each in wait_for_pictures(at, records)]
    assert len(first) > 8 and [each.place for each in later] == [each.place for each in first]
    assert [each.image.tobytes() for each in later] == [each.image.tobytes() for each in first]
