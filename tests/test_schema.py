"""Kinds of options: accepted values, refused values and their messages, and options read from a mapping."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from annotated_types import Interval, Len

from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.checkpoints.configs.dit import DiTTransformer2DConfig
from fastdiff.checkpoints.configs.unet2d import UNet2DConfig
from fastdiff.errors import InputError
from fastdiff.kinds import Fraction, PositiveNumber, Side, Widths
from fastdiff.samplers.ddim import DDIMConfig
from fastdiff.samplers.ddpm import DDPMConfig
from fastdiff.schema import Schema, Wanted, checked, whole

SCHEMAS = (UNet2DConfig, DiTTransformer2DConfig, AutoencoderKLConfig, DDPMConfig, DDIMConfig)


@pytest.mark.parametrize(
    ("kind", "value", "taken"),
    [
        pytest.param(whole(1, 9), 9, 9, id="whole"),
        pytest.param(whole(1, 9), np.int64(3), 3, id="whole-of-numpy"),
        pytest.param(whole(1, 9), torch.tensor(3), 3, id="whole-of-torch"),
        pytest.param(Fraction, 1, 1.0, id="a-whole-number-for-a-number"),
        pytest.param(Fraction, np.float32(0.5), 0.5, id="number-of-numpy"),
        pytest.param(Side | tuple[Side, Side] | None, [8, 16], (8, 16), id="list-for-a-tuple"),
        pytest.param(Side | tuple[Side, Side] | None, None, None, id="null"),
        pytest.param(tuple[float, ...], np.array([0, 1.5]), (0.0, 1.5), id="array"),
        pytest.param(dict[str, tuple[str, ...]], {"a": ["b"]}, {"a": ("b",)}, id="object"),
    ],
)
def test_taken(kind, value, taken):
    found = checked("x", value, kind)
    assert found == taken and type(found) is type(taken)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (whole(1, 9), [0, 10, 1.0, True, "3", None, [3], {}, 10**400, torch.tensor(2.5)], "a whole number from 1 to 9"),
        (Annotated[int, Interval(ge=1)], [0], "a whole number of at least 1"),
        (PositiveNumber, [0, -1.0, float("nan"), float("inf"), 10**400, "1", False], "a number greater than 0"),
        (Fraction, [2, -0.1], "a number from 0 to 1"),
        (bool, [0, 1, "x", None], "true or false"),
        (Literal["a", "b", None], ["c", 1, [], {}], "one of a, b"),
        (Widths, [[], 8, [8, 0], ["8"], [8] * 13], "a list of 1 to 12, each a whole number from 1 to 65536"),
        (
            Side | tuple[Side, Side] | None,
            [0, [8], [8, 8, 8], "8"],
            "a whole .* or a list of 2, each a .*",
        ),
        (Annotated[str, Len(0, 3)], ["abcd", 3, None], "a string of up to 3"),
        (tuple[float, ...], [torch.zeros(1).expand(2**40), np.broadcast_to(0.5, 2**40)], "a list, each a number"),
        (dict[str, str], [{"a": 1}, {1: "a"}, [], "a"], "an object in which every value is a string"),
        (Annotated[str, Len(1), Wanted("a name")] | None, ["", 3], "a name"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_refused_in_words(kind, values, words):
    for value in values:
        with pytest.raises(InputError, match=f"^x: .* is not {words}$") as error:
            checked("x", value, kind)
        assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_a_value_error_is_what_it_is():
    """So callers can catch it without knowing fastdiff."""
    with pytest.raises(ValueError, match=r"^x: 0 is not a whole number"):
        checked("x", 0, whole(1, 9))


def test_a_list_that_holds_itself_is_refused():
    endless: list = []
    endless.append(endless)
    with pytest.raises(InputError, match="is not a list"):
        checked("x", endless, tuple[float, ...])


@dataclass(frozen=True)
class Options(Schema):
    SWITCHED_OFF: ClassVar[Mapping[str, Any]] = {"upcast": False}
    SHOWN_AS: ClassVar[Mapping[str, str]] = {"sizes": "all-sizes"}
    width: whole(1, 9) = 3
    sizes: tuple[int, ...] = ()

    def check(self) -> None:
        if self.width < sum(self.sizes):
            raise InputError("sizes: they are more than the width")


@dataclass(frozen=True)
class Required(Schema):
    first: int
    second: str
    third: bool = False


def test_options_without_a_default_must_be_there():
    assert Required.from_mapping({"second": "x", "first": 1}, "here") == Required(1, "x")
    for given, missing in (({"_x": 1}, "first, second"), ({"second": "x", "third": True}, "first")):
        with pytest.raises(InputError, match=f"^here: {missing} is missing; add it"):
            Required.from_mapping(given, "here")


def test_lists_become_tuples_and_bookkeeping_is_passed_over():
    given = {"_class_name": "Options", "_diffusers_version": "0.42.1", "width": 3, "sizes": [1, 2], "upcast": False}
    assert Options.from_mapping(given, "here") == Options(3, (1, 2))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        pytest.param({"b": 1, "a": 2}, "here: unknown option a, b; Options has sizes, width", id="unknown"),
        pytest.param({"upcast": True}, "here: upcast True is not supported", id="switched-on"),
        pytest.param({"upcast": np.zeros(2)}, "here: upcast a ndarray of shape (2,)", id="array-for-a-switch"),
        pytest.param({"sizes": [9]}, "here: sizes: they are more than the width", id="options-do-not-go-together"),
        pytest.param({"width": "1"}, "here: width: '1' is not a whole number from 1 to 9", id="wrong-kind"),
        pytest.param({"sizes": 1}, "here: all-sizes: 1 is not a list, each a whole number", id="name-for-people"),
    ],
)
def test_bad_options_are_one_line_that_names_the_source(mapping, message):
    with pytest.raises(InputError) as error:
        Options.from_mapping(mapping, "here")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
@pytest.mark.parametrize("value", [{}, [[[]]], "x", -1, 10**400, float("nan"), object()], ids=lambda v: f"{v!r:.10}")
def test_no_option_takes_what_is_no_value_of_any(schema, value):
    for name in [field.name for field in fields(schema)]:
        try:
            schema(**{name: value})
        except InputError as error:
            assert str(error).startswith(f"{name}: ") and len(str(error)) < 400
        else:
            assert (name, value) in {("beta_schedule", "x"), ("freq_shift", -1), ("steps_offset", -1)} or (
                "factor" in name and value == -1
            ), (name, value)
