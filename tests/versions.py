"""Test each extra with its lowest declared or its newest released versions.

    make test-lowest test-latest PYTHONS="python3.11 python3.13" EXTRAS="xgboost tune"

Each extra has a separate environment. uv creates it from its cache, so that all environments share
the files of a package. The results are rows of the table in `docs/compatibility.md`, which this
program updates.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).parents[1]
TABLE = REPO / "docs" / "compatibility.md"
TEST_PACKAGES = {
    "lowest": ("pytest>=8", "pytest-timeout", "pandas", "psutil", "pyarrow<26"),  # 26 needs NumPy 2
    "latest": ("pytest>=8", "pytest-timeout", "pandas", "psutil", "pyarrow"),
}
RESOLUTIONS = {"lowest": "lowest-direct", "latest": "highest"}


class Suite(NamedTuple):
    """Tests of an extra: the files that use most of the framework, in about two minutes."""

    tests: str
    shown: str
    """Packages whose versions the table has."""
    needs: str = ""
    """Packages that only the tests need, in any version."""
    same: str = ""
    """Packages that only the tests need, in the lowest or newest version."""


SUITES = {
    "core": Suite(
        "train/test_ray_compat.py train/config/test_secrets.py cli/test_app.py",
        "ray typer rich msgspec",
    ),
    "data": Suite(
        "train/data/test_data.py train/data/test_indexed_tables.py",
        "ray pandas pyarrow",
        needs="datasets torch",
    ),
    "torch": Suite(
        "torch/test_compat.py torch/test_config.py torch/test_model.py torch/test_data_loader.py "
        "torch/test_loader_decisions.py torch/test_mixed_precision.py torch/test_devices.py",
        "torch numpy ray",
        needs="accelerate datasets",
    ),
    "lightning": Suite(
        "lightning/test_errors.py lightning/test_report.py",
        "pytorch-lightning torch",
        needs="scikit-learn",
        same="lightning>=2.4,!=2.6.2,!=2.6.3",
    ),
    "accelerate": Suite(
        "accelerate/test_compat.py accelerate/test_accelerate.py accelerate/test_data_position.py",
        "accelerate torch",
        needs="datasets",
    ),
    "transformers": Suite(
        "transformers/test_compat.py transformers/test_trainer.py", "transformers accelerate torch"
    ),
    "tensorflow": Suite("tensorflow", "tensorflow tf-keras"),
    "jax": Suite("jax", "jax orbax-checkpoint", same="flax>=0.10 optax>=0.2.4"),
    "keras": Suite(
        "keras/test_compat.py keras/test_report.py",
        "keras jax",
        needs="jax scikit-learn",
    ),
    "xgboost": Suite("xgboost", "xgboost-cpu scikit-learn pandas pyarrow"),
    "lightgbm": Suite("lightgbm", "lightgbm scikit-learn pandas pyarrow"),
    "tune": Suite("tune", "ray", needs="optuna"),
    "deepspeed": Suite(
        "lightning/test_compat.py transformers/test_sharding_integration.py",
        "deepspeed torch",
        needs="lightning transformers",
    ),
    "cli": Suite("cli/test_inspect.py", "matplotlib", needs="fsspec"),
    "metrics": Suite(
        "train/driver/test_metrics_server.py train/history/test_metrics_exporter.py",
        "prometheus-client",
    ),
    "tensorboard": Suite("trackers/test_tensorboard.py", "tensorboardx", needs="tensorboard"),
    # The tests of the other three trackers are skipped.
    "mlflow": Suite("trackers/test_other_trackers.py", "mlflow"),
    "wandb": Suite("trackers/test_other_trackers.py", "wandb"),
    "trackio": Suite("trackers/test_other_trackers.py", "trackio"),
}


@dataclass(frozen=True)
class Run:
    """Tests of one extra in one environment."""

    extra: str
    which: str
    python: str
    pins: Sequence[str]
    directory: Path

    def execute(self) -> str:
        """Install the environment and run the tests. Return the row of the table."""
        environment = self._install()
        python = environment / "bin" / "python"
        versions = self._read_versions(python)
        results = environment / "results.xml"
        results.unlink(missing_ok=True)
        suite = SUITES[self.extra]
        subprocess.run(
            # Warnings of other versions are no failures.
            [
                *(python, "-m", "pytest", "-q", "-W", "default", "-m", "not nightly and not alone"),
                f"--junitxml={results}",
                *(f"tests/{path}" for path in suite.tests.split()),
            ],
            cwd=REPO,
            env=os.environ | {"KERAS_BACKEND": "jax"},  # instead of TensorFlow
        )
        counts = _count(results)
        shown = [f"{name} {versions[name]}" for name in suite.shown.split() if name in versions]
        cells = (self.extra, self.which, self._version(), ", ".join(shown))
        return _format_row(*cells, datetime.date.today().isoformat(), *map(str, counts))

    def _install(self) -> Path:
        environment = self.directory / f"{self.which}-{self._version()}-{self.extra}"
        _uv("venv", "--quiet", "--clear", "--python", self.python, str(environment))
        extra = "" if self.extra == "core" else f"[{self.extra}]"
        into = ("pip", "install", "--quiet", "--python", str(environment / "bin" / "python"))
        resolution = f"--resolution={RESOLUTIONS[self.which]}"
        suite = SUITES[self.extra]
        tested = ("--editable", f".{extra}", *suite.same.split(), *self.pins)
        _uv(*into, resolution, *tested)
        # Again with the tested packages: otherwise this installs versions that do not fit to them.
        _uv(*into, *tested, *TEST_PACKAGES[self.which], *suite.needs.split())
        return environment

    def _version(self) -> str:
        program = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
        return _read([self.python, "-c", program]).strip()

    def _read_versions(self, python: Path) -> dict[str, str]:
        listed = _read([sys.executable, "-m", "uv", "pip", "list", "--format=json", "-p", python])
        return {package["name"]: package["version"] for package in json.loads(listed)}


def _uv(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "uv", *arguments], cwd=REPO, check=True)


def _read(command: Sequence[str | Path]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _count(results: Path) -> tuple[int, int, int]:
    """Return the numbers of passed, failed, and skipped tests."""
    if not results.exists():
        return 0, 1, 0  # pytest could not start
    suite = ElementTree.parse(results).getroot()[0].attrib
    total, skipped = int(suite["tests"]), int(suite["skipped"])
    failed = int(suite["failures"]) + int(suite["errors"])
    return total - failed - skipped, failed, skipped


def _format_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def update_table(text: str, row: str) -> str:
    """Replace the row of the same extra, versions, and Python in a page, or append it.

    The rows of the page's last table are sorted.
    """
    lines = text.rstrip("\n").split("\n")
    start = max(number for number, line in enumerate(lines) if line.startswith("|---")) + 1
    rows = [line for line in lines[start:] if _key(line) != _key(row)]
    return "\n".join([*lines[:start], *sorted([*rows, row])]) + "\n"


def _key(row: str) -> list[str]:
    return row.split("|")[1:4]


def main() -> int:
    """Test the extras and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--pin", nargs="*", default=[], help="for example torch==2.13.0")
    parser.add_argument("--directory", type=Path, default=REPO / ".venv-versions")
    parser.add_argument("--extras", nargs="*", choices=SUITES, default=list(SUITES))
    parser.add_argument("which", choices=RESOLUTIONS)
    arguments = parser.parse_args()
    is_passed = True
    for python in arguments.python:
        for extra in arguments.extras:
            try:
                run = Run(extra, arguments.which, python, arguments.pin, arguments.directory)
                row = run.execute()
            except subprocess.CalledProcessError as error:
                print(f"{extra} with {python}: {error}", file=sys.stderr)
                is_passed = False
                continue
            print(row, flush=True)
            TABLE.write_text(update_table(TABLE.read_text(), row))
            is_passed &= row.split("|")[7].strip() == "0"
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
