"""The child process that tries plans, so that a hang or crash stays in it.

Its protocol is::

    stdin   one line of JSON, {"device": "cuda:0", "plans": [...]}; the process ends when stdin ends
    stdout  a line of JSON when it is ready, then one for each plan: {"plan": ..., "why": null or a text, "last": bool}

After an error other than a wrong output the process may be unable to use the card, so that line is its last. This
module does not import torch. The process runs `judging`.
"""

import json
import os
import sys
import threading
from collections.abc import Callable

from fastdiff.errors import in_one_line


class WrongError(Exception):
    """A plan gave a wrong output; the message says how."""


def serve(judge: Callable[[str, str], None]) -> None:
    """Call `judge(plan, device)` for each plan from stdin, and write each result to stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the output of libraries must not mix with the answers
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for plan in asked["plans"]:
        why, is_last = None, False
        try:
            judge(plan, asked["device"])
        except WrongError as error:
            why = str(error)
        except Exception as error:
            why, is_last = in_one_line(error), True
        print(json.dumps({"plan": plan, "why": why, "last": is_last}), file=answers, flush=True)
        if is_last:
            os._exit(1)  # a normal exit would wait for the card


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
