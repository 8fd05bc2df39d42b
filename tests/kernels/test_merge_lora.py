"""merge_lora: weights of many shapes at once against float64, and its bits alone and among others."""

import pytest
import torch

from fastdiff.kernels.merge_lora import BK, BM, BN, LowRank, merge_lora

gpu = pytest.mark.gpu
SHAPES = {  # of weights, with the ranks of their changes
    "one": [((1, 1), (1,))],
    "whole-tiles": [((BM, BN), (BK,))],
    "odd": [((70, 130), (4, 40)), ((5, 260), (33,)), ((129, 3), (1, 2, 3))],
    "filter": [((40, 24, 1, 1), (4,)), ((24, 40), (8,))],
    "unchanged-among-others": [((9, 9), ()), ((9, 9), (2,))],
    "of-sdxl": pytest.param([((1280, 2048), (32, 128)), ((10240, 1280), (32, 8)), ((640, 640), (256,))], marks=gpu),
}


@pytest.fixture
def run(runs_triton):
    return merge_lora.kernel if runs_triton else merge_lora


@pytest.fixture
def draw(randn):
    """Return weights, and changes as a LoRA file has them: of a size that changes every number."""

    def some(weights, dtype, factors):
        loaded = [randn(*shape, dtype=dtype) for shape, _ in weights]
        changes = [
            [
                LowRank(randn(shape[0], rank, dtype=factors), randn(rank, shape[1], dtype=factors), 0.7 / (i + rank))
                for i, rank in enumerate(ranks)
            ]
            for shape, ranks in weights
        ]
        return [torch.full_like(each, torch.nan) for each in loaded], loaded, changes

    return some


def truth(loaded, changes):
    total = sum((change.up.double() @ change.down.double() * change.factor for change in changes), start=0.0)
    return loaded.double() + total.view(loaded.shape) if changes else loaded.double()


def by_torch(loaded, changes):
    """Return the sum computed by torch in float32, rounded once."""
    total = loaded.float()
    for up, down, factor in changes:
        total = total + (factor * (up.float() @ down.float())).view(loaded.shape)
    return total.to(loaded.dtype)


@pytest.mark.usefixtures("exact_matmuls")
@pytest.mark.parametrize("factors", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("weights", SHAPES.values(), ids=SHAPES)
def test_output(weights, factors, dot_dtype, draw, run, runs_triton, device, assert_accurate):
    if runs_triton and device.type == "cpu" and factors == torch.bfloat16:
        factors = torch.float16  # Triton's interpreter has no bfloat16 dot
    targets, loaded, changes = draw(weights, dot_dtype, factors)
    run(targets, loaded, changes)
    for target, its_loaded, its_changes in zip(targets, loaded, changes, strict=True):
        assert_accurate(target, by_torch(its_loaded, its_changes), truth(its_loaded, its_changes))


def test_a_weight_has_the_same_bits_among_others(draw, run):
    together, loaded, changes = draw(SHAPES["odd"], torch.float16, torch.float16)
    run(together, loaded, changes)
    for i, its_loaded in enumerate(loaded):
        alone = torch.full_like(its_loaded, torch.nan)
        run([alone], [its_loaded], [changes[i]])
        assert torch.equal(alone, together[i])


def test_nothing_but_the_targets_is_written(draw, run):
    targets, loaded, changes = draw(SHAPES["odd"], torch.float32, torch.float32)
    memory = [torch.full((2 * each.numel(),), 7.0, device=each.device) for each in targets]
    views = [each[: target.numel()].view(target.shape) for each, target in zip(memory, targets, strict=True)]
    before = [each.clone() for each in loaded]
    run(views, loaded, changes)
    assert all((each[target.numel() :] == 7).all() for each, target in zip(memory, targets, strict=True))
    assert all(map(torch.equal, loaded, before))


def test_torch_counts_the_write(draw, run):
    targets, loaded, changes = draw(SHAPES["odd"], torch.float16, torch.float16)
    before = [each._version for each in targets]
    run(targets, loaded, changes)
    assert all(each._version > old for each, old in zip(targets, before, strict=True))


def test_a_factor_of_zero_gives_the_loaded_bits(draw, run):
    targets, loaded, changes = draw(SHAPES["odd"], torch.float16, torch.float16)
    run(targets, loaded, [[change._replace(factor=0.0) for change in its] for its in changes])
    assert all(map(torch.equal, targets, loaded))


W, UP, DOWN = torch.zeros(4, 6), torch.zeros(4, 2), torch.zeros(2, 6)
REFUSED = {
    "nothing": (([], [], []), "targets: expected at least one"),
    "too-few-changes": (([W], [W], []), "targets: expected at least one"),
    "a-filter": (([W.view(2, 3, 2, 2)], [W.view(2, 3, 2, 2)], [[]]), "targets: expected contiguous matrices"),
    "transposed": (([W.T], [W.T], [[]]), "targets: expected contiguous matrices"),
    "two-dtypes": (([W, W.half()], [W, W.half()], [[], []]), "targets: expected contiguous matrices"),
    "loaded-of-another-dtype": (([W], [W.half()], [[]]), "loaded: expected"),
    "loaded-of-another-shape": (([W], [W[:2]], [[]]), "loaded: expected"),
    "ranks-that-differ": (([W], [W], [[LowRank(UP, DOWN[:1], 1.0)]]), "changes: .* is no"),
    "rows-that-differ": (([W], [W], [[LowRank(UP[:3], DOWN, 1.0)]]), "changes: .* is no"),
    "changes-of-two-dtypes": (([W], [W], [[LowRank(UP, DOWN.half(), 1.0)]]), "changes: expected contiguous"),
    "a-transposed-change": (([W], [W], [[LowRank(UP, DOWN.T.contiguous().T, 1.0)]]), "changes: expected contiguous"),
    "a-change-elsewhere": (([W], [W], [[LowRank(UP, DOWN.to("meta"), 1.0)]]), "changes: expected contiguous"),
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(args, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        merge_lora(*args)
