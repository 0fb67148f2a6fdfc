"""LightGBMConfig and the setup of LightGBM workers.

LightGBM would connect the workers in `lightgbm.train`, from a list of addresses in the parameters.
Drawbar connects them before the training function starts. A `Dataset` that is created before the
booster then has common bins as well, and a port is bound right after it was found.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, ClassVar

from drawbar._boosting.backend import BoostingConfig
from drawbar._boosting.threads import worker_threads
from drawbar._rendezvous import reserved_port
from drawbar.train import collective, get_context
from drawbar.train.backend import Backend, get_worker_address, make_import_error, parse_duration

try:
    from lightgbm import Booster  # noqa: F401  # the first import, for the error message
except ImportError as error:
    raise make_import_error("lightgbm", extra="lightgbm") from error

from drawbar.lightgbm import _c_api
from drawbar.lightgbm._network.sockets import reset_connections_on_failure
from drawbar.lightgbm._parameters import (
    check_tree_learner,
    drop_parameters,
    find_alias,
    get_parameter,
)

CONNECT_DELAY_S = 0.02
"""Delay in seconds with which rank 0 connects to the others. Higher ranks wait less."""


def _check_port_range(name: str, ports: Any) -> Any:
    if len(ports) != 2 or not all(isinstance(port, int) for port in ports):
        raise TypeError(f"{name} must be the first and the last port, found {ports!r}.")
    if not 1024 <= ports[0] <= ports[1] <= 65535:
        raise ValueError(
            f"{name} must be the first and the last port, both from 1024 to 65535, found {ports!r}."
        )
    return ports


@dataclass(frozen=True)
class LightGBMConfig(BoostingConfig):
    """Configure LightGBM's network between the workers.

    Args:
        port_range: First and last TCP port on which workers may listen, for example if a firewall
            allows only some. A node needs one port per worker. Default: any free port, preferably
            between 20000 and 29999.
        timeout_s: Time to wait for other workers: seconds or a timedelta. LightGBM uses whole
            minutes.
        import_sklearn: Whether a worker imports scikit-learn with LightGBM, which takes about a
            second. Estimators such as `LGBMClassifier` need it. Default: only if user code runs on
            the workers, such as a training function, a callback, or a metric.
        import_pandas: Whether a worker without scikit-learn imports pandas, which takes 0.2 s.
            LightGBM needs it to accept DataFrames. Default: only if user code runs on the workers.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.

    Example:
        ```python
        config = LightGBMConfig(port_range=(20000, 20100))
        trainer = LightGBMTrainer(train_func, lightgbm_config=config)
        ```
    """

    library_module: ClassVar[str] = "lightgbm"
    min_version: ClassVar[str] = "4.6"
    optional_imports: ClassVar[tuple[str, ...]] = ("sklearn", "pandas")

    import_pandas: bool | None = None
    port_range: Annotated[tuple[int, int] | None, _check_port_range] = None
    timeout_s: Annotated[float | timedelta, parse_duration] = 1800

    @property
    def backend_cls(self) -> type[Backend]:
        """Class of the backend."""
        return LightGBMBackend

    @contextmanager
    def train_func_context(self) -> Iterator[None]:
        """Connect the workers for the training function and disconnect them afterwards."""
        with _network(self):
            _success_callbacks.at = []
            yield
            for call in _success_callbacks.at:
                call()


class LightGBMBackend(Backend):
    """Backend of LightGBMTrainer. It has no controller part; worker processes are reused.

    Example:
        ```python
        @dataclass(frozen=True)
        class MyConfig(BackendConfig):
            @property
            def backend_cls(self):
                return drawbar.lightgbm.LightGBMBackend
        ```
    """

    can_reuse_processes = True  # a failed network leaves no state in the process


# Thread-local, because ranks are threads in `drawbar.train.testing`.
_success_callbacks = threading.local()


def on_success(call: Callable[[], None]) -> None:
    """Register a function to call when the training function returns without an exception.

    Raises:
        RuntimeError: The training function belongs to another trainer.
    """
    if not hasattr(_success_callbacks, "at"):
        raise RuntimeError(
            "RayTrainReportCallback of drawbar.lightgbm needs the workers of a LightGBMTrainer. "
            "Pass the training function to drawbar.lightgbm.LightGBMTrainer."
        )
    _success_callbacks.at.append(call)


@contextmanager
def _network(config: LightGBMConfig) -> Iterator[None]:
    if get_context().get_world_size() == 1:
        yield
        return
    candidates = (
        range(config.port_range[0], config.port_range[1] + 1) if config.port_range else None
    )
    with reserved_port(candidates) as port:
        machines = collective.all_gather(f"{get_worker_address()}:{port}")
        time.sleep(_connect_delay())
        try:
            assert not isinstance(config.timeout_s, timedelta)  # converted in __post_init__
            _c_api.init_network(machines, port, math.ceil(config.timeout_s / 60))
            with reset_connections_on_failure(machines, port):
                yield
        finally:
            _c_api.free_network()


def _connect_delay() -> float:
    """Return the delay in seconds with which this rank connects to higher ranks.

    LightGBM's lower ranks connect to higher ones, and retry after 0.2 s if these do not listen yet.
    """
    context = get_context()
    return CONNECT_DELAY_S * (1 - context.get_world_rank() / (context.get_world_size() - 1))


def get_network_params(tree_learner: str = "data") -> dict[str, object]:
    """Return parameters with which lightgbm.train uses the run's network and CPUs.

    The network is already connected, so the parameters contain no addresses or ports.

    Args:
        tree_learner: "data", or "voting" for many features on a slow network. "feature" is not
            available. A single worker always uses LightGBM's "serial", and accepts this value.

    Returns:
        `num_threads` and, with several workers, `num_machines`, `tree_learner`, `pre_partition`.

    Raises:
        RuntimeError: Called outside a training function.
        ValueError: The tree learner is not supported.

    Example:
        ```python
        params = {"objective": "binary", **drawbar.lightgbm.get_network_params()}
        booster = lightgbm.train(params, train_set)
        ```
    """
    workers = get_context().get_world_size()
    check_tree_learner("tree_learner", tree_learner, workers)
    threads: dict[str, object] = {"num_threads": worker_threads()}
    if workers == 1:
        return threads
    network = {"num_machines": workers, "tree_learner": tree_learner, "pre_partition": True}
    return {**threads, **network}


def add_network_parameters(params: Mapping[str, object]) -> dict[str, object]:
    """Add the run's network and this worker's threads to parameters that do not set them.

    Raises:
        RuntimeError: Called outside a training function.
        ValueError: The tree learner does not support several workers.
    """
    learner = str(get_parameter(params, "tree_learner", "data")).removesuffix("_parallel")
    if int(get_parameter(params, "num_threads", 0)) <= 0:
        params = drop_parameters(params, "num_threads")
    user_params = {name: value for name, value in params.items() if value is not None}
    network_params = get_network_params(learner)
    return {
        **{
            name: network_params[name]
            for name in network_params
            if find_alias(user_params, name) is None
        },
        **user_params,
    }
