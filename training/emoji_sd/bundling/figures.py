"""The results of a run's scripts, which its card shows."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

KEPT = {  # path in the run's folder -> name in training/results
    "evaluation/evaluation.json": "evaluation-sd.json",
    "sampling.json": "sampling-sd.json",
    "unet/log.jsonl": "training-log-sd.jsonl",
    "{vae}/log.jsonl": "training-log-sd-vae.jsonl",
    "judge/log.jsonl": "training-log-sd-judge.jsonl",
}


@dataclass(frozen=True)
class Figures:
    """The results of a run: from `evaluate` and `compare_sampling`, and the lines of the logs."""

    evaluation: dict[str, Any]
    sampling: dict[str, Any]
    unet: list[dict[str, Any]]
    vae: list[dict[str, Any]]
    judge: list[dict[str, Any]]
    prompts: dict[str, list[str]]  # of the sheets "grid" and "new"

    @classmethod
    def read(cls, run: Path, vae: str) -> "Figures":
        evaluation, sampling, *logs = (run / source.format(vae=vae) for source in KEPT)
        return cls(
            json.loads(evaluation.read_text(encoding="utf-8")),
            json.loads(sampling.read_text(encoding="utf-8")),
            *([json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] for log in logs),
            {
                name: (run / "evaluation" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
                for name in ("grid", "new")
            },
        )


def minutes(log: list[dict[str, Any]]) -> float:
    """Return a training's minutes from its log, in which `seconds` restarts with each run."""
    ends = [row["seconds"] for row, after in pairwise(log) if after["seconds"] < row["seconds"]]
    return (sum(ends) + log[-1]["seconds"]) / 60
