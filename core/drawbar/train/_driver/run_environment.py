"""Describe the environment in which a run starts, for its journal."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Collection

from drawbar.train._config.secrets import redact_arguments
from drawbar.train._driver_env import DriverEnvironment
from drawbar.train._wording import escape_surrogates

_PACKAGES = (
    *("ray", "torch", "lightning", "pytorch-lightning", "transformers", "accelerate", "deepspeed"),
    *("tensorflow", "keras", "jax", "xgboost", "xgboost-cpu", "lightgbm", "numpy"),
)

_GIT_TIMEOUT_S = 2.0  # on a slow network filesystem


def describe_environment(
    driver: DriverEnvironment | None, secret_keys: Collection[str]
) -> dict[str, str]:
    """Return the command, directory, commit, host, system, and Python version of a driver.

    Secrets in the command are redacted.

    Args:
        driver: Environment of the driver; None if it is unknown.
        secret_keys: Additional names of options of the command whose values are redacted.
    """
    command = {}
    if driver is not None:
        command = {
            "command": redact_arguments(driver.argv, secret_keys),
            "directory": driver.working_directory,
            **_find_commit(driver.working_directory),
        }
    found = {**command, "host": platform.node(), **_describe_system()}
    return {key: escape_surrogates(text) for key, text in found.items()}


def _find_commit(directory: str) -> dict[str, str]:
    """Return the commit that Git has checked out in a directory, if there is one."""
    # A Git hook sets variables for its own repository.
    variables = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}
    try:
        output = subprocess.check_output(
            ["git", "-C", directory, "rev-parse", "HEAD"],
            env=variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, ValueError, subprocess.SubprocessError):  # also without Git
        return {}
    match = re.fullmatch(rb"([0-9a-f]{40,64})\s*", output)
    return {"commit": match[1].decode()} if match else {}


@functools.cache
def _describe_system() -> dict[str, str]:
    return {"system": platform.platform(), "python": platform.python_version()}


@functools.cache
def list_versions() -> dict[str, str]:
    """Return the versions of the installed frameworks, by the names of their packages."""
    versions = {}
    for name in _PACKAGES:
        try:
            metadata = importlib.metadata.distribution(name).read_text("METADATA") or ""
        except importlib.metadata.PackageNotFoundError:
            continue
        # importlib.metadata.version() would parse the whole file, which takes ten times as long.
        if version := re.search(r"^Version: *(\S+)", metadata, re.MULTILINE):
            versions[name] = version[1]
    return versions
