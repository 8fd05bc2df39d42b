"""The table of choices: how a call runs, and what a report says about it. The plans of the sm_90 kernels."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import conv2d
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.recording import because, record
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import choices, confirmation, hopper_attention, hopper_linear
from fastdiff.kernels.plans.choices import CHOICES, CHOSEN, SM_90, Choice, ChoiceTable
from fastdiff.kernels.plans.dispatch import Operation

ROOT = Path(__file__).parents[3]
CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True, eq=False)
class Way(Call[str]):
    """A call that returns the way in which it ran."""

    name = "way"

    size: int = 1
    obstacle_of_hopper: str | None = None

    @property
    def device(self):
        return CPU

    def check(self):
        pass

    def facts(self):
        return {"size": self.size, "kind": "usual"}

    def reference(self):
        return "reference"

    def library(self):
        return "library"

    def kernel(self):
        because("8 tokens a tile")
        return "kernel"

    def hopper_obstacle(self):
        return self.obstacle_of_hopper

    def hopper(self):
        because("made for sm_90")
        return "hopper"


way = Operation("way", Way)


def row(size, way, plan="", card=SM_90, **others):
    why = "" if plan else "{size} is slow"
    return Choice("way", card, {"size": size, "kind": "usual"}, way, CHOSEN, plan, why, **others)


ROWS = (
    row(range(1, 3), "hopper", "measured"),
    row((2, 3), "library"),
    row(4, "library"),
    row(4, "hopper", "behind"),
    row(5, "hopper", "elsewhere", card="sm_100"),
)


@pytest.fixture
def on_sm_90(monkeypatch):
    pytest.importorskip("triton", reason="no Triton here")
    monkeypatch.setattr(choices, "unavailable", lambda device: None)
    monkeypatch.setattr(choices, "card_of", lambda device: SM_90)
    monkeypatch.setattr(confirmation, "is_sm_90", lambda device: True)
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr(choices, "CHOICES", ChoiceTable(ROWS))


@pytest.mark.parametrize(
    ("size", "obstacle", "taken", "why"),
    [
        pytest.param(1, None, "hopper", "made for sm_90", id="a-plan"),
        pytest.param(2, None, "hopper", "made for sm_90", id="before-the-library"),
        pytest.param(3, None, "library", "3 is slow", id="beyond-the-plan"),
        pytest.param(4, None, "library", "4 is slow", id="behind-the-library"),
        pytest.param(5, None, "kernel", "8 tokens a tile", id="another-card"),
        pytest.param(6, None, "kernel", "8 tokens a tile", id="no-row"),
        pytest.param(1, "odd", "kernel", "8 tokens a tile; not as measured: odd", id="obstacle"),
        pytest.param(2, "odd", "library", "2 is slow; not as measured: odd", id="obstacle-and-library"),
    ],
)
def test_the_way_and_why(on_sm_90, size, obstacle, taken, why):
    with record(CPU) as recorded:
        assert way(size, obstacle) == taken
    assert recorded.calls[0].why == why


def test_other_cards_take_none_of_them_and_say_nothing_of_it(on_sm_90, monkeypatch):
    monkeypatch.setattr(choices, "card_of", lambda device: "sm_89")
    with record(CPU) as recorded:
        assert way() == "kernel"
    assert recorded.calls[0].why == "8 tokens a tile"


def test_where_no_kernel_runs_the_reference_does(monkeypatch):
    monkeypatch.setattr(choices, "CHOICES", ChoiceTable(ROWS))
    monkeypatch.setattr(choices, "unavailable", lambda device: "no CUDA device")
    with record(CPU) as recorded:
        assert way() == "reference"
    assert recorded.calls[0].why == "no CUDA device"


@pytest.mark.parametrize(
    ("version", "said"),
    [("3.6.0", None), ("3.60.0", "not known to work in triton 3.60.0"), ("4.0.0", "not known to work in triton 4.0.0")],
)
def test_gluon_runs_in_versions_of_triton_that_are_known(on_sm_90, monkeypatch, version, said):
    monkeypatch.setattr("triton.__version__", version)
    assert confirmation.gluon_obstacle(CPU) == (said and f"Gluon: {said}")
    with record(CPU) as recorded:
        assert way() == ("hopper" if said is None else "kernel")
    passed_over = f"8 tokens a tile; not as measured: Gluon: {said}"
    assert recorded.calls[0].why == ("made for sm_90" if said is None else passed_over)


def test_a_plan_in_triton_itself_runs_in_every_version(on_sm_90, monkeypatch):
    monkeypatch.setattr("triton.__version__", "4.0.0")
    monkeypatch.setattr(Way, "in_gluon", False)
    assert way() == "hopper"


def test_a_plan_can_be_off_in_one_version_of_triton(on_sm_90, monkeypatch):
    monkeypatch.setattr(confirmation, "VERSIONS", ((3, 6), (3, 7)))
    table = ChoiceTable([row(1, "hopper", "measured", off_in=((3, 7),)), row(1, "library")])
    monkeypatch.setattr(choices, "CHOICES", table)
    taken = []
    for version in ("3.6.0", "3.7.1"):
        monkeypatch.setattr("triton.__version__", version)
        taken.append((way(), choices.confirmed_plans()))
    assert taken == [("hopper", {"measured"}), ("library", set())]


def test_a_table_can_be_had_with_some_plans_alone(on_sm_90):
    table = choices.CHOICES.only(frozenset({"behind"}))
    assert table.plans == {"behind"} and choices.CHOICES.plans == {"measured", "behind", "elsewhere"}
    assert [each.way for each in table.rows] == ["library", "library", "hopper"]


class TestTheTable:
    """The rows of the table itself."""

    def test_plans_have_names_of_their_own_and_are_off_only_where_they_are_known(self):
        plans = [each for each in CHOICES.rows if each.plan]
        assert len({each.plan for each in plans}) == len(plans) and all(each.way == "hopper" for each in plans)
        assert all(set(each.off_in) <= set(confirmation.VERSIONS) for each in plans)

    def test_a_measurement_is_saved_where_the_row_says(self):
        """The file also names the plan."""
        texts = {}
        for each in CHOICES.rows:
            if each.measured.endswith(".json"):
                file = ROOT / "benchmarks" / "results" / each.measured
                texts.setdefault(each.measured, json.dumps(json.loads(file.read_text())))
                assert f'"{each.plan}' in texts[each.measured], each
            else:
                assert each.measured in (choices.UNSAVED, CHOSEN)

    def test_rows_ask_for_facts_that_calls_tell(self):
        half = torch.empty(1, 64, 64, dtype=torch.bfloat16, device=META)
        calls = (
            attention.parse(half, half, half, heads=1), linear.parse(half, half[0]), geglu.parse(half, half[0]),
            conv2d.parse(half[None], half[0, :, :, None, None]),
        )  # fmt: skip
        facts = {call.name: call.facts().keys() for call in calls}
        asked = {each.operation: each.facts.keys() for each in CHOICES.rows if each.operation in facts}
        assert asked.keys() == facts.keys()
        for each in CHOICES.rows:
            assert each.facts.keys() <= facts.get(each.operation, each.facts.keys()), each

    def test_the_sizes_of_a_plan_are_those_that_its_name_says(self):
        for each in CHOICES.rows:
            if each.operation == "conv2d":
                least, most = re.fullmatch(r"conv2d-\w+-(\d+)-(\d+|more).*", each.plan).groups()
                assert each.facts["pixels"].start == int(least)
                assert most == "more" or each.facts["channels"][-1] == int(most)
                for pixels in (each.facts["pixels"].start, each.facts["pixels"].stop - 1):
                    for channels in (each.facts["channels"].start, each.facts["channels"].stop - 1):
                        options = {"shortcut": each.facts["shortcut"], "format": each.facts["format"]}
                        assert each.plan == choices.convolution_plan(each.facts["mode"], pixels, channels, **options)


def attention_plan(width: int, keys: int) -> Choice | None:
    return choices.plan_of("attention", width=width, keys=keys)


@pytest.mark.parametrize("width", range(8, 257, 8))
def test_a_block_of_keys_follows_from_width_and_keys(width):
    """Also for plans with tiles for few queries."""
    for keys in (1, 64, 77, 80, 81, 256, 257, 1023, 1024, 8192, 8193, 10**6):
        row = attention_plan(width, keys)
        if row is None:
            continue
        if row.tiles.few is not None:
            assert row.tiles.few.keys == row.tiles.tiles.keys
        assert sum(row.tiles.tiles.parts) >= (width if row.tiles.in_gluon else keys)


def test_a_plan_begins_and_ends_with_the_keys_that_were_measured():
    for width, by_keys in {
        24: {64: None, 1024: None},
        32: {64: None, 65: "to 80 keys", 81: "to 256 keys, heads of 32", 256: "to 256 keys, heads of 32",
             257: None, 1023: None, 1024: "to 8192 keys, heads of 48", 8193: None},
        64: {80: "to 80 keys", 81: None, 1023: None, 1024: "to 8192 keys, heads of 64",
             8192: "to 8192 keys, heads of 64", 8193: "to more keys, heads of 64"},
        256: {256: "to 256 keys, heads of 256", 257: None},
    }.items():  # fmt: skip
        for keys, name in by_keys.items():
            row = attention_plan(width, keys)
            assert (row and row.plan) == (name and f"attention {name}"), (width, keys)


@pytest.mark.parametrize("keys", [4, 77, 256, 1024, 8193])
@pytest.mark.parametrize("width", [32, 40, 64, 80, 160, 256])
def test_no_plan_adds_a_residual(width, keys):
    """The generic kernel does, and the library with an addition."""
    plain, added = (
        choices.CHOICES.fitting(
            "attention", SM_90, bits=16, width=width, head_bytes=2 * width, keys=keys, mask="", residual=residual
        )
        for residual in (False, True)
    )
    assert added == tuple(row for row in plain if not row.plan)
    tokens = torch.empty(1, keys, width, dtype=torch.bfloat16, device=META)
    call = attention.parse(tokens, tokens, tokens, heads=1, residual=tokens)
    assert call.hopper_obstacle() == "no plan"
    with pytest.raises(NotImplementedError):
        call.hopper()


@pytest.mark.parametrize(
    ("bits", "width", "keys"), [(16, 64, 77), (16, 80, 4096), (16, 128, 4096), (16, 256, 256), (32, 64, 77)]
)
def test_lengths_and_grouped_keys_are_for_the_generic_kernel(bits, width, keys):
    """Rows that fit these sizes: of plans, which do not read them, and of torch's library."""
    facts = {"bits": bits, "width": width, "head_bytes": width * bits // 8, "keys": keys, "mask": ""}
    facts |= {"residual": False, "elements": 1}
    assert choices.CHOICES.fitting("attention", SM_90, **facts, group=1, lengths=False)
    assert choices.CHOICES.fitting("attention", SM_90, **facts, group=4, lengths=False) == ()
    of_lengths = choices.CHOICES.fitting("attention", SM_90, **facts, group=1, lengths=True)
    plans = {"attention with lengths, heads of 128"} if (width, keys) == (128, 4096) else set()
    assert {row.plan for row in of_lengths} == plans
    assert all({*row.off_in} == {*confirmation.VERSIONS} for row in of_lengths)  # no GPU has run it
    tokens = torch.empty(1, 77, 4 * width, dtype=torch.bfloat16, device=META)
    counts = torch.empty(1, dtype=torch.int32, device=META)
    for call in (
        attention.parse(tokens, tokens, tokens, heads=4, lengths=counts),
        attention.parse(tokens, *[tokens[..., :width]] * 2, heads=4),
    ):
        assert (call.hopper_obstacle(), call.hopper_plan()) == ("no plan", None)
        with pytest.raises(NotImplementedError):
            call.hopper()


@pytest.mark.parametrize(
    ("width", "keys", "way"),
    [(96, 255, "kernel"), (96, 256, "library"), (128, 1024, "library"), (136, 1023, "kernel"), (136, 1024, "library")],
)
def test_attention_of_wide_heads_is_the_librarys_from_so_many_keys_on(width, keys, way):
    row = choices.CHOICES.fitting("attention", SM_90, bits=16, width=width, head_bytes=2 * width, keys=keys, mask="")
    assert (row[0].way if row else "kernel") == way


@pytest.mark.parametrize("pairs", [1, 3, 8, 20, 512])
def test_tiles_cover_all_queries_and_end_no_later_than_full_ones(pairs):
    for blocks in (1, 2, 3, 4, 7, 18, 64, 129):
        full, small = hopper_attention._split(blocks, pairs, 132)
        assert 3 * full + 2 * small >= blocks
        assert hopper_attention._end(full * pairs, small * pairs, 132) <= hopper_attention._end(
            -(-blocks // 3) * pairs, 0, 132
        )


@pytest.mark.parametrize(
    ("tokens", "out_channels", "parts", "turns"),
    [
        pytest.param(512, 4608, (128, 16), False, id="fc1"),
        pytest.param(512, 3456, (128, 0), False, id="qkv"),
        pytest.param(2048, 1280, (128, 32), False, id="one-wave"),
        pytest.param(8192, 4608, (128, 64), True, id="many"),
    ],
)
def test_tiles_of_a_product_share_out_the_card(tokens, out_channels, parts, turns):
    tiles = hopper_linear.cut(tokens, out_channels, 132)
    assert (tiles.parts, tiles.turns) == (parts, turns)
    assert tiles.turns or 66 < tiles.number <= 132


@pytest.mark.parametrize(
    ("tokens", "out_channels", "dual", "parts", "turns"),
    [
        pytest.param(2048, 1280, False, (128, 32), False, id="one-wave"),
        pytest.param(2048, 3840, False, (128, 128), False, id="two-waves"),
        pytest.param(8192, 1920, False, (128, 0), True, id="many"),
        pytest.param(512, 3456, True, (128, 128), False, id="two-products"),
        pytest.param(2048, 5120, True, (128, 0), True, id="many-of-two-products"),
    ],
)
def test_tiles_in_fp8_are_of_both_warpgroups_but_where_there_are_many(tokens, out_channels, dual, parts, turns):
    tiles = hopper_linear.cut(tokens, out_channels, 132, dual=dual, fp8=True)
    assert (tiles.parts, tiles.turns) == (parts, turns)
    assert not turns or tiles.number >= 2 * 132


@pytest.mark.parametrize(
    ("tokens", "out_channels", "dual"), [(1, 4608, False), (512, 1152, False), (256, 1536, False), (128, 5120, True)]
)
def test_few_tokens_are_for_the_kernel_of_all_cards(tokens, out_channels, dual):
    assert not hopper_linear.fills(tokens, out_channels, 132, dual=dual)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("dual", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("tokens", [500, 4096, 10**5])
@pytest.mark.parametrize("out_channels", [3000, 10240])
def test_tiles_cover_a_product_and_its_steps_fit(tokens, out_channels, dual, fp8):
    tiles = hopper_linear.cut(tokens, out_channels, 132, dual=dual, fp8=fp8)
    width = sum(tiles.parts) // (1 + dual)
    assert (tiles.down - 1) * 128 < tokens <= tiles.down * 128
    assert (tiles.across - 1) * width < out_channels <= tiles.across * width
    assert 3 <= tiles.stages <= hopper_linear.STAGES


def test_gluon_is_for_sm_90_alone():
    assert confirmation.gluon_obstacle(CPU) == "Gluon: the device is not sm_90"


def test_products_are_of_rows_aligned_to_16_bytes():
    unaligned = "rows are not contiguous, or not aligned to 16 bytes"
    for channels, out_channels, reason in ((16, 24, None), (12, 24, unaligned), (16, 12, unaligned)):
        x, weight = torch.zeros(1, 2, channels).half(), torch.zeros(out_channels, channels).half()
        assert hopper_linear.obstacle(x, weight, out_channels) == reason, (channels, out_channels)
