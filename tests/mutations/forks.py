"""A process that has imported the modules it is told, and forks another for each line of arguments for pytest.

Half of the time of a short run goes into these imports. A line of stdin is a JSON object: the `arguments`, the
`environment` to add, and the file for the `output`. Two lines answer it: the number of the process, which begins a
group of its own, and then its exit code.
"""

import contextlib
import importlib
import json
import os
import sys
from typing import Any, NoReturn


def main() -> None:
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(request: dict[str, Any]) -> NoReturn:
    """Run pytest in this process, and end it."""
    os.setsid()
    nothing, output = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    )
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.update(request["environment"])
    sys.argv = ["pytest", *request["arguments"]]
    code: int = 3
    try:
        import pytest

        code = pytest.main(request["arguments"])
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
