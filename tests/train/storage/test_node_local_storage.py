"""Tests of two nodes whose storage path is local to each node.

The second node has its own mount namespace and two of the three ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from ast import literal_eval
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import ray
from fsspec.implementations.local import LocalFileSystem

from drawbar import train
from drawbar.train import (
    CheckpointUploadMode,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PARTS = ["part_0", "part_1", "part_2"]
LOGS = ["rank_0.log", "rank_1.log", "rank_2.log"]


@pytest.fixture(scope="module")
def unshared_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that the second node does not share."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs permission to create a mount namespace")
    path = tmp_path_factory.mktemp("unshared") / "storage"
    path.mkdir()
    return path


def start_two_nodes(path: Path) -> Iterator[None]:
    """Start Ray, and a second node that has a separate empty directory at `path`."""
    ray.init(num_cpus=1, include_dashboard=False)
    script = Path(sys.executable).with_name("ray")
    address = ray.get_runtime_context().gcs_address
    mounts = (
        f"mount -t tmpfs none {path} && mount -t tmpfs none /tmp/ray"  # `ray start` leaves a file
    )
    command = f"{mounts} && exec {script} start --address={address} --num-cpus=2"
    node = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{command} --block"], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len([info for info in ray.nodes() if info["Alive"]]) < 2:  # type: ignore[no-untyped-call]
        assert time.monotonic() < deadline, "the second node did not start"
    yield
    node.terminate()
    node.wait()


def make_content(rank: int) -> bytes:
    return bytes([rank + 1]) * 20_000_000


def create_old_checkpoint(checkpoint: Path) -> None:
    """Create the files of an earlier run of the same name on the node with local storage."""
    if not (checkpoint.parent / "journal.jsonl").exists():
        (checkpoint / "deep").mkdir(parents=True, exist_ok=True)
        (checkpoint / "deep" / "part_old").touch()


def function() -> list[str]:
    rank = train.get_context().get_world_rank()
    train.collective.barrier()  # so that both ranks of a node request the checkpoint at once
    newest = train.get_checkpoint()
    if newest is not None:
        with newest.as_directory() as path:
            return sorted(file.name for file in Path(path).rglob("part_*"))
    create_old_checkpoint(train.get_context().get_storage() / "checkpoint_000000")
    with train.checkpoint_dir() as path:
        (path / "deep").mkdir()
        (path / "deep" / f"part_{rank}").write_bytes(make_content(rank))
        (path / f"empty_{rank}").touch()
        train.report({}, checkpoint=path)
    if rank == 1:
        os._exit(1)
    return []


def report_too_large() -> None:
    with train.checkpoint_dir() as path:
        with open(path / f"part_{train.get_context().get_world_rank()}", "wb") as sparse:
            sparse.truncate(1_000_000_001)
        train.report({}, checkpoint=path)


def move_and_fail() -> None:
    rank = train.get_context().get_world_rank()
    if rank == 1:  # never on the driver's node, which has the first or the last rank
        source = Path(tempfile.mkdtemp())
        (source / "part").write_text("p")
        train.report({}, checkpoint=source, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    train.collective.barrier()
    if rank == 2:
        raise RuntimeError("on purpose")
    train.collective.barrier()


def list_files_on_other_node(path: Path) -> list[str]:
    """Return the files below a path on the second node, the only node with two CPUs."""

    @ray.remote(num_cpus=2)
    def list_files() -> list[str]:
        return sorted(str(file.relative_to(path)) for file in path.rglob("*"))

    names: list[str] = ray.get(list_files.remote())
    return names


def fit(
    function: Callable[[], Any],
    path: Path,
    name: str = "run",
    filesystem: Any = None,
    num_workers: int = 3,
) -> Any:
    failures = FailureConfig(max_failures=1)
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=num_workers, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name=name,
            storage_path=str(path),
            storage_filesystem=filesystem,
            failure_config=failures,
        ),
    ).fit()


@dataclass(frozen=True)
class Output:
    """Output of the driver of several runs on two nodes."""

    out: str
    err: str


@pytest.fixture(scope="module")
def output(unshared_path: Path, drivers: Drivers) -> Output:
    """Return the output of runs with node-local, remote, and too large checkpoints."""

    def main() -> None:
        for _ in start_two_nodes(unshared_path):
            print("found", fit(function, unshared_path).return_values)
            far = unshared_path.parent / "far"
            remote = fit(function, far, "remote", LocalFileSystem(auto_mkdir=True))
            print("remote", remote.return_values)
            (far / "without_logs").mkdir()
            (far / "without_logs" / "logs").touch()  # so that no log can be written there
            remote_files = LocalFileSystem(auto_mkdir=True)
            without = fit(lambda: "done", far, "without_logs", remote_files, num_workers=2)
            print("without logs", without.return_values)
            for name, failing_function in (("large", report_too_large), ("kept", move_and_fail)):
                try:
                    fit(failing_function, unshared_path, name)
                except WorkerGroupError as error:
                    print("refused", error)
            for name in ("cache/drawbar", "run", "kept"):
                print("remaining", name, list_files_on_other_node(unshared_path / name))

    # The work directories of the remote run are not shared either.
    with drivers(main, RAY_ADDRESS="local", XDG_CACHE_HOME=str(unshared_path / "cache")) as driver:
        return Output(*driver.communicate(timeout=200))


def test_node_local_checkpoint_over_size_limit_raises(unshared_path: Path, output: Output) -> None:
    assert "StorageError: rank_" in output.out, output.err
    assert "saved 1 GB (1000000001 bytes) for checkpoint checkpoint_000000" in output.out
    assert f"does not share {unshared_path}/large with the driver's node" in output.out
    assert "The run ends: it would fail again in the same way" in output.out
    assert Result.from_path(unshared_path / "large").checkpoint is None


def test_remote_storage_needs_no_shared_directory(unshared_path: Path, output: Output) -> None:
    assert f"remote {[PARTS] * 3}" in output.out, output.err
    far = str(unshared_path.parent / "far" / "remote")
    checkpoint = Result.from_path(far, LocalFileSystem(auto_mkdir=True)).checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    assert sorted(path.name for path in Path(far, "logs").iterdir()) == LOGS


def test_failed_log_upload_warns_and_run_succeeds(output: Output) -> None:
    assert f"without logs {['done'] * 2}" in output.out, output.err
    pattern = r"Could not upload the log of rank (\d) from node .*logs/rank_\1\.log failed: "
    assert re.search(pattern, output.err)


def test_error_lists_uncommitted_moved_files_on_other_node(
    unshared_path: Path, output: Output
) -> None:
    paths = re.findall(
        rf"^Rank 1 on node {os.uname().nodename} moved files for report 0, which were not "
        rf"committed\. They are in {unshared_path}/kept/(\.staging/handed-over.*) on that node\.$",
        output.out,
        re.MULTILINE,
    )
    assert len(paths) == 2, output.out  # of two attempts
    for path in paths:
        assert f"'{path}/part'" in output.out


def test_run_cleans_up_other_nodes(output: Output) -> None:
    remaining = dict(re.findall(r"^remaining (\S+) (.*)$", output.out, re.MULTILINE))
    remote = {
        name for name in literal_eval(remaining["cache/drawbar"]) if name.startswith("remote-")
    }
    assert {name.partition("/")[2] for name in remote if "checkpoint_" not in name} == {""}
    run = {name.partition("/")[0] for name in literal_eval(remaining["run"])}
    assert run == {"checkpoint_000000", "logs"}


def test_checkpoints_are_transferred_in_both_directions(
    unshared_path: Path, output: Output
) -> None:
    out, err = output.out, output.err
    assert "does not share" in err, err
    assert f"found {[PARTS] * 3}" in out, err
    checkpoint = Result.from_path(unshared_path / "run").checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    for rank, part in enumerate(PARTS):
        assert (Path(checkpoint) / "deep" / part).read_bytes() == make_content(rank)
