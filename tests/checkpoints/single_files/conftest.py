"""Tiny pipelines as folders and as single files."""

import functools

import pytest

from tests.checkpoints.single_files.ldm import save_pipeline


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return the function that gives a kind's pipeline, folder and single file."""
    return functools.cache(lambda kind: save_pipeline(kind, tmp_path_factory.mktemp(kind)))
