"""Packages that fastdiff can do without, imported when they are needed."""

from importlib import import_module
from types import ModuleType

from fastdiff.errors import InputError


def import_diffusers(purpose: str) -> ModuleType:
    """diffusers. InputError names the `purpose` that needs it and the remedy."""
    try:
        return import_module("diffusers")
    except ImportError:
        raise InputError(
            f"{purpose} needs diffusers, which is not installed; pip install 'fastdiff[diffusers]'"
        ) from None


def import_scipy_stats(purpose: str) -> ModuleType:
    """scipy.stats. InputError names the `purpose` that needs it and the remedy."""
    try:
        return import_module("scipy.stats")
    except ImportError:
        raise InputError(f"{purpose} needs scipy, which is not installed; pip install scipy") from None
