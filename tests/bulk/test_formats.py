"""The files of shards, read by other tools' readers."""

import io
import json
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from fastdiff.requests import png

pytestmark = pytest.mark.usefixtures("one_thread")  # like a worker


@pytest.fixture
def pictures(make_plan, worker, labelled, tmp_path):
    """Runs workers. Returns the pictures of the PNG format as arrays, and the folder of another format."""

    def draw(format, **options):
        folders = []
        for each in ("png", format):
            worker(make_plan(labelled, num_images=3, shard_size=4, format=each, **options), tmp_path / each).work()
            folders.append(tmp_path / each)
        return [np.asarray(Image.open(path)) for path in sorted(folders[0].rglob("*.png"))], folders[1]

    return draw


def test_a_webdataset(pictures):
    expected, folder = pictures("webdataset")
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [
        "000000.tar",
        "000001.tar",
        "000002.tar",
        "plan.json",
    ]
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, ending = member.name.split(".")
                samples.setdefault(key, {})[ending] = tar.extractfile(member).read()
    assert list(samples) == [f"{i:06d}" for i in range(9)]
    for i, (sample, image) in enumerate(zip(samples.values(), expected, strict=True)):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(sample["png"]))), image)
        assert int(sample["cls"]) == i // 3 and json.loads(sample["json"])["seed"] == i % 3


def test_a_webdataset_has_the_prompts(make_plan, worker, text_folder, tmp_path):
    plan = make_plan(text_folder("sd1"), prompt=("a cat", "ein Fuß"), num_images=1, format="webdataset")
    worker(plan).work()
    with tarfile.open(tmp_path / "out/000000.tar") as tar:
        assert tar.getnames() == [f"00000{i}.{ending}" for i in range(2) for ending in ("png", "json", "txt")]
        assert tar.extractfile("000001.txt").read().decode() == "ein Fuß"


def test_npz_as_guided_diffusions_evaluator_reads_it(pictures):
    expected, folder = pictures("npz")
    with np.load(folder / "samples.npz") as samples:
        assert samples["arr_0"].dtype == np.uint8 and np.array_equal(samples["arr_0"], expected)
        assert samples["arr_1"].tolist() == [i // 3 for i in range(9)]
    with zipfile.ZipFile(folder / "000001.npz") as archive:
        assert [json.loads(line)["seed"] for line in archive.read("settings.jsonl").splitlines()] == [1, 2, 0, 1]


def test_npz_without_labels(make_plan, worker, tmp_path):
    worker(make_plan(format="npz")).work()
    with np.load(tmp_path / "out/samples.npz") as samples:
        assert samples.files == ["arr_0"] and samples["arr_0"].shape == (20, 8, 8, 3)


def test_the_joined_file_is_written_again_where_it_is_gone(make_plan, worker, tmp_path):
    worker(make_plan(format="npz")).work()
    first = (tmp_path / "out/samples.npz").read_bytes()
    (tmp_path / "out/samples.npz").unlink()
    worker(make_plan(format="npz")).work()
    assert (tmp_path / "out/samples.npz").read_bytes() == first


def test_pngs_hold_their_settings(pictures, tmp_path):
    pictures("npz")
    settings = png.read_settings(tmp_path / "png/000001/000005.png")
    assert (settings["seed"], settings["label"], settings["num_inference_steps"]) == (2, 1, 2)


@pytest.mark.parametrize("format", ["png", "webdataset", "npz"])
def test_equal_pictures_are_equal_bytes(make_plan, worker, tmp_path, records, format):
    for name in ("a", "b"):
        worker(make_plan(format=format, batch_size=3 if name == "a" else 5), tmp_path / name).work()
    assert records(tmp_path / "a") == records(tmp_path / "b") and len(records(tmp_path / "a")) == 4
