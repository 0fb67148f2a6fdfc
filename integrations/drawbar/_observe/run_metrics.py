"""Metrics of a run for monitoring systems, computed from its events.

This module has the values. `metrics_exporter.py` formats them for Prometheus.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, get_args

import msgspec

from drawbar._observe.goodput_meter import GoodputMeter
from drawbar._observe.resources import ResourceSample
from drawbar._records import events, live_events
from drawbar._records.events import AttemptEndCause
from drawbar._records.live_events import Event
from drawbar._records.timeline import FINAL_STATUSES, AttemptTimes, RunState


class MetricInfo(NamedTuple):
    """Description of a metric."""

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


_RUN = ("run", "run_id")
_RAY_RUN = ("ray_train_run_name", "ray_train_run_id")
_NODE = (*_RUN, "node", "node_rank")

METRICS = {
    "drawbar_run_status": MetricInfo("gauge", "1 for the status of the run.", (*_RUN, "status")),
    "drawbar_attempts_total": MetricInfo("counter", "Started attempts.", _RUN),
    "drawbar_restarts_total": MetricInfo("counter", "Restarts by cause.", (*_RUN, "cause")),
    "drawbar_goodput_seconds": MetricInfo(
        "gauge", "Time of the run in seconds, by part.", (*_RUN, "part")
    ),
    "drawbar_goodput_ratio": MetricInfo(
        "gauge", "Productive share of the time in which a process hosted the run.", _RUN
    ),
    "drawbar_reports_total": MetricInfo("counter", "Reports of all ranks.", _RUN),
    "drawbar_last_report_age_seconds": MetricInfo(
        "gauge", "Time since the last report, or since the last start without one.", _RUN
    ),
    "drawbar_progress_ratio": MetricInfo(
        "gauge", "Completed share of the run, if its total number of steps is known.", _RUN
    ),
    "drawbar_checkpoints_total": MetricInfo("counter", "Committed checkpoints.", _RUN),
    "drawbar_checkpoint_seconds": MetricInfo("gauge", "Duration of the last commit.", _RUN),
    "drawbar_checkpoint_bytes": MetricInfo("gauge", "Size of the last checkpoint.", _RUN),
    "drawbar_blocked_seconds": MetricInfo(
        "gauge", "Time in which ranks were blocked, averaged over the ranks.", (*_RUN, "reason")
    ),
    "drawbar_live_ranks": MetricInfo("gauge", "Ranks whose processes are running.", _RUN),
    "drawbar_stalled_ranks": MetricInfo("gauge", "Ranks that make no progress.", _RUN),
    "drawbar_lateness_ratio": MetricInfo(
        "gauge", "Time per step of the slowest rank, divided by the median of all ranks.", _RUN
    ),
    "drawbar_cpu_percent": MetricInfo("gauge", "Use of all CPUs of a node.", _NODE),
    "drawbar_memory_bytes": MetricInfo(
        "gauge", "Resident memory of the run's processes on a node.", _NODE
    ),
    "drawbar_gpu_utilization_percent": MetricInfo("gauge", "Use of a GPU.", (*_NODE, "gpu")),
    "drawbar_gpu_memory_bytes": MetricInfo("gauge", "Used memory of a GPU.", (*_NODE, "gpu")),
    "drawbar_disk_free_bytes": MetricInfo("gauge", "Free space for the run directory.", _NODE),
    "drawbar_disk_total_bytes": MetricInfo(
        "gauge", "Size of the filesystem of the run directory.", _NODE
    ),
    "ray_train_controller_state": MetricInfo(
        "gauge", "1 for the state of the controller.", (*_RAY_RUN, "ray_train_controller_state")
    ),
    "ray_train_worker_group_start_total_time_s": MetricInfo(
        "gauge", "Total time to start the workers.", _RAY_RUN
    ),
    "ray_train_worker_group_shutdown_total_time_s": MetricInfo(
        "gauge", "Total time from failures to the next attempts.", _RAY_RUN
    ),
    "ray_train_report_total_blocked_time_s": MetricInfo(
        "gauge",
        "Total time in which ranks were blocked in checkpoints, averaged over the ranks.",
        (*_RAY_RUN, "ray_train_worker_world_rank", "ray_train_worker_actor_id"),
    ),
}
"""All metrics by name. Those that begin with `ray_train_` have the names of Ray Train."""

STATUSES = ("starting", "running", "restarting", *FINAL_STATUSES, "interrupted", "unknown")
RAY_STATES = {
    "starting": "SCHEDULING",
    "running": "RUNNING",
    "restarting": "RESTARTING",
    "finished": "FINISHED",
    "failed": "ERRORED",
    "stopped": "ABORTED",
}
"""States of Ray Train's controller, by the status of the run."""

CAUSES = (*get_args(AttemptEndCause), "driver")
"""Causes of restarts. "driver": the process that controlled the run died."""

_BLOCKED_KEYS = {
    "checkpoint_save": "checkpoint",
    "checkpoint_blocked": "checkpoint",
    "collective": "collective",
    "data_wait": "data",
}


class MetricValue(NamedTuple):
    """Value of a metric, with the values of its labels in the order of `MetricInfo.labels`."""

    name: str
    labels: tuple[str, ...]
    value: float


class RunMetrics:
    """Metrics of one run. Events and `collect` may come from different threads.

    Args:
        name: Name of the run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._run_id = ""
        self._lock = threading.RLock()
        self._state = RunState()
        self._report_times: dict[int, float] = {}  # by attempt: time of the last report
        self._goodput = GoodputMeter(self._report_times.get)
        self._restarts = Counter[str](dict.fromkeys(CAUSES, 0))
        self._end_cause = ""  # of the last attempt, until the next one starts
        self._earlier_reports = 0
        self._attempt_reports = 0
        self._last_report_time: float | None = None
        self._num_checkpoints = 0
        self._last_checkpoint: events.CheckpointCommitted | None = None
        self._earlier_blocked = Counter[str]()
        self._attempt_blocked = Counter[str]()
        self._lateness = 1.0
        self._shutdown_seconds = 0.0
        self._attempt_end_time: float | None = None
        self._resources: dict[tuple[str, int], ResourceSample] = {}

    @property
    def key(self) -> tuple[str, str]:
        """Name and ID of the run, which are labels of each metric."""
        return self._name, self._run_id

    def add_sample(self, sample: ResourceSample) -> None:
        """Update the resources of a node."""
        with self._lock:
            self._resources[sample.node, sample.node_rank] = sample

    def apply(self, event: Event) -> None:
        """Update the metrics with the next event."""
        with self._lock:
            if isinstance(event, events.JournalEntry):
                self._goodput.apply(event)
            match event:
                case live_events.ReportsReceived():
                    self._attempt_reports += len(event.indices)
                    self._last_report_time = max(self._last_report_time or 0.0, event.times[-1])
                case live_events.ObservationReceived(kind="resources"):
                    self.add_sample(msgspec.convert(event.payload, ResourceSample))
                case events.RunStarted():
                    self._on_run_started(event)
                case events.AttemptStarted():
                    self._on_attempt_started(event)
                case events.FirstReportReceived():
                    self._last_report_time = max(self._last_report_time or 0.0, event.time)
                case events.CheckpointCommitted():
                    # Not from the timeline: a damaged journal may have lost the attempts.
                    self._num_checkpoints += 1
                    self._last_checkpoint = event
                case events.RankTimesRecorded():
                    self._attempt_blocked = _sum_blocked(event)
                case events.StragglerFound():
                    self._lateness = max(self._lateness, event.ratio)
                case events.AttemptEnded() | events.RunEnded():
                    self._on_end(event)
                case _:
                    pass
            # At the end, because `_on_run_started` needs the status before the event.
            self._state.apply(event)

    @property
    def _attempts(self) -> list[AttemptTimes]:
        return self._state.timeline.attempts

    def on_activity(self, time: float | None) -> None:
        """Record the time of the last report of a run that is read from its directory."""
        with self._lock:
            if time is not None:
                attempt = self._attempts[-1].attempt if self._attempts else 0
                self._report_times[attempt] = time
                self._last_report_time = max(self._last_report_time or 0.0, time)

    def _on_run_started(self, event: events.RunStarted) -> None:
        self._run_id = event.run_id
        if self._attempts and self._state.status not in FINAL_STATUSES and not self._end_cause:
            self._end_cause = "driver"
        self._last_report_time = event.time

    def _on_attempt_started(self, event: events.AttemptStarted) -> None:
        if self._end_cause:
            self._restarts[self._end_cause] += 1
        self._end_cause = ""
        self._add_shutdown(event.time)
        self._earlier_reports += self._attempt_reports
        self._attempt_reports = 0
        self._earlier_blocked.update(self._attempt_blocked)
        self._attempt_blocked = Counter()
        self._lateness = 1.0
        self._resources = {}  # the nodes may be others

    def _on_end(self, event: events.AttemptEnded | events.RunEnded) -> None:
        # The journal alone has no reports, but their number.
        self._attempt_reports = self._attempt_reports or event.num_reports or 0
        if isinstance(event, events.AttemptEnded):
            self._end_cause = event.cause
            self._attempt_end_time = event.time
        else:
            self._end_cause = ""
            self._add_shutdown(event.time)

    def _add_shutdown(self, time: float) -> None:
        if self._attempt_end_time is not None:
            self._shutdown_seconds += max(time - self._attempt_end_time, 0.0)
        self._attempt_end_time = None

    def collect(
        self, now: float, *, status: str | None = None, num_reports: int | None = None
    ) -> list[MetricValue]:
        """Return the values of all metrics.

        Args:
            now: Current time, in seconds since the epoch.
            status: Status of the run. Default: according to its events.
            num_reports: Number of reports. Default: according to its events.
        """
        with self._lock:
            status = status or self._state.status
            values = [*self._collect_drawbar(now, status, num_reports), *self._collect_ray(status)]
            run = self._name, self._run_id
            return [MetricValue(name, (*run, *labels), value) for name, labels, value in values]

    def _collect_drawbar(
        self, now: float, status: str, num_reports: int | None
    ) -> Iterator[MetricValue]:
        is_active = status in ("starting", "running", "restarting")
        for name in STATUSES:
            yield MetricValue("drawbar_run_status", (name,), float(name == status))
        yield MetricValue("drawbar_attempts_total", (), len(self._attempts))
        for cause, count in self._restarts.items():
            yield MetricValue("drawbar_restarts_total", (cause,), count)
        goodput = self._goodput.compute(now=now if is_active else None)
        for part, seconds in ({"productive": 0.0} | dict(goodput.parts)).items():
            yield MetricValue("drawbar_goodput_seconds", (part,), seconds)
        if goodput.goodput is not None:
            yield MetricValue("drawbar_goodput_ratio", (), goodput.goodput)
        reports = self._earlier_reports + self._attempt_reports
        yield MetricValue("drawbar_reports_total", (), max(reports, num_reports or 0))
        if self._last_report_time is not None:
            age = max(now - self._last_report_time, 0.0)
            yield MetricValue("drawbar_last_report_age_seconds", (), age)
        progress = self._state.progress
        if progress is not None and progress.percent is not None:
            yield MetricValue("drawbar_progress_ratio", (), max(progress.percent, 0.0) / 100)
        checkpoint = self._last_checkpoint
        yield MetricValue("drawbar_checkpoints_total", (), self._num_checkpoints)
        if checkpoint is not None:
            yield MetricValue("drawbar_checkpoint_seconds", (), checkpoint.seconds)
            yield MetricValue("drawbar_checkpoint_bytes", (), checkpoint.nbytes)
        for reason in dict.fromkeys(_BLOCKED_KEYS.values()):
            yield MetricValue("drawbar_blocked_seconds", (reason,), self._get_blocked(reason))
        yield MetricValue("drawbar_live_ranks", (), self._count_live() if is_active else 0)
        yield MetricValue("drawbar_stalled_ranks", (), len(self._state.stalled_ranks))
        yield MetricValue("drawbar_lateness_ratio", (), self._lateness)
        if is_active:
            for sample in self._resources.values():
                yield from _collect_resources(sample)

    def _count_live(self) -> int:
        if not self._attempts or self._state.status != "running":
            return 0
        # The status remains "running" from the end of an attempt to the start of the next one.
        last = self._attempts[-1]
        return last.world_size if last.end_time is None else 0

    def _get_blocked(self, reason: str) -> float:
        return float(self._earlier_blocked[reason] + self._attempt_blocked[reason])

    def _collect_ray(self, status: str) -> Iterator[MetricValue]:
        for state, ray_state in RAY_STATES.items():
            yield MetricValue("ray_train_controller_state", (ray_state,), float(state == status))
        start_seconds = sum(
            max(attempt.workers_ready_time - attempt.start_time, 0.0)
            for attempt in self._attempts
            if attempt.workers_ready_time is not None
        )
        yield MetricValue("ray_train_worker_group_start_total_time_s", (), start_seconds)
        yield MetricValue(
            "ray_train_worker_group_shutdown_total_time_s", (), self._shutdown_seconds
        )
        blocked = self._get_blocked("checkpoint")
        yield MetricValue("ray_train_report_total_blocked_time_s", ("mean", ""), blocked)


def _sum_blocked(event: events.RankTimesRecorded) -> Counter[str]:
    blocked = Counter[str]()
    for key, reason in _BLOCKED_KEYS.items():
        blocked[reason] += event.seconds.get(key, 0.0)  # type: ignore[assignment]
    return blocked


def _collect_resources(sample: ResourceSample) -> Iterator[MetricValue]:
    node = sample.node, str(sample.node_rank)
    measured: Mapping[str, float | None] = {
        "drawbar_cpu_percent": sample.cpu_percent,
        "drawbar_memory_bytes": sample.rss_bytes,
        "drawbar_disk_free_bytes": sample.disk_free_bytes,
        "drawbar_disk_total_bytes": sample.disk_total_bytes,
    }
    for name, value in measured.items():
        if value is not None:
            yield MetricValue(name, node, value)
    for gpu in sample.gpus:
        labels = (*node, str(gpu.index))
        yield MetricValue("drawbar_gpu_utilization_percent", labels, gpu.utilization_percent)
        yield MetricValue("drawbar_gpu_memory_bytes", labels, gpu.memory_used_bytes)
