"""Rows of a spec with pictures that IP-Adapters read."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from fastdiff.bulk.fingerprint import differences
from fastdiff.errors import InputError
from fastdiff.runs.drawing import draw
from fastdiff.runs.option_files.kinds import files_of
from tests.parity.image_prompts.adapters import ip_adapter, picture, save_ip_adapter
from tests.support.text_pipelines import tiny_unet

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("plain.safetensors", "plus.safetensors")
CSV = "prompt,ip_adapter_image,seed\na cat,a.png,1\na cat,b.png,2\na cat,a.png,3\na fox,,4\n"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder, unet = tmp_path_factory.mktemp("ip"), tiny_unet("sd1")
    for name in NAMES:
        save_ip_adapter(folder, ip_adapter(unet, name.partition(".")[0]), name)
    return folder


@pytest.fixture
def planned(adapters, make_plan, text_folder, tmp_path):
    """Return a function that plans the rows of a file."""
    for i, name in enumerate("abc"):
        picture(i).save(tmp_path / f"{name}.png")

    def make(text, *, count=1, image="c.png", suffix=".csv", **options):
        (tmp_path / f"rows{suffix}").write_text(text)
        own = {"ip_adapter": tuple(str(adapters / name) for name in NAMES[:count])}
        own |= {"ip_adapter_image": (str(tmp_path / image),) * count} if image else {}
        own |= {"spec": str(tmp_path / f"rows{suffix}"), "num_images": None, "num_inference_steps": 1}
        return make_plan(text_folder("sd1"), **own | options)

    return make


def lines(rows):
    return "\n".join(map(json.dumps, rows))


def names_of(made):
    return [[each.name.rpartition("/")[2] for each in cell.image_prompt.pictures] for cell in made.run.cells]


def test_the_plan_knows_the_pictures_by_their_contents(planned, tmp_path):
    made = planned(CSV)
    assert names_of(made) == [["a.png"], ["b.png"], ["a.png"], ["c.png"]]
    assert made.record["ip-adapter-images"].startswith("3 of SHA-256 ") and made.record["ip-adapter-scale"] == [1.0]
    assert names_of(planned("prompt\na cat\n")) == [["c.png"]]
    assert names_of(planned(lines([{"prompt": "a cat", "ip_adapter_image": ["a.png", "b.png"]}]), suffix=".jsonl")) == [
        ["a.png", "b.png"]
    ]
    before = made.record
    shutil.copy(tmp_path / "b.png", tmp_path / "a.png")
    assert differences(planned(CSV).record, before)[0].startswith("ip-adapter-images 2 of SHA-256")


def test_the_fingerprint_has_the_files_of_the_adapters_and_of_their_encoder(planned, adapters):
    encoder = adapters / "image_encoder"
    own = [*(adapters / name for name in NAMES), encoder / "model.safetensors", encoder / "config.json"]
    assert files_of(planned(CSV, count=2, image="a.png", suffix=".csv", spec=None, prompt=("a",)).run.request) == own


@pytest.mark.parametrize(
    ("count", "rows"),
    [
        (1, CSV),
        (2, [{"prompt": "a cat", "ip_adapter_image": [f"{one}.png", f"{two}.png"]} for one, two in ("ab", "bc", "ca")]),
        (
            1,
            [{"prompt": "a cat", "ip_adapter_image": [f"{name}.png" for name in names]} for names in ("ab", "c", "bc")],
        ),
    ],
)
def test_pictures_have_the_same_bits_alone_and_in_a_batch(planned, worker, pipes, tmp_path, count, rows):
    text, suffix = (rows, ".csv") if isinstance(rows, str) else (lines(rows), ".jsonl")
    alone = planned(text, count=count, suffix=suffix, batch_size=1)
    pictures = [np.asarray(done.image) for at in draw(alone.run, pipes(alone)[0]) for done in at.finished]
    assert len({each.tobytes() for each in pictures}) == len(pictures) >= 3
    worker(planned(text, count=count, suffix=suffix, batch_size=4), out := tmp_path / "out").work()
    for path, expected in zip(sorted(out.rglob("*.png")), pictures, strict=True):
        assert np.array_equal(np.asarray(Image.open(path)), expected), path


def test_a_batch_is_drawn_in_one_call(planned, pipes):
    """Image prompts that differ need no calls of their own."""
    made = planned(CSV)
    assert [len(at.places) for at in draw(made.run, pipes(made)[0])] == [4]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"ip_adapter_image": "none.png"}, {}, "row 1: ip_adapter_image '.* does not exist; give a picture"),
        ({"ip_adapter_image": 3}, {}, "row 1: ip_adapter_image: 3 is not a path, or a list of one for each --ip-ad"),
        ({"ip_adapter_image": "a.png"}, {"count": 0}, "row 1: ip_adapter_image: an IP-Adapter reads it; give --ip-ad"),
        ({"ip_adapter_image": "a.png"}, {"count": 2}, "row 1: ip-adapter-image: 1 given for 2 --ip-adapter; give one"),
        ({"ip_adapter_image": []}, {}, "row 1: ip-adapter-image: 0 given for 1 --ip-adapter; give one for each"),
        ({}, {"image": None}, "ip-adapter-image: 0 given for 1 --ip-adapter; give one for each, in the same order"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(planned, row, options, message):
    with pytest.raises(InputError, match=message):
        planned(lines([{"prompt": "a cat", **row}, {"prompt": "a cat"}]), suffix=".jsonl", **options)


def test_rows_of_labels_have_none(planned, labelled):
    rows = lines([{"label": 1, "ip_adapter_image": "a.png"}])
    with pytest.raises(InputError, match=r"row 1: ip_adapter_image: .* has no text encoder; leave it out"):
        planned(rows, suffix=".jsonl", model=str(labelled))
