"""What the runtime counted of its injections, for Prometheus: read anew for each scrape, since the runtime is a program
of milliseconds and keeps the counts itself. They go on over a restart of the plugin, and begin anew with the boot."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpulet.injection import tally


class Injections(Collector):
    """The metrics of the tally in a folder. folder: the runtime's state folder, "" for none."""

    def __init__(self) -> None:
        self.folder = ""

    def collect(self) -> Iterator[Metric]:
        total = CounterMetricFamily("runtime_inject", "Containers that asked for GPUs", labels=["mode", "result"])
        times = HistogramMetricFamily(
            "runtime_inject_duration_seconds", "Time that the runtime took for one", labels=["mode", "result"]
        )
        for labels, (spent, count, *buckets) in self._read().items():
            total.add_metric(labels, count)
            ends = zip((*map(str, tally.BUCKETS), "+Inf"), accumulate(buckets), strict=True)
            times.add_metric(labels, list(ends), spent / 1e6)
        yield total
        yield times

    def _read(self) -> tally.Tally:
        try:
            return tally.read(self.folder) if self.folder else {}
        except OSError:
            return {}  # something else of that name lies there
