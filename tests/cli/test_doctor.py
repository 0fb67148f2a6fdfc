"""Tests of `drawbar doctor`."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Command


def test_doctor_without_address_checks_this_machine(cli: Command, tmp_path: Path) -> None:
    result = cli("doctor", "--storage", tmp_path, "--all")
    *lines, summary = result.out.splitlines()
    assert any(f"GPUs ({socket.gethostname()}): " in line for line in lines)
    assert any("disk (storage path)" in line for line in lines)
    assert summary.endswith(" errors")
    assert result.code == any(line.startswith("error") for line in lines)


@pytest.mark.usefixtures("ray_cluster")
def test_doctor_of_cluster_checks_storage(cli: Command, tmp_path: Path) -> None:
    storage = tmp_path / "not" / "yet"
    result = cli("doctor", "--address", "auto", "--storage", storage, "--json")
    checks_by_subject = {check["subject"]: check for check in json.loads(result.out)}
    assert checks_by_subject["storage path"]["value"] == f"{storage} is shared"
    assert checks_by_subject["clock"]["status"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_doctor_of_unreachable_cluster_prints_one_line(cli: Command) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        result = cli("doctor", "--address", f"127.0.0.1:{closed.getsockname()[1]}")
    *others, line = result.err.splitlines()
    assert line.startswith("drawbar: error: Cannot connect to a Ray cluster at")
    assert (result.code, "Traceback" in str(others)) == (2, False)
