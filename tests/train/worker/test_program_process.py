"""Tests of run_program() without Ray."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train.backend import DataSource, run_program
from drawbar.train.run_modes import ProgramMode, RunMode

SOURCE = """
import os, sys
from drawbar import train
from drawbar.train import CheckpointUploadMode

assert train.get_context().get_world_size() == 1
assert train.collective.all_gather("value") == ["value"]
train.report({"step": 1})
child = os.fork()
if not child:
    try:
        train.report({"step": "in a fork"})
    except RuntimeError as error:
        os._exit(7 if "a fork of process" in str(error) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
with train.checkpoint_dir() as path:
    (path / "file").write_text("saved")
    mode = CheckpointUploadMode.ASYNC
    train.report({"step": 2}, checkpoint=path, checkpoint_upload_mode=mode)
if sys.argv[1:]:
    os._exit(int(sys.argv[1]))
"""


FORKS = """
import os, sys

def get_exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

if not (child := os.fork()):
    sys.exit(3)
assert get_exit_code(child) == 3
if not (child := os.fork()):
    raise ValueError("in a fork")
assert get_exit_code(child) == 1
os._exit(9)
"""


def fit(directory: Path, *arguments: str, source: str = SOURCE) -> train.Result:
    script = directory / "script.py"
    script.write_text(textwrap.dedent(source))
    return train.DataParallelTrainer(
        lambda: run_program([str(script), *arguments], os.environ),
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(name="run", storage_path=directory),
    ).fit()


def test_program_with_async_checkpoint_commits_before_it_ends(tmp_path: Path) -> None:
    result = fit(tmp_path)
    assert result.metrics == {"step": 2}
    assert result.checkpoint is not None
    assert (Path(result.checkpoint.path) / "file").read_text() == "saved"


def test_program_exit_code_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError, match="program ended: exited with code 9") as failed:
        fit(tmp_path, "9")
    (error,) = failed.value.worker_failures.values()
    assert isinstance(error, train.ProgramFailedError)
    assert error.exit_code == 9


def test_program_output_is_in_the_log_once(tmp_path: Path) -> None:
    source = "import sys; print('to stdout'); print('to stderr', file=sys.stderr)"
    path = fit(tmp_path, source=source).path
    log = (Path(path) / "logs" / "rank_0.log").read_text()
    assert sorted(log.splitlines()) == ["to stderr", "to stdout"]


def test_program_ignores_exit_of_its_forks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(train.WorkerGroupError, match="program ended: exited with code 9"):
        fit(tmp_path, source=FORKS)
    err = capfd.readouterr().err
    assert "ValueError: in a fork" in err
    assert "program_main" not in err


def test_program_that_closes_all_descriptors_may_have_raised(tmp_path: Path) -> None:
    source = "import os; os.closerange(3, os.sysconf('SC_OPEN_MAX')); raise ValueError('boom')"
    with pytest.raises(train.WorkerGroupError, match=r"code 1 .* or after closing all descriptors"):
        fit(tmp_path, source=source)
    assert "ValueError: boom" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


def test_report_after_program_closed_all_descriptors_raises(tmp_path: Path) -> None:
    source = (
        "import os; from drawbar import train; train.report({'step': 0}); os.closerange(3, 65536); "
        "train.report({'step': 1})"
    )
    with pytest.raises(train.WorkerGroupError, match="exited with code 1"):
        fit(tmp_path, source=source)
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert re.search(r"has closed file descriptor \d+, its connection to Drawbar", log)


REPORTS = 300
REPORT_AND_END = """
import os
import re
from drawbar import train
for step in range({reports}):
    train.report({{"step": step}})
{end}
"""


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_program_ends_right_after_report_loses_nothing(tmp_path: Path, end: str) -> None:
    with pytest.raises(train.WorkerGroupError):
        fit(tmp_path, source=REPORT_AND_END.format(reports=REPORTS, end=end))
    steps = train.Result.from_path(tmp_path / "run").metrics_dataframe["step"]
    assert list(steps) == list(range(REPORTS))


class RejectedData(DataSource):
    def check(self, scaling_config: train.ScalingConfig) -> None:
        raise ValueError(f"no data for {scaling_config.num_workers} workers")

    def assign(self, node_ids: Sequence[str], positions: object) -> list[Any]:
        return [None for _ in node_ids]


class ProgramTrainer(train.DataParallelTrainer):
    def get_run_mode(self, *, use_caller_thread: bool) -> RunMode:
        return ProgramMode(use_caller_thread=use_caller_thread)


def test_program_mode_checks_data_before_the_run_opens(tmp_path: Path) -> None:
    trainer = ProgramTrainer(
        lambda: None,
        datasets=RejectedData(),
        scaling_config=train.ScalingConfig(num_workers=1),
        run_config=train.RunConfig(name="run", storage_path=tmp_path),
    )
    with pytest.raises(ValueError, match="no data for 1 workers"):
        trainer.fit()
    assert not (tmp_path / "run").exists()
