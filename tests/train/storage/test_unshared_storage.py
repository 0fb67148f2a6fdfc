"""Two nodes with a storage path that they do not share: a mount namespace of its own for one.

That one has two of the three ranks.
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
from drawbar.train._storage.node_local_storage import MAX_TRANSFER_BYTES

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PARTS = ["part_0", "part_1", "part_2"]
LOGS = ["rank_0.log", "rank_1.log", "rank_2.log"]


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a second node will not share."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace of its own needs the right to make one")
    folder = tmp_path_factory.mktemp("unshared") / "storage"
    folder.mkdir()
    return folder


def two_nodes(path: Path) -> Iterator[None]:
    """Start Ray here, and a second node that has an empty folder of its own at `path`."""
    ray.init(num_cpus=1, include_dashboard=False)
    script = Path(sys.executable).with_name("ray")
    address = ray.get_runtime_context().gcs_address
    own = f"mount -t tmpfs none {path} && mount -t tmpfs none /tmp/ray"  # `ray start` leaves a file
    command = f"{own} && exec {script} start --address={address} --num-cpus=2"
    node = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{command} --block"], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len([each for each in ray.nodes() if each["Alive"]]) < 2:  # type: ignore[no-untyped-call]
        assert time.monotonic() < deadline, "the second node does not come up"
    yield
    node.terminate()
    node.wait()


def big(rank: int) -> bytes:
    return bytes([rank + 1]) * 20_000_000


def leave_behind(checkpoint: Path) -> None:
    """Have the node that does not share the storage look as after an earlier run of that name."""
    if not (checkpoint.parent / "journal.jsonl").exists():
        (checkpoint / "deep").mkdir(parents=True, exist_ok=True)
        (checkpoint / "deep" / "part_old").touch()


def function() -> list[str]:
    rank = train.get_context().get_world_rank()
    train.collective.barrier()  # the two ranks of one node ask for the checkpoint at once
    newest = train.get_checkpoint()
    if newest is not None:
        with newest.as_directory() as path:
            return sorted(each.name for each in Path(path).rglob("part_*"))
    leave_behind(train.get_context().get_storage() / "checkpoint_000000")
    with train.checkpoint_dir() as path:
        (path / "deep").mkdir()
        (path / "deep" / f"part_{rank}").write_bytes(big(rank))
        (path / f"empty_{rank}").touch()
        train.report({}, checkpoint=path)
    if rank == 1:
        os._exit(1)
    return []


def too_large() -> None:
    with train.checkpoint_dir() as path:
        with open(path / f"part_{train.get_context().get_world_rank()}", "wb") as sparse:
            sparse.truncate(MAX_TRANSFER_BYTES + 1)
        train.report({}, checkpoint=path)


def hand_over_and_fail() -> None:
    rank = train.get_context().get_world_rank()
    if rank == 1:  # never on the driver's node, which has the first or the last
        own = Path(tempfile.mkdtemp())
        (own / "part").write_text("p")
        train.report({}, checkpoint=own, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    train.collective.barrier()
    if rank == 2:
        raise RuntimeError("on purpose")
    train.collective.barrier()


def left_on_the_other_node(path: Path) -> list[str]:
    """List what lies below a path on the second node, which alone has two CPUs."""

    @ray.remote(num_cpus=2)
    def found() -> list[str]:
        return sorted(str(each.relative_to(path)) for each in path.rglob("*"))

    names: list[str] = ray.get(found.remote())
    return names


def fit(function: Callable[[], Any], path: Path, name: str = "run", filesystem: Any = None) -> Any:
    failures = FailureConfig(max_failures=1)
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=3, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name=name,
            storage_path=str(path),
            storage_filesystem=filesystem,
            failure_config=failures,
        ),
    ).fit()


@dataclass(frozen=True)
class Said:
    """What the driver of four runs on two such nodes has said."""

    out: str
    err: str


@pytest.fixture(scope="module")
def said(hidden: Path, drivers: Drivers) -> Said:
    """Checkpoints that travel, storages that are not mounted, a checkpoint that is too large."""

    def main() -> None:
        for _ in two_nodes(hidden):
            print("found", fit(function, hidden).return_values)
            far = hidden.parent / "far"
            remote = fit(function, far, "remote", LocalFileSystem(auto_mkdir=True))
            print("remote", remote.return_values)
            (far / "without_logs").mkdir()
            (far / "without_logs" / "logs").touch()  # so that no log can be written there
            without = fit(lambda: "done", far, "without_logs", LocalFileSystem(auto_mkdir=True))
            print("without logs", without.return_values)
            for name, unlucky in (("large", too_large), ("kept", hand_over_and_fail)):
                try:
                    fit(unlucky, hidden, name)
                except WorkerGroupError as error:
                    print("refused", error)
            for place in ("cache/drawbar", "run", "kept"):
                print("left", place, left_on_the_other_node(hidden / place))

    # The work folders of the remote run are not shared either.
    with drivers(main, RAY_ADDRESS="local", XDG_CACHE_HOME=str(hidden / "cache")) as driver:
        return Said(*driver.communicate(timeout=200))


def test_what_is_too_large_to_travel_is_refused_at_once(hidden: Path, said: Said) -> None:
    assert "StorageError: rank_" in said.out, said.err
    assert f"has 1 GB ({MAX_TRANSFER_BYTES + 1} bytes) for checkpoint checkpoint_000000" in said.out
    assert f"does not share {hidden}/large with the driver's node" in said.out
    assert "The run ends: it would fail again in the same way" in said.out
    assert Result.from_path(hidden / "large").checkpoint is None


def test_a_storage_that_is_not_mounted_needs_no_shared_folder(hidden: Path, said: Said) -> None:
    assert f"remote {[PARTS] * 3}" in said.out, said.err
    far = str(hidden.parent / "far" / "remote")
    checkpoint = Result.from_path(far, LocalFileSystem(auto_mkdir=True)).checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    assert sorted(each.name for each in Path(far, "logs").iterdir()) == LOGS


def test_a_log_that_cannot_be_published_is_told_and_fails_nothing(said: Said) -> None:
    assert f"without logs {['done'] * 3}" in said.out, said.err
    assert re.search(r"the log of rank (\d) stays on node .*logs/rank_\1\.log failed: ", said.err)


def test_what_another_node_has_of_what_was_handed_over_is_told(hidden: Path, said: Said) -> None:
    stages = re.findall(
        rf"^Rank 1 on node {os.uname().nodename} moved files for report 0, which were not "
        rf"committed\. They are in {hidden}/kept/(\.staging/handed-over.*) on that node\.$",
        said.out,
        re.MULTILINE,
    )
    assert len(stages) == 2, said.out  # of two attempts
    for stage in stages:
        assert f"'{stage}/part'" in said.out


def test_other_nodes_are_tidied(said: Said) -> None:
    left = dict(re.findall(r"^left (\S+) (.*)$", said.out, re.MULTILINE))
    remote = {name for name in literal_eval(left["cache/drawbar"]) if name.startswith("remote-")}
    assert {name.partition("/")[2] for name in remote if "checkpoint_" not in name} == {""}
    run = {name.partition("/")[0] for name in literal_eval(left["run"])}
    assert run == {"checkpoint_000000", "logs"}


def test_checkpoints_travel_both_ways(hidden: Path, said: Said) -> None:
    out, err = said.out, said.err
    assert "does not share" in err, err
    assert f"found {[PARTS] * 3}" in out, err
    checkpoint = Result.from_path(hidden / "run").checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    for rank, part in enumerate(PARTS):
        assert (Path(checkpoint) / "deep" / part).read_bytes() == big(rank)
