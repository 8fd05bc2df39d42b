"""Files of labels or prompts."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fastdiff.bulk.fingerprint import differences
from fastdiff.bulk.spec import Row, read_rows
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.errors import InputError
from fastdiff.requests.defaults import BULK
from fastdiff.runs.drawing import draw
from tests.support.text_pipelines import tiny_controlnet

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [{"label": 2, "seed": 5, "num_images": 2}, {"label": 0}, {"label": 1, "seed": 0}]
CONTROLLED = "prompt,control,seed\na cat,a.png,1\na cat,b.png,2\na fox,a.png,3\na cat,,4\n"
CSV = "label,seed,num_images\n2,5,2\n0,,\n1,0,\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(ROWS)),
        ("a.JSONL", "\n".join(map(json.dumps, ROWS)) + "\n\n"),
        ("a.csv", CSV),
        ("b.csv", "\ufeff" + CSV.replace("\n", "\r\n")),
    ],
)
def test_rows_are_drawn_in_their_order(tmp_path, make_plan, labelled, name, text):
    (tmp_path / name).write_bytes(text.encode())
    plan = make_plan(labelled, spec=str(tmp_path / name), seed=7, num_images=1)
    assert [(cell.label, cell.seed) for cell in plan.run.cells] == [(2, 5), (2, 6), (0, 7), (1, 0)]


def test_a_prompt_may_hold_commas_and_lines(tmp_path):
    (tmp_path / "a.csv").write_text('prompt\n"a cat, sitting\nand a ""dog"""\n', newline="")
    assert read_rows(str(tmp_path / "a.csv")) == [Row(prompt='a cat, sitting\nand a "dog"')]


def test_rows_of_prompts(tmp_path, make_plan, text_folder):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a cat"}\n{"prompt": "a fox", "seed": 9}\n{"prompt": "a cat"}\n')
    plan = make_plan(text_folder("sd1"), spec=str(tmp_path / "a.jsonl"), num_images=None)
    assert [(cell.prompt, cell.seed) for cell in plan.run.cells] == [("a cat", 0), ("a fox", 9), ("a cat", 0)]
    assert plan.run.request.prompt == ("a cat", "a fox")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "is not a .json, .jsonl or .csv file"),
        ("a.json", "{}", "it is not a list of objects"),
        ("a.json", "[", "cannot be read"),
        ("a.json", "[]", "has no rows"),
        ("a.json", "[1]", "row 1: 1 is not an object"),
        (
            "a.json",
            '[{"labels": 1}]',
            "row 1: unknown labels; a row has label, prompt, seed, num_images, image, strength, mask, control, ip_",
        ),
        ("a.json", '[{"label": 1}, {"label": 1, "seed": -1}]', "row 2: seed: -1 is not"),
        ("a.json", '[{"label": 1, "prompt": "a"}]', "row 1: has both label and prompt; leave one out"),
        ("a.json", '[{"label": 1}, {}]', "some rows have no label or prompt"),
        ("a.json", '[{"seed": 1}]', "draws from labels, and no row has one; give each row a label"),
        ("a.json", '[{"label": 3}]', "label 3 is out of range"),
        ("a.json", '[{"prompt": "a"}]', "has no text encoder"),
        ("a.json", '[{"label": 1, "seed": 4294967295, "num_images": 2}]', "would exceed the last seed"),
        ("a.csv", "label,seed\n1,2,3\n", "a row has more or fewer values than the header"),
        ("a.csv", "label,seed\n1,x\n", "row 1: seed: 'x' is not"),
    ],
)
def test_refusals(tmp_path, make_plan, labelled, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        make_plan(labelled, spec=str(tmp_path / name), num_images=1)


def test_a_file_that_is_not_there(make_plan, labelled):
    with pytest.raises(InputError, match=r"spec no\.csv does not exist; give a \.json"):
        make_plan(labelled, spec="no.csv", num_images=1)


@pytest.mark.parametrize(
    ("request_", "message"), [({"label": (1,)}, "leave one out"), ({"seed": (1, 2)}, "takes a single seed")]
)
def test_flags_beside_it(tmp_path, make_plan, labelled, request_, message):
    (tmp_path / "a.csv").write_text(CSV)
    with pytest.raises(InputError, match=message):
        make_plan(labelled, spec=str(tmp_path / "a.csv"), **{"num_images": None} | request_)


def test_too_many_pictures(tmp_path, make_plan, labelled, monkeypatch):
    assert BULK.most_pictures == 1_000_000
    monkeypatch.setattr("fastdiff.bulk.spec.BULK", replace(BULK, most_pictures=1000))
    (tmp_path / "a.csv").write_text("label,num_images\n" + "0,50\n" * 21)
    with pytest.raises(InputError, match="more than 1000 pictures"):
        make_plan(labelled, spec=str(tmp_path / "a.csv"), num_images=1)


@pytest.fixture
def pictures(tmp_path):
    """The folder of a spec, with pictures."""
    for name, size in (("a", (20, 34)), ("b", (20, 34)), ("wide", (40, 20))):
        Image.effect_noise(size, 9).save(tmp_path / f"{name}.png")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt,image,strength\na cat,a.png,0.5\na fox,b.png,\n"),
        ("a.jsonl", '{"prompt": "a cat", "image": "a.png", "strength": 0.5}\n{"prompt": "a fox", "image": "b.png"}\n'),
    ],
)
def test_rows_start_from_pictures_beside_the_spec(pictures, make_plan, text_folder, name, text, monkeypatch):
    monkeypatch.chdir("/")
    (pictures / name).write_text(text)
    plan = make_plan(text_folder("sd1"), spec=str(pictures / name), num_images=None)
    starts = [cell.start for cell in plan.run.cells]
    assert [start.strength for start in starts] == [0.5, 0.8]
    assert [start.picture.sha256 for start in starts] == [file_hash(pictures / name) for name in ("a.png", "b.png")]
    assert (plan.run.request.height, plan.run.request.width) == (34, 20)
    assert plan.record["images"].startswith("2 of SHA-256 ")


def test_a_plan_is_of_its_pictures_contents(pictures, make_plan, text_folder):
    def record(text, **options):
        (pictures / "a.csv").write_text(text)
        return make_plan(text_folder("sd1"), spec=str(pictures / "a.csv"), num_images=None, **options).record

    rows = "prompt,image\na cat,a.png\n"
    before = record(rows)
    shutil.copy(pictures / "a.png", pictures / "copy.png")
    assert record(rows.replace("a.png", "copy.png")) == before
    assert differences(record(rows, strength=0.5), before)[0].startswith("order SHA-256")
    shutil.copy(pictures / "b.png", pictures / "a.png")
    assert differences(record(rows), before)[0].startswith("images 1 of SHA-256")
    shared = record(
        "prompt,image,strength\na cat,,\na fox,b.png,0.5\n", init_image=str(pictures / "a.png"), strength=0.7
    )
    assert shared["strength"] == 0.7 and shared["images"].startswith("1 of")
    assert "images" not in record("prompt\na cat\n")


def test_rows_of_pictures_of_several_sizes_need_a_size(pictures, make_plan, text_folder):
    (pictures / "a.csv").write_text("prompt,image\na cat,a.png\na fox,wide.png\n")

    def plan(**options):
        return make_plan(text_folder("sd1"), spec=str(pictures / "a.csv"), num_images=None, **options)

    with pytest.raises(InputError, match=r"row 2: image .* is 20 x 40, and the first picture is 34 x 20"):
        plan(height=16)
    assert plan(height=16, width=24).run.size == (24, 16)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('"image": "none.png"', "row 1: image .* does not exist; give a picture"),
        ('"image": "cut.png"', "row 1: image .*: its data cannot be read"),
        ('"strength": 0.5', "row 1: strength 0.5: it says how much of a picture to change"),
        ('"image": "a.png", "strength": 1.5', "row 1: strength: 1.5 is not a number from 0 to 1"),
        ('"image": "a.png", "strength": 0.1', "row 1: strength 0.1: it leaves none of 2 steps"),
        ('"image": 7', "row 1: image: 7 is not a path"),
    ],
)
def test_pictures_that_cannot_be_drawn_from_are_named(pictures, make_plan, text_folder, row, message):
    (pictures / "cut.png").write_bytes((pictures / "a.png").read_bytes()[:200])
    (pictures / "a.jsonl").write_text('{"prompt": "a cat", ' + row + "}")
    with pytest.raises(InputError, match=message):
        make_plan(text_folder("sd1"), spec=str(pictures / "a.jsonl"))


def test_a_model_of_labels_takes_no_pictures(pictures, make_plan, labelled):
    (pictures / "a.jsonl").write_text('{"label": 1, "image": "a.png"}')
    with pytest.raises(InputError, match=r"row 1: image: .* has no text encoder; leave it out"):
        make_plan(labelled, spec=str(pictures / "a.jsonl"))


@pytest.fixture
def masks(pictures):
    """The folder of a spec, with pictures and masks of the model's size."""
    for i, name in enumerate(("m", "n")):
        Image.effect_noise((16, 16), 9 + i).save(pictures / f"{name}.png")
    Image.effect_noise((16, 16), 50).save(pictures / "square.png")
    return pictures


def test_rows_have_masks_of_their_own(masks, make_plan, text_folder):
    (masks / "a.csv").write_text(
        "prompt,image,strength,mask\na cat,a.png,,m.png\na cat,wide.png,0.5,n.png\na cat,square.png,,\n"
    )

    def plan(**options):
        return make_plan(text_folder("sd1"), spec=str(masks / "a.csv"), num_images=None, **options)

    made = plan(mask_blur=2.0)
    starts = [cell.start for cell in made.run.cells]
    assert [start.strength for start in starts] == [1.0, 0.5, 0.8]
    assert [start.mask and start.mask.picture.sha256 for start in starts] == [
        *(file_hash(masks / f"{name}.png") for name in "mn"),
        None,
    ]
    assert [start.mask and start.mask.blur for start in starts] == [2.0, 2.0, None]
    assert made.run.size == (16, 16) and made.record["masks"].startswith("2 of SHA-256 ")
    assert differences(plan(mask_blur=1.0).record, made.record)[0].startswith("order SHA-256")
    before = made.record
    shutil.copy(masks / "n.png", masks / "m.png")
    assert differences(plan(mask_blur=2.0).record, before)[0].startswith("masks 1 of SHA-256")


def test_the_runs_picture_and_mask_are_for_rows_without(masks, make_plan, text_folder):
    def starts(text, **options):
        (masks / "a.csv").write_text(text)
        plan = make_plan(text_folder("sd1"), spec=str(masks / "a.csv"), num_images=None, **options)
        found = [cell.start for cell in plan.run.cells]
        return [each and (each.picture.name, each.mask and each.mask.picture.name) for each in found]

    own = {name: str(masks / f"{file}.png") for name, file in (("init_image", "square"), ("mask", "n"))}
    square, n, m, a = (str(masks / f"{name}.png") for name in ("square", "n", "m", "a"))
    rows = "prompt,image,mask\na cat,,m.png\na cat,a.png,\na cat,,\n"
    assert starts(rows, **own) == [(square, m), (a, n), (square, n)]
    assert starts("prompt\na cat\n", **own) == [(square, n)]
    no_picture = starts("prompt,image\na cat,a.png\na cat,\n", mask=n)
    assert no_picture == [(a, n), None]


def test_rows_with_masks_are_guided_as_inpainting_is(masks, make_plan, text_folder):
    def plan(rows, **options):
        (masks / "a.csv").write_text(f"prompt,image,mask\n{rows}")
        size = {"height": 16, "width": 16, "num_inference_steps": 5}
        return make_plan(text_folder("sdxl"), spec=str(masks / "a.csv"), num_images=None, **size, **options)

    scales = [plan(f"a cat,square.png,{mask}\n").run.request.guidance_scale for mask in ("m.png", "")]
    assert scales == [7.5, 5.0]
    both = "a cat,square.png,m.png\na cat,square.png,\n"
    with pytest.raises(InputError, match="spec: with a mask the model has another guidance scale than without; give"):
        plan(both)
    assert plan(both, guidance_scale=6.0).run.request.guidance_scale == 6.0


def test_an_inpainting_model_takes_rows_with_masks(masks, make_plan, inpainting_folder):
    def plan(text, **options):
        (masks / "a.csv").write_text(text)
        return make_plan(inpainting_folder, spec=str(masks / "a.csv"), num_images=None, **options)

    assert plan("prompt,image,mask\na cat,a.png,m.png\n").run.cells[0].start.mask.picture.setting == "spec: row 1: mask"
    assert plan("prompt,mask\na cat,m.png\n", init_image=str(masks / "a.png")).run.cells[0].start.strength == 1
    with pytest.raises(InputError, match=r"row 2: mask: .* is for inpainting; give --mask, a picture"):
        plan("prompt,image,mask\na cat,a.png,m.png\na fox,a.png,\n", height=16, width=16)
    with pytest.raises(InputError, match=r"mask: .* is for inpainting; give --init-image and --mask"):
        plan("prompt\na cat\n")


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ('"mask": "m.png"', {}, "row 1: mask .*m.png': it says where to change a picture; give --init-image"),
        ('"image": "a.png", "mask": "none.png"', {}, "row 1: mask .* does not exist; give a picture"),
        ('"image": "a.png", "mask": 3', {}, "row 1: mask: 3 is not a path"),
        ('"image": "a.png"', {"mask_blur": 2.0}, "mask-blur 2: it is an option of a mask; give --mask"),
        ('"image": "a.png", "mask": "m.png"', {"mask_crop": 2}, "row 1: mask-crop: the mask is 16 x 16, and the"),
        ('"image": "square.png", "mask": "m.png"', {"upscale": 2.0}, "row 1: upscale: it enlarges whole pictures"),
        (
            '"image": "square.png", "mask": "m.png"}\n{"prompt": "a cat", "image": "a.png"',
            {},
            "rows with a mask have the model's size, and rows without have their picture's; give --height",
        ),
        (
            '"image": "square.png", "mask": "m.png"}\n{"prompt": "a cat", "image": "a.png", "mask": "a.png"',
            {"mask_crop": 2},
            "mask-crop: it keeps the size of each row's picture; give pictures of one size, or leave it out",
        ),
    ],
)
def test_masks_that_cannot_be_drawn_with_are_named(masks, make_plan, text_folder, row, options, message):
    (masks / "a.jsonl").write_text('{"prompt": "a cat", ' + row + "}")
    with pytest.raises(InputError, match=message):
        make_plan(text_folder("sd1"), spec=str(masks / "a.jsonl"), num_images=None, num_inference_steps=4, **options)


def test_larger_pictures_are_of_their_own_plan(make_plan, text_folder):
    plain, larger = (
        make_plan(text_folder("sd1"), prompt=("a cat",), num_inference_steps=4, **x) for x in ({}, {"upscale": 2.0})
    )
    assert larger.run.size == (32, 32) and larger.record["upscale"] == 2.0
    assert (larger.record["height"], "base_height" in larger.record) == (16, False)
    assert "upscale 2.0, not none" in differences(larger.record, plain.record)


@pytest.fixture
def folder(tmp_path):
    """A folder with two ControlNets and three control pictures."""
    for i in range(2):
        tiny_controlnet("sd1", seed=4 + i).save_pretrained(tmp_path / f"net{i}")
    for i, name in enumerate("abc"):
        Image.effect_noise((16, 24), 90 + i).save(tmp_path / f"{name}.png")
    return tmp_path


@pytest.fixture
def controlled(folder, make_plan, text_folder):
    """Return a function that plans the rows of a file."""

    def make(text, *, nets=1, image="c.png", suffix=".csv", **options):
        (folder / f"a{suffix}").write_text(text)
        own = {"control": tuple(str(folder / f"net{i}") for i in range(nets))}
        own |= {"control_image": (str(folder / image),) * nets} if image else {}
        own |= {"spec": str(folder / f"a{suffix}"), "num_images": None, "num_inference_steps": 2}
        return make_plan(text_folder("sd1"), **own | options)

    return make


def names_of(made):
    return [[picture.name.rpartition("/")[2] for picture in cell.control.pictures] for cell in made.run.cells]


def test_rows_have_control_pictures_of_their_own(folder, controlled):
    made = controlled(CONTROLLED)
    assert names_of(made) == [["a.png"], ["b.png"], ["a.png"], ["c.png"]]
    assert made.run.size == (16, 24) and made.record["control-images"].startswith("3 of SHA-256 ")
    assert names_of(controlled("prompt\na cat\n")) == [["c.png"]]
    pairs = '{"prompt": "a cat", "control": ["a.png", "b.png"]}\n{"prompt": "a cat"}\n'
    assert names_of(controlled(pairs, nets=2, suffix=".jsonl")) == [["a.png", "b.png"], ["c.png", "c.png"]]
    before = made.record
    shutil.copy(folder / "b.png", folder / "a.png")
    assert differences(controlled(CONTROLLED).record, before)[0].startswith("control-images 2 of SHA-256")


@pytest.mark.parametrize(
    ("nets", "rows"),
    [
        (1, CONTROLLED),
        (2, [{"prompt": "a cat", "control": [f"{one}.png", f"{two}.png"]} for one, two in ("ab", "bc", "ca")]),
        (2, [{"prompt": "a cat", "control": ["a.png", "b.png"], "seed": i} for i in range(3)]),
    ],
)
def test_the_pictures_are_those_of_sample(controlled, worker, pipes, tmp_path, nets, rows):
    text, suffix = (rows, ".csv") if isinstance(rows, str) else ("\n".join(map(json.dumps, rows)), ".jsonl")
    alone = controlled(text, nets=nets, suffix=suffix, batch_size=1)
    pictures = [np.asarray(done.image) for at in draw(alone.run, pipes(alone)[0]) for done in at.finished]
    assert len({each.tobytes() for each in pictures}) == len(pictures) >= 3
    worker(controlled(text, nets=nets, suffix=suffix, batch_size=4), out := tmp_path / "out").work()
    for path, expected in zip(sorted(out.rglob("*.png")), pictures, strict=True):
        assert np.array_equal(np.asarray(Image.open(path)), expected), path


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"control": "none.png"}, {}, "row 1: control '.* does not exist; give a picture"),
        ({"control": 3}, {}, "row 1: control: 3 is not a path, or a list of one for each --control"),
        ({"control": "a.png"}, {"nets": 0}, "row 1: control: a ControlNet reads it; give --control, or leave it out"),
        ({"control": "a.png"}, {"nets": 2}, "row 1: control-image: 1 given for 2 --control; give one for each"),
        ({}, {"image": None}, "control-image: 0 given for 1 --control; give one for each, in the same order"),
        ({"control": "wide.png"}, {}, "row 2: control .* is 24 x 16, and the first picture is 20 x 30"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(folder, controlled, row, options, message):
    Image.effect_noise((30, 20), 90).save(folder / "wide.png")
    second = {"control": "a.png"} if row.get("control") == "wide.png" else {}
    rows = [{"prompt": "a cat", **each} for each in (row, second)]
    with pytest.raises(InputError, match=message):
        controlled("\n".join(map(json.dumps, rows)), suffix=".jsonl", **options)
