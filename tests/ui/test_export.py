"""Tests of the single HTML file with the pages of runs, and of the command `drawbar ui`."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drawbar import ui
from tests.ui.conftest import HOSTILE, Client


def read_data(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="drawbar-data">(.*?)</script>', page)
    assert match is not None
    return json.loads(match[1])


def test_export_contains_all_runs_and_no_references(ui_storage: Path, tmp_path: Path) -> None:
    path = ui.export_html([ui_storage], tmp_path / "runs.html")
    page = path.read_text()
    data = read_data(page)
    runs = data["responses"]["api/runs"]["runs"]
    assert {"finished", "failed", "killed"} <= {run["name"] for run in runs}
    for run in runs:
        base = f"api/runs/{run['id']}"
        keys = ("", "/ranks", "/curves?ranks=lowest&x=step", "/curves?ranks=band&x=time")
        assert all(base + key in data["responses"] for key in keys)
    assert HOSTILE not in page
    assert "alert(" in page  # as data
    outside = re.sub(r"<script type=.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", outside)
    assert os.listdir(tmp_path) == ["runs.html"]


def test_export_import_map_has_every_imported_module(ui_storage: Path, tmp_path: Path) -> None:
    page = ui.export_html([ui_storage / "finished"], tmp_path / "run.html").read_text()
    match = re.search(r'<script type="importmap">(.*?)</script>', page)
    assert match is not None
    modules = json.loads(match[1])["imports"]
    sources = [base64.b64decode(url.partition(",")[2]).decode() for url in modules.values()]
    names = {name for source in sources for name in re.findall(r'from "([^"]+)"', source)}
    assert names <= modules.keys()
    assert f"import {json.dumps('drawbar/app.js')};" in page


def test_export_empty_storage_raises_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs"):
        ui.export_html([tmp_path], tmp_path / "page.html")


def test_command_exports_and_serves_until_interrupted(ui_storage: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drawbar.cli", "ui", str(ui_storage)]
    output = tmp_path / "page.html"
    printed = subprocess.check_output([*command, "-o", str(output)], text=True)
    assert printed.strip() == str(output)
    command += ["--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        line = server.stdout.readline().decode()
        url = line.removeprefix("Runs are shown at ").strip()
        client = Client(url)
        assert client.send("")[0] == 200
        status, data, headers = client.send("static/app.js")
        assert (status, headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
        assert data
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        assert server.stderr.read() == b""


def test_command_missing_storage_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drawbar.cli", "ui", str(tmp_path / "missing")]
    result = subprocess.run([*command, "--no-browser"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "does not exist" in result.stderr
