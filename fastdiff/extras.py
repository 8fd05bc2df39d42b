"""Import optional packages when they are needed."""

from importlib import import_module
from types import ModuleType

from fastdiff.errors import InputError


def import_diffusers(purpose: str) -> ModuleType:
    """Import diffusers. The InputError for a missing package names `purpose` and the remedy."""
    return _imported("diffusers", purpose, "'fastdiff[diffusers]'")


def import_transformers(purpose: str) -> ModuleType:
    """Import transformers. The InputError for a missing package names `purpose` and the remedy."""
    return _imported("transformers", purpose, "'fastdiff[diffusers]'")


def import_peft(purpose: str) -> ModuleType:
    """Import peft. The InputError for a missing package names `purpose` and the remedy."""
    return _imported("peft", purpose, "peft")


def import_scipy_stats(purpose: str) -> ModuleType:
    """Import scipy.stats. The InputError for a missing package names `purpose` and the remedy."""
    return _imported("scipy.stats", purpose, "scipy")


def import_sd_parsers(purpose: str) -> ModuleType:
    """Import sd_parsers. The InputError for a missing package names `purpose` and the remedy."""
    return _imported("sd_parsers", purpose, "'fastdiff[ui]'")


def _imported(name: str, purpose: str, wanted: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise InputError(f"{purpose} needs {package}, which is not installed; pip install {wanted}") from None
