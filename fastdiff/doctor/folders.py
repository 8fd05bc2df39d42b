"""The cache folders: where they are, whether they can be written, and the free space on their disks."""

import os
import shutil
import tempfile
from pathlib import Path

from fastdiff.doctor.finding import Finding
from fastdiff.kernels.plans import tuning, verdict

LEAST_FREE = 2**30  # bytes


def findings() -> list[Finding]:
    """Return a finding for each folder."""
    from huggingface_hub import constants

    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.join(
        os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache"
    )
    return [
        folder_finding("hub cache", Path(constants.HF_HUB_CACHE), "HF_HOME"),
        folder_finding("Triton cache", Path(triton), "TRITON_CACHE_DIR"),
        folder_finding("verdicts", verdict.file().parent, verdict.VARIABLE),
        folder_finding("tables", tuning.user_folder(), tuning.VARIABLE),
    ]


def folder_finding(name: str, folder: Path, variable: str) -> Finding:
    """Return a finding about a folder, which need not exist.

    Args:
        variable: the environment variable that sets another folder.
    """
    nearest = folder.absolute()
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    remedy = f"set {variable} to another folder"
    try:
        free = shutil.disk_usage(nearest).free
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return Finding(name, f"{folder} cannot be written ({error.strerror})", remedy, {"path": str(folder)})
    text, values = f"{folder}, {free / 2**30:.1f} GiB free", {"path": str(folder), "free": free}
    return Finding(name, text, f"make room, or {remedy}" if free < LEAST_FREE else "", values)
