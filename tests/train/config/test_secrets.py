"""Tests of secrets: they are neither written to the journal nor shown."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawbar.train import RunConfig, runs
from tests.train.runs import fit

S = "s3cr3t-value-4b1f"


@dataclass
class Tracking:
    api_key: str
    project: str = "p"


@pytest.mark.parametrize(
    "config",
    [
        {"hf_token": S},
        {"WANDB_API_KEY": S},
        {"db": {"password": S}},
        {"trackers": [{"client_secret": S}, ("x", {"aws-access-key": S})]},
        {"url": f"postgresql://ann:{S}@host/db"},
        {"urls": [f"https://:{S}@host"]},
        {"tracking": Tracking(S)},
        {"note": f"api_key={S}, rest"},
        {"header": {"Authorization": f"Bearer {S}"}},
        {"tokenTwo": S},
        {"api_key_2": S},
        {"wandb_key": S},
        {"note": f"comet_key: {S}"},
        {"nested": {"key": S}},
        {"auth": ("ann", S)},
        {"nested": {b"api_key": S}},
        {"license": S},
        {"more": {"license": S}},
    ],
)
def test_secret_value_is_visible_only_to_train_func(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], config: dict[str, Any]
) -> None:
    def function(config: dict[str, Any]) -> str:
        return repr(config)

    options: dict[str, Any] = {"secret_keys": ["license"]}
    assert S in fit(function, tmp_path, {**config, "lr": 0.1}, **options).return_value
    fit(function, tmp_path, {"lr": 0.2}, **options)
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    shown = "".join(capfd.readouterr())
    assert S not in journal + shown
    assert "<secret>" in journal
    assert "train_loop_config.lr: '0.1' -> '0.2'" in shown


def run_with_config(config: dict[str, Any]) -> None:
    """Do nothing, in a run whose config is tested."""


def read_settings(path: Path) -> object:
    """Return the `train_loop_config` of a run as the journal has it."""
    return runs.find_run(path / "run").config["train_loop_config"]


def test_settings_that_are_no_secrets_are_journaled_unchanged(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "max_tokens": 5,
        "pad_token_id": 0,
        "pad_token": "<pad>",
        "num_tokens": "many",
        "tokens": 3,
        "token_type": "a",
        "keys": ["k"],
        "tokenizer": "bert",
        "use_secret": True,
        "auth": "basic",
        "sort_key": "k",
        "key_2": "k",
        "label_token_ids": [1, 2],
        "column_key": "the_longest_of_all_columns",
        "s3_key": "data/2026/part-0001.parquet",
        "seed_key": "12345678901234567890",
        "note": "group_key=customer_identifier",
        "nested": {"tokens": 3},
        "url": "https://host:80/a@b",
        "monkey": "m",
        "password": None,
    }
    fit(run_with_config, tmp_path, config)
    assert read_settings(tmp_path) == {key: repr(value) for key, value in config.items()}


def test_secret_in_existing_journal_is_not_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(run_with_config, tmp_path, {"db": {"password": S, "host": "a"}})
    journal = tmp_path / "run" / "journal.jsonl"
    start, *rest = journal.read_text().splitlines(keepends=True)
    event = json.loads(start)
    event["config"]["train_loop_config"] = {
        "token": repr(S),
        "db": repr({"password": S, "host": "a"}),
        "gone_token": repr(S),
    }
    journal.write_text("".join([json.dumps(event) + "\n", *rest]))
    fit(run_with_config, tmp_path, {"token": S, "db": {"password": S, "host": "b"}})
    shown = "".join(capfd.readouterr())
    assert S not in shown
    assert "gone_token: changed" in shown


def test_run_config_secret_keys_must_be_names() -> None:
    with pytest.raises(TypeError, match=r"RunConfig.secret_keys must be a list of keys"):
        RunConfig(secret_keys="license")


@pytest.mark.parametrize(("place", "expected"), [(0o700, 0o600), (0o770, 0o660), (0o755, 0o644)])
def test_run_directory_permissions_follow_storage_directory(
    tmp_path: Path, place: int, expected: int
) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    storage.chmod(place)
    for umask in (0o077, 0o022, 0o002):
        before = os.umask(umask)
        try:
            fit(lambda: None, storage)
        finally:
            os.umask(before)
        run = storage / "run"
        modes = [
            each.stat().st_mode & 0o777 for each in (run / "journal.jsonl", run / "trainer.pkl")
        ]
        assert modes == [expected, expected]


def test_long_texts_of_config_are_redacted_fast(tmp_path: Path) -> None:
    """A pattern whose time is quadratic would need hours."""
    texts = ("a", "a-", "token ", "http://a", "://a:")
    config = {f"text_{n}": text * (200_000 // len(text)) for n, text in enumerate(texts)}
    fit(run_with_config, tmp_path, config)
    assert read_settings(tmp_path) == {key: repr(text) for key, text in config.items()}


def test_arrays_of_config_are_journaled_as_their_reprs(tmp_path: Path) -> None:
    array = np.arange(3)
    fit(run_with_config, tmp_path, {"a": array, "b": {"hf_token": array}})
    assert read_settings(tmp_path) == {"a": repr(array), "b": "{'hf_token': <secret>}"}


def test_secrets_of_command_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {
        f"--hf_token {S} --lr 0.1": "--hf_token <secret> --lr 0.1",
        f"--api-key={S}": "--api-key=<secret>",
        f"postgres://ann:{S}@host/db": "postgres://ann:<secret>@host/db",
        f"--wandb-key {'a1' * 20} x": "--wandb-key <secret> x",
        f"--license {S} --license=1": "--license <secret> --license=<secret>",
        "--api-key --verbose x": "--api-key --verbose x",
        "--max_tokens 5": "--max_tokens 5",
    }
    with_spaces = {f"--password={S} and more": "--password=<secret>", "a b": "'a b'"}
    not_utf8 = {os.fsdecode(b"--name=a\xff"): r"--name='a\udcff'"}
    words = [word for text in arguments for word in text.split()]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, *with_spaces, *not_utf8])
    fit(lambda: None, tmp_path, secret_keys=["license"])
    expected = ["train.py", *arguments.values(), *with_spaces.values(), *not_utf8.values()]
    assert runs.find_run(tmp_path / "run").environment["command"] == " ".join(expected)
