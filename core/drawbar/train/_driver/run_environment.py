"""Describe the environment in which a run starts, for its journal."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Collection

from drawbar.train._config.secrets import redact_arguments
from drawbar.train._driver_env import DriverEnvironment

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
    # Bytes of arguments and paths that are not UTF-8 are surrogates, which JSON cannot contain.
    return {key: text.encode(errors="backslashreplace").decode() for key, text in found.items()}


def _find_commit(directory: str) -> dict[str, str]:
    """Return the commit that Git has checked out in a directory, if there is one."""
    command = ["git", "-C", directory, "rev-parse", "HEAD"]
    try:
        commit = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=_GIT_TIMEOUT_S)
    except (OSError, ValueError, subprocess.SubprocessError):  # also without Git
        return {}
    return {"commit": commit.decode().strip()}


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
