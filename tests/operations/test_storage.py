"""Tests of docs/operations/storage.md: the URI of an S3 server, and a directory for a team."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from pyarrow.fs import FileType, S3FileSystem

from drawbar import train
from drawbar.train import DataParallelTrainer, Result, RunConfig, ScalingConfig
from tests.cli.conftest import Command, cli
from tests.train.storage.conftest import s3, s3_port

__all__ = ["cli", "s3", "s3_port"]

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "storage.md"


def save_step() -> int:
    checkpoint = train.get_checkpoint()
    step = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as path:
            step = int(Path(path, "step").read_text()) + 1
    with train.checkpoint_dir() as directory:
        (directory / "step").write_text(str(step))
        train.report({"step": step}, checkpoint=directory)
    return step


def fit(storage_path: str, name: str = "digits") -> Result:
    return DataParallelTrainer(
        save_step,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=name, storage_path=storage_path),
    ).fit()


@pytest.mark.filterwarnings("ignore:.*finished:UserWarning")
def test_minio_uri_of_the_page_stores_and_resumes_a_run(
    s3: S3FileSystem, s3_port: int, cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    s3.create_dir("team-runs")
    text = PAGE.read_text()

    def on_this_machine(uri: str) -> str:
        return uri.replace("minio.example.com:9000", f"127.0.0.1:{s3_port}")

    (storage_path,) = re.findall(r'storage_path="(s3://\S*endpoint_override\S*)"', text)
    (run,) = re.findall(r"drawbar show '(\S*endpoint_override\S*)'", text)
    assert fit(on_this_machine(storage_path)).return_value == 0
    assert fit(on_this_machine(storage_path)).return_value == 1
    assert Result.from_path(on_this_machine(run)).metrics == {"step": 1}
    shown = cli("show", on_this_machine(run))
    assert shown.code == 0
    assert "digits  finished" in shown.out
    assert s3.get_file_info("team-runs/vision/digits/journal.jsonl").type == FileType.File


def test_team_directory_gives_the_group_access(tmp_path: Path) -> None:
    storage = tmp_path / "runs"
    storage.mkdir()
    assert "chmod 2770 /shared/runs" in PAGE.read_text()
    storage.chmod(0o2770)
    umask = os.umask(0o007)
    try:
        fit(str(storage), name="alice/digits")
    finally:
        os.umask(umask)
    for path in storage.rglob("*"):
        mode = path.stat().st_mode
        assert mode & stat.S_IRGRP, path
        assert mode & stat.S_IWGRP, path
        assert not mode & stat.S_IRWXO, path
        assert not path.is_dir() or mode & stat.S_ISGID, path
