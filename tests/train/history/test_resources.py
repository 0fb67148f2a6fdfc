"""Resource samples: taking, storing, thinning out, and reading them. No Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from drawbar.train import TrainingFailedError, runs
from drawbar.train._history import resource_log
from drawbar.train._history.live_events import ResourcesSampled
from drawbar.train._history.resource_log import ResourceLog, read_resources, thin_out
from drawbar.train._protocol.assignment import Ranks, WorkerAssignment, WorkerSpec
from drawbar.train._protocol.resources import GpuSample, ResourceSample
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._worker import resource_sampler
from drawbar.train._worker.resource_sampler import ResourceSampler, sample_resources
from tests.train.runs import fit


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


def write(directory: RunDirectory, *samples: ResourceSample) -> None:
    with contextlib.closing(ResourceLog(directory)) as log:
        for sample in samples:
            log.on_event(ResourcesSampled(sample))


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
    samples: list[ResourceSample] = []
    received = threading.Event()

    def send(sample: ResourceSample) -> None:
        samples.append(sample)
        received.set()

    with sample_resources(make_assignment(directory, 1), send):
        assert "drawbar-resources" not in [thread.name for thread in threading.enumerate()]
    with sample_resources(make_assignment(directory), send):
        assert received.wait(300)
    assert samples[0].rank == 0


def test_resource_log_appends_to_samples_of_earlier_driver(directory: RunDirectory) -> None:
    write(directory, make_sample(1), make_sample(2))
    path = directory.local_path / "resources.jsonl"
    path.write_bytes(path.read_bytes() + b'{"torn')
    write(directory, make_sample(3))
    assert [sample.time for sample in read_resources(directory)] == [1, 2, 3]
    assert path.read_bytes().count(b"\n") == 3


def test_read_resources_skips_damaged_lines(directory: RunDirectory) -> None:
    gpu = GpuSample(index=1, utilization_percent=50, memory_used_bytes=10, memory_total_bytes=20)
    sample = ResourceSample(time=1, attempt=0, rank=0, node_rank=0, node="a", gpus=[gpu])
    write(directory, sample)
    path = directory.local_path / "resources.jsonl"
    path.write_bytes(b'\xff\n{"time": "x"}\n[]\n' + path.read_bytes())
    assert read_resources(directory) == [sample]
    path.unlink()
    assert read_resources(directory) == []
    path.mkdir()
    assert read_resources(directory) == []


def test_resource_log_thins_out_old_samples(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_log, "MAX_SAMPLES", 50)
    monkeypatch.setattr(resource_log, "MIN_SAMPLES_PER_NODE", 2)
    for number in range(20):
        write(directory, *(make_sample(10 * number + i, "ab"[i % 2]) for i in range(10)))
    times = [sample.time for sample in read_resources(directory)]
    assert len(times) <= 60
    assert times == sorted(times)
    assert times[-1] == 199
    assert times[0] < 30  # the whole run is covered


def test_thin_out_keeps_last_sample_of_each_node() -> None:
    samples = [make_sample(1), make_sample(2, "b"), make_sample(3), make_sample(4)]
    kept = [(sample.time, sample.node) for sample in thin_out(samples)]
    assert kept == [(1, "a"), (2, "b"), (4, "a")]


def test_resource_log_of_deleted_directory_warns_once(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(directory.local_path)
    write(directory, make_sample(1))
    write_again = ResourceLog(directory)
    for number in range(3):
        write_again.on_event(ResourcesSampled(make_sample(number)))
    write_again.close()
    assert not directory.local_path.exists()
    assert caplog.text.count("Resource samples are no longer written") == 2  # one for each log


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
            if "Resource samples are no longer written" in record.getMessage():
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
    assert caplog.text.count("Resource samples are no longer written") == 1
