"""How LightGBM workers meet: the settings, and the network that is up around the function.

LightGBM would connect the workers inside `lightgbm.train`, from a list of addresses in the
parameters. Here they are connected before the training function starts, so that a `Dataset` that is
made before the booster has its bins agreed as well, and a port is bound right after it was found.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from drawbar._boosting import BoostingConfig, worker_threads
from drawbar._rendezvous import reserved_port
from drawbar.train import collective, get_context
from drawbar.train.backend import Backend, get_worker_address, make_import_error, parse_duration

try:
    from lightgbm import Booster  # noqa: F401  # here first, for what the error says
except ImportError as error:
    raise make_import_error("lightgbm", extra="lightgbm") from error

from drawbar.lightgbm import _c_api
from drawbar.lightgbm._network.sockets import reset_connections_on_failure
from drawbar.lightgbm._parameters import drop_parameters, find_alias, get_parameter

CONNECT_DELAY_S = 0.02
"""How long rank 0 waits before it looks for the others; those between them wait less."""


@dataclass(frozen=True)
class LightGBMConfig(BoostingConfig):
    """How the workers' network is made that is up when the training function starts.

    Args:
        ports: The first and the last TCP port that workers may listen on, as when a firewall lets
            only some through; a node needs one for each of its workers. Default: any free one,
            preferably between 20000 and 29999.
        timeout_s: How long a worker waits for another: seconds, or a timedelta; LightGBM counts
            whole minutes.
        import_sklearn: Whether a worker imports scikit-learn with LightGBM, which takes about a
            second and is what `LGBMClassifier` and the like need. Default: only where code of
            yours runs, as a training function, a callback or a metric.
        import_pandas: Whether a worker that does without scikit-learn imports pandas, which takes
            a fifth of a second and is what LightGBM needs to be given frames. Default: as above.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
    """

    library_module: ClassVar[str] = "lightgbm"
    min_version: ClassVar[str] = "4.5"
    optional_imports: ClassVar[tuple[str, ...]] = ("sklearn", "pandas")

    import_pandas: bool | None = None
    port_range: tuple[int, int] | None = None
    timeout_s: float | timedelta = 1800

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = parse_duration("LightGBMConfig.timeout_s", self.timeout_s)
        object.__setattr__(self, "timeout_s", seconds)
        if self.port_range is None:
            return
        if len(self.port_range) != 2 or not all(isinstance(port, int) for port in self.port_range):
            raise TypeError(
                "LightGBMConfig.ports must be the first and the last port, found "
                f"{self.port_range!r}"
            )
        if not 1024 <= self.port_range[0] <= self.port_range[1] <= 65535:
            raise ValueError(
                "LightGBMConfig.ports must be the first and the last port, both from 1024 to "
                f"65535, found {self.port_range!r}"
            )

    @property
    def backend_cls(self) -> type[Backend]:
        """The class with the controller's part."""
        return LightGBMBackend

    def train_func_context(self) -> AbstractContextManager[None]:
        """Connect the workers before the training function, part them after it."""
        return _set_up(self)


class LightGBMBackend(Backend):
    """The controller's part: nothing. The workers tell each other where they are."""

    can_reuse_processes = True  # a network that has failed leaves nothing behind in the process


@contextmanager
def _set_up(config: LightGBMConfig) -> Iterator[None]:
    with _network(config):
        _success_callbacks.at = []
        yield
        for call in _success_callbacks.at:
            call()


# By thread: in the worlds of `drawbar.train.testing` the ranks are threads.
_success_callbacks = threading.local()


def on_success(call: Callable[[], None]) -> None:
    """Call something when the training function has returned; not if it has raised."""
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
            assert not isinstance(config.timeout_s, timedelta)  # seconds, since it was checked
            _c_api.init_network(machines, port, math.ceil(config.timeout_s / 60))
            with reset_connections_on_failure(machines, port):
                yield
        finally:
            _c_api.free_network()


def _connect_delay() -> float:
    """How many seconds this rank lets higher ones begin to listen.

    LightGBM's lower ranks connect to the higher ones, and wait 0.2 s if nobody listens yet.
    """
    context = get_context()
    return CONNECT_DELAY_S * (1 - context.get_world_rank() / (context.get_world_size() - 1))


def get_network_params(tree_learner: str = "data") -> dict[str, object]:
    """Give the parameters that make `lightgbm.train` use this run's network and CPUs.

    The network is up already, so there are no addresses and ports among them.

        params = {"objective": "binary", **drawbar.lightgbm.get_network_params()}

    Args:
        tree_learner: "data", or "voting" for many features on a slow network; LightGBM has no
            "feature" here. One worker alone has LightGBM's "serial".

    Returns:
        `num_threads`, and with several workers `num_machines`, `tree_learner` and `pre_partition`.

    Raises:
        RuntimeError: Called outside a training function.
        ValueError: There is no such tree learner.
    """
    if tree_learner not in ("data", "voting"):
        raise ValueError(
            f"tree_learner must be 'data' or 'voting', found {tree_learner!r}; LightGBM's Python "
            "package has no 'feature', and one worker alone has 'serial' by itself"
        )
    workers = get_context().get_world_size()
    threads: dict[str, object] = {"num_threads": worker_threads()}
    if workers == 1:
        return threads
    network = {"num_machines": workers, "tree_learner": tree_learner, "pre_partition": True}
    return {**threads, **network}


def add_network_parameters(params: Mapping[str, object]) -> dict[str, object]:
    """Give the parameters with the run's network and this worker's threads where none are set.

    Raises:
        RuntimeError: Called outside a training function.
        ValueError: The tree learner does not work with workers.
    """
    learner = str(get_parameter(params, "tree_learner", "data")).removesuffix("_parallel")
    if int(get_parameter(params, "num_threads", 0)) <= 0:
        params = drop_parameters(params, "num_threads")
    given = {name: value for name, value in params.items() if value is not None}
    network_params = get_network_params(learner)
    return {
        **{
            name: network_params[name] for name in network_params if find_alias(given, name) is None
        },
        **given,
    }
