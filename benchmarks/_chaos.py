"""Kill random processes of a run and check that nothing is lost.

    python -m benchmarks._chaos --kills 20 --seed 7

Four workers save checkpoints in a loop on a cluster of three nodes. Unless `--hazards` selects
fewer features, checkpoints contain links to user directories, user directories are moved with ASYNC
uploads, the group is elastic with two to four workers, and workers are forked. Between two
checkpoints, ranks report metrics, and a callback records those that it receives. Of ten kills, six
hit a worker or a fork server, two a node, and two the driver; the seed determines their order,
times, and victims. All kills are SIGKILLs. After each kill, the run directory must be intact, and
processes of a killed driver must exit within 5 s. Finally, the run finishes and leaves no process.
The seed does not determine the timing of the machine: it reproduces the kills, but not their
interleaving.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks._chaos_run import (
    HAZARDS,
    check_link_targets,
    make_link_targets,
    numbers,
    shown_reports,
    step_of,
)
from benchmarks._wait import becomes_true

Victim = Literal["worker", "node", "driver"]

OF_TEN: dict[Victim, int] = {"worker": 6, "node": 2, "driver": 2}
NODES = 3
CPUS_PER_NODE = 2  # with one node gone there is still a place for every worker
LONGEST_CALM_SECONDS = 1.5
GONE_SECONDS = 30.0
SERVER_GONE_SECONDS = 60.0  # a fork server ends after its imports
PATIENCE_SECONDS = 60.0
FORK_SERVER_CALM_SECONDS = 0.3  # shorter calms end with the kill of a fork server
FOLDER_VARIABLE = "CHAOS_FOLDER"  # which fork servers inherit
# A node is given up after some 2 s instead of 15, so that most of the time is spent on training.
QUICK_TO_GIVE_UP = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


@dataclass(frozen=True)
class Kill:
    """One strike.

    Attributes:
        victim: Kind of process to kill.
        which: Which of those there are, from 0 to below 1.
        after: Seconds of calm before it.
        at_rest: The run makes a checkpoint before it; otherwise the strike may hit a run that is
            not on its feet yet after the one before.
    """

    victim: Victim
    which: float
    after: float
    at_rest: bool


def draw(seed: int, count: int) -> list[Kill]:
    """Draw so many kills; the same seed gives the same ones, and a shorter list is the start."""
    generator = random.Random(seed)
    victims: list[Victim] = []
    while len(victims) < count:
        victims += generator.sample(list(OF_TEN), k=10, counts=list(OF_TEN.values()))
    return [
        Kill(
            victim=victim,
            which=generator.random(),
            after=generator.uniform(0, LONGEST_CALM_SECONDS),
            at_rest=generator.random() < 0.7,
        )
        for victim in victims[:count]
    ]


class Chaos:
    """A cluster, a run on it in a separate driver, and methods to kill and check processes.

    Args:
        folder: Empty directory for the run and the driver's output.
        hazards: Features of the run in addition to saving files; see `HAZARDS`.
    """

    def __init__(self, folder: Path, hazards: Sequence[str]) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._folder = folder
        self._hazards = hazards
        self._run = folder / "run"
        make_link_targets(folder)
        os.environ[FOLDER_VARIABLE] = str(folder)
        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "no_monitor": True,  # of an autoscaler
                "_system_config": QUICK_TO_GIVE_UP,
            },
        )
        self._nodes = [self._cluster.add_node(num_cpus=CPUS_PER_NODE) for _ in range(NODES)]
        ray.init(address=self._cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        self._drivers = 0
        self._driver = self._start_driver()

    def close(self) -> None:
        """End everything."""
        import ray

        self._driver.kill()
        self._driver.wait()
        ray.shutdown()
        self._cluster.shutdown()

    def _start_driver(self) -> subprocess.Popen[bytes]:
        self._drivers += 1
        command = [sys.executable, "-m", "benchmarks._chaos_run", str(self._folder)]
        command += self._hazards
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                command,
                env={**os.environ, "RAY_ADDRESS": self._cluster.address},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def _log(self) -> Path:
        return self._folder / f"driver_{self._drivers}.log"

    # -- looking

    def newest(self) -> int:
        """Return the latest step that a worker knows to be committed, -1 if there is none."""
        return max(numbers(self._folder / "acknowledged"), default=-1)

    def wait_for_a_checkpoint(self, after: int) -> None:
        """Wait until a later step than that is committed."""
        self._wait(lambda: self.newest() > after, f"a checkpoint after step {after}")

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        def done_or_failed() -> bool:
            failed = self._driver.poll() not in (None, 0, -signal.SIGKILL)
            assert not failed, f"the driver has failed:\n{self._log.read_text()[-3000:]}"
            return done()

        if not becomes_true(done_or_failed, within=PATIENCE_SECONDS):
            log = self._log.read_text()[-3000:]
            raise AssertionError(f"no {what} within {PATIENCE_SECONDS:g} s; driver:\n{log}")

    def check(self) -> None:
        """Check that the run directory is intact.

        It must have the steps known to be committed, and the reports that a callback has received.
        """
        from drawbar.train.testing import check_run

        check_link_targets(self._folder)
        known = set(numbers(self._folder / "acknowledged"))
        shown = shown_reports(self._folder)
        if not (self._run / "journal.jsonl").exists():
            return  # the very first driver has died early
        check_run(self._run)
        forgotten = known - set(self._journaled())
        assert not forgotten, f"acknowledged, and not in the journal: steps {sorted(forgotten)}"
        lost = shown - self._stored_reports()
        assert not lost, f"shown, and not stored: reports (attempt, number) {sorted(lost)}"
        self._load_newest()

    def _stored_reports(self) -> set[tuple[int, int]]:
        from drawbar._records.stored_reports import StoredReports
        from drawbar._storage.run_directory import RunDirectory

        reports = StoredReports(RunDirectory(self._run).run_files)
        return {
            (block.metrics["attempt"][row], block.metrics["number"][row])
            for attempt in reports.list_attempts()
            for blocks in reports.read_blocks(reports.list_segments(attempt))
            for block in blocks
            if "number" in block.metrics
            for row in range(len(block))
        }

    def _journaled(self) -> Iterator[int]:
        from drawbar._records.events import CheckpointCommitted
        from drawbar._records.journal import replay

        for event in replay(self._run / "journal.jsonl"):
            if isinstance(event, CheckpointCommitted):
                yield event.metrics["step"]

    def _load_newest(self) -> None:
        from drawbar.train import Result

        while newest := Result.from_path(self._run).checkpoint:
            try:
                step_of(Path(newest))
            except FileNotFoundError:
                continue  # the run continues, and retention deleted the checkpoint: check again
            return

    def _check_gone(self) -> None:
        """Check that no process of a run is left some time after its driver has ended."""
        is_gone = becomes_true(lambda: not self._fork_servers(), within=SERVER_GONE_SECONDS)
        assert is_gone, f"alive {SERVER_GONE_SECONDS:g} s later: {self._remains()}"
        # Ray may start a worker of a dead driver, whose client starts another server.
        is_gone = becomes_true(
            lambda: len(self._remains()) == len(self._fork_servers()), within=GONE_SECONDS
        )
        assert is_gone, f"alive {GONE_SECONDS:g} s later: {self._remains()}"
        is_gone = becomes_true(lambda: not self._remains(), within=SERVER_GONE_SECONDS)
        assert is_gone, f"alive {SERVER_GONE_SECONDS:g} s later: {self._remains()}"

    def _remains(self) -> list[str]:
        from ray.util import placement_group_table

        from drawbar._base.ray_compat import list_actors

        processes = [f"process {each.pid}" for each in self._workers()]
        children = [f"child {pid}" for pid in numbers(self._folder / "children") if _lives(pid)]
        groups = [
            f"placement group {name}"
            for name, group in placement_group_table().items()
            if group["state"] != "REMOVED"
        ]
        living = [
            f"actor {name}" for name, each in list_actors().items() if each["State"] != "DEAD"
        ]
        servers = [f"fork server {server.pid}" for server in self._fork_servers()]
        return [*processes, *children, *groups, *living, *servers]

    def _workers(self) -> list[Any]:
        """Return the processes of the run's workers on all nodes, oldest first."""
        import psutil

        found = []
        for node in self._nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(_raylet(node)).children(recursive=True)
        for server in self._fork_servers():
            found += server.children()
        return sorted((each for each in found if _is_worker(each)), key=lambda each: each.pid)

    def _fork_servers(self) -> list[Any]:
        import psutil

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_server = any("_fork_server/server.py" in text for text in process.cmdline())
                if is_server and process.environ().get(FOLDER_VARIABLE) == str(self._folder):
                    found.append(process)
        return [server for server in found if server.parent().pid not in {s.pid for s in found}]

    # -- striking

    def strike(self, kill: Kill) -> None:
        """Kill a process, and replace a killed node."""
        match kill.victim:
            case "worker":
                servers = self._fork_servers() if kill.after < FORK_SERVER_CALM_SECONDS else []
                if workers := servers or self._workers():
                    _kill(workers[int(kill.which * len(workers))].pid)
            case "node":
                self._kill_node(self._nodes.pop(int(kill.which * len(self._nodes))))
                self._nodes.append(self._cluster.add_node(num_cpus=CPUS_PER_NODE))
            case "driver":
                self._driver.kill()
                self._driver.wait()
                self._check_gone()
                self.check()
                self._driver = self._start_driver()

    def _kill_node(self, node: Any) -> None:
        """Kill all of its processes at once, as a power cut would; Ray's account comes after."""
        import psutil

        raylet = psutil.Process(_raylet(node))
        for process in [*raylet.children(recursive=True), raylet]:
            _kill(process.pid)
        self._cluster.remove_node(node, allow_graceful=False)

    def finish(self) -> None:
        """Let the run come to its end, and check that nothing is left of it."""
        (self._folder / "enough").touch()
        self._wait(lambda: self._driver.poll() == 0, "end of the run")
        self._check_gone()
        self.check()


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _is_worker(process: Any) -> bool:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return bool(process.cmdline()[:1]) and process.cmdline()[0].startswith("ray::Worker")
    return False


def _lives(pid: int) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "sleep" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def unleash(
    folder: Path,
    *,
    seed: int,
    kills: int,
    hazards: Sequence[str] = HAZARDS,
    say: Callable[[str], None] = print,
) -> dict[Victim, list[float]]:
    """Strike so many times; give the seconds from each kill to the next committed checkpoint.

    Only those that the run had the time to recover from are counted.

    Raises:
        AssertionError: Something was lost, or outlived the run; the message has the seed.
    """
    recovered: dict[Victim, list[float]] = {"worker": [], "node": [], "driver": []}
    plan = draw(seed, kills)
    chaos = Chaos(folder, hazards)
    number = 0
    try:
        chaos.wait_for_a_checkpoint(after=-1)
        for number, kill in enumerate(plan, start=1):
            time.sleep(kill.after)
            before, began = chaos.newest(), time.monotonic()
            chaos.strike(kill)
            chaos.check()
            if number == kills or plan[number].at_rest:
                chaos.wait_for_a_checkpoint(after=before)
                recovered[kill.victim].append(time.monotonic() - began)
            say(f"{number}/{kills}: {kill.victim} killed after step {before}; nothing lost")
        chaos.finish()
    except BaseException as error:
        error.add_note(f"with seed {seed}, at kill {number} of {kills}")
        raise
    finally:
        chaos.close()
    return recovered


def main() -> None:
    """Run chaos with the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--hazards", nargs="*", choices=HAZARDS, default=HAZARDS)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="drawbar-chaos-") as folder:
        unleash(Path(folder), seed=options.seed, kills=options.kills, hazards=options.hazards)
    print("nothing was lost", flush=True)


if __name__ == "__main__":
    main()
