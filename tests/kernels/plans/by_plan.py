"""Run calls by the sm_90 kernel where the table of choices does."""

from typing import Any

from fastdiff.kernels.plans.dispatch import Operation


def by_plan(operation: Operation, *args: Any, **options: Any) -> Any:
    """Run a call by the sm_90 kernel, but a product with too few tokens by the generic kernel, as `decide` does.

    No plan runs a product that leaves programs without a tile.
    """
    call = operation.parse(*args, **options)
    return call.hopper() if call.facts().get("fills_card", True) else call.kernel()
