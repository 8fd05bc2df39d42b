"""Pretend that a GPU is there: torch and Triton name it, and its tensors are ghosts."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.kernels.device.language import Absent, triton
from fastdiff.warming.ghosts import GPU, haunted


@dataclass(frozen=True)
class Card:
    """A GPU as far as it decides which kernels run: its compute capability and its number of multiprocessors."""

    capability: tuple[int, int]
    multiprocessors: int
    name: str

    @classmethod
    def here(cls) -> "Card | None":
        """Return the first GPU of this machine, or None."""
        if not torch.cuda.is_available():
            return None
        found = torch.cuda.get_device_properties(GPU)
        return cls((found.major, found.minor), found.multi_processor_count, found.name)


# The card of each compute capability that is met most often. A tuning table is never theirs: they have other names.
CARDS = {
    f"sm_{major}{minor}": Card((major, minor), multiprocessors, f"sm_{major}{minor}")
    for (major, minor), multiprocessors in {
        (8, 0): 108,  # A100
        (8, 6): 84,  # A40, RTX 3090 Ti
        (8, 9): 128,  # RTX 4090
        (9, 0): 132,  # H100 SXM, H200
        (10, 0): 148,  # B200
        (12, 0): 170,  # RTX 5090
    }.items()
}


def find_card(name: str | None) -> Card:
    """Return the card of a compute capability such as `sm_90`, or this machine's for None.

    Raises InputError if there is none, if its name is unknown, or if Triton cannot compile here.
    """
    known = ", ".join(CARDS)
    if name is not None and name not in CARDS:
        raise InputError(f"--card: {shown(name)} is unknown; use {known}")
    if isinstance(triton, Absent):
        raise InputError(
            "Triton is not installed, so there are no kernels to compile; fastdiff draws without them here"
        )
    if triton.knobs.runtime.interpret:
        raise InputError("TRITON_INTERPRET is set, so Triton compiles nothing; unset it")
    card = Card.here() if name is None else CARDS[name]
    if card is None:
        raise InputError(f"--card: this machine has no GPU; name the card to compile for: {known}")
    return card


class _Nothing:
    """A stream or an event of the absent GPU: every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def pretended(card: Card) -> Iterator[None]:
    """Pretend inside the block that the first GPU is `card`. Kernels can be compiled there, and never launched.

    This changes torch and Triton for the whole process, so only a command does it.
    """
    properties = SimpleNamespace(
        name=card.name, multi_processor_count=card.multiprocessors, major=card.capability[0], minor=card.capability[1]
    )
    torch_cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_name": lambda device=None: card.name,
        "get_device_properties": lambda device=None: properties,
        "current_stream": _Nothing,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        **dict.fromkeys(("device", "Event", "Stream", "stream"), _Nothing),
    }
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(_driver(card))
    try:
        with patch.multiple(torch.cuda, **torch_cuda), haunted():
            yield
    finally:
        triton.runtime.driver._active = active


def _driver(card: Card) -> Any:
    """Return what Triton asks of a driver to compile a kernel, and to compile the C code that launches it."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher

    target = GPUTarget("cuda", 10 * card.capability[0] + card.capability[1], 32)
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=CudaLauncher,
    )
