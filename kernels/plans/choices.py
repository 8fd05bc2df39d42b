"""The table that decides how each operation runs, and the functions that read it. Nothing else decides.

The ways to run an operation are::

    reference  torch functions, where none of our kernels can run or take the arguments
    library    torch's library, where it was measured faster; for `linear` with RMSNorm, two launches
    hopper     a kernel for sm_90 only, launched by a plan: the kernel and its tiles for some shapes
    kernel     the generic Triton kernel, where no row says otherwise

A row matches calls with its `facts`. The first row that matches, and whose way has no obstacle, decides. Other rows
("weight", "conv2d tile") say how a weight is loaded and which tile some shapes have.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.launching import capability
from fastdiff.kernels.plans import confirmation
from fastdiff.kernels.plans.conv2d_tiles import TILES, WIDE_TILE, ConvTile
from fastdiff.kernels.plans.hopper_attention import AttentionPlan, AttentionTiles, FewKeys

SM_90, ANY_CARD = "sm_90", ""
# The source of a row: a file in benchmarks/results, or one of these.
UNSAVED, CHOSEN = "measured, not saved", "chosen, not measured"


# The facts of attention without grouped keys and without lengths.
ALL_KEYS: dict[str, Any] = {"group": 1, "lengths": False}


class Choice(NamedTuple):
    """A row: calls with these facts run this way."""

    operation: str
    card: str
    facts: Mapping[str, Any]  # name -> a value, or a range or tuple of allowed values
    way: str
    measured: str
    plan: str = ""  # its name in reports, `fastdiff doctor` and verdict files
    why: str = ""  # a template with facts in braces, for a way that does not explain itself
    tiles: Any = None
    off_in: tuple[tuple[int, int], ...] = ()  # Triton versions in which the plan failed, or was slower than the others

    def fits(self, facts: Mapping[str, Any]) -> bool:
        """Whether the row matches all given facts; facts that are missing match."""
        return all(
            facts[name] in wanted if isinstance(wanted, range | tuple) else facts[name] == wanted
            for name, wanted in self.facts.items()
            if name in facts
        )


class ChoiceTable:
    """An ordered list of rows; the first match decides."""

    def __init__(self, rows: Iterable[Choice]) -> None:
        self.rows = tuple(rows)
        self.plans = frozenset(row.plan for row in self.rows if row.plan)  # names
        self.of = {name: tuple(row for row in self.rows if row.operation == name) for name, *_ in self.rows}
        self.fitting = functools.lru_cache(4096)(self._fitting)

    def only(self, plans: frozenset[str]) -> "ChoiceTable":
        """Return a table with only these plans, and all rows without a plan."""
        return ChoiceTable(row for row in self.rows if not row.plan or row.plan in plans)

    def _fitting(self, operation: str, card: str, **facts: Any) -> tuple[Choice, ...]:
        """Return the rows for an operation on a card, in order. Facts that are not given are not checked."""
        rows = self.of.get(operation, ())
        return tuple(row for row in rows if row.card in (card, ANY_CARD) and row.fits(facts))


def span(first: int, last: int = sys.maxsize - 1) -> range:
    """Return the range from `first` to `last`, inclusive."""
    return range(first, last + 1)


def _attention(name: str, widths: range, keys: range, plan: AttentionPlan, *how: str) -> Iterator[Choice]:
    """Yield the rows of a plan: one without a mask, and one for each mask in `how` with which it was faster too."""
    for mask in ("", *how):
        facts = {"bits": 16, "width": widths, "keys": keys, "mask": mask, "elements": span(1), "residual": False}
        facts |= ALL_KEYS
        plan_name = attention_plan(name, mask)
        yield Choice("attention", SM_90, facts, "hopper", "attention.json", plan_name, tiles=plan)


def _attention_with_lengths(name: str, widths: range, keys: range, plan: AttentionPlan) -> Choice:
    """Return the row of a plan for pictures with numbers of keys of their own."""
    (row,) = _attention(name, widths, keys, plan)
    return row._replace(facts={**row.facts, "lengths": True}, measured=CHOSEN, off_in=UNMEASURED)


def attention_plan(name: str, mask: str) -> str:
    """Return the name of an attention plan. `mask` is "" (none), "causal" or "masked"."""
    return f"{name}, {mask}" if mask else name


def _attention_by_library(widths: range, keys: range) -> Choice:
    """Return a row for heads whose size is a multiple of 16 bytes.

    For other heads SDPA uses batched products, whose bits vary with the batch.
    """
    facts = {"bits": 16, "width": widths, "head_bytes": range(0, 2**16, 16), "keys": keys, "mask": ("", "causal")}
    facts |= ALL_KEYS
    why = "{keys} keys, {width} wide: torch's library is faster on sm_90"
    return Choice("attention", SM_90, facts, "library", "attention.json", why=why)


# The sizes in the names of convolution plans: the minimum output pixels of a picture, and the maximum input channels.
PIXELS, DEPTHS, MORE = (65536, 16384, 4096, 1024, 256), (128, 256, 512), sys.maxsize - 1


# Plans that were over 2.5 % slower than what runs instead, at the largest size of `bench_tritons.py plans`, in these
# versions of Triton (tritons.json). The bits are the same either way.
SLOWER_IN = {"linear 320 to 960": ((3, 7), (3, 9)), "geglu 640 to 5120, fp8": ((3, 7),)}
# Of a plan that no GPU has run yet. Once it was measured, `off_in` lists only the versions in which it was slower.
UNMEASURED = confirmation.VERSIONS
# Triton 3.8 compiles no convolution in Gluon: it cannot view a part of shared memory as another shape.
CONVOLUTIONS_OFF_IN = ((3, 8),)


def convolution_plan(mode: str, pixels: int, channels: int, *, shortcut: bool, format: str | None) -> str | None:
    """Return the name of a convolution's plan, by output pixels and input channels; None if `pixels` is below all."""
    least = next((least for least in PIXELS if pixels >= least), None)
    depth = next((str(most) for most in DEPTHS if channels <= most), "more")
    name = f"conv2d-{mode}-{least}-{depth}" + "-shortcut" * shortcut + (f", {format}" if format else "")
    return None if least is None else name


def _convolutions(
    mode: str, least: int, most: int, formats: str, shortcuts: str = "", measured: str = "conv2d.json"
) -> Iterator[Choice]:
    """Yield the rows for 3x3 convolutions with a weight in these formats.

    A picture's bits may not depend on its batch, so a row is for all batches: over the measured batches the plan was
    faster on the whole, and may be a little slower in one of them.

    Args:
        shortcuts: the formats with a row for an added 1x1 shortcut.
    """
    pixels = range(least, min((other for other in PIXELS if other > least), default=sys.maxsize))
    channels = range(max((other + 1 for other in DEPTHS if other < most), default=1), most + 1)
    for shortcut, each in ((False, formats), (True, shortcuts)):
        for format in (None if name == "16" else name for name in each.split()):
            facts = {"filter": "3x3", "mode": mode, "pixels": pixels, "channels": channels, "bits": 16}
            facts |= {"shortcut": shortcut, "format": format}
            name = convolution_plan(mode, least, most, shortcut=shortcut, format=format)
            file = "conv2d_8bit.json" if format else measured
            yield Choice("conv2d", SM_90, facts, "hopper", file, name or "", off_in=CONVOLUTIONS_OFF_IN)


def product_plan(operation: str, channels: int, rows: int, *, residual: bool, format: str | None) -> str:
    """Return the name of the plan for a product, by the input channels and rows of its weight."""
    return f"{operation} {channels} to {rows}" + ", residual" * residual + (f", {format}" if format else "")


def _products(
    operation: str, channels: int, rows: int, formats: str, *, residual: bool = False, measured: str = UNSAVED
) -> Iterator[Choice]:
    """Yield the rows for products with a weight in these formats; the generic kernel gives the same bits."""
    for format in (None if name == "16" else name for name in formats.split()):
        facts = {"channels": channels, "rows": rows, "residual": residual, "format": format, "bits": 16}
        facts |= {"gate": False, "norm": False, "fills_card": True}
        file = "linear_8bit.json" if format else measured
        name = product_plan(operation, channels, rows, residual=residual, format=format)
        yield Choice(operation, SM_90, facts, "hopper", file, name, off_in=SLOWER_IN.get(name, ()))


def _products_by_library(channels: int, rows: int, tokens: int) -> Choice:
    """Return a row for at most `tokens` tokens.

    The library's bits equalled ours at each power of two from 256 to 32768 tokens.
    """
    facts = {"channels": channels, "rows": rows, "tokens": span(0, tokens), "picture": range(0, 2**31, 256)}
    facts |= {"dtype": torch.bfloat16, "format": None, "activation": None}
    facts |= {"gate": False, "residual": False, "norm": False}
    why = "{channels} to {rows} channels: torch's library is faster on sm_90"
    return Choice("linear", SM_90, facts, "library", UNSAVED, why=why)


def _tile(side: int, channels: int, out_channels: int, pictures: int, tile: ConvTile) -> Choice:
    """Return a row for at least `pictures`, where `tile` beat the tile that the times in `conv2d_tiles` select."""
    facts = {"mode": "same", "pixels": side * side, "channels": channels, "out_channels": out_channels}
    return Choice("conv2d tile", ANY_CARD, facts | {"pictures": span(pictures)}, "kernel", UNSAVED, tiles=tile)


# Measured on one H200 with Triton 3.6 and torch 2.11, in bfloat16. A plan has the best of the tiles that were tried.
# Shapes without a row were slower, or were not tried: heads of up to 24 channels were not tried, and the kernel for
# few keys does not compile for heads of 8 channels. The library's bits were equal at batch 1, 3, 8 and 64.
CHOICES = ChoiceTable((
    *_attention("attention to 80 keys", span(25, 64), span(65, 80),
                AttentionPlan(FewKeys((64, 16), stages=2, resident=4)), "causal", "masked"),
    *_attention("attention to 256 keys, heads of 32", span(25, 32), span(81, 256),
                AttentionPlan(FewKeys((256, 0), stages=3, resident=2))),
    *_attention("attention to 8192 keys, heads of 48", span(25, 48), span(1024, 8192),
                AttentionPlan(AttentionTiles((32, 16), 128, groups=3, stages=3))),
    *_attention("attention to 8192 keys, heads of 64", span(49, 64), span(1024, 8192),
                AttentionPlan(AttentionTiles((64, 0), 128, groups=3))),
    *_attention("attention to more keys, heads of 64", span(49, 64), span(8193),
                AttentionPlan(AttentionTiles((64, 0), 128, groups=3, persistent=False))),
    *_attention("attention to 256 keys, heads of 80", span(65, 80), span(1, 256),
                AttentionPlan(AttentionTiles((64, 16), 64, groups=2, stages=3), busy=2,
                              few=AttentionTiles((64, 16), 64, groups=1, resident=3, persistent=False))),
    *_attention("attention to more keys, heads of 80", span(65, 80), span(257),
                AttentionPlan(AttentionTiles((64, 16), 128, groups=2), busy=2,
                              few=AttentionTiles((64, 16), 128, groups=2, persistent=False))),
    *_attention("attention to 256 keys, heads of 160", span(129, 160), span(1, 256),
                AttentionPlan(AttentionTiles((128, 32), 128, groups=1))),
    *_attention("attention to 256 keys, heads of 256", span(161, 256), span(1, 256),
                AttentionPlan(AttentionTiles((256, 0), 64, groups=2, in_turn=False, persistent=False), busy=0.5,
                              few=AttentionTiles((256, 0), 64, groups=1, in_turn=False, persistent=False))),
    _attention_by_library(span(33, 64), span(1024)),
    _attention_by_library(span(65, 128), span(256)),
    _attention_by_library(span(129, 192), span(1024)),
    _attention_by_library(span(193, 256), span(256)),
    _attention_with_lengths("attention with lengths, heads of 128", span(97, 128), span(1024),
                            AttentionPlan(AttentionTiles((128, 0), 128, groups=2))),
    # 2 to 8 times as fast at every width: Triton has no tensor cores for float32
    Choice("attention", SM_90, {"bits": 32, "head_bytes": range(0, 2**16, 16), "mask": ("", "causal")} | ALL_KEYS,
           "library", UNSAVED, why="float32: torch's library is faster on sm_90"),

    *_convolutions("same", 65536, 128, "16 fp8 int8", "16 fp8"),
    *_convolutions("same", 65536, 256, "16 fp8 int8"),
    *_convolutions("same", 16384, 128, "16 int8", "16"),
    *_convolutions("same", 16384, 256, "16", measured="tritons.json"),
    *_convolutions("same", 16384, 512, "16 fp8 int8", "16 fp8"),
    *_convolutions("same", 16384, MORE, "16 fp8 int8"),
    *_convolutions("same", 4096, 128, "16", "16"),
    *_convolutions("same", 4096, 256, "16 fp8 int8", "16"),
    *_convolutions("same", 4096, 512, "16 fp8 int8", "16"),
    *_convolutions("same", 4096, MORE, "16 fp8 int8", "16 fp8"),
    *_convolutions("same", 1024, 128, "16 int8", "16"),
    *_convolutions("same", 1024, 256, "16 int8", "16"),
    *_convolutions("same", 1024, 512, "16"),
    *_convolutions("same", 1024, MORE, "16 fp8 int8", "16 fp8"),
    *_convolutions("same", 256, 128, "16", "16"),
    *_convolutions("same", 256, 256, "16 int8", "16"),
    *_convolutions("same", 256, 512, "16 fp8 int8", "16"),
    *_convolutions("same", 256, MORE, "16", "16"),
    *_convolutions("up", 65536, 128, "16 fp8 int8"),
    *_convolutions("up", 16384, 256, "16 fp8"),
    *_convolutions("up", 16384, MORE, "16 fp8 int8"),
    *_convolutions("up", 4096, MORE, "16 fp8 int8"),
    *_convolutions("up", 1024, MORE, "16 fp8 int8"),

    Choice("linear", SM_90, {"norm": True, "bits": 16}, "library", "linear.json",
           why="a separate RMSNorm is faster on sm_90"),
    _products_by_library(320, 960, 4096),
    _products_by_library(640, 640, 8192),
    _products_by_library(640, 1920, 1024),
    _products_by_library(1280, 1280, 32768),
    _products_by_library(1280, 3840, 2048),
    _products_by_library(512, 1536, 4096),
    _products_by_library(1152, 1152, 4096),
    _products_by_library(1152, 3456, 1024),
    _products_by_library(4608, 1152, 4096),
    *_products("linear", 320, 320, "16 fp8 int8"),
    *_products("linear", 320, 960, "16 int8"),
    *_products("linear", 640, 640, "16 fp8 int8"),
    *_products("linear", 640, 1920, "16 fp8"),
    *_products("linear", 768, 24960, "16"),
    *_products("linear", 1152, 1152, "16 fp8 int8", measured="linear.json"),
    *_products("linear", 1152, 3456, "16 fp8", measured="linear.json"),
    *_products("linear", 1152, 4608, "16 fp8 int8", measured="linear.json"),
    *_products("linear", 1280, 320, "16 fp8 int8", residual=True),
    *_products("linear", 1280, 1280, "16 fp8 int8"),
    *_products("linear", 1280, 3840, "16 fp8"),
    *_products("linear", 2048, 166400, "16"),
    *_products("linear", 2560, 640, "16 fp8 int8", residual=True),
    *_products("linear", 3840, 3840, "16", measured="linear.json"),
    *_products("linear", 3840, 11520, "16", measured="linear.json"),
    *_products("linear", 4608, 1152, "16 fp8 int8", measured="linear.json"),
    *_products("linear", 5120, 1280, "16 fp8 int8", residual=True),
    *_products("linear", 10240, 3840, "16", measured="linear.json"),
    *_products("swiglu", 3840, 20480, "16", measured="swiglu.json"),
    *_products("geglu", 320, 2560, "16 int8"),
    *_products("geglu", 640, 5120, "16 fp8 int8"),
    *_products("geglu", 1280, 10240, "16 fp8 int8", measured="tritons.json"),

    # With an int8 operand in registers, Triton 3.6 gave NaN for some U-Nets on sm_90, and ptxas serialised many
    # products: a forward took 1.3 to 2.7 times as long as in bfloat16.
    Choice("weight", SM_90, {"format": "int8", "bits": 16}, "from_int8", UNSAVED),

    _tile(128, 320, 320, 2, TILES[1]),
    _tile(64, 256, 256, 7, TILES[1]),
    _tile(64, 320, 320, 2, TILES[2]),
    _tile(64, 640, 640, 2, ConvTile(128, 128, 64, warps=8, stages=4)),
    _tile(32, 1280, 1280, 2, TILES[1]),
    _tile(32, 64, 64, 50, WIDE_TILE),
    _tile(32, 128, 64, 50, WIDE_TILE),
    _tile(32, 192, 64, 50, WIDE_TILE),
))  # fmt: skip


class Decision(NamedTuple):
    """The way in which a call runs, and why."""

    way: str
    why: str = ""  # "" where the way explains itself
    passed_over: str = ""  # the plan that would have run, and its obstacle


def decide(call: Call[Any]) -> Decision:
    """Choose how a call runs, and say why; `--explain` and `fastdiff.report` show these words."""
    reason = unavailable(call.device) or call.obstacle()
    if reason is not None:
        return Decision("reference", reason)
    facts, passed_over = call.facts(), ""
    for row in CHOICES.fitting(call.name, card_of(call.device), **facts) if facts else ():
        if row.plan:
            if confirmation.known_version() in row.off_in:
                continue
            reason = confirmation.plan_obstacle(row.plan, call.device) or hopper_obstacle(call)
            if reason is not None:
                passed_over = f"not as {row.plan}: {reason}"
                continue
        return Decision(row.way, row.why.format_map(facts), passed_over)
    return Decision("kernel", "", passed_over)


def hopper_obstacle(call: Call[Any]) -> str | None:
    """Return why the sm_90 kernel cannot run a call (the Triton version, the card or the tensors); None if it can."""
    reason = confirmation.gluon_obstacle(call.device) if call.in_gluon else None
    return reason or call.hopper_obstacle()


def first(operation: str, device: torch.device | None, **facts: Any) -> Choice | None:
    """Return the first row of `operation` that matches these facts; None if there is none.

    Args:
        operation: also a part of an operation, such as "weight" or "conv2d tile".
        device: None for rows of any card.
    """
    card = ANY_CARD if device is None else card_of(device)
    return next(iter(CHOICES.fitting(operation, card, **facts)), None)


def plan_of(operation: str, **facts: Any) -> Choice | None:
    """Return the first matching row with a plan, even if a row without one comes before it; None if there is none."""
    return next((row for row in CHOICES.fitting(operation, SM_90, **facts) if row.plan), None)


def confirmed_plans() -> frozenset[str]:
    """Return the names of the plans that run in the installed Triton, if it needs no verdict."""
    version = confirmation.known_version()
    return frozenset(row.plan for row in CHOICES.rows if row.plan and version not in row.off_in)


@functools.cache
def card_of(device: torch.device) -> str:
    """Return the card's name in rows: cpu, sm_90 and so on."""
    return "sm_{}{}".format(*capability(device)) if device.type == "cuda" else device.type


_references_only: ContextVar[bool] = ContextVar("references_only", default=False)


@contextmanager
def references_only() -> Iterator[None]:
    """Run every operation by its torch reference inside the block. Kernel tests and benchmarks compare with it."""
    token = _references_only.set(True)
    try:
        yield
    finally:
        _references_only.reset(token)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def unavailable(device: torch.device) -> str | None:
    """Return why no kernel can run on the device; None if one can. Triton needs a GPU or its interpreter."""
    if _references_only.get():
        return "references_only"
    if not _has_triton():
        return "Triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "no CUDA device"
    return None
