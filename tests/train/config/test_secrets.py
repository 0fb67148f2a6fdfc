"""Tests of secrets: they are neither written to the journal nor shown."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawbar.train import RunConfig, runs
from drawbar.train._config.secrets import REDACTED, redact_arguments, redact_settings
from drawbar.train._driver.resume import list_config_changes
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
    assert REDACTED in journal
    assert "train_loop_config.lr: '0.1' -> '0.2'" in shown


@pytest.mark.parametrize(
    "config",
    [
        {"max_tokens": 5, "pad_token_id": 0, "pad_token": "<pad>", "num_tokens": "many"},
        {"tokens": 3, "token_type": "a", "keys": ["k"], "tokenizer": "bert", "use_secret": True},
        {"auth": "basic", "sort_key": "k", "key_2": "k", "label_token_ids": [1, 2]},
        {"sort_key": "the_longest_of_all_columns", "s3_key": "data/2026/part-0001.parquet"},
        {"seed_key": "12345678901234567890", "note": "group_key=customer_identifier"},
        {"nested": {"tokens": 3}, "url": "https://host:80/a@b", "monkey": "m", "password": None},
    ],
)
def test_redact_settings_keeps_values_that_are_no_secrets(config: dict[str, Any]) -> None:
    assert redact_settings(config) == {key: repr(value) for key, value in config.items()}


def test_secret_in_existing_journal_is_not_shown() -> None:
    before = {"token": repr(S), "db": repr({"password": S, "host": "a"}), "gone_token": repr(S)}
    now = {"token": REDACTED, "db": repr({"password": REDACTED, "host": "b"})}
    found = "; ".join(list_config_changes(before, now))
    assert S not in found
    assert "gone_token: changed" in found


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


@pytest.mark.parametrize("text", ["a", "a-", "token ", "http://a", "://a:"])
def test_redact_text_of_megabytes_is_fast(text: str) -> None:
    long = text * (1_000_000 // len(text))
    assert redact_settings({"text": long}) == {"text": repr(long)}


def test_redact_settings_shows_arrays_unchanged() -> None:
    array = np.arange(3)
    assert redact_settings({"a": array, "b": {"hf_token": array}}) == {
        "a": repr(array),
        "b": "{'hf_token': <secret>}",
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train.py", "--hf_token", S, "--lr", "0.1"], "train.py --hf_token <secret> --lr 0.1"),
        (["train.py", f"--api-key={S}"], "train.py --api-key=<secret>"),
        (["train.py", f"postgres://ann:{S}@host/db"], "train.py postgres://ann:<secret>@host/db"),
        (["train.py", f"--password={S} and more"], "train.py --password=<secret>"),
        (["train.py", "--wandb-key", "a1" * 20, "x"], "train.py --wandb-key <secret> x"),
        (
            ["train.py", "--license", S, "--license=1"],
            "train.py --license <secret> --license=<secret>",
        ),
        (["train.py", "--api-key", "--verbose", "x"], "train.py --api-key --verbose x"),
        (["train.py", "--max_tokens", "5", "a b"], "train.py --max_tokens 5 'a b'"),
    ],
)
def test_secret_in_command_is_redacted(arguments: list[str], text: str) -> None:
    assert redact_arguments(arguments, ["license"]) == text


def test_command_that_is_not_utf8_is_journaled(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", os.fsdecode(b"--name=a\xff"), f"--api-key={S}"])
    result = fit(lambda: None, run_config, num_workers=0)
    (start, *_) = runs.find_run(result.path).list_events()
    environment: Any = start["environment"]
    assert environment["command"] == r"train.py --name='a\udcff' --api-key=<secret>"
