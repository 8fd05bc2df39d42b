"""Bits on an sm_90 card with an unconfirmed Triton: they change only at a restart."""

import json

import pytest
import torch

import fastdiff
from fastdiff.bulk.fingerprint import take_fingerprint
from fastdiff.kernels.plans import choices, confirmation, verdict

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture
def unconfirmed(file, monkeypatch):
    """The verdict file's path on a machine where no plan is known to work."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90")
    monkeypatch.setattr(confirmation, "VERSIONS", ())
    return file


def load():
    return fastdiff.Pipeline.from_pretrained("emoji64", device=CUDA)


def draw(pipe) -> torch.Tensor:
    return pipe(num_images=4, seed=7, num_inference_steps=3, class_labels=0, output_type="pt").images.clone()


def on_gluon(pipe) -> bool:
    return any(row.why.startswith("Gluon") for row in fastdiff.report(pipe, batch_size=4).rows)


def test_bits_change_at_a_restart_alone(unconfirmed):
    pipe = load()
    first, before = draw(pipe), take_fingerprint(pipe, "0" * 64)
    assert not on_gluon(pipe) and fastdiff.report(pipe).notice.startswith("the fast kernels are off")
    made = verdict.Verdict(verdict.surroundings(CUDA), choices.CHOICES.plans, {})
    unconfirmed.parent.mkdir()
    unconfirmed.write_text(json.dumps(made.as_dict()))
    assert torch.equal(draw(pipe), first) and torch.equal(draw(load()), first)
    assert take_fingerprint(pipe, "0" * 64) == before
    verdict.forget()  # as in a new process
    pipe = load()
    then = draw(pipe)
    assert on_gluon(pipe) and fastdiff.report(pipe).notice == ""
    assert take_fingerprint(pipe, "0" * 64) == before | {"fast kernels": made.digest}
    unconfirmed.unlink()
    assert torch.equal(draw(pipe), then) and torch.equal(draw(load()), then)
