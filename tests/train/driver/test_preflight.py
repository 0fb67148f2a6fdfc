"""Errors that are raised before a process starts, with names and values in the message."""

import functools
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from drawbar.train import DataParallelTrainer
from drawbar.train.backend import require_package, require_version
from tests.train.runs import fit

LOCK = threading.Lock()


class Loop:
    """Callable with a method and attributes that may not be picklable."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __call__(self, config: dict[str, Any]) -> None: ...

    def fit(self) -> None: ...


def no_argument() -> None: ...
def one_argument(config: dict[str, Any]) -> dict[str, Any]:
    return config


def default_argument(lr: object = 0.1) -> object:
    return lr


def two_arguments(config: dict[str, Any], extra: object) -> None: ...
def keyword_only(*, config: dict[str, Any]) -> None: ...
def any_arguments(*args: Any, **kwargs: Any) -> None: ...
async def coroutine() -> None: ...
def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "takes_config"),
    [
        (no_argument, False),
        (one_argument, True),
        (default_argument, True),
        (any_arguments, False),
        (functools.partial(two_arguments, extra=1), True),
        (functools.partial(two_arguments, {}, 1), False),
        (Loop(), True),
        (Loop().fit, False),
        (lambda config: None, True),
        (dict, True),
    ],
)
def test_trainer_accepts_valid_signatures_and_warns_of_unused_config(
    function: Callable[..., Any], takes_config: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataParallelTrainer(function, train_loop_config={"lr": 0.1})
    if takes_config:
        assert caught == []
    else:
        (warning,) = caught
        assert warning.category is UserWarning
        message = r"has 'lr', but .* Define it as `def train\(config\):`"
        assert re.search(message, str(warning.message))


@pytest.mark.parametrize("config", [None, {}])
def test_trainer_without_config_warns_of_no_unused_one(config: dict[str, Any] | None) -> None:
    DataParallelTrainer(no_argument, train_loop_config=config)  # a warning fails the test


@pytest.mark.parametrize(
    ("function", "config", "value"),
    [
        (one_argument, {"lr": 1}, {"lr": 1}),
        (one_argument, None, {}),
        (one_argument, [1], [1]),
        (default_argument, {"lr": 1}, {"lr": 1}),
        (default_argument, None, 0.1),
        (dict, {"lr": 1}, {"lr": 1}),
        (dict, None, {}),
    ],
)
def test_train_function_receives_config(
    function: Callable[..., Any], config: Any, value: object, tmp_path: Path
) -> None:
    assert fit(function, tmp_path, config).return_value == value


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            two_arguments,
            r"two_arguments\(config: .*\) -> None requires config, extra, but a train",
        ),
        (keyword_only, r"keyword_only\(\*, config.*one positional argument, the train_loop_config"),
        (coroutine, "coroutine is an async or a generator function"),
        (generator, "generator is an async or a generator function"),
        (async_generator, "calling it does not run its code"),
        (None, "must be callable, found None"),
    ],
)
def test_trainer_rejects_invalid_signatures(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        DataParallelTrainer(function)


def with_helper() -> Callable[[], object]:
    lock = LOCK

    def helper() -> object:
        return {"locks": [lock]}

    def train() -> object:
        return [helper() for _ in range(2)]

    return train


def with_config() -> Callable[[], object]:
    config = {"model": {"locks": [1, LOCK]}}

    def train() -> object:
        return config

    return train


def with_global() -> Callable[[], object]:
    scope: dict[str, Any] = {"handle": LOCK, "acquire": LOCK}
    exec("def train(): return handle.acquire", scope)  # `acquire` is also the name of a global
    return scope["train"]  # type: ignore[no-any-return]


def with_default() -> Callable[[], object]:
    def train(lock: object = LOCK) -> None: ...

    return train


def with_itself() -> Callable[[], object]:
    def train() -> object:
        return train, LOCK

    return train


@pytest.mark.parametrize(
    ("function", "path"),
    [
        (with_helper(), "train.helper.lock"),
        (with_config(), "train.config['model']['locks'][1]"),
        (with_global(), "train.handle"),
        (with_default(), "train.lock"),
        (with_itself(), "train.LOCK"),
        (Loop(lock=LOCK, size=3).fit, "fit.self.lock"),
        (Loop(inner=Loop(lock=LOCK)), "Loop.self.inner.lock"),
        (functools.partial(one_argument, {"lock": LOCK}), "one_argument.args[0]['lock']"),
        (functools.partial(two_arguments, extra=LOCK), "two_arguments.extra"),
    ],
)
def test_unpicklable_capture_error_names_its_path(
    function: Callable[..., Any], path: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError) as caught:
        fit(function, tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == [f"  {path} (_thread.lock): cannot pickle '_thread.lock' object"]
    assert "Create them inside the training function" in lines[-1]


def test_large_capture_warning_has_name_and_size(tmp_path: Path) -> None:
    weights, small = bytearray(101_000_000), 3

    def helper() -> object:
        return weights, small, helper

    def train() -> object:
        return helper()

    message = r"train takes 101 MB .* are train\.helper\.weights \(bytearray, 101 MB\)\. Load them"
    # The warning is an error here, so the run does not start.
    with pytest.raises(UserWarning, match=message):
        fit(train, tmp_path)


METADATA = """Metadata-Version: 2.4
Name: drawbar
Version: 0.1.0
Requires-Dist: ray>=2.50
Provides-Extra: torch
Requires-Dist: no-such-torch>=2.4; extra == "torch"
Requires-Dist: numpy>=1.0; extra == "torch"
Requires-Dist: numpy<1.0; python_version < "3" and extra == "torch"
Provides-Extra: lightning
Requires-Dist: drawbar[torch]; extra == "lightning"
Requires-Dist: no-such-lightning; extra == "lightning"
"""


@pytest.mark.parametrize(
    ("module", "extra", "command"),
    [
        ("no_such_torch", "torch", '"no-such-torch>=2.4"'),
        ("no_such_lightning", "lightning", '"no-such-torch>=2.4" "no-such-lightning"'),
        ("no_such_framework", "unknown", '"no_such_framework"'),
    ],
)
def test_require_package_with_missing_package_names_packages_to_install(
    module: str, extra: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command works without an index that has Drawbar."""
    (tmp_path / "drawbar-0.1.0.dist-info").mkdir()
    (tmp_path / "drawbar-0.1.0.dist-info" / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(tmp_path)
    require_package("json", extra)
    with pytest.raises(ModuleNotFoundError, match=f"run: pip install {command}$") as caught:
        require_package(module, extra)
    assert caught.value.name == module


def test_require_package_without_metadata_of_drawbar_names_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if Drawbar were in PYTHONPATH, and not installed."""

    def requires(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    with pytest.raises(ModuleNotFoundError, match=r'run: pip install "no_such_framework"$'):
        require_package("no_such_framework", "torch")


def test_require_version_with_old_version_names_installed_package() -> None:
    require_version("xgboost", "3.10.0rc1", "3.1")
    message = '^xgboost 2.1.4 is installed, but 3.1 or newer .* --upgrade "xgboost-cpu>=3.1"$'
    with pytest.raises(ImportError, match=message):
        require_version("xgboost", "2.1.4", "3.1")


NAMED_LIKE_A_FRAMEWORK = {
    "torch.py": "import torch; from drawbar.torch import TorchTrainer",
    "xgboost.py": "from drawbar.xgboost import XGBoostTrainer",
    "ray.py": "import ray; from drawbar.train import DataParallelTrainer",
    "keras/__init__.py": "layers = 3",
}
USES_KERAS = """
from drawbar.keras import KerasConfig
from drawbar.train import ScalingConfig
KerasConfig(keras_backend="torch").check_requirements(ScalingConfig())
"""


@pytest.mark.parametrize("file", NAMED_LIKE_A_FRAMEWORK)
def test_user_file_that_hides_framework_is_named(file: str, tmp_path: Path) -> None:
    hides = tmp_path / file
    hides.parent.mkdir(exist_ok=True)
    hides.write_text(NAMED_LIKE_A_FRAMEWORK[file])
    script = hides
    if hides.parent != tmp_path:
        script = tmp_path / "script.py"
        script.write_text(USES_KERAS)
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True).stderr
    name = Path(file).parts[0].removesuffix(".py")
    message = (
        f"ImportError: `import {name}` finds {hides}, which hides the package {name}; rename it"
    )
    assert shown.splitlines()[-1] == message


def test_require_package_with_old_version_raises() -> None:
    require_package("pytest", "dev", min_version="8.1")
    with pytest.raises(ImportError, match=r'99\.1 or newer.*--upgrade "pytest>=99\.1"'):
        require_package("pytest", "dev", min_version="99.1")


@pytest.mark.parametrize(
    ("version", "newest"),
    [("4.50.3", "4.50.3"), ("5.0rc1", "5.0"), ("2.13.0+cpu", "2.13.0"), ("unknown", "")],
)
def test_require_version_compares_release_numbers(version: str, newest: str) -> None:
    """`newest` is the newest version that can be required."""
    require_version("torch", version, newest)
    with pytest.raises(ImportError, match="is installed, but"):
        require_version("torch", version, f"{newest or 0}.1")


def test_fit_creates_storage_path(tmp_path: Path) -> None:
    fit(lambda: None, tmp_path / "a" / "b")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["run"]
    assert list((tmp_path / "a" / "b" / "run").glob(".drawbar-probe*")) == []


def test_fit_with_file_in_storage_path_raises(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(
        FileExistsError, match=r"run' cannot be written .* is a file, so choose a directory"
    ):
        fit(lambda: None, tmp_path)
    with pytest.raises(NotADirectoryError, match="choose a directory"):
        fit(lambda: None, tmp_path / "run" / "below")


def test_fit_without_permission_for_storage_path_raises() -> None:
    message = r"'/proc/runs/run' cannot be written by user \w+: .*; set RunConfig.storage_path to a"
    with pytest.raises(OSError, match=message):
        fit(lambda: None, "/proc/runs")
