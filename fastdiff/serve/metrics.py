"""The metrics of a server, for Prometheus. Each server has a registry of its own."""

import threading
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastdiff.serve.orders.jobs import Drawer
from fastdiff.serve.wire.errors import ApiError

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Metrics(Collector):
    """Counts what a server does. Any thread may call the methods."""

    def __init__(self, drawer: Drawer) -> None:
        """drawer: whose steps are told too."""
        self._drawer = drawer
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self._pictures = Counter("fastdiff_pictures", "Finished pictures.", ["model"], **options)
        self._errors = Counter("fastdiff_errors", "Errors by their code.", ["status", "code"], **options)
        self._requests = Histogram(
            "fastdiff_request_seconds", "Time from a request to its end.", buckets=_SECONDS, **options
        )
        self._lock = threading.Lock()
        self._arrived: dict[object, float] = {}  # requests that are not drawn yet
        self._drawn: dict[object, float] = {}  # requests that are drawn, and when they arrived
        self.registry.register(self)

    def arrived(self, request: object) -> None:
        """Count a request that waits."""
        with self._lock:
            self._arrived[request] = time.monotonic()

    def begun(self, request: object) -> None:
        """Count a request that is drawn now."""
        with self._lock:
            arrived = self._arrived.pop(request, None)
            if arrived is not None:
                self._drawn[request] = arrived

    def finished(self, model: str) -> None:
        """Count a finished picture of a model."""
        self._pictures.labels(model).inc()

    def ended(self, request: object) -> None:
        """Forget a request that has ended in any way."""
        with self._lock:
            arrived = self._arrived.pop(request, None)
            drawn = self._drawn.pop(request, None)
        begun = arrived if drawn is None else drawn
        if begun is not None:
            self._requests.observe(time.monotonic() - begun)

    def failed(self, error: ApiError) -> None:
        """Count an error answer."""
        self._errors.labels(str(error.status), error.code or error.kind).inc()

    def text(self) -> tuple[bytes, str]:
        """Return all metrics, and their media type. It may wait for the drawer."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield what is measured when somebody asks."""
        with self._lock:
            waiting, drawn = list(self._arrived.values()), len(self._drawn)
        age = time.monotonic() - min(waiting) if waiting else 0.0
        yield GaugeMetricFamily("fastdiff_queue_length", "Requests that wait.", value=len(waiting))
        yield GaugeMetricFamily("fastdiff_queue_age_seconds", "Age of the oldest request that waits.", value=age)
        yield GaugeMetricFamily("fastdiff_running", "Requests that are drawn.", value=drawn)
        counts = self._drawer.counts()
        for name, words, count in (
            ("steps", "Steps that were taken, each by one request or several.", counts.steps),
            ("step_pictures", "Pictures in these steps.", counts.pictures),
            ("step_rows", "Rows of these steps: the pictures, and rows that fill a CUDA graph.", counts.rows),
            ("step_seconds", "Time of these steps on the device.", counts.step_seconds),
            ("decodes", "Batches of latents that were decoded.", counts.decodes),
            ("worker_restarts", "Worker processes that died and got a successor.", counts.restarts),
        ):
            yield CounterMetricFamily(f"fastdiff_{name}", words, value=count)
        yield GaugeMetricFamily("fastdiff_workers", "Worker processes that live.", value=counts.workers)
        memory = GaugeMetricFamily("fastdiff_memory_bytes", "Memory of the processes and their GPUs.", labels=["kind"])
        for kind, value in counts.memory.items():
            memory.add_metric([kind], value)
        yield memory
