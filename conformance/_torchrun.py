"""Run PyTorch's tests of torchrun with `drawbar launch` in place of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from conformance._report import Report, read_junit

TESTS = Path("test/distributed/launcher/test_run.py")

NOT_APPLICABLE: Mapping[str, str] = MappingProxyType(
    {
        "test_launch_elastic_agent_raise_exception": (
            "replaces LocalElasticAgent.run, a class of torchrun that Drawbar does not use"
        ),
        "test_launch_shutdown": (
            "replaces LocalElasticAgent and the rendezvous handler, which Drawbar does not use"
        ),
    }
)
"""Tests of torchrun's internals, with the reason."""


def run_torchrun_tests(pytorch: Path | None) -> Report:
    """Run the tests.

    Args:
        pytorch: Source tree of PyTorch, of the installed version.

    Raises:
        FileNotFoundError: The directory does not have the tests.
    """
    version = f"PyTorch {torch.__version__}"
    if pytorch is None:
        tag = f"v{torch.__version__.partition('+')[0]}"
        return Report(
            "torchrun",
            version,
            notice=f"Pass a checkout of PyTorch {tag}: make conformance PYTORCH=/path/to/pytorch",
        )
    tests = (pytorch / TESTS).absolute()
    if not tests.is_file():
        raise FileNotFoundError(f"{pytorch} is not a source tree of PyTorch: no {TESTS} in it.")
    with tempfile.TemporaryDirectory(prefix="conformance") as directory:
        results = Path(directory, "results.xml")
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", str(tests), "--rootdir", str(tests.parent)),
                *("-p", "conformance._torchrun_plugin", "--junit-xml", str(results)),
                *("-p", "no:cacheprovider", "-c", os.devnull, "--quiet", "--no-header"),
            ],
            env={**os.environ, "TMPDIR": directory, "PYTHONPATH": os.getcwd()},
        )
        return Report("torchrun", version, read_junit(results, NOT_APPLICABLE))
