"""The program that compiles kernels for a parent process: kernels arrive on a socket, files go to Triton's cache.

`compiling` starts it in a fresh interpreter that shares nothing with the parent: no CUDA, threads or locks. It imports
Triton but not torch, and is ready in a tenth of a second. Then it forks a worker for every socket that it receives, and
each worker is ready at once.
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
from fastdiff.kernels.host.lazy_triton import triton

ANSWER = b"\n"  # sent after each kernel, whether or not it compiled
IDLE = 60.0  # seconds without work after which the program exits


class Description(NamedTuple):
    """Everything that determines a kernel's compiled code, as values that can be pickled."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: Any  # triton.backends.compiler.GPUTarget
    triton_key: str  # a hash of Triton's own files, which takes 0.2 s to compute

    def arguments(self) -> tuple[Any, ...]:
        """Return the types that determine a launch's C code: for a descriptor only the number of dimensions matters."""
        return tuple(
            re.sub(r"\d+(?=[,\]])", "", kind) if isinstance(kind, str) and kind.startswith("tensordesc") else kind
            for kind in self.signature.values()
        )

    def source(self):
        """Return Triton's own source object, with this process's kernel."""
        kernel = getattr(import_module(self.module), self.name)
        settle_key(kernel)
        made = self.signature, self.constants, self.attributes
        if kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource  # no public name in 3.6

            return GluonASTSource(kernel, *made)
        return triton.compiler.ASTSource(kernel, *made)

    def compile(self) -> None:
        """Compile the kernel into Triton's cache."""
        triton.runtime.cache.triton_key = lambda: self.triton_key
        # not a CUDA driver, but device code only asks for the target
        triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: self.target))
        triton.compile(self.source(), target=self.target, options=self.options)


class Launch(NamedTuple):
    """The C code that launches a kernel. Triton 3.6 compiles it too."""

    launcher: type  # Triton's launcher class, which compiles it
    kernel: Description

    def compile(self) -> None:
        """Compile the launcher into Triton's cache. This does not need the compiled kernel."""
        kinds = [kind for kind in self.kernel.signature.values() if isinstance(kind, str)]
        descriptors = sum(kind.startswith("tensordesc") for kind in kinds)
        self.launcher(self.kernel.source(), Uncompiled([True] * descriptors))


class Uncompiled:
    """A stand-in for Triton's metadata of a compiled kernel. The launcher only asks for the number of descriptors."""

    def __init__(self, descriptors: list):
        self.tensordesc_meta = descriptors

    def __getattr__(self, name: str) -> int:
        return 0


def settle_key(kernel) -> None:
    """Make Triton hash a kernel's callees before the kernel, so that all processes compute the same cache key.

    Triton 3.6 and 3.7 leave out the constants of a callee that has not been hashed yet.
    """
    if isinstance(kernel, triton.JITFunction) and kernel.hash is None:
        names = {line.argval for line in dis.get_instructions(kernel.fn) if line.opname == "LOAD_GLOBAL"}
        for name in names - {kernel.__name__}:
            settle_key(kernel.fn.__globals__.get(name))
        kernel.cache_key  # noqa: B018  Triton caches it


def main() -> None:
    """Fork a worker for each socket received on standard input, itself a socket, until it closes or is long idle."""
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
    """Import and hash every kernel that workers may compile, once for all of them."""
    for module in walk_packages(device.__path__, f"{device.__name__}."):
        with suppress(Exception):  # another Triton; the parent raises the error when it imports the module
            for kernel in vars(import_module(module.name)).values():
                settle_key(kernel)


def _forget_ended() -> None:
    """Reap workers that have exited. Until then their process ids cannot be reused."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def work(descriptor: int) -> None:
    """Send this process's id to a socket, then compile what arrives there until it closes; never return.

    The process leads a process group, so its children can be killed with it.
    """
    os.setsid()
    with suppress(BaseException), socket.socket(fileno=descriptor) as other, other.makefile("rb") as descriptions:
        other.sendall(b"%d\n" % os.getpid())
        while True:
            description = pickle.load(descriptions)
            with suppress(Exception):  # the parent raises the error when it compiles the kernel itself
                description.compile()
            other.sendall(ANSWER)
    os._exit(0)
