"""Tests of the single HTML file with the pages of runs, and of the command `drawbar ui`."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
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


@pytest.mark.parametrize("name", ["journal.jsonl", "page.txt", "checkpoint_000000/page.html"])
def test_export_to_file_of_run_raises_value_error(
    ui_storage: Path, tmp_path: Path, name: str
) -> None:
    run = ui_storage / "finished"
    before = sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*"))
    link = tmp_path / "link.html"
    link.symlink_to(run / name)
    for output in (run / name, link):
        with pytest.raises(ValueError, match=r"directory of the run .* Set a path outside"):
            ui.export_html([ui_storage], output)
    assert before == sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*"))


def test_export_into_run_directory_writes_html_file(ui_storage: Path, tmp_path: Path) -> None:
    shutil.copytree(ui_storage / "finished", tmp_path / "run")
    output = tmp_path / "run" / "page.html"
    assert ui.export_html([tmp_path / "run"], output).stat().st_size > 0


def test_export_symbolic_link_is_followed_and_modes_are_kept(
    ui_storage: Path, tmp_path: Path
) -> None:
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    old.touch(0o600)
    umask = os.umask(0o027)
    try:
        for target in (old, new):
            link = tmp_path / f"link-{target.name}"
            link.symlink_to(target.name)
            ui.export_html([ui_storage / "finished"], link)
            assert link.is_symlink()
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, new)] == [0o600, 0o640]
    assert len(os.listdir(tmp_path)) == 4


def test_export_special_file_is_written_directly(ui_storage: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()), daemon=True)
    reader.start()
    ui.export_html([ui_storage / "finished"], pipe)
    reader.join(60)
    assert read_data(texts[0])["export"] is True
    assert pipe.is_fifo()
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        ui.export_html([ui_storage / "finished"], full)


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
        assert server.wait(300) == 0
        assert server.stderr.read() == b""


def test_command_missing_storage_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drawbar.cli", "ui", str(tmp_path / "missing")]
    result = subprocess.run([*command, "--no-browser"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "does not exist" in result.stderr
