"""The check of a plan finds errors, bits that change or depend on the batch, and outputs that are not written."""

from dataclasses import dataclass

import pytest
import torch

from fastdiff.doctor import judging
from fastdiff.doctor.child import WrongError
from fastdiff.doctor.trials import Trial, trials_of
from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.plans import choices
from fastdiff.kernels.plans.dispatch import Operation

CPU, META = torch.device("cpu"), torch.device("meta")
HALF = torch.bfloat16


@dataclass(frozen=True, eq=False)
class Doubled(Call):
    """2 x, by a faulty plan."""

    x: torch.Tensor
    fault: str = ""

    @property
    def device(self):
        return self.x.device

    def check(self):
        pass

    def reference(self):
        return self.x * 2

    kernel = reference

    def hopper_plan(self):
        return "doubled"

    def hopper(self):
        y = torch.empty_like(self.x)
        y[:, self.fault == "unwritten" :] = 2 * self.x[:, self.fault == "unwritten" :]
        runs.append(y)
        if self.fault == "wrong":
            y[0, 0] += 1
        if self.fault == "moves" and len(runs) == judging.RUNS:
            y[-1, -1] += 2**-6 * y[-1, -1]
        if self.fault == "batch" and len(y) == 1:
            y += 2**-7 * y
        if self.fault == "bits":
            y[:, 0] += 2**-6
        return y


runs: list[torch.Tensor] = []
doubled = Operation("doubled", Doubled)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", None),
        ("unwritten", "in bfloat16 some elements are NaN or infinite, or were not written"),
        ("wrong", "in bfloat16 the error is 1; the generic kernel has 0"),
        ("moves", "its bits in bfloat16 change from run to run"),
        ("batch", "a picture in bfloat16 has different bits alone and in a batch"),
        ("bits", "its bits in bfloat16 differ from the generic kernel"),
    ],
)
def test_each_fault_is_found(monkeypatch, fault, said):
    runs.clear()
    x = torch.full((2, 4), 1.5, dtype=HALF)
    monkeypatch.setattr(judging, "trials_of", lambda plan, device: [Trial(doubled, {"x": x}, {"fault": fault})])
    if said is None:
        judging.judge("doubled", "cpu")
        assert len(runs) == judging.RUNS + 1
        with pytest.raises(WrongError, match=r"^doubled runs at its shapes instead$"):
            judging.judge("another", "cpu")
        return
    with pytest.raises(WrongError) as caught:
        judging.judge("doubled", "cpu")
    assert str(caught.value) == said


ULP = 2.0**-6  # of numbers from 2 to 4, and a multiple of the ulp of numbers from 1 to 2
TRUTH = 1 + ULP * torch.arange(64, dtype=torch.float64)


@pytest.mark.parametrize(
    ("error", "twins_error", "wrong", "said"),
    [
        pytest.param(ULP / 2, 0.0, 1, None, id="within-an-ulp"),
        pytest.param(ULP / 2, 0.0, 64, "the RMS error is 0.00781; the generic kernel has 0", id="rms"),
        pytest.param(3 * ULP, ULP, 1, "the error is 0.0469; the generic kernel has 0.0156", id="over-twice"),
        pytest.param(ULP, ULP, 64, None, id="as-the-other"),
        pytest.param(3 * ULP, 3 * ULP, 64, "the error is 0.0469, above the allowed 0.0318", id="cap"),
        pytest.param(float("nan"), 1.0, 1, "some elements are NaN or infinite, or were not written", id="nan"),
        pytest.param(float("inf"), 1.0, 1, "some elements are NaN or infinite, or were not written", id="inf"),
    ],
)
def test_the_bound_on_errors(error, twins_error, wrong, said):
    """`wrong` of 64 numbers have the error."""

    def output(error):
        made = TRUTH.clone()
        made[:wrong] += error
        return made.to(HALF)

    assert judging.error_of(output(error), output(twins_error), TRUTH) == said


def test_outputs_are_poisoned_and_products_exact_inside_the_block_alone():
    with judging.poisoned(), judging.exact_products():
        assert torch.empty(3).isnan().all() and torch.zeros(2).new_empty(3).isnan().all()
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 and torch.empty is not None
    assert torch.empty.__name__ == "empty"


@pytest.mark.slow
def test_every_confirmed_plan_has_shapes_that_have_it(monkeypatch):
    monkeypatch.setattr("fastdiff.doctor.trials.DTYPES", (HALF,))
    wrong = {
        plan: found
        for plan in choices.CHOICES.plans
        for trial in trials_of(plan, META)
        if (found := trial.call().hopper_plan()) != plan
    }
    assert wrong == {}


@pytest.mark.parametrize("plan", ["attention to 3 keys", "conv2d-same", "linear 320"])
def test_a_name_that_no_plan_has_is_refused(plan):
    with pytest.raises(ValueError, match="is not a plan"):
        list(trials_of(plan, META))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "plan",
    ["attention to 8192 keys, heads of 64", "attention to 80 keys, causal", "conv2d-same-1024-256-shortcut",
     "conv2d-up-1024-more, fp8", "linear 640 to 640", "linear 2560 to 640, residual, int8", "geglu 640 to 5120, fp8"],
)  # fmt: skip
def test_plans_pass_on_a_card_of_sm_90(plan):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90")
    judging.judge(plan, "cuda")
