"""The program that compiles kernels for another process: a kernel comes by a socket, files go to Triton's cache.

`compiling` starts it in a fresh interpreter, with nothing of the other process: no CUDA, no threads, no lock. It
imports Triton, no torch, and is ready in a tenth of a second; then it forks a worker for every socket that it is sent,
each ready at once.
"""

import dis
import os
import pickle
import re
import socket
from contextlib import suppress
from importlib import import_module
from pkgutil import walk_packages
from types import SimpleNamespace
from typing import Any, NamedTuple

from fastdiff.kernels import device
from fastdiff.kernels.device.language import triton

ANSWER = b"\n"  # for each kernel, compiled or not
IDLE = 60.0  # seconds without work after which the program ends


class Description(NamedTuple):
    """All that decides the code that Triton makes of a kernel, in values that can be pickled."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: Any  # triton.backends.compiler.GPUTarget
    triton_key: str  # a hash of Triton's own files, which takes a process 0.2 s to make

    def arguments(self) -> tuple[Any, ...]:
        """The types that decide the C code of a launch; of a descriptor the number of dimensions counts, no size."""
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
        triton.compile(self.source(), target=self.target, options=self.options)


class Launch(NamedTuple):
    """The C code that launches a kernel, which Triton 3.6 compiles too."""

    launcher: type  # that makes it
    kernel: Description

    def compile(self) -> None:
        """Leave its file in Triton's cache. It needs of the kernel only what is known before that is compiled."""
        kinds = [kind for kind in self.kernel.signature.values() if isinstance(kind, str)]
        descriptors = sum(kind.startswith("tensordesc") for kind in kinds)
        self.launcher(self.kernel.source(), Uncompiled([True] * descriptors))


class Uncompiled:
    """Stands for all that Triton knows of a compiled kernel; C code asks only how many descriptors it has, if any."""

    def __init__(self, descriptors: list):
        self.tensordesc_meta = descriptors

    def __getattr__(self, name: str) -> int:
        return 0


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
    """Fork a worker for each socket that standard input, a socket too, brings; until it is closed, or long idle."""
    _learn_kernels()
    with socket.socket(fileno=0) as control, suppress(TimeoutError):
        control.settimeout(IDLE)
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            (descriptor,) = descriptors
            if os.fork() == 0:
                control.close()
                work(descriptor)
            os.close(descriptor)
            _forget_ended()


def _learn_kernels() -> None:
    """Import and hash all that workers may compile, once for all of them."""
    for module in walk_packages(device.__path__, f"{device.__name__}."):
        with suppress(Exception):  # of another Triton; it is raised where the other process imports it
            for kernel in vars(import_module(module.name)).values():
                settle_key(kernel)


def _forget_ended() -> None:
    """Let workers go that have ended. Until then no other process gets their numbers."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def work(descriptor: int) -> None:
    """Tell a socket the number of this process, then compile what it brings until it is closed; never return.

    The process leads a group, so that all that it starts can be ended with it.
    """
    os.setsid()
    with suppress(BaseException), socket.socket(fileno=descriptor) as other, other.makefile("rb") as descriptions:
        other.sendall(b"%d\n" % os.getpid())
        while True:
            description = pickle.load(descriptions)
            with suppress(Exception):  # it is raised where the other process compiles the kernel in turn
                description.compile()
            other.sendall(ANSWER)
    os._exit(0)
