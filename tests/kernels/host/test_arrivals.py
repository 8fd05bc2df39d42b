"""Counters of the programs of a tile, and convolutions whose programs each sum a chunk of k."""

import threading

import pytest
import torch

from fastdiff.kernels import conv2d as operation
from fastdiff.kernels.conv2d import Norm, conv2d
from fastdiff.kernels.host import arrivals
from fastdiff.kernels.plans.conv2d_tiles import ARRIVAL_TILES, CHUNK_TILE
from tests.kernels.test_conv2d import Case, judged

CPU = torch.device("cpu")
CASES = {
    "H8": Case(2, 8, 8, (512,), 64, temb=True),
    "H4-pair": Case(3, 4, 4, (192, 64), 64, residual=True, output_scale=2.0),
    "H4-shortcut": Case(1, 4, 4, (256,), 64, shortcut=(64, 96)),
    "H8-pair-shortcut": Case(1, 8, 8, (256, 256), 64, temb=True, shortcut=(64,)),
    "H8-down": Case(1, 8, 8, (192,), 64, stride=2, padding=(0, 1, 0, 1)),
    "H4-up": Case(1, 4, 4, (512,), 64, upsample=True),
}
REPEATS = 20  # on a GPU, where other programs may arrive last


def launched(monkeypatch, *, spread):
    """Let conv2d give each chunk its own program or not, and return a list of the tilings that it uses."""
    found, usual = [], operation.tuned_tiling

    def tiling_of(tiling, problem, call):
        found.append(usual(tiling, problem, call)._replace(spread=spread and tiling.chunks > 1))
        return found[-1]

    monkeypatch.setattr(operation, "tuned_tiling", tiling_of)
    return found


@pytest.mark.parametrize("normed", [False, True], ids=["moments", "norm"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_program_for_each_chunk(case, normed, dot_dtype, device, runs_triton, assert_accurate, monkeypatch):
    if not runs_triton or dot_dtype == torch.float32:
        pytest.skip("only with descriptors")
    args, options = case.inputs(dot_dtype, device)
    options |= {"norm": Norm(8, activation="silu")} if normed else {"moments": True}
    outputs, zeros = [], arrivals.new_counters(args[1].device)
    for spread in (False, True):
        found = launched(monkeypatch, spread=spread)
        for _ in range(REPEATS if device.type == "cuda" and spread else 1):
            with arrivals.with_counters(zeros):
                made = conv2d.kernel(*args, **options)
            outputs.append([made] if normed else [made[0], made[1].mean, made[1].m2])
        assert found[0].chunks > 1 and not found[0].apart and found[0].spread is spread
    assert not zeros.any()
    for each in outputs:
        assert all(map(torch.equal, each, outputs[0]))
    given = {name: value for name, value in options.items() if name != "moments"}
    assert_accurate(outputs[0][0], *judged(args, given))


@pytest.mark.parametrize("tile", [CHUNK_TILE, *ARRIVAL_TILES], ids=lambda tile: f"{tile.pixels}x{tile.channels}")
def test_tiles_for_chunks_give_the_usual_bits(tile, dot_dtype, device, monkeypatch):
    if device.type != "cuda" or dot_dtype == torch.float32:
        pytest.skip("numpy's bits depend on the tile")
    side = 4 if tile.pixels == 16 else 8
    args, options = Case(3, side, side, (256, 256), 256, temb=True).inputs(dot_dtype, device)
    usual = conv2d.kernel(*args, **options)
    for spread in (False, True):

        def tiling_of(tiling, problem, call, spread=spread):
            steps = tiling.steps * tiling.tile.block // tile.block
            return tiling._replace(tile=tile, steps=steps, spread=spread)

        monkeypatch.setattr(operation, "tuned_tiling", tiling_of)
        for _ in range(REPEATS):
            assert torch.equal(conv2d.kernel(*args, **options), usual)


@pytest.mark.gpu
def test_a_graph_leaves_zeros(monkeypatch):
    device = torch.device("cuda")
    (x, *rest), options = Case(1, 4, 4, (256,), 256, temb=True).inputs(torch.bfloat16, device)
    found = launched(monkeypatch, spread=True)
    expected = conv2d.kernel(x, *rest, **options)
    assert found[0].spread and not found[0].apart
    zeros, graph = arrivals.new_counters(device), torch.cuda.CUDAGraph()
    with arrivals.with_counters(zeros), torch.cuda.graph(graph):
        y = conv2d.kernel(x, *rest, **options)
        y = conv2d.kernel(y, *rest, **options)
    again = conv2d.kernel(expected, *rest, **options)
    for _ in range(REPEATS):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, again) and not zeros.any()


@pytest.mark.gpu
def test_streams_and_graphs_have_counters_of_their_own():
    device = torch.device("cuda", torch.cuda.current_device())
    usual, stream = arrivals.counters(1, device), torch.cuda.Stream()
    assert arrivals.counters(7, device) is usual and not usual.any()
    with torch.cuda.stream(stream):
        other = arrivals.counters(1, device)
        assert other is not usual and arrivals.counters(1, device) is other
    zeros, graph = arrivals.new_counters(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = arrivals.counters(1, device)
        with arrivals.with_counters(zeros):
            assert arrivals.counters(1, device) is zeros
    assert captured is not usual and captured is not other


def test_a_graph_s_counters_are_its_thread_s():
    zeros, seen = arrivals.new_counters(CPU), []
    with arrivals.with_counters(zeros):
        assert arrivals.counters(arrivals.MOST, CPU) is zeros
        assert len(arrivals.counters(arrivals.MOST + 1, CPU)) == arrivals.MOST + 1
        thread = threading.Thread(target=lambda: seen.append(arrivals.counters(1, CPU)))
        thread.start()
        thread.join()
    assert seen[0] is not zeros and arrivals.counters(1, CPU) is not zeros
