"""The messages between the server and its worker processes. They are pickled: both ends are our own processes."""

import pickle
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.errors import in_one_line
from fastdiff.hosting.catalogue.offered import OptionFiles
from fastdiff.hosting.models import Models
from fastdiff.kinds import Precision
from fastdiff.serve.drawing.offers import Offers
from fastdiff.serve.orders.jobs import Counts, Made
from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.orders.translation import Order


@dataclass(frozen=True)
class Setup:
    """The models on offer and the limits, for a server and its workers."""

    names: tuple[str, ...]
    precision: Precision
    lora_dir: Path | None
    limits: Limits

    def offers(self, device: str) -> Offers:
        """Return the models on offer. They are not loaded yet. Raises InputError."""
        models = Models(device=device, files=OptionFiles(self.lora_dir), most=len(self.names))
        return Offers(self.names, models, self.precision)


class RemoteError(Exception):
    """The traceback of an error in a worker."""

    def __str__(self) -> str:
        return f"in a worker:\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """An error, as it goes through the pipe."""

    error: BaseException
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the failure of an error. An error that cannot be pickled becomes a RuntimeError."""
        sent = error if _can_be_sent(error) else RuntimeError(in_one_line(error))
        return cls(sent, "".join(traceback.format_exception(error)))

    def raised(self) -> BaseException:
        """Return the error, with the worker's traceback for a log."""
        self.error.__cause__ = RemoteError(self.trace)
        return self.error


def _can_be_sent(error: BaseException) -> bool:
    try:
        there = pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return type(there) is type(error) and str(there) == str(error)


# To a worker.


@dataclass(frozen=True)
class Begin:
    """Load the models, and draw a few steps at these sizes (width, height)."""

    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Draw:
    """Draw an order."""

    task: int
    order: Order


@dataclass(frozen=True)
class Cancel:
    """End a drawing before its next step."""

    task: int


@dataclass(frozen=True)
class Ask:
    """Tell the counts."""


@dataclass(frozen=True)
class Stop:
    """End the process at once."""


# To the server.


@dataclass(frozen=True)
class Loaded:
    """The models are loaded."""

    notices: list[str]


@dataclass(frozen=True)
class Begun:
    """A drawing begins."""

    task: int


@dataclass(frozen=True)
class Drawn:
    """A picture of a drawing."""

    task: int
    made: Made


@dataclass(frozen=True)
class Ended:
    """A drawing ended, perhaps by an error."""

    task: int
    failure: Failure | None


@dataclass(frozen=True)
class Counted:
    """The answer to `Ask`."""

    counts: Counts


@dataclass(frozen=True)
class Lost:
    """The process ends by an error."""

    failure: Failure


def packed(message: Any) -> bytes:
    """Return a message as bytes."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
