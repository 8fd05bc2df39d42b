"""The user's table for a card: the choice for each tuned shape."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from fastdiff.execution import temporaries
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.plans.tuning import NO_TABLE, Choices, file_name, read_table, user_folder


def keep(card: str, row: dict[str, Any]) -> None:
    """Write the choice of a result row to the card's table; a row without a choice removes the shape's old entry.

    Entries for other shapes stay, if the table was made with this Triton. Raises OSError, with a one-line message, if
    the table cannot be written.
    """
    file = table_of(card)
    choices: dict[str, dict[str, list]] = {name: dict(shapes) for name, shapes in _known(file).items()}
    of_operation = choices.setdefault(row["operation"], {})
    of_operation.pop(row["shape"], None)
    if row["choice"] is not None:
        of_operation[row["shape"]] = row["choice"]
    table = {"gpu": card, "torch": torch.__version__, "triton": triton.__version__, "choices": choices}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with temporaries.holding(file.parent, (json.dumps(table, indent=1) + "\n").encode()) as temporary:
            os.replace(temporary, file)
    except OSError as error:
        remedy = "make room, or set FASTDIFF_TABLES to another folder"
        raise OSError(f"cannot write the table {file} ({error.strerror}); {remedy}") from None


def table_of(card: str) -> Path:
    """Return the path of a card's table."""
    return user_folder() / file_name(card)


def _known(file: Path) -> Choices:
    """Return the choices of the table in a file; none if the file is missing or not for this Triton."""
    return read_table(file).choices if file.is_file() else NO_TABLE.choices
