"""A fork server for pytest: imports the modules in its arguments once, and forks a process for each run.

The imports are half of the time of a short run. A line of stdin is a JSON object with pytest's `arguments`, the
`environment` variables to add, and the file for the `output`. The server answers with two lines: the id of the process,
which leads its own process group, and then its exit code.
"""

import contextlib
import importlib
import json
import os
import sys
from typing import Any, NoReturn


def main() -> None:
    sys.path[0] = os.getcwd()  # as in `python -m pytest`
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
    """Run pytest in this process, and exit."""
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
