"""Drawing a request: the cells of a run in batches, the progress of each step, and pictures with their settings."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastdiff.diffusion.loop import Loop
from fastdiff.errors import DeviceLostError, InputError
from fastdiff.pipelines import Pipeline, load_pipeline
from fastdiff.pipelines.reporting import report
from fastdiff.requests.completion import Cell
from fastdiff.requests.defaults import COMMAND, LIBRARY, PAGE
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Progress, Run, draw, find_model, first_batch
from tests.support.tiny import UNET, save_unet

ASKED = Request(model="emoji64", label=("noto food", 1), seed=(7, 8), num_inference_steps=2, dtype="float32")


@pytest.fixture(scope="module")
def card():
    return find_model(ASKED)


@pytest.fixture(scope="module")
def pipe(card):
    return load_pipeline(card, ASKED, "cpu")


def test_a_run_is_checked_without_weights(card, monkeypatch):
    monkeypatch.setattr(Pipeline, "from_card", lambda *args, **options: pytest.fail("weights were loaded"))
    run = Run.prepare(ASKED, card, COMMAND)
    assert (run.batch_size, run.size, run.request.height) == (8, (64, 64), 64)
    assert run.cells[0] == Cell(7, card.info.label_choices("noto food")[7 % 5], "noto drinks")
    assert [(cell.seed, cell.label_name) for cell in run.cells[2:]] == [
        (7, "fluent-3d creatures"),
        (8, "fluent-3d creatures"),
    ]
    with pytest.raises(InputError, match="label 'x' is not a label"):
        Run.prepare(Request(label=("x",)), card, COMMAND)


@pytest.mark.parametrize(("defaults", "asked", "expected"), [(COMMAND, 3, 3), (PAGE, None, 16), (LIBRARY, None, 4)])
def test_the_batch_size_is_the_callers_or_all_at_once(card, defaults, asked, expected):
    assert Run.prepare(ASKED, card, defaults, batch_size=asked).batch_size == expected


def test_pictures_are_the_pipelines_whatever_the_batches(card, pipe):
    run = Run.prepare(ASKED, card, COMMAND, batch_size=3)
    steps = list(draw(run, pipe))
    assert [(at.places, at.step.index, len(at.finished)) for at in steps] == [
        (range(3), 0, 0),
        (range(3), 1, 3),
        (range(3, 4), 0, 0),
        (range(3, 4), 1, 1),
    ]
    assert [at.fraction for at in steps] == pytest.approx([3 / 8, 3 / 4, 7 / 8, 1])
    assert all(at.rate == pytest.approx(4 * at.fraction / at.seconds) for at in steps)
    finished = [each for at in steps for each in at.finished]
    assert [each.place for each in finished] == [0, 1, 2, 3]
    assert [each.cell for each in finished] == list(run.cells)
    expected = pipe(class_labels=["noto food", 1], seed=[7, 8], num_inference_steps=2).images
    for each, image in zip(finished, expected, strict=True):
        assert np.array_equal(np.asarray(each.image), np.asarray(image))


@pytest.mark.parametrize("steps", [3, 7, 49])
def test_shares_of_pictures_are_whole_at_the_end_of_a_batch(card, steps):
    run, last = Run.prepare(ASKED, card, COMMAND), SimpleNamespace(index=steps - 1, num_steps=steps)
    batches = [Progress(run, places, last, 1.0, []) for places in (range(3), range(3, 4))]
    assert [(at.done, at.fraction) for at in batches] == [(3, 0.75), (4, 1)]


def test_each_picture_records_its_settings(card, pipe):
    run = Run.prepare(Request(model="emoji64", label=(1,), seed=7, num_images=1, num_inference_steps=1), card, COMMAND)
    *_, last = draw(run, pipe)
    (finished,) = last.finished
    versions = finished.record.pop("versions")
    assert versions["torch"] == torch.__version__ and "fastdiff" in versions
    assert finished.record == {
        "model": "emoji64",
        "revision": None,
        "variant": None,
        "scheduler": "ddim",
        "num_inference_steps": 1,
        "eta": 0.0,
        "use_clipped_model_output": True,
        "guidance_scale": 4.0,
        "dtype": "float32",
        "device": "cpu",
        "seed": 7,
        "label": "fluent-3d creatures",
        "width": 64,
        "height": 64,
    }


def test_a_run_has_a_size_of_its_own(card, pipe):
    request = Request(model="emoji64", label=(1,), num_images=1, num_inference_steps=1, height=72, width=80)
    run = Run.prepare(request, card, COMMAND)
    *_, last = draw(run, pipe)
    assert last.finished[0].image.size == (80, 72)


def test_the_scheduler_is_the_requests(card):
    assert load_pipeline(card, Request(scheduler="ddpm", dtype="float32"), "cpu").scheduler_name == "ddpm"


@pytest.fixture
def fits(monkeypatch):
    """Make steps of more than `most` pictures fail. Returns the sizes of all attempted steps."""

    def fits(most, error):
        sizes, step = [], Loop.step_by_picture

        def step_if_it_fits(self, x_t, i, noise, part):
            sizes.append(len(x_t[part]))
            if sizes[-1] > most:
                raise error
            return step(self, x_t, i, noise, part)

        monkeypatch.setattr(Loop, "step_by_picture", step_if_it_fits)
        return sizes

    return fits


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The card and the pipeline of a U-Net of two labels and a null label, 8 x 8."""
    folder = save_unet(tmp_path_factory.mktemp("models") / "tiny", **UNET, num_class_embeds=3)
    (folder / "fastdiff.json").write_text('{"null_label": 2, "guidance_scale": 4}')
    card = find_model(Request(model=str(folder)))
    return card, load_pipeline(card, replace(ASKED, model=str(folder)), "cpu")


@pytest.mark.slow
def test_out_of_memory_halves_this_batch_and_those_after_it(tiny, fits):
    (card, pipe), asked = tiny, replace(ASKED, label=(0, 1), seed=tuple(range(5)))
    run = Run.prepare(replace(asked, model=card.name), card, COMMAND, batch_size=4)
    expected = [each for at in draw(run, pipe) for each in at.finished]
    sizes = fits(2, torch.OutOfMemoryError("CUDA out of memory"))
    steps = list(draw(run, pipe))
    assert sizes == [4, 2, 2, 2, 2, *[2] * 6], "only the first step of the first batch is retried"
    assert [at.places for at in steps] == [range(4)] * 2 + [range(i, i + 2) for i in (4, 4, 6, 6, 8, 8)]
    assert [bool(at.step.notice) for at in steps] == [True] * 2 + [False] * 6
    assert [at.done for at in steps] == sorted(at.done for at in steps)
    finished = [each for at in steps for each in at.finished]
    assert [each.place for each in finished] == list(range(10))
    for each, same in zip(finished, expected, strict=True):
        assert np.array_equal(np.asarray(each.image), np.asarray(same.image))


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), MemoryError, "cpu: out of memory for 1 picture at a time"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError, "lower height or width"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered\nSearch"), DeviceLostError, "start fastdiff"),
        (RuntimeError("another"), RuntimeError, "another"),
    ],
    ids=["GPU", "CPU", "lost-device", "no-memory-error"],
)
def test_failures_of_a_device_are_one_line(tiny, fits, error, expected, message):
    card, pipe = tiny
    fits(0, error)
    run = Run.prepare(replace(ASKED, model=card.name, label=(0, 1)), card, COMMAND, batch_size=3)
    for use in (lambda: list(draw(run, pipe)), lambda: report(pipe, **first_batch(run))):
        with pytest.raises(expected, match=message) as failure:
            use()
        assert "\n" not in str(failure.value)


LARGE = {"height": 128, "width": 128}  # activations, not weights, take most of the memory


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGPU:
    """A GPU with memory for 8 pictures but not for 64."""

    REQUEST = Request(
        model="emoji64", label=(1,), num_images=64, num_inference_steps=4, eta=0.5, scheduler="ddim", dtype="bfloat16"
    )

    @pytest.fixture
    def pipe(self, card):
        return load_pipeline(card, self.REQUEST, "cuda")

    @pytest.fixture
    def measure(self, card, pipe):
        """Draw 64 pictures. Return them, each step's (first place, index, pictures at once), and the bytes used."""

        def measure(batch_size):
            release(pipe)
            torch.cuda.reset_peak_memory_stats()
            pictures, steps = [], []
            for at in draw(Run.prepare(replace(self.REQUEST, **LARGE), card, COMMAND, batch_size=batch_size), pipe):
                pictures += [np.asarray(each.image) for each in at.finished]
                steps.append((at.places.start, at.step.index, at.step.at_once))
            return np.stack(pictures), steps, torch.cuda.max_memory_reserved()

        return measure

    @pytest.fixture
    def limit(self):
        total = torch.cuda.get_device_properties("cuda").total_memory
        yield lambda most: torch.cuda.set_per_process_memory_fraction(most / total)
        torch.cuda.set_per_process_memory_fraction(1.0)

    def test_it_draws_on_fewer_at_a_time_with_the_same_bits(self, measure, limit):
        expected, _, least = measure(8)
        whole, _, most = measure(64)
        assert np.array_equal(whole, expected) and most > 2 * least
        limit(int((least * most) ** 0.5))
        pictures, steps, reserved = measure(64)
        assert np.array_equal(pictures, expected) and reserved < most
        assert [index for first, index, _ in steps if first == 0] == [0, 1, 2, 3]
        sizes = [at_once for *_, at_once in steps]
        assert 1 <= sizes[0] < 64 and sizes == sorted(sizes, reverse=True)
        assert np.array_equal(measure(sizes[-1])[0], expected)

    def test_the_error_leaves_the_process_usable(self, pipe, measure, limit):
        expected, _, least = measure(8)
        release(pipe)
        before = torch.cuda.memory_allocated()
        limit(least)
        with pytest.raises(MemoryError, match="for 64 pictures at a time; lower batch size") as error:
            pipe(generator=torch.Generator(), class_labels=1, num_images=64, num_inference_steps=3, **LARGE)
        assert torch.cuda.memory_allocated() - before < 2**26, "the noise was kept alive by the error"
        assert error.value.__context__ is None
        limit(torch.cuda.memory_reserved() + 8 * 10**7)  # enough for the initial noise of two pictures
        with pytest.raises(MemoryError, match="for 1 picture at a time; lower height or width or use another device"):
            pipe(class_labels=1, num_images=2, num_inference_steps=3, height=1024, width=1024)
        del error
        limit(2 * least)
        assert np.array_equal(measure(8)[0], expected)


def release(pipe):
    pipe.denoiser.release_graphs()
    gc.collect()
    torch.cuda.empty_cache()
