"""The weights of a request, such as a set of LoRAs, and which requests may begin together."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fastdiff.arguments import shown
from fastdiff.errors import InputError


@dataclass(frozen=True)
class Weights:
    """A set of adapters and embeddings of a model, with their weights. ::

        half = Weights(("style", 0.5), lambda: pipe.set_adapters("style", 0.5))

    Two are equal if their keys are.
    """

    key: Hashable  # names the set: equal keys mean equal weights
    apply: Callable[[], object] = field(compare=False)  # puts the set into the model, whatever set it had before


class Wanted(NamedTuple):
    """The model and the weights of a request."""

    model: Hashable
    weights: Hashable


def checked_weights(weights: Any) -> Weights | None:
    """Return the weights of a request. Raises InputError for another type, and for a key that is not hashable."""
    if weights is None:
        return None
    if not isinstance(weights, Weights):
        raise InputError(f"weights: {shown(weights)} has the wrong type; give fastdiff.engine.Weights, or leave it out")
    try:
        hash(weights.key)
    except TypeError:
        raise InputError(f"weights: the key {shown(weights.key)} is not hashable; give a tuple") from None
    return weights


def admitted(queue: Sequence[Wanted], active: Sequence[Wanted], room: int) -> list[int]:
    """Return the indices of the queued requests that may begin beside the active ones, oldest first, at most `room`.

    A model has the weights of one set at a time. A request with another set waits until the requests with the current
    set have ended, and no younger request of its model begins meanwhile. Then the oldest request chooses the set, and
    all that wait for this set begin with it. So no set keeps another out, and a switch serves many requests.
    """
    current, held, chosen = dict(active), set[Hashable](), list[int]()
    running = set(current)
    for i, (model, weights) in enumerate(queue):
        if len(chosen) >= room:
            break
        if model not in held and current.setdefault(model, weights) == weights:
            chosen.append(i)
        elif model in running:
            held.add(model)
    return chosen


class Applied:
    """The weights that each model has."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Any, Hashable] = WeakKeyDictionary()  # keys alone: `apply` may keep the model alive

    def apply(self, model: Any, weights: Weights | None) -> None:
        """Put weights into a model unless it has them. Raises the errors of `Weights.apply`.

        None leaves the model as it is. Its own requests may change it, so nothing is known of it afterwards.
        """
        if weights is not None and model in self._of and self._of[model] == weights.key:
            return
        self._of.pop(model, None)  # an error may leave any weights behind
        if weights is not None:
            weights.apply()
            self._of[model] = weights.key
