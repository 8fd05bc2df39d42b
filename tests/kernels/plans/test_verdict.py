"""The verdict file: when it applies, that a process reads it once, and that no bits change during a process."""

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.recording import record
from fastdiff.kernels.plans import choices, confirmation, verdict
from fastdiff.kernels.plans.choices import Choice, ChoiceTable
from fastdiff.kernels.plans.dispatch import Operation

triton = pytest.importorskip("triton", reason="no Triton here")
CPU = torch.device("cpu")
PLANS = ("thirds", "halves")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of the test's verdict file, which does not exist yet."""
    monkeypatch.setenv(verdict.VARIABLE, str(tmp_path / "kernels.json"))
    verdict.forget()
    yield tmp_path / "kernels.json"
    verdict.forget()


@pytest.fixture
def unknown_triton(file, monkeypatch):
    """The verdict file's path on a mocked sm_90 machine with an unconfirmed Triton."""
    monkeypatch.setattr(confirmation, "is_sm_90", lambda device: True)
    monkeypatch.setattr(choices, "card_of", lambda device: choices.SM_90)
    monkeypatch.setattr(choices, "unavailable", lambda device: None)
    monkeypatch.setattr(triton, "__version__", "77.1.0")
    rows = [Choice("thirds", choices.SM_90, {"plan": plan}, "hopper", choices.CHOSEN, plan) for plan in PLANS]
    monkeypatch.setattr(choices, "CHOICES", ChoiceTable(rows))
    return file


def content(passed=PLANS, failed=(), **others):
    plans = {"passed": sorted(passed), "failed": dict.fromkeys(failed, "the error is 3")}
    return json.dumps({"schema": 1, **verdict.surroundings(CPU), **plans, **others})


@dataclass(frozen=True, eq=False)
class Thirds(Call):
    """x / 3. The sm_90 kernel rounds differently from the generic kernel."""

    name = "thirds"

    x: torch.Tensor
    plan: str = "thirds"

    @property
    def device(self):
        return CPU

    def check(self):
        pass

    def reference(self):
        return self.x / 3

    def kernel(self):
        return self.x * (1 / 3)

    def facts(self):
        return {"plan": self.plan}

    def hopper_obstacle(self):
        return None

    def hopper(self):
        return self.x / 3


thirds = Operation("thirds", Thirds)
X = torch.linspace(1, 2, 999)


def test_bits_change_at_a_restart_alone(unknown_triton):
    first = thirds(X)
    assert torch.equal(first, X * (1 / 3)) and confirmation.in_force(CPU) is None
    unknown_triton.write_text(content())
    assert torch.equal(thirds(X), first) and confirmation.in_force(CPU) is None
    verdict.forget()  # as in a new process
    then = thirds(X)
    assert torch.equal(then, X / 3) and not torch.equal(then, first)
    assert confirmation.in_force(CPU).digest
    unknown_triton.unlink()
    assert torch.equal(thirds(X), then)
    verdict.forget()
    assert torch.equal(thirds(X), first)


def test_a_plan_that_failed_or_was_not_tried_stays_off(unknown_triton):
    unknown_triton.write_text(content(["halves"], ["thirds"]))
    with record(CPU) as recorded:
        assert torch.equal(thirds(X), X * (1 / 3)) and torch.equal(thirds(X, "halves"), X / 3)
    said = "not as thirds: it failed fastdiff doctor --check-kernels in triton 77.1.0"
    assert [call.why for call in recorded.calls if call.operation == "thirds"] == [said, ""]
    unknown_triton.write_text(content(["halves"]))
    verdict.forget()
    with record(CPU) as recorded:
        assert torch.equal(thirds(X), X * (1 / 3))
    assert recorded.calls[0].why.startswith("not as thirds: it was not tried by fastdiff doctor --check-kernels")


def test_a_confirmed_triton_needs_no_verdict_and_reads_none(unknown_triton, monkeypatch):
    unknown_triton.write_text(content([], PLANS))
    monkeypatch.setattr(confirmation, "VERSIONS", ((77, 1),))
    monkeypatch.setattr(verdict, "reading", lambda device: pytest.fail("the verdict was read"))
    assert torch.equal(thirds(X), X / 3)
    assert confirmation.in_force(CPU) is None and confirmation.notice(CPU) is None


def test_other_cards_need_none(unknown_triton, monkeypatch):
    monkeypatch.setattr(confirmation, "is_sm_90", lambda device: False)
    monkeypatch.setattr(verdict, "reading", lambda device: pytest.fail("the verdict was read"))
    assert confirmation.in_force(CPU) is None and confirmation.notice(CPU) is None


@pytest.mark.parametrize("name", ["card", "driver", "torch", "triton", "fastdiff"])
def test_a_verdict_of_something_else_does_not_count(unknown_triton, name):
    unknown_triton.write_text(content(**{name: "another"}))
    assert confirmation.in_force(CPU) is None
    here = verdict.surroundings(CPU)[name]
    assert verdict.reading(CPU).problem == f"the verdict was made with {name} another, not {here}"
    assert f"and the verdict was made with {name} another" in confirmation.notice(CPU)


BROKEN = {
    "empty": "",
    "no-json": "{",
    "list": "[]",
    "schema": json.dumps({"schema": 2}),
    "number": "7",
    "deep": "[" * 100_000,
    "no-plans": json.dumps({"schema": 1, **dict.fromkeys(("card", "driver", "torch", "triton", "fastdiff"), "")}),
    "numbers-for-names": content(failed=()).replace('"passed": [', '"passed": [1, '),
    "failed-is-no-object": content().replace('"failed": {}', '"failed": []'),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_verdict_is_one_line_and_counts_as_none(unknown_triton, text):
    unknown_triton.write_text(text)
    assert verdict.reading(CPU) == (None, f"{unknown_triton} is not a verdict file")
    assert torch.equal(thirds(X), X * (1 / 3))
    assert confirmation.notice(CPU) == (
        f"the fast kernels are off: nobody has confirmed them in Triton 77.1.0, and {unknown_triton} is not a verdict "
        "file; `fastdiff doctor --check-kernels` tries them on this machine"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(["schema", "card", "driver", "torch", "passed", "failed"]), JSON))
def test_no_content_breaks_the_reader(tmp_path_factory, changes):
    path = tmp_path_factory.getbasetemp() / "some.json"
    path.write_text(json.dumps(json.loads(content()) | changes))
    found = verdict.read(path)
    assert (found.verdict is None) == (found.problem == f"{path} is not a verdict file")


def test_a_folder_in_its_place_is_no_verdict(unknown_triton):
    unknown_triton.mkdir()
    assert verdict.reading(CPU) == (None, f"{unknown_triton} is not a verdict file")


def test_notices(unknown_triton):
    assert confirmation.notice(CPU) == (
        "the fast kernels are off: nobody has confirmed them in Triton 77.1.0; "
        "`fastdiff doctor --check-kernels` tries them on this machine"
    )
    for passed, said in (
        ([], "the fast kernels are off: none passed `fastdiff doctor --check-kernels` in Triton 77.1.0"),
        (["thirds"], None),
    ):
        unknown_triton.write_text(content(passed, ["halves"]))
        verdict.forget()
        assert confirmation.notice(CPU) == said


def test_the_digest_is_of_the_plans_alone(unknown_triton):
    def digest(**options):
        unknown_triton.write_text(content(**options))
        return verdict.read(unknown_triton).verdict.digest

    usual = digest()
    assert digest(card="another", driver="1") == usual
    assert len({usual, digest(passed=["thirds"]), digest(passed=["thirds"], failed=["halves"])}) == 3


def test_the_file_is_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(verdict.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert verdict.file() == tmp_path / "fastdiff" / "kernels.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert verdict.file() == tmp_path / ".cache" / "fastdiff" / "kernels.json"


@pytest.mark.gpu
def test_the_driver_has_a_version():
    assert verdict.driver_version()[0].isdigit()
