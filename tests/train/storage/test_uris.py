"""Tests of URIs of runs whose names contain characters with a meaning in URIs or patterns."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pyarrow.fs import S3FileSystem

from drawbar import train
from drawbar.cli import main
from drawbar.train import Checkpoint, Result
from drawbar.train.runs import find_run, list_runs
from tests.train.storage.faulty_storage import content, save, two_steps

SPECIAL_NAME = "my run 100% #1 ?x é"
NAMES = [
    SPECIAL_NAME,
    pytest.param("a+b%41%", marks=pytest.mark.nightly),
    "[x]*~'\"&=;@,$!()",
]


@pytest.fixture(
    params=["path", "file", "s3", pytest.param("s3 quoted", marks=pytest.mark.nightly), "memory"]
)
def storage_path(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Return the path or URI of an empty directory with a space in its name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "path":
        return str(tmp_path / "all runs")
    if request.param == "file":
        return (tmp_path / "all runs").as_uri()
    directory = f"{uuid.uuid4().hex}/all runs é"
    if request.param == "memory":
        return f"memory://{directory}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    request.getfixturevalue("s3")
    port = request.getfixturevalue("s3_port")
    path = quote(directory) if request.param == "s3 quoted" else directory
    return f"s3://bucket/{path}?scheme=http&endpoint_override=127.0.0.1:{port}&region=us-east-1"


def fit(name: str, storage_path: str, function: Any = two_steps, **config: Any) -> Result:
    return train.DataParallelTrainer(
        function,
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(name=name, storage_path=storage_path, **config),
    ).fit()


@pytest.mark.parametrize("name", NAMES)
def test_uri_of_run_opens_run_and_checkpoint(
    storage_path: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fit(name, storage_path)
    assert result.checkpoint is not None
    assert content(Checkpoint(result.checkpoint.uri)) == "1"
    assert content(Checkpoint(result.checkpoint.path, result.filesystem)) == "1"
    for path, filesystem in (
        (result.uri, None),
        (result.uri, result.filesystem),
        (result.path, result.filesystem),
    ):
        read = Result.from_path(path, filesystem)
        assert read.metrics == {"step": 1}
        assert content(read.checkpoint) == "1"
    record = find_run(result.uri)
    assert record.name == name
    assert [run.name for run in list_runs(record.storage_path)] == [name]
    for command in (["show", result.uri], ["verify", result.uri], ["runs", record.storage_path]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main([*command, "--json"])
        assert not exit_info.value.code
        assert json.loads(capsys.readouterr().out)
    resumed = fit(record.name, record.storage_path, lambda: save("2"), resume="must")
    assert resumed.uri == result.uri
    assert len(Result.from_path(result.uri).metrics_dataframe) == 3


def test_error_of_run_prints_storage_path_that_resumes_it(storage_path: str) -> None:
    def fail() -> None:
        save("0")
        raise RuntimeError("boom")

    with pytest.raises(train.TrainingFailedError) as raised:
        fit(SPECIAL_NAME, storage_path, fail)
    path = raised.value.path
    assert path is not None
    assert re.search(re.escape(f"Run directory: {path}"), str(raised.value))
    record = find_run(path)
    resumed = fit(record.name, record.storage_path, lambda: save("1"), resume="must")
    assert len(resumed.metrics_dataframe) == 2


def test_name_with_wildcards_deletes_no_files_of_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    storage_path = f"memory://{uuid.uuid4().hex}"
    others = [fit(name, storage_path) for name in ("run1", "runs")]
    config = train.CheckpointConfig(num_to_keep=1)
    result = fit("run?", storage_path, checkpoint_config=config)
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == ["1"]
    for other in others:
        checkpoints = Result.from_path(other.uri).best_checkpoints
        assert sorted(content(checkpoint) for checkpoint, _ in checkpoints) == ["0", "1"]


def test_path_of_remote_run_without_filesystem_raises_with_remedy(
    s3: S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = train.DataParallelTrainer(
        two_steps,
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(
            name="run", storage_path=f"bucket/{uuid.uuid4().hex}", storage_filesystem=s3
        ),
    ).fit()
    assert result.checkpoint is not None
    with pytest.raises(FileNotFoundError, match="pass its URI, or its filesystem"):
        Result.from_path(result.path)
    with pytest.raises(train.CheckpointError, match="pass its URI, or its filesystem"):
        Checkpoint(result.checkpoint.path).verify()


@pytest.mark.parametrize("uri", ["file://tmp/runs", "file:/tmp/runs", "local://tmp/runs"])
def test_local_uri_with_host_or_without_authority_raises_with_remedy(uri: str) -> None:
    with pytest.raises(
        ValueError, match=r"must have three slashes\. For /tmp/runs, use '\w+:///tmp"
    ):
        find_run(uri)
