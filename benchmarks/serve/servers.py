"""The servers that are measured, as processes on free ports."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx

from benchmarks.harness.reports import environment

_FASTDIFF, _DIFFUSERS = ("fastdiff", "serve", "--port", "0"), ("benchmarks.serve.diffusers_server",)
SERVERS = {  # the module that runs, and its options
    "shared": _FASTDIFF,
    "worker": (*_FASTDIFF, "--workers", "1"),
    "alone": (*_FASTDIFF, "--max-batch", "1"),
    "diffusers": _DIFFUSERS,
    "diffusers-eager": (*_DIFFUSERS, "--eager"),
}
SHARING = ("shared", "worker")  # servers whose requests share steps
ENDING = 10.0  # seconds after SIGTERM


class Server(NamedTuple):
    """A running server."""

    address: str
    process: int


@contextmanager
def serving(model: str, server: str = "shared") -> Iterator[Server]:
    """Run one of SERVERS as a process inside the block. It is ready."""
    command = [sys.executable, "-m", *SERVERS[server], "--model", model]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(_address_of(process), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(ENDING)
            except subprocess.TimeoutExpired:
                process.kill()


def _address_of(process: "subprocess.Popen[str]") -> str:
    """Return the address that a server prints, once it is ready. Exits if the server has ended."""
    assert process.stdout is not None
    words = (word for line in process.stdout for word in line.split())
    address = next((word for word in words if word.startswith("http://")), "").removesuffix("/v1")
    while process.poll() is None and address:
        if httpx.get(f"{address}/ready", trust_env=False).status_code == 200:
            return address
        time.sleep(0.1)
    raise SystemExit(f"the server has ended with exit code {process.wait()}")
