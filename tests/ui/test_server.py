"""Tests of the server of `drawbar ui`: data of runs in all states, and rejected requests."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from drawbar import ui
from tests.ui.conftest import HOSTILE, Client, make_run

PARTS = ("", "/curves", "/ranks", "/log", "/stacks")


def get_run(client: Client, name: str) -> Any:
    return client.get(f"api/runs/{client.find_id(name)}")


# -- list of runs


def test_runs_lists_runs_in_all_states(client: Client) -> None:
    reply = client.get("api/runs")
    statuses = {run["name"]: run["status"] for run in reply["runs"]}
    hostile = next(name for name in statuses if "alert" in name)
    del statuses[hostile]
    assert statuses == {
        "finished": "finished",
        "failed": "failed",
        "killed": "interrupted",
        "damaged": "finished",
        "no-journal": "unknown",
    }
    assert reply["server_time"] >= reply["as_of"] > 0
    run = next(run for run in reply["runs"] if run["name"] == "finished")
    assert (run["attempts"], run["restarts"], run["is_active"]) == (1, 0, False)
    assert run["metrics"] == {"loss": 1 / 3, HOSTILE: 2, "val/acc": 0.5, "bad": "NaN"}
    assert run["duration"] == pytest.approx(run["end_time"] - run["start_time"])


def test_runs_long_poll_returns_when_a_run_appears(tmp_path: Path) -> None:
    make_run(tmp_path, "first", 1)
    with ui.start_server([tmp_path], port=0) as server:
        client = Client(server.url)
        version = client.get("api/runs")["version"]
        same = client.get("api/runs", after=version, wait=0)
        assert same["unchanged"]
        assert "runs" not in same
        replies: list[Any] = []
        arguments = {"after": version, "wait": 30}
        thread = threading.Thread(
            target=lambda: replies.append(client.get("api/runs", **arguments))
        )
        thread.start()
        make_run(tmp_path, "second", 1)
        thread.join(60)
        assert {run["name"] for run in replies[0]["runs"]} == {"first", "second"}
        shutil.rmtree(tmp_path / "first")
        after = client.get("api/runs", after=replies[0]["version"], wait=30)
        assert "first" not in {run["name"] for run in after["runs"]}


def test_start_server_missing_storage_raises_lookup_error(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="does not exist"):
        ui.start_server([tmp_path / "missing"], port=0)


def test_runs_relative_storage_deleted_is_reported_as_missing_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs", "run", 1)
    monkeypatch.chdir(tmp_path)
    with ui.start_server(["runs"], port=0) as server:
        client = Client(server.url)
        version = client.get("api/runs")["version"]
        shutil.rmtree(tmp_path / "runs")
        (error,) = client.get("api/runs", after=version, wait=30)["errors"]
    assert f"Storage path {tmp_path / 'runs'} does not exist." in error


def test_list_run_summaries_equals_page(client: Client, ui_storage: Path) -> None:
    names = [run["name"] for run in ui.list_run_summaries([ui_storage])]
    assert names == [run["name"] for run in client.get("api/runs")["runs"]]


def test_info_single_run_is_opened_directly(ui_storage: Path) -> None:
    with ui.start_server([ui_storage / "finished"], port=0) as server:
        client = Client(server.url)
        assert client.get("api/info")["only_run"] == client.find_id("finished")


# -- page of a run


def test_run_failed_has_root_cause_and_remedy(client: Client) -> None:
    page = get_run(client, "failed")
    failure = page["failure"]
    assert (failure["rank"], failure["headline"]) == (0, "ValueError: boom <b>")
    assert failure["file"].endswith("conftest.py")
    assert failure["code"] == 'raise ValueError("boom <b>")'
    assert "Traceback" in failure["traceback"]
    assert page["resume"]["checkpoint"] == "checkpoint_000000"
    assert page["resume"]["advice"].startswith("Fix the error first.")
    assert "name='failed',\nstorage_path=" in page["resume"]["code"]
    assert [(mark["kind"], mark["rank"]) for mark in page["events"]] == [("failure", 0)]
    assert failure["repeats"] == 1
    decision, evidence, remedy = failure["decision"].splitlines()
    assert decision == "stop, exception: an exception of the function"
    assert evidence.startswith("  Attempt 0: rank 0 on node ")
    assert remedy == "  If it is repeated at the same place in another process, the run stops."
    assert page["attempts"][0]["decision"] == failure["decision"]


def test_run_with_same_failure_on_other_ranks_counts_repeats(tmp_path: Path) -> None:
    make_run(tmp_path, "run", 2)
    ends = [("ValueError: x", 0), ("RuntimeError: x (a.py:1 in f)", 1)]
    ends += [("RuntimeError: x (a.py:1 in f)", 0)]
    info = {"deadline_ms": 60_000, "preempted_node_to_ranks": {"b": [3, 2], "a": [0]}}
    events: list[dict[str, Any]] = [{"event": "preemption_announced", "attempt": 0, "info": info}]
    events += [
        {"event": "attempt_ended", "attempt": 0, "cause": "worker"}
        | {"failure_headlines": [f"rank {rank}: {text}"]}
        for text, rank in ends
    ]
    events.append({"event": "run_ended", "outcome": "failed", "error": "failed"})
    journal = tmp_path / "run" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)[:-1]
    lines += [json.dumps({"time": time.time(), **event}) + "\n" for event in events]
    journal.write_text("".join(lines))
    with ui.start_server([tmp_path], port=0) as server:
        page = get_run(Client(server.url), "run")
    assert page["failure"]["repeats"] == 2
    marks = [(mark["kind"], mark["rank"]) for mark in page["events"]]
    assert marks == [("preemption", None), ("failure", 0), ("failure", 1), ("failure", 0)]
    assert page["events"][0]["text"] == (
        "The nodes of ranks 0, 2, 3 are about to be removed, at 00:01:00 UTC."
    )


def test_run_with_implausible_numbers_in_its_journal_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path, "run", 1)
    journal = tmp_path / "run" / "journal.jsonl"
    text = journal.read_text().replace('"num_workers":0', f'"num_workers":"{"9" * 5_000}"')
    info = {"deadline_ms": 10**15, "preempted_node_to_ranks": {}}
    events: list[dict[str, Any]] = [
        {"event": "preemption_announced", "attempt": 0, "info": info},
        {"event": "attempt_ended", "attempt": 0, "cause": "worker", "failure_headlines": []},
        {"event": "attempt_ended", "attempt": 1, "cause": "worker"}
        | {"failure_headlines": [f"rank {'1' * 5_000}: x"]},
        {"event": "run_ended", "outcome": "failed", "error": "x"},
    ]
    lines = [json.dumps({"time": time.time(), **event}) for event in events]
    journal.write_text(text + "\n".join(lines) + "\n")
    with ui.start_server([tmp_path], port=0) as server:
        client = Client(server.url)
        page = get_run(client, "run")
        assert client.send("metrics")[0] == 200
    texts = [mark["text"] for mark in page["events"]]
    assert texts[0] == "The nodes are about to be removed."
    assert page["goodput"]["requested_worker_seconds"] == 0
    assert page["failure"]["repeats"] == 1


def test_run_finished_has_checkpoints_and_segments_without_gaps(client: Client) -> None:
    page = get_run(client, "finished")
    assert page["failure"] is page["resume"] is None
    assert [item["status"] for item in page["checkpoints"]] == ["stored"] * 3
    assert page["checkpoints"][0]["files"] == [{"path": "model", "size": 7}]
    (attempt,) = page["attempts"]
    assert (attempt["status"], attempt["lost"], attempt["unsaved"]) == ("finished", 0, 0)
    segments = page["segments"]
    assert [segment["kind"] for segment in segments] == ["startup", "training"]
    assert all(a["end"] == b["start"] for a, b in itertools.pairwise(segments))
    assert page["settings"]["scaling_config/num_workers"] == "0"
    assert 0 < page["goodput"]["worker_seconds"] <= page["goodput"]["elapsed"]
    assert page["versions"]["drawbar"] == page["drawbar_version"]
    (location,) = page["report_locations"]
    assert re.fullmatch(r".*/conftest.py:\d+ in train_func", location)


def test_run_killed_driver_has_unsaved_work_and_no_crash_gap_yet(client: Client) -> None:
    page = get_run(client, "killed")
    assert page["failure"]["cause"] == "driver"
    assert page["resume"]["checkpoint"] == "checkpoint_000001"
    assert not page["resume"]["advice"].startswith("Fix")
    assert [item["kind"] for item in page["segments"]][:2] == ["startup", "training"]
    assert page["attempts"][0]["status"] == "interrupted"


def test_run_killed_and_resumed_has_crash_gap(ui_storage: Path, tmp_path: Path) -> None:
    shutil.copytree(ui_storage / "killed", tmp_path / "killed")
    make_run(tmp_path, "killed", 4)
    with ui.start_server([tmp_path], port=0) as server:
        page = get_run(Client(server.url), "killed")
    assert "crash_gap" in [segment["kind"] for segment in page["segments"]]
    assert page["attempts"][1]["resume_checkpoint"] == "checkpoint_000001"
    assert page["attempts"][1]["restart"] < 60
    assert [item["name"] for item in page["checkpoints"] if item["is_resume"]] == [
        "checkpoint_000001"
    ]


def test_run_every_part_of_every_run_is_readable(client: Client) -> None:
    for run in client.get("api/runs")["runs"]:
        for part in PARTS:
            reply = client.get(f"api/runs/{run['id']}{part}")
            assert "as_of" in reply, (run["name"], part)
    assert "cannot be read in line" in get_run(client, "damaged")["run"]["damage"]


# -- curves, logs, checkpoints, and comparison


def test_curves_by_step_time_and_rank(client: Client) -> None:
    base = f"api/runs/{client.find_id('finished')}/curves"
    curves = client.get(base, metric=["loss", HOSTILE, "missing"])["curves"]
    assert curves["loss"] == {"x": [0, 1, 2], "y": [1.0, 1 / 2, 1 / 3]}
    assert curves[HOSTILE]["y"] == [0, 1, 2]
    assert curves["missing"] == {"x": [], "y": []}
    times = client.get(base, x="time", metric="loss")
    assert all(0 <= x < 1_000 for x in times["curves"]["loss"]["x"])
    band = client.get(base, ranks="band", metric="val/acc")["curves"]["val/acc"]
    assert (band["median"], band["ranks"]) == ([0.5, 0.5, 0.5], 1)
    each = client.get(base, ranks="each", metric="loss")["curves"]["loss"]
    assert each["ranks"]["0"]["x"] == [0, 1, 2]
    part = client.get(base, metric="loss", **{"from": 1, "to": 1})
    assert part["curves"]["loss"] == {"x": [1], "y": [0.5]}
    assert "bad" not in client.get(base)["curves"]


def test_log_is_read_in_parts(client: Client) -> None:
    base = f"api/runs/{client.find_id('finished')}/log"
    everything = client.get(base, offset=0)
    assert everything["text"].startswith(f"\x1b[31mlog line\x1b[0m {HOSTILE}\n")
    assert everything["next"] == everything["size"]
    first = client.get(base, offset=0, limit=5)
    rest = client.get(base, offset=first["next"])
    assert first["text"] + rest["text"] == everything["text"]
    last = client.get(base, limit=30)
    assert everything["text"].endswith(last["text"])
    assert client.get(base, rank=7)["size"] is None


def test_verify_reports_damage(ui_storage: Path, client: Client, tmp_path: Path) -> None:
    base = f"api/runs/{client.find_id('finished')}/verify"
    assert client.get(base, name="checkpoint_000001")["damage"] == ""
    assert client.send(f"{base}?name=../failed")[0] == 404
    shutil.copytree(ui_storage / "finished", tmp_path / "run")
    (tmp_path / "run" / "checkpoint_000001" / "model").write_text("changed")
    with ui.start_server([tmp_path], port=0) as server:
        copy = Client(server.url)
        base = f"api/runs/{copy.find_id('run')}/verify"
        assert "model" in copy.get(base, name="checkpoint_000001")["damage"]


def test_compare_lists_different_settings_first(client: Client) -> None:
    ids = f"{client.find_id('finished')},{client.find_id('failed')}"
    reply = client.get("api/compare", run=ids)
    different = [row["name"] for row in reply["settings"] if row["differs"]]
    assert {"train_loop_config/epochs", "train_loop_config/fails"} <= set(different)
    assert [row["name"] for row in reply["settings"]][: len(different)] == different
    curves = client.get("api/compare/curves", run=ids, metric="loss")["curves"]["loss"]
    assert {len(curve["x"]) for curve in curves.values()} == {1, 3}
    assert client.send(f"api/compare?run={client.find_id('failed')}")[0] == 400


# -- security


@pytest.mark.parametrize(
    "path",
    [
        "api/nothing",
        "api/runs/../../etc/passwd",
        "static/../_server.py",
        "static/%2e%2e/_server.py",
        "static//etc/passwd",
        "static/",
        "%00",
        "api/runs/%ff%00",
    ],
)
def test_get_unknown_path_is_not_found(client: Client, path: str) -> None:
    assert client.send(path)[0] == 404


@pytest.mark.parametrize(
    "query", ["points=1e9", "points=x", "x=other", "ranks=none", "from=nan", "points=nan"]
)
def test_get_invalid_parameter_names_it(client: Client, query: str) -> None:
    status, data, _ = client.send(f"api/runs/{client.find_id('finished')}/curves?{query}")
    assert status == 400
    assert query.partition("=")[0] in json.loads(data)["error"]


def test_get_foreign_host_header_is_rejected(client: Client) -> None:
    for host in ("attacker.example", "localhost:1", "", "127.0.0.1"):
        status, data, headers = client.send("api/runs", Host=host)
        assert status in (400, 403), host
        assert b"finished" not in data
        assert "Access-Control-Allow-Origin" not in headers


def test_replies_have_content_security_policy(client: Client) -> None:
    _, _, headers = client.send("api/info")
    assert headers["Content-Security-Policy"].startswith("default-src 'self'")
    assert "unsafe-inline" not in headers["Content-Security-Policy"].partition("style-src")[0]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_stop_needs_token_and_same_origin(client: Client) -> None:
    path = f"api/runs/{client.find_id('finished')}/stop"
    page = {"Cookie": client.cookie, "X_Drawbar": "1"}
    assert client.send(path, b"{}")[0] == 403
    assert client.send(path, b"{}", Cookie=client.cookie)[0] == 403
    assert client.send(path, b"{}", X_Drawbar="1", Cookie="drawbar_1=x")[0] == 403
    assert client.send(path, b"{}", Origin="http://attacker.example", **page)[0] == 403
    assert client.send(path, b"{}", Sec_Fetch_Site="cross-site", **page)[0] == 403
    assert client.send(path, b"{}", Origin="http://[", **page)[0] == 403
    assert client.send(path, b"{}", Origin="null", **page)[0] == 403
    assert client.send(path, b"{}", **page)[0] == 403
    page["Origin"] = client.base.rstrip("/")
    assert client.send(path, b"[", **page)[0] == 400
    status, data, _ = client.send(path, b"{}", **page)
    assert status == 409
    assert "not in progress" in json.loads(data)["error"]


@pytest.mark.parametrize(
    "lines",
    [
        ["GET http://[x HTTP/1.1", "Host: {host}"],
        ["POST http://[x HTTP/1.1", "Host: {host}", "Content-Length: 0"],
        ["GET / HTTP/1.1", "Host: localhost:\xb2"],
        ["GET / HTTP/1.1", "Host: localhost:" + "1" * 5_000],
        ["POST /api/runs/x/stop HTTP/1.1", "Host: {host}", "Content-Length: \xb2"],
        ["POST /api/runs/x/stop HTTP/1.1", "Host: {host}", "Content-Length: " + "1" * 5_000],
        ["POST /api/runs/x/stop HTTP/1.1", "Host: {host}", "Content-Length: -1"],
    ],
)
def test_malformed_request_is_rejected(client: Client, lines: list[str]) -> None:
    host = urlsplit(client.base).netloc
    request = "\r\n".join([*lines, "", ""]).replace("{host}", host)
    address = ("127.0.0.1", int(host.rpartition(":")[2]))
    with socket.create_connection(address, timeout=300) as connection:
        connection.sendall(request.encode("latin-1"))
        status = connection.makefile("rb").readline().split()[1]
    assert status in (b"400", b"403")


def test_head_has_headers_of_get_and_no_body(client: Client) -> None:
    replies = []
    for method in ("HEAD", "GET"):
        request = urllib.request.Request(client.base, method=method)
        with urllib.request.urlopen(request, timeout=300) as reply:
            replies.append((reply.status, reply.headers["Content-Length"], len(reply.read())))
    (_, length, size), get = replies
    assert size == 0
    assert (200, length, int(length)) == get


def test_info_can_stop_only_with_token(client: Client) -> None:
    assert client.get("api/info")["can_stop"] is False
    _, data, _ = client.send("api/info", Cookie=client.cookie)
    assert json.loads(data)["can_stop"] is True


def test_server_on_other_address_needs_token(ui_storage: Path) -> None:
    with ui.start_server([ui_storage], host="0.0.0.0", port=0) as server:
        client = Client(server.url.replace(socket.gethostname(), "127.0.0.1", 1))
        assert client.send("api/runs")[0] == 403
        assert client.send("api/runs?token=wrong")[0] == 403
        assert client.send("api/runs", Cookie=client.cookie)[0] == 200


# -- ports and the end of the server


def test_start_server_port_in_use_takes_the_next_one(ui_storage: Path) -> None:
    with ui.start_server([ui_storage], port=0) as first:
        port = int(first.url.split(":")[2].split("/")[0])
        with ui.start_server([ui_storage], port=port) as second:
            assert second.url.split("?")[0] != first.url.split("?")[0]
            assert Client(second.url).get("api/runs") is not None


def test_close_ends_long_polls(ui_storage: Path) -> None:
    server = ui.start_server([ui_storage], port=0)
    client = Client(server.url)
    version = client.get("api/runs")["version"]

    def poll() -> None:
        with contextlib.suppress(OSError):  # closed before the request arrived
            client.get("api/runs", after=version, wait=30)

    thread = threading.Thread(target=poll)
    thread.start()
    server.close()
    server.close()  # has no effect
    server.wait()
    thread.join(20)
    assert not thread.is_alive()


def test_run_deleted_is_not_found(tmp_path: Path) -> None:
    make_run(tmp_path, "run", 1)
    with ui.start_server([tmp_path], port=0) as server:
        client = Client(server.url)
        run_id, version = client.find_id("run"), client.get("api/runs")["version"]
        shutil.rmtree(tmp_path / "run")
        client.get("api/runs", after=version, wait=30)
        status, data, _ = client.send(f"api/runs/{run_id}")
    assert status == 404
    assert "deleted" in json.loads(data)["error"]


def test_log_symbolic_link_is_not_followed(ui_storage: Path, tmp_path: Path) -> None:
    shutil.copytree(ui_storage / "finished", tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    log = tmp_path / "run" / "logs" / "rank_0.log"
    log.unlink()
    os.symlink(secret, log)
    with ui.start_server([tmp_path], port=0) as server:
        client = Client(server.url)
        reply = client.get(f"api/runs/{client.find_id('run')}/log")
    assert "secret" not in reply["text"]


def test_ranks_show_the_late_rank(ui_storage: Path, tmp_path: Path) -> None:
    shutil.copytree(ui_storage / "finished", tmp_path / "run")
    lines = []
    for number, slow in ((1, 1.0), (2, 3.0)):
        seconds = {"function": [10.0 * number] * 3, "forward": [1.0 * number, 1.0 * number, slow]}
        line = {"attempt": 0, "ranks": [0, 1, 2], "steps": [10 * number] * 3, "seconds": seconds}
        lines.append(json.dumps({"time": 1e9 + 10 * number, **line}))
    (tmp_path / "run" / "rank_times.jsonl").write_text("\n".join([*lines, "{torn"]))
    with ui.start_server([tmp_path], port=0) as server:
        client = Client(server.url)
        reply = client.get(f"api/runs/{client.find_id('run')}/ranks")
    assert reply["ranks"] == [0, 1, 2]
    assert reply["columns"] == [1e9, 1e9 + 10]
    assert reply["late"] == [[0, 0], [0, 0], [0, pytest.approx(0.1)]]
    assert reply["totals"][2]["ratio"] == pytest.approx(1.5)


def test_run_resumed_after_its_end_has_no_restart_and_one_goodput(tmp_path: Path) -> None:
    make_run(tmp_path, "run", 1)
    make_run(tmp_path, "run", 1)
    with ui.start_server([tmp_path], port=0) as server:
        page = get_run(Client(server.url), "run")
    assert (page["run"]["attempts"], page["run"]["restarts"]) == (2, 0)
    kinds = [segment["kind"] for segment in page["segments"]]
    assert "restart" not in kinds
    assert kinds[kinds.index("paused") :] == ["paused", "startup", "training"]
    shares = {part["name"]: part["share"] for part in page["goodput"]["parts"]}
    assert shares["productive"] == page["goodput"]["goodput"] == page["run"]["goodput"]
    assert shares.pop("paused") is None
    assert sum(shares.values()) == pytest.approx(1)


def test_run_goodput_parts_sum_to_elapsed(client: Client) -> None:
    goodput = get_run(client, "failed")["goodput"]
    parts = {part["name"]: part["seconds"] for part in goodput["parts"]}
    assert sum(parts.values()) == pytest.approx(goodput["elapsed"], abs=1e-3)
    assert 0 < goodput["goodput"] <= 1
    assert "unsaved" in parts
