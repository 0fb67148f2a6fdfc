"""Tests of the pages of a run in progress: state, log, and the button that stops it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from drawbar import ui
from tests.ui.conftest import Client

DRIVER = """
import sys, time
from drawbar import train

def train_func(config):
    train.set_progress(30, 100)
    with train.checkpoint_dir() as path:
        (path / "model").write_text("weights")
        train.report({"loss": 1.0}, checkpoint=path)
    print("ready", flush=True)
    while True:
        train.report({"loss": 0.5})
        time.sleep(0.01)

train.DataParallelTrainer(
    train_func,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="live", storage_path=sys.argv[1]),
).fit()
"""


def test_live_run_is_shown_and_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver,
        ui.start_server([tmp_path], port=0) as server,
    ):
        try:
            assert driver.stdout is not None
            while b"ready" not in (line := driver.stdout.readline()):
                assert line, "the driver ended early"
            driver.stdout.close()  # otherwise, the pipe could become full
            check_live_run(Client(server.url))
            driver.wait(300)
        finally:
            driver.kill()


def check_live_run(client: Client) -> None:
    base = f"api/runs/{client.find_id('live')}"
    page = client.get(base)
    assert (page["run"]["status"], page["run"]["is_active"]) == ("running", True)
    assert page["run"]["progress"]["fraction"] == 0.3
    assert page["failure"] is page["resume"] is None
    assert [segment["kind"] for segment in page["segments"]][-1] == "unsaved"
    assert "ready" in client.get(f"{base}/log", wait=30)["text"]
    changed = client.get(base, after=page["version"], wait=30)
    assert changed["version"] != page["version"]
    headers = {"Cookie": client.cookie, "X_Drawbar": "1", "Origin": client.base.rstrip("/")}
    status, data, _ = client.send(f"{base}/stop", b'{"save": false}', **headers)
    assert status == 200, data
    assert "status" in json.loads(data)
    version = changed["version"]
    while True:
        page = client.get(base, after=version, wait=30)
        version = page["version"]
        if "run" in page and not page["run"]["is_active"]:
            break
    assert page["run"]["status"] == "stopped"
    assert page["resume"]["advice"].startswith("Call fit() again")
    texts = [mark["text"] for mark in page["events"] if mark["kind"] == "stop"]
    assert texts == ["The user requested to end the run at once.", "The run was stopped."]
