"""The server's counters: for Prometheus (`/metrics`) and for the page (`/stats`)."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stretto.deploy.scheduler import Answer

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHARES = tuple(step / 10 for step in range(1, 12))


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"stretto_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, label: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"stretto_{name}", text, (label,), buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests answered.", "route", "code")
        self.depth = counter("exits", "Inputs that left after each layer.", "model", "layer")
        self.duration = histogram("request_seconds", "Seconds per request.", "route", SECONDS)
        self.queued = histogram("queue_seconds", "Seconds in the queue.", "model", SECONDS)
        self.computed = histogram("compute_seconds", "Seconds from admission to the answer.", "model", SECONDS)
        self.rows = histogram("step_rows", "Rows of one step (one layer).", "model", ROWS)
        self.cost = histogram("cost", "Fraction of the full model's FLOPs.", "model", SHARES)
        self.queue_size = Gauge("stretto_queue_size", "Sequences in the queue.", ("model",), registry=registry)
        self.live = Gauge("stretto_live_sequences", "Sequences in the engine.", ("model",), registry=registry)


class ModelMetrics:
    """The metrics of one model."""

    def __init__(self, metrics: Metrics, name: str, n_layers: int) -> None:
        self.total_cost, self.depths = 0.0, [0] * n_layers
        self.queued, self.computed = metrics.queued.labels(name), metrics.computed.labels(name)
        self.rows, self.cost = metrics.rows.labels(name), metrics.cost.labels(name)
        self.exits = [metrics.depth.labels(name, str(layer + 1)) for layer in range(n_layers)]

    def answered(self, answer: Answer) -> None:
        """Count the answers to one request."""
        self.queued.observe(answer.queued)
        self.computed.observe(answer.computed)
        for each in answer.predictions:
            layer = max(1, round(each.depth)) - 1
            self.depths[layer] += 1
            self.exits[layer].inc()
            self.total_cost += each.cost
            self.cost.observe(each.cost)
