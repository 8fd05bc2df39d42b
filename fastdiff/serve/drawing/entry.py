"""The beginning of a worker process. Imports no torch: the GPU is chosen before anything can use one."""

import os
import pickle
import signal
from multiprocessing.connection import Connection

VISIBLE = "CUDA_VISIBLE_DEVICES"


def run(connection: Connection, device: str, setup: bytes) -> None:
    """Draw what comes through the connection until the process ends.

    Args:
        device: such as "cpu" or "cuda:1".
        setup: a pickled `Setup`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches all processes; the server ends its workers
        signal.signal(number, signal.SIG_IGN)
    device = choose_gpu(device)
    from fastdiff.serve.drawing.worker import work

    work(connection, device, pickle.loads(setup))


def choose_gpu(device: str) -> str:
    """Let this process see one GPU alone, so that no thread of it uses another one. Return the device's name here."""
    name, _, number = device.partition(":")
    if name != "cuda":
        return device
    visible = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = visible.split(",")[int(number)].strip() if visible else number
    return name
