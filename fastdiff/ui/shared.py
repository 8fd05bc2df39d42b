"""Shared: what all sessions of the page share, which are the models, the queue of runs and the time limit."""

from fastdiff.hosting.budget import Budget
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.hosting.models import Models
from fastdiff.ui.queueing.messages import PROBLEMS
from fastdiff.ui.queueing.queue import Queue


class Shared:
    """The models that the page draws with, the queue of its runs, and the time limit of a request."""

    def __init__(self, models: Models, max_minutes: float | None = None) -> None:
        """max_minutes: the limit of one request; None: no limit."""
        self.models = models
        self.budget = Budget(max_minutes)
        self.queue = Queue(PROBLEMS)

    @property
    def catalogue(self) -> Catalogue:
        return self.models.catalogue

    def warm_up(self, name: str) -> None:
        """Load a model and draw one step, so the first request finds the model ready."""
        self.models.warm_up(name, self.queue.device)
