import pytest

from tests.tree.floors import ROOT
from tests.tree.packages import build


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this tree."""
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))
