"""CPU programs: replays have the function's bits, follow changed weights, and refuse what they cannot repeat."""

import threading

import pytest
import torch
from torch import nn

from fastdiff.execution.replaying import cpu_programs
from fastdiff.execution.replaying.cpu_programs import Programmed
from fastdiff.execution.replaying.trees import Fixed
from fastdiff.kernels.conv2d import conv2d
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host.leaves import Leaf
from fastdiff.kernels.host.recording import record
from fastdiff.kernels.linear import linear


@pytest.fixture
def layer():
    return nn.Conv2d(8, 8, 3, padding=1).requires_grad_(False)


@pytest.fixture
def counted():
    """A decorator that counts the calls of a function in `calls`."""

    def counting(function):
        def call(*args):
            call.calls += 1
            return function(*args)

        call.calls = 0
        return call

    return counting


def network(layer):
    """A function with convolutions, a norm, a product, views, a concatenation and changes in place."""
    columns = torch.randn(16, 16)

    def forward(x, temb, rest):
        (text,) = rest
        h = group_norm.reference(x, 2, eps=1e-5, activation="silu", scale=temb[:, :8], shift=temb[:, 8:])
        h = conv2d.reference(h, layer.weight, layer.bias, padding=1, residual=x, temb=temb[:, 4:12])
        tokens = torch.cat([h, x], dim=-1).flatten(1, 2)
        tokens = linear.reference(tokens, columns) + text[:, None]
        tokens[:, 0] += 1
        first, second = tokens.chunk(2, dim=-1)
        return first.transpose(1, 2), second.mean(dim=1)

    return forward


def inputs(seed, count=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = (count, 4, 4, 8), (count, 16), (count, 16)
    x, temb, text = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, temb, (text,)


def equal(y, expected):
    return all(torch.equal(*pair) for pair in zip(y, expected, strict=True))


def test_the_second_call_is_traced_and_the_bits_stay(layer, counted):
    function = counted(network(layer))
    run = Programmed(function)
    for seed in range(4):
        y = run(*inputs(seed))
        assert equal(y, network_result(function, seed)), seed
    assert function.calls == 2 + 4  # the first call, the trace, and four by this test


def network_result(function, seed):
    return function(*inputs(seed))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes(layer, mode):
    run, function = Programmed(network(layer)), network(layer)
    run = Programmed(function)
    with mode():
        for seed in range(3):
            assert equal(run(*inputs(seed)), function(*inputs(seed)))


def test_inputs_may_be_views_or_fixed(layer, counted):
    function = counted(network(layer))
    run = Programmed(function)
    for seed in range(4):
        x, temb, rest = inputs(seed, count=2)
        view, row = x.transpose(1, 2)[1:], temb[1:2]
        y = run(view, row, Fixed((rest[0][1:],)))
        assert equal(y, function(view.contiguous(), row, (rest[0][1:],)))
    assert function.calls == 2 + 4


def test_wanted_outputs(layer):
    run = Programmed(network(layer))
    for seed in range(3):
        (second,) = run(*inputs(seed), wanted=(1,))
        assert torch.equal(second, network_result(run._function, seed)[1])


def test_outputs_are_new_at_each_call(layer):
    run = Programmed(network(layer))
    ys = [run(*inputs(0))[0] for _ in range(4)]
    ys[2].zero_()
    assert torch.equal(ys[1], ys[3])


def test_changed_weights_count(layer):
    function = network(layer)
    run = Programmed(function)
    for _ in range(3):
        run(*inputs(0))
    layer.weight.mul_(2)
    layer.bias.add_(1)
    assert equal(run(*inputs(0)), function(*inputs(0)))


@pytest.fixture
def packed(monkeypatch):
    """A list that gets the kind of each layer whose weight is packed."""
    packed = []
    for kind in ("convolution", "linear"):
        function = getattr(torch.ops.mkldnn, f"_reorder_{kind}_weight")

        def pack(*args, function=function, kind=kind):
            packed.append(kind)
            return function(*args)

        monkeypatch.setattr(torch.ops.mkldnn, f"_reorder_{kind}_weight", pack)
    return packed


def test_only_changed_weights_are_packed_again(layer, counted, packed):
    rows = torch.randn(16, 8)

    def forward(x):
        h = conv2d.reference(x, layer.weight, layer.bias, padding=1)
        tokens, (first, second) = h.flatten(1, 2), rows.chunk(2)  # two layers of one weight
        tokens = linear.reference(tokens, first) * linear.reference(tokens, second)
        return linear.reference(tokens, rows[:8] + rows[8:])  # a weight made on the way is not packed

    function = counted(forward)
    run, x = Programmed(function), torch.randn(2, 4, 4, 8)
    for _ in range(3):
        run(x)
    assert packed == ["convolution", "linear", "linear"]
    for change, expected in (
        (lambda: None, []),
        (lambda: layer.weight.mul_(2), ["convolution"]),
        (lambda: rows[:8].neg_(), ["linear", "linear"]),
        (lambda: (rows.add_(1), layer.weight.neg_()), ["convolution", "linear", "linear"]),
        (lambda: layer.weight[0].copy_(layer.weight[1]), ["convolution"]),
    ):
        packed.clear()
        change()
        y = run(x)
        assert packed == expected and torch.equal(run(x), y)
        fresh = Programmed(forward)
        assert all(torch.equal(fresh(x), y) for _ in range(3))
    assert function.calls == 2


def test_weights_are_packed_again_in_any_mode(layer, packed):
    function = network(layer)
    run = Programmed(function)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
        with torch.no_grad():
            layer.weight.mul_(1.5)
        with mode():
            for seed in range(2):
                assert equal(run(*inputs(seed)), function(*inputs(seed)))
    assert len(packed) == 2 + 3  # a trace, and the convolution for each change after it


def test_weights_that_change_unseen_are_not_packed(layer):
    """torch counts no change through `data`, as when diffusers' parameters have the memory of ours."""
    function = network(layer)
    run = Programmed(function, packs=False)
    for _ in range(2):
        run(*inputs(0))
    layer.weight.data.mul_(2)
    assert equal(run(*inputs(0)), function(*inputs(0)))


def test_too_many_weights_are_not_packed(layer, monkeypatch):
    monkeypatch.setattr(cpu_programs, "MOST_PACKED", layer.weight.nbytes - 1)
    packed = []
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_convolution_weight", packed.append)
    function = network(layer)
    run = Programmed(function)
    for seed in range(3):
        assert equal(run(*inputs(seed)), function(*inputs(seed)))
    assert not packed


@pytest.mark.parametrize(
    "function",
    [lambda x: x * x.sum().item(), lambda x: x if x.sum() > 0 else -x, lambda x: x.mul_(2), lambda x: WEIGHT.add_(x)],
    ids=["item", "branch", "changes an input", "changes a weight"],
)
def test_what_a_replay_cannot_repeat_is_called_each_time(function, counted):
    function = counted(function)
    run = Programmed(function)
    for seed in range(4):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        before = WEIGHT.clone()
        y = run(x.clone())
        after = WEIGHT.clone()
        WEIGHT.copy_(before)
        assert torch.equal(y, function(x.clone()))
        WEIGHT.copy_(after)
    assert function.calls == 4 + 1 + 4  # one for the trace that failed


WEIGHT = torch.zeros(3)


def test_a_leaf_may_read_numbers(counted):
    @Leaf
    def halved(x):
        return x / 2 if x.sum().item() > 0 else x.clone()

    function = counted(lambda x: halved(x) + 1)
    run = Programmed(function)
    for value in (1.0, -1.0, 3.0, -3.0):
        assert torch.equal(run(torch.full((2,), value)), halved(torch.full((2,), value)) + 1)
    assert function.calls == 2


def test_a_program_for_each_shape_and_number_of_threads(layer, counted):
    function = counted(network(layer))
    run = Programmed(function)
    for count in (1, 2, 1, 2):
        run(*inputs(0, count))
    assert function.calls == 4 and len(run._programs) == 2
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        run(*inputs(0))
    finally:
        torch.set_num_threads(before)
    assert function.calls == 5


def test_the_oldest_programs_are_dropped(layer):
    run = Programmed(network(layer))
    for count in range(1, cpu_programs.CAPACITY + 3):
        run(*inputs(0, count))
    assert len(run._programs) == cpu_programs.CAPACITY


def test_a_recorder_hears_every_call(layer):
    from fastdiff.kernels.group_norm import group_norm as operation

    run = Programmed(lambda x: operation(x, 2, eps=1e-5))
    x = torch.randn(1, 4, 4, 8)
    for _ in range(3):
        with record(torch.device("cpu")) as recorded:
            run(x)
        assert [call.operation for call in recorded.calls] == ["group_norm"]


def test_threads_share_a_program(layer):
    function = network(layer)
    run = Programmed(function)
    for _ in range(2):
        run(*inputs(0))
    wrong = []

    def repeat(seed):
        expected = function(*inputs(seed))
        wrong.extend(seed for _ in range(20) if not equal(run(*inputs(seed)), expected))

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_pack_a_changed_weight_once(layer, packed):
    function, threads = network(layer), 4
    run = Programmed(function)
    for _ in range(2):
        run(*inputs(0))
    wrong, barrier = [], threading.Barrier(threads + 1)

    def repeat(seed):
        for expected in results[seed]:
            barrier.wait(60)
            if not equal(run(*inputs(seed)), expected):
                wrong.append(seed)
            barrier.wait(60)

    first, results = layer.weight.clone(), [[] for _ in range(threads)]
    for factor in range(2, 12):
        layer.weight.copy_(factor * first)
        for seed in range(threads):
            results[seed].append(function(*inputs(seed)))
    workers = [threading.Thread(target=repeat, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    packed.clear()
    for factor in range(2, 12):
        layer.weight.copy_(factor * first)
        barrier.wait(60)
        barrier.wait(60)
    for worker in workers:
        worker.join()
    assert not wrong and packed == ["convolution"] * 10


def test_a_replay_keeps_the_weights_that_it_began_with(layer):
    began, changed = threading.Event(), threading.Event()

    @Leaf
    def pausing(x):
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert changed.wait(60)
        return x.clone()

    def function(x):
        return conv2d.reference(pausing(x), layer.weight, layer.bias, padding=1)

    run, x, found = Programmed(function), torch.randn(1, 4, 4, 8), []
    before = [run(x) for _ in range(3)]
    thread = threading.Thread(target=lambda: found.append(run(x)))
    thread.start()
    assert began.wait(60)
    layer.weight.mul_(2)
    after = run(x)
    changed.set()
    thread.join()
    assert torch.equal(found[0], before[0]) and torch.equal(after, function(x))
