"""The two number checks that flags, JSON files and model options share."""

import math
import sys
from typing import Any


def is_int(value: Any, least: float, most: float = math.inf) -> bool:
    """Whether `value` is a whole number (an int, not a bool) from `least` to `most`."""
    return type(value) is int and least <= value <= most


def is_number(value: Any, least: float, most: float = math.inf) -> bool:
    """Whether `value` is a number (an int or float, not a bool) from `least` to `most` that is finite as a float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max and least <= value <= most
