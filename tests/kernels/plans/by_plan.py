"""A call by the kernel for sm_90 where its table of choices takes one."""

from typing import Any

from fastdiff.kernels.plans.dispatch import Operation


def by_plan(operation: Operation, *args: Any, **options: Any) -> Any:
    """Run a call by the kernel for sm_90, and a product of too few tokens by the kernel of all cards, as `decide` does.

    No plan runs a product that leaves programs without a tile.
    """
    call = operation.parse(*args, **options)
    return call.hopper() if call.facts().get("fills_card", True) else call.kernel()
