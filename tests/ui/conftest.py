"""A storage with finished, failed, killed, and damaged runs, and a server that shows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from drawbar import train, ui
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, WorkerGroupError

HOSTILE = '</script><script>alert("x")</script>'

KILLED_DRIVER = """
import sys, time
from drawbar import train

def train_func(config):
    for step in range(3):
        with train.checkpoint_dir() as path:
            (path / "model").write_text("weights")
            train.report({"loss": 1.0}, checkpoint=path if step < 2 else None)
    print("ready", flush=True)
    time.sleep(600)

train.DataParallelTrainer(
    train_func,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="killed", storage_path=sys.argv[1]),
).fit()
"""


def train_func(config: dict[str, Any]) -> None:
    print(f"\x1b[31mlog line\x1b[0m {HOSTILE}")
    for epoch in range(config["epochs"]):
        with train.checkpoint_dir() as path:
            (path / "model").write_text("weights")
            metrics = {"loss": 1 / (epoch + 1), HOSTILE: epoch, "val": {"acc": 0.5}}
            train.report({**metrics, "bad": float("nan")}, checkpoint=path)
    if config["fails"]:
        raise ValueError("boom <b>")


def make_run(storage: Path, name: str, epochs: int, *, fails: bool = False) -> None:
    DataParallelTrainer(
        train_func,
        train_loop_config={"epochs": epochs, "fails": fails},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=name, storage_path=storage),
    ).fit()


def make_killed_run(storage: Path) -> None:
    command = [sys.executable, "-c", KILLED_DRIVER, str(storage)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver:
        assert driver.stdout is not None
        while b"ready" not in (line := driver.stdout.readline()):
            assert line, "the driver ended early"
        driver.send_signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def ui_storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage with the runs of this module's description. Do not change it."""
    storage = tmp_path_factory.mktemp("ui")
    make_run(storage, "finished", 3)
    make_run(storage, "nested/run", 2)
    with pytest.raises(WorkerGroupError):
        make_run(storage, "failed", 1, fails=True)
    make_killed_run(storage)
    make_run(storage, "damaged", 1)
    journal = storage / "damaged" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:-1], b"\xff{not JSON\n", lines[-1]]))
    make_run(storage, "no-journal", 1)
    (storage / "no-journal" / "journal.jsonl").write_bytes(b"")
    hostile = os.fsencode(storage) + b"/\xff" + HOSTILE.replace("/", "|").encode() + b"\n"
    os.rename(os.fsencode(storage / "nested" / "run"), hostile)
    (storage / "loop").symlink_to(storage)
    return storage


@dataclass(frozen=True)
class Client:
    """Requests to a server, with the token of its URL."""

    url: str

    @property
    def base(self) -> str:
        """URL without the token."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}/"

    @property
    def cookie(self) -> str:
        """Cookie that the server sets for its printed URL."""
        port = urlsplit(self.url).port
        return f"drawbar_{port}={self.url.partition('token=')[2]}"

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON reply of an endpoint."""
        text = urlencode(query, doseq=True)
        status, data, _ = self.send(f"{path}?{text}" if text else path)
        assert status == 200, data
        return json.loads(data)

    def send(
        self, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body, and headers of a reply. Headers have "_" for "-"."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.base + path, data=body, headers=names)
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, reply.read(), dict(reply.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), dict(error.headers)

    def find_id(self, name: str) -> str:
        """Return the id of a run. The server can have read the list just before the run started."""
        reply = self.get("api/runs")
        runs = {run["name"]: run["id"] for run in reply["runs"]}
        if name not in runs:
            reply = self.get("api/runs", after=reply["version"], wait=30)
            runs = {run["name"]: run["id"] for run in reply["runs"]}
        return str(runs[name])


@pytest.fixture(scope="session")
def client(ui_storage: Path) -> Iterator[Client]:
    """Client of a server that shows `ui_storage`."""
    with ui.start_server([ui_storage], port=0) as server:
        yield Client(server.url)
