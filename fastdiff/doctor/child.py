"""The process in which plans are tried: what hangs or crashes here harms nobody else.

    stdin   one line of JSON, {"device": "cuda:0", "plans": [...]}; at its end the process ends
    stdout  a line of JSON when it is ready, then one for each plan: {"plan": ..., "why": null or a text, "last": bool}

After an error that is not a wrong output the card may be of no use to the process, so that line is its last. Imports
no torch: `judging` is run as the process.
"""

import json
import os
import sys
import threading
from collections.abc import Callable

from fastdiff.errors import in_one_line


class WrongError(Exception):
    """A plan that gives something else than it should; the message says what."""


def serve(judge: Callable[[str, str], None]) -> None:
    """Have `judge(plan, device)` try the plans that stdin names, and say on stdout what came of each."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
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
            os._exit(1)  # the end of Python would wait for the card


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
