"""Which kernels run on this machine, and why the others do not."""

import torch

from fastdiff.doctor.finding import Finding
from fastdiff.doctor.machine import Machine
from fastdiff.kernels.host.launching import capability, fp8_obstacle, is_sm_90
from fastdiff.kernels.plans import choices, confirmation, verdict
from fastdiff.kernels.plans.tuning import current


def findings(machine: Machine) -> list[Finding]:
    """Return findings about the generic kernels, fp8 products, and the fast kernels for sm_90."""
    if machine.platform != "CUDA":
        return [Finding("kernels", "off: they need a CUDA card and Triton", values={"on": False})]
    device = machine.device
    obstacle, tiles = fp8_obstacle(device), current(device).source
    return [
        Finding("kernels", f"on; tiles by {tiles}", values={"on": True, "tiles": tiles}),
        Finding("fp8", f"off: the card is {obstacle}" if obstacle else "on", values={"on": obstacle is None}),
        fast_kernels(device),
    ]


def fast_kernels(device: torch.device) -> Finding:
    """Return a finding about the sm_90 kernels on the device."""
    if not is_sm_90(device):
        text = "off: they are for sm_90 (H100, H200), the card is sm_{}{}".format(*capability(device))
        return Finding("fast kernels", text, values={"on": 0})
    plans = choices.CHOICES.plans
    if not confirmation.needs_verdict(device):
        count = len(choices.confirmed_plans())
        text = f"on: {count} of {len(plans)} plans, confirmed in this Triton"
        return Finding("fast kernels", text, values={"on": count})
    found, problem = verdict.reading(device)
    if found is None:
        reason = f"nobody has confirmed them in this Triton{problem and f', and {problem}'}"
        return Finding("fast kernels", f"off: {reason}", f"run {confirmation.REMEDY}", {"on": 0})
    text = f"on: {len(found.passed)} of {len(plans)} plans, according to {verdict.file()}"
    values = {"on": len(found.passed), "failed": dict(found.failed), "digest": found.digest}
    if not found.failed:
        return Finding("fast kernels", text, values=values)
    plan, why = min(found.failed.items())
    remedy = "they stay off; report it with the output of fastdiff doctor --json"
    return Finding("fast kernels", f"{text}; {len(found.failed)} failed, such as {plan}: {why:.80}", remedy, values)
