"""An operation whose kernel has candidates of every kind: correct, slow, wrong, racing and failing ones."""

import torch

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.plans import tuning
from fastdiff.kernels.plans.dispatch import Operation
from fastdiff.tuning import shapes

CPU = torch.device("cpu")
USUAL, FAST, SLOW = ("usual", 4), ("fast", 4), ("slow", 4)
OTHER_BITS, RACING, UNWRITTEN, FAILING = ("other", 4), ("racing", 4), ("unwritten", 4), ("failing", 4)
# of candidates, and of a forward without and with its choices
MILLISECONDS = {USUAL: 2.0, FAST: 1.0, SLOW: 3.0, "usual": 10.0, "tuned": 9.0}


class Doubling(Call):
    """2 x, by a kernel that behaves as its candidate's name says."""

    runs = 0

    def __init__(self, x):
        self.x, self.device = x, CPU

    device = CPU

    def check(self):
        pass

    def reference(self):
        return 2 * self.x

    def kernel(self):
        candidates = [FAST, SLOW, OTHER_BITS, RACING, UNWRITTEN, FAILING]
        kind, _ = tuning.tuned("doubling", CPU, lambda: str(len(self.x)), USUAL, lambda: candidates)
        if kind == "failing":
            raise RuntimeError("out of resources\nand more")
        out = torch.empty_like(self.x)
        if kind != "unwritten":
            out.copy_(2 * self.x)
        Doubling.runs += kind == "racing"
        if kind == "other" or (kind == "racing" and Doubling.runs % 3 == 0):
            out *= 1 + 1e-3
        return out


doubling = Operation("doubling", Doubling)


class Quadrupling(Doubling):
    """4 x, by two doublings. The first is a call of another operation."""

    def reference(self):
        return 4 * self.x

    def kernel(self):
        y = doubling(self.x)
        factor, _ = tuning.tuned("quadrupling", CPU, lambda: "any", (2, 0), list)
        return factor * y


quadrupling = Operation("quadrupling", Quadrupling)


def shape_of(x: torch.Tensor) -> shapes.Shape:
    """Return the single shape of a doubling of x (n,)."""
    (found,) = shapes.shapes_of(lambda: doubling(x))
    return found
