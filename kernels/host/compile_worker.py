"""The program that compiles kernels for another process: a kernel on its input, files in Triton's cache, an answer.

`compiling` starts it in a fresh interpreter, with nothing of the other process: no CUDA, no threads, no lock. It
imports no torch, so it is ready in a tenth of a second.
"""

import dis
import os
import pickle
import re
import sys
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from fastdiff.kernels.device.language import triton

ANSWER = b"\n"  # once at the start and once for each kernel, compiled or not


class Description(NamedTuple):
    """All that decides the code that Triton makes of a kernel, in values that can be pickled."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: Any  # triton.backends.compiler.GPUTarget
    launcher: type | None  # that makes C code, which Triton 3.6 compiles too
    triton_key: str  # a hash of Triton's own files, which takes a process 0.2 s to make

    def arguments(self) -> tuple[Any, ...]:
        """What decides the C code of a launch: types, of which a descriptor's have any shape of so many dimensions."""
        return tuple(
            re.sub(r"\d+(?=[,\]])", "", kind) if isinstance(kind, str) and kind.startswith("tensordesc") else kind
            for kind in self.signature.values()
        )

    def source(self):
        """The description as Triton's own, with the kernel of this process."""
        kernel = getattr(import_module(self.module), self.name)
        settle_key(kernel)
        made = self.signature, self.constants, self.attributes
        if kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource  # which has no public name in 3.6

            return GluonASTSource(kernel, *made)
        return triton.compiler.ASTSource(kernel, *made)

    def compile(self) -> None:
        """Leave the kernel's files in Triton's cache."""
        triton.runtime.cache.triton_key = lambda: self.triton_key
        # not a driver of CUDA's, but device code asks for the target alone
        triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: self.target))
        kernel = triton.compile(self.source(), target=self.target, options=self.options)
        if self.launcher is not None:
            self.launcher(kernel.src, kernel.metadata)


def settle_key(kernel) -> None:
    """Have Triton hash a kernel after all that it calls, whatever was hashed before: a key that all processes share.

    Triton 3.6 leaves out the constants of a function whose own hash is not known yet.
    """
    if isinstance(kernel, triton.JITFunction) and kernel.hash is None:
        names = {line.argval for line in dis.get_instructions(kernel.fn) if line.opname == "LOAD_GLOBAL"}
        for name in names - {kernel.__name__}:
            settle_key(kernel.fn.__globals__.get(name))
        kernel.cache_key  # noqa: B018  which Triton remembers


def main() -> None:
    """Compile until the input ends."""
    descriptions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a compiler prints is no answer
    answers.write(ANSWER)
    with suppress(EOFError):
        while True:
            description = pickle.load(descriptions)
            with suppress(Exception):  # it is raised where the other process compiles the kernel in turn
                description.compile()
            answers.write(ANSWER)
