"""Packages that fastdiff can do without, imported when they are needed."""

from importlib import import_module
from types import ModuleType

from fastdiff.errors import InputError


def import_diffusers(purpose: str) -> ModuleType:
    """diffusers. InputError names the `purpose` that needs it and the remedy."""
    return _imported("diffusers", purpose)


def import_transformers(purpose: str) -> ModuleType:
    """transformers. InputError names the `purpose` that needs it and the remedy."""
    return _imported("transformers", purpose)


def _imported(name: str, purpose: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise InputError(f"{purpose} needs {name}, which is not installed; pip install 'fastdiff[diffusers]'") from None
