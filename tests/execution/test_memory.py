"""Memory that runs out: every library's error, smaller portions, one-line messages, and nothing left in memory."""

import gc
import weakref
from itertools import chain

import numpy as np
import pytest
import torch

from fastdiff.execution.memory import OutOfMemoryError, Portions, is_out_of_memory, or_explain, smaller_portions

HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Freeze existing objects, so that collections need not traverse the libraries' objects. Nothing thaws them."""
    gc.collect()
    gc.freeze()


def cuda():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")


def portions(count, halves=True, release=lambda: None, dtype=torch.float32):
    return Portions(count, torch.device("cpu"), dtype, halves=halves, release=release)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (cuda(), True),
        (MemoryError(), True),
        (
            RuntimeError(HOST),
            True,
        ),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("another"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
    ids=["GPU", "Python", "host", "CUDA", "Triton", "library", "assertion", "another", "no-error-of-torch", "none"],
)
def test_errors_that_say_so(error, expected):
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("first", "expected"), [(cuda(), True), (ValueError("ours"), False)], ids=["memory", "mistake"]
)
def test_a_capture_that_was_cut_short_says_another_thing(first, expected):
    with pytest.raises(torch.AcceleratorError) as last:
        try:
            raise first
        finally:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
    assert is_out_of_memory(last.value) is expected


def test_an_error_beside_one_of_memory_is_none():
    with pytest.raises(RuntimeError) as last:
        try:
            raise cuda()
        finally:
            raise RuntimeError("our own mistake")
    assert not is_out_of_memory(last.value)


def fitting(most, sizes):
    def function(part):
        sizes.append(part.stop - part.start)
        if sizes[-1] > most:
            raise cuda()
        return list(range(part.start, part.stop))

    return function


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    [(10, 10, [10]), (10, 4, [10, 5, 2, 2, 2, 2, 2]), (5, 2, [5, 2, 2, 1]), (3, 1, [3, 1, 1, 1])],
)
def test_portions_are_halved_until_they_fit(count, most, expected):
    sizes, released = [], []
    found = portions(count, release=lambda: released.append(0))
    assert list(chain(*found.map(fitting(most, sizes), count))) == list(range(count))
    assert sizes == expected
    assert len(released) == len([size for size in sizes if size > most])
    assert found.size == max(size for size in sizes if size <= most), "the size stays"


def test_a_portion_that_is_done_is_not_done_again():
    done = []

    def function(part):
        if part.start and part.stop - part.start > 1:
            raise cuda()
        done.append(part)

    found = portions(8)
    found.size = 4
    found.map(lambda part: function(part) or part, 8)
    assert done == [slice(0, 4), *(slice(i, i + 1) for i in range(4, 8))]


@pytest.mark.parametrize(
    ("count", "halves", "expected", "line"),
    [
        (4, True, [4, 2, 1], "cpu: out of memory for 1 picture at a time; lower height or width"),
        (1, True, [1, 1], "for 1 picture at a time; lower height or width"),
        (4, False, [4], "for 4 pictures at a time; lower batch size, height or width"),
    ],
    ids=["halved", "one", "generator"],
)
def test_what_does_not_fit_is_one_error(count, halves, expected, line):
    sizes = []
    with pytest.raises(OutOfMemoryError, match=f"{line}, use dtype bfloat16 or use another device$") as error:
        portions(count, halves).map(fitting(0, sizes), count)
    assert sizes == expected
    assert error.value.__context__ is None, "its frames would keep the attempt's tensors alive"


def test_the_error_is_pythons_and_torchs():
    assert issubclass(OutOfMemoryError, MemoryError) and issubclass(OutOfMemoryError, torch.OutOfMemoryError)
    with pytest.raises(OutOfMemoryError, match="height or width or use another device"):
        portions(1, dtype=torch.bfloat16).map(fitting(0, []), 1)


def test_other_errors_are_not_caught():
    def fail(part):
        raise RuntimeError("our own mistake")

    with pytest.raises(RuntimeError, match="our own mistake"):
        portions(4).map(fail, 4)


def test_what_an_attempt_held_is_gone_when_the_next_begins():
    held = []

    def function(part):
        assert not held or held[-1]() is None
        array = np.zeros(10)
        held.append(weakref.ref(array))
        if part.stop - part.start > 1:
            raise cuda()
        return part

    gc.disable()
    try:
        portions(4).map(function, 4)
    finally:
        gc.enable()
    assert len(held) == 6


def test_or_explain_says_its_line():
    def fail():
        raise cuda()

    assert or_explain(lambda: 3, "line") == 3
    with pytest.raises(OutOfMemoryError, match=r"^line$") as error:
        or_explain(fail, "line")
    assert error.value.__context__ is None


def test_the_line_of_smaller_portions():
    assert smaller_portions(4, 4) is None
    assert smaller_portions(64, 8) == (
        "out of memory for 64 pictures at a time; continuing with at most 8; the pictures are the same"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGPU:
    """A card with room for 10 more arrays of 64 MB."""

    ARRAY = 2**26

    @pytest.fixture(autouse=True)
    def room(self):
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties("cuda").total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 10 * self.ARRAY) / total)
        yield
        torch.cuda.set_per_process_memory_fraction(1.0)

    def fill(self, part):
        x = torch.ones(part.stop - part.start, self.ARRAY // 4, device="cuda")
        return x.sum(dim=1)

    def test_portions_fit_and_the_cache_of_another_run_makes_room(self):
        before = torch.cuda.memory_allocated()
        torch.empty(9, self.ARRAY, dtype=torch.uint8, device="cuda")  # stays in torch's cache
        found = Portions(64, torch.device("cuda"), torch.float32, halves=True, release=lambda: None)
        sums = torch.cat(found.map(self.fill, 64))
        assert found.size == 8 and sums.tolist() == [self.ARRAY // 4] * 64
        assert torch.cuda.memory_allocated() - before < 2**20

    def test_after_the_error_all_of_it_is_free(self):
        found = Portions(64, torch.device("cuda"), torch.float32, halves=False, release=lambda: None)
        before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        with pytest.raises(OutOfMemoryError, match="cuda: out of memory for 64 pictures at a time") as error:
            found.map(lambda part: [torch.ones(self.ARRAY, dtype=torch.uint8, device="cuda") for _ in range(64)], 64)
        assert torch.cuda.memory_allocated() == before, "even while the error is alive"
        assert torch.cuda.memory_reserved() <= reserved and error.value
        assert len(self.fill(slice(0, 8))) == 8
