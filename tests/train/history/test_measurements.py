"""Measurements: times and progress of ranks, slow ranks, and resources. Most start no run."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from drawbar._observe import resource_sampler, sample_log
from drawbar._observe.observation_recorder import RESOURCES, ObservationRecorder, ProgressRecorder
from drawbar._observe.rank_times import RankTimesOfRank, find_stragglers
from drawbar._observe.rates import RateWindow
from drawbar._observe.resource_sampler import ResourceSampler, sample_resources
from drawbar._observe.resources import GpuSample, ResourceSample
from drawbar._process.ranks import Ranks
from drawbar._records.events import ProgressRecorded
from drawbar._records.live_events import Event, ObservationReceived, ProgressReceived
from drawbar._records.run_progress import RunProgress
from drawbar._records.timeline import RunState
from drawbar._storage.run_directory import RunDirectory
from drawbar.train import TrainingFailedError, runs
from drawbar.train._protocol.assignment import WorkerAssignment, WorkerSpec
from drawbar.train._protocol.messages import Message, Observation
from drawbar.train._worker.progress_sender import ProgressSender
from drawbar.train._worker.rank_timer import MAX_PHASES, RankTimer
from tests.train.event_factories import attempt_started
from tests.train.runs import fit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock) -> RankTimer:
    return RankTimer(clock)


def test_timer_counts_nested_time_once(clock: Clock, timer: RankTimer) -> None:
    with timer.measure("phase:eval"):
        clock.now += 1
        with timer.measure("data_wait"):
            clock.now += 2
        clock.now += 4
    clock.now += 8
    seconds = timer.get_times().seconds
    assert seconds == {"function": 15, "warmup": 0, "phase:eval": 5, "data_wait": 2}


def test_timer_measures_waiting_for_items(clock: Clock, timer: RankTimer) -> None:
    def load() -> list[int]:
        items = []
        for item in timer.measure_items("data_wait", slow_items()):
            clock.now += 10  # a step
            items.append(item)
        return items

    def slow_items() -> Iterator[int]:
        for item in range(3):
            clock.now += 1
            yield item

    assert load() == [0, 1, 2]
    assert timer.get_times().seconds["data_wait"] == 3


def test_timer_suspended_phase_that_ends_late_does_not_affect_others(
    clock: Clock, timer: RankTimer
) -> None:
    timer.begin("phase:a")
    timer.begin("phase:b")
    timer.end("phase:a")
    clock.now += 1
    timer.end("phase:b")
    timer.end("phase:b")
    clock.now += 1
    assert timer.get_times().seconds["phase:b"] == 1


def test_timer_warmup_is_excess_of_first_step(clock: Clock, timer: RankTimer) -> None:
    clock.now += 10
    timer.on_report()
    for _ in range(4):
        with timer.measure("data_wait"):
            clock.now += 5
        clock.now += 1
        timer.on_report()
    times = timer.get_times()
    assert (times.seconds["warmup"], times.steps) == (9, 5)


def test_timer_steps_of_user_replace_reports(clock: Clock, timer: RankTimer) -> None:
    timer.on_report()
    for _ in range(3):
        clock.now += 1
        timer.on_step()
    timer.on_report()
    assert timer.get_times().steps == 3


def test_timer_sends_times_rarely(clock: Clock, timer: RankTimer) -> None:
    sent = 0
    for _ in range(1000):
        clock.now += 0.1
        sent += timer.on_report() is not None
    assert 10 <= sent <= 16


def test_timer_many_phases_are_counted_together(clock: Clock, timer: RankTimer) -> None:
    for number in range(MAX_PHASES + 50):
        with timer.measure(timer.make_phase_key(str(number))):
            clock.now += 1
    seconds = timer.get_times().seconds
    assert seconds["phase:other phases"] == 50
    assert len(seconds) == MAX_PHASES + 3


def make_ranks(steps: int = 100, **slow: float) -> dict[int, RankTimesOfRank]:
    """Return four ranks with steps of 100 ms, of which rank 2 has additional seconds."""
    base = {
        "function": steps * 0.1,
        "data_wait": steps * 0.01,
        "forward": steps * 0.03,
        "checkpoint_save": steps * 0.001,
    }
    ranks = {rank: RankTimesOfRank(steps, base) for rank in range(4)}
    own = {key: base.get(key, 0.0) + slow.get(key, 0.0) for key in {**base, **slow}}
    ranks[2] = RankTimesOfRank(steps, own)
    return ranks


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("data_wait", "data loader"),
        ("forward", "forward pass"),
        ("checkpoint_save", "checkpoint"),
    ],
)
def test_stragglers_are_named_with_their_part(key: str, part: str) -> None:
    (found,) = find_stragglers(make_ranks(100, **{key: 2.0}))
    assert (found.rank, found.part) == (2, part)
    assert found.ratio > 1.3
    assert f"rank 2 is slow in its {part}" in found.describe()


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        make_ranks(),
        make_ranks(data_wait=0.2),  # 3 times as much, but only 2 % of a step
        make_ranks(steps=40, data_wait=2.0),
        {0: make_ranks()[2]},
        make_ranks(100, **{"phase:eval": 5.0}),  # only one rank has this phase
    ],
)
def test_stragglers_need_many_steps_and_a_relevant_difference(
    ranks: dict[int, RankTimesOfRank],
) -> None:
    assert find_stragglers(ranks) == []


def test_stragglers_are_found_after_a_slow_first_step() -> None:
    ranks = {
        rank: RankTimesOfRank(100, {**times.seconds, "function": 110.0, "warmup": 100.0})
        for rank, times in make_ranks(data_wait=1.0).items()
    }
    assert [(found.rank, found.part) for found in find_stragglers(ranks)] == [(2, "data loader")]


def test_stragglers_without_forward_passes_are_found_by_their_computation() -> None:
    seconds = [{"function": 10.0, "collective": wait} for wait in (6.0, 1.0, 6.0)]
    ranks = {rank: RankTimesOfRank(100, value) for rank, value in enumerate(seconds)}
    assert [(found.rank, found.part) for found in find_stragglers(ranks)] == [(1, "computation")]


def test_progress_sender_sends_first_and_last_of_many_updates() -> None:
    messages: list[Message] = []
    sender = ProgressSender(0, messages.append)
    for step in range(100_001):
        sender.set(step, 100_000, "steps")
    sent = [message.payload["done"] for message in messages if isinstance(message, Observation)]
    assert (sent[0], sent[-1]) == (0, 100_000)
    assert len(sent) < 100
    assert sent == sorted(set(sent))


def test_progress_sender_without_total_sends_last_update_at_flush() -> None:
    messages: list[Message] = []
    sender = ProgressSender(0, messages.append)
    for step in range(10):
        sender.set(step, None, "steps")
    sender.flush()
    sender.flush()
    last = messages[-1]
    assert isinstance(last, Observation)
    assert last.payload["done"] == 9


def test_progress_sender_of_other_rank_sends_nothing() -> None:
    messages: list[Message] = []
    ProgressSender(1, messages.append).set(1, 1, "steps")
    assert not messages


def test_rate_window_uses_recent_updates_and_restarts_if_counter_decreases() -> None:
    window = RateWindow()
    for second in range(100):
        window.add(second, second if second < 50 else 50 + 10 * (second - 50))
    assert window.get_rate() == 10
    window.add(100, 3)
    assert window.get_rate() is None
    window.add(102, 7)
    assert window.get_rate() == 2


def test_progress_recorder_journals_first_progress_and_the_last_once() -> None:
    emitted: list[Event] = []
    recorder = ProgressRecorder(0, emitted.append)
    for second in range(20):
        recorder.on_progress(RunProgress(done=second, total=20, unit="steps", time=second))
    recorder.record()
    recorder.record()
    recorded = [event for event in emitted if isinstance(event, ProgressRecorded)]
    assert [event.progress.done for event in recorded] == [0, 19]
    assert recorded[-1].progress.eta_seconds == 1
    assert len([event for event in emitted if isinstance(event, ProgressReceived)]) == 20


def test_run_state_after_restart_has_progress_without_eta() -> None:
    state = RunState()
    state.apply(ProgressReceived(runs.RunProgress(done=5, total=10, rate=1.0)))
    state.apply(attempt_started(1))
    assert state.progress == runs.RunProgress(done=5, total=10)


# -- resources


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create_directories()
    return directory


def make_assignment(directory: RunDirectory, local_rank: int = 0) -> WorkerAssignment:
    return WorkerAssignment(
        spec=WorkerSpec(env_vars={}, driver_env=None, metadata={}),
        run_id="r",
        run_directory=directory,
        attempt=3,
        first_report_index=0,
        ranks=Ranks(
            world_rank=local_rank,
            world_size=2,
            local_rank=local_rank,
            local_world_size=2,
            node_rank=0,
            num_nodes=1,
        ),
    )


def make_sample(time: float, node: str = "a") -> ResourceSample:
    return ResourceSample(time=time, attempt=0, rank=0, node_rank=0, node=node, rss_bytes=5)


def no_event(event: Event) -> None:
    pytest.fail(f"unexpected event {event}")


def observe(sample: ResourceSample) -> ObservationReceived:
    return ObservationReceived(0, 0, "resources", msgspec.to_builtins(sample))


def write(directory: RunDirectory, *samples: ResourceSample) -> None:
    with contextlib.closing(ObservationRecorder(directory, no_event)) as recorder:
        for sample in samples:
            recorder.on_event(observe(sample))


def test_recorder_ignores_progress_that_arrives_after_its_attempt(directory: RunDirectory) -> None:
    emitted: list[Event] = []
    with contextlib.closing(ObservationRecorder(directory, emitted.append)) as recorder:
        recorder.on_event(attempt_started(1))
        for attempt in (0, 1):
            progress = RunProgress(done=100 - attempt, time=attempt)
            payload = msgspec.to_builtins(progress)
            recorder.on_event(ObservationReceived(attempt, 0, "progress", payload))
    (received,) = [event for event in emitted if isinstance(event, ProgressReceived)]
    assert received.progress.done == 99


def test_sampler_measures_memory_disk_and_cpu_of_this_node(directory: RunDirectory) -> None:
    sample = ResourceSampler(make_assignment(directory)).take()
    assert (sample.attempt, sample.rank, sample.node) == (3, 0, os.uname().nodename)
    assert sample.rss_bytes is not None
    assert 10 * 2**20 < sample.rss_bytes < 2**40
    assert sample.num_processes is not None
    assert sample.num_processes >= 1
    assert sample.cpu_percent is None or 0 <= sample.cpu_percent <= 100
    assert sample.disk_free_bytes is not None
    assert sample.disk_total_bytes is not None
    assert 0 < sample.disk_free_bytes <= sample.disk_total_bytes


def test_sampler_of_missing_directory_has_no_disk(tmp_path: Path) -> None:
    sampler = ResourceSampler(make_assignment(RunDirectory(tmp_path / "missing")))
    assert sampler.take().disk_free_bytes is None


def test_sample_resources_sends_from_lowest_local_rank_only(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_sampler, "FIRST_SAMPLE_SECONDS", 0.0)
    samples: list[Observation] = []
    received = threading.Event()

    def send(sample: Observation) -> None:
        samples.append(sample)
        received.set()

    with sample_resources(make_assignment(directory, 1), send):
        assert "drawbar-resources" not in [thread.name for thread in threading.enumerate()]
    with sample_resources(make_assignment(directory), send):
        assert received.wait(300)
    assert (samples[0].kind, samples[0].payload["rank"]) == ("resources", 0)
    assert not samples[0].is_activity


def test_resource_log_appends_to_samples_of_earlier_driver(directory: RunDirectory) -> None:
    write(directory, make_sample(1), make_sample(2))
    path = directory.local_path / "resources.jsonl"
    path.write_bytes(path.read_bytes() + b'{"torn')
    write(directory, make_sample(3))
    assert [sample.time for sample in RESOURCES.read(directory)] == [1, 2, 3]
    assert path.read_bytes().count(b"\n") == 3


def test_read_resources_skips_damaged_lines(directory: RunDirectory) -> None:
    gpu = GpuSample(index=1, utilization_percent=50, memory_used_bytes=10, memory_total_bytes=20)
    sample = ResourceSample(time=1, attempt=0, rank=0, node_rank=0, node="a", gpus=[gpu])
    write(directory, sample)
    path = directory.local_path / "resources.jsonl"
    path.write_bytes(b'\xff\n{"time": "x"}\n[]\n' + path.read_bytes())
    assert RESOURCES.read(directory) == [sample]
    path.unlink()
    assert RESOURCES.read(directory) == []
    path.mkdir()
    assert RESOURCES.read(directory) == []


def test_resource_log_thins_out_old_samples(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "MAX_SAMPLES", 50)
    monkeypatch.setattr(sample_log, "MIN_SAMPLES_PER_SOURCE", 2)
    for number in range(20):
        write(directory, *(make_sample(10 * number + i, "ab"[i % 2]) for i in range(10)))
    times = [sample.time for sample in RESOURCES.read(directory)]
    assert len(times) <= 60
    assert times == sorted(times)
    assert times[-1] == 199
    assert times[0] < 30  # the whole run is covered


def test_thin_out_keeps_last_sample_of_each_node() -> None:
    samples = [make_sample(1), make_sample(2, "b"), make_sample(3), make_sample(4)]
    kept = [(sample.time, sample.node) for sample in RESOURCES.thin_out(samples)]
    assert kept == [(1, "a"), (2, "b"), (4, "a")]


def test_resource_log_of_deleted_directory_warns_once(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(directory.local_path)
    write(directory, make_sample(1))
    write_again = ObservationRecorder(directory, no_event)
    for number in range(3):
        write_again.on_event(observe(make_sample(number)))
    write_again.close()
    assert not directory.local_path.exists()
    assert caplog.text.count("Samples are no longer written") == 2  # one for each log


def test_local_mode_run_has_resource_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_sampler, "FIRST_SAMPLE_SECONDS", 0.0)

    def train_function() -> None:
        deadline = time.monotonic() + 120
        while not runs.find_run(tmp_path / "run").read_resources():
            assert time.monotonic() < deadline

    fit(train_function, tmp_path)
    (sample,) = runs.find_run(tmp_path / "run").read_resources()
    assert (sample.attempt, sample.rank, sample.node_rank) == (0, 0, 0)
    assert sample.rss_bytes


def test_unwritable_resource_file_keeps_error_of_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource_sampler, "FIRST_SAMPLE_SECONDS", 0.0)
    warned = tmp_path / "warned"

    class MarkerHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Samples are no longer written" in record.getMessage():
                warned.touch()

    def train_function() -> None:
        deadline = time.monotonic() + 120
        while not warned.exists():
            assert time.monotonic() < deadline
        raise ValueError("error of the user")

    (tmp_path / "run" / "resources.jsonl").mkdir(parents=True)
    handler = MarkerHandler()
    logging.getLogger("drawbar.train").addHandler(handler)
    try:
        with pytest.raises(TrainingFailedError, match="error of the user"):
            fit(train_function, tmp_path)
    finally:
        logging.getLogger("drawbar.train").removeHandler(handler)
    assert caplog.text.count("Samples are no longer written") == 1
