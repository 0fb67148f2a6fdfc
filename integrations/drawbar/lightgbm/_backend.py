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
from drawbar.train.backend import Backend, import_failed, require_duration, worker_address

try:
    from lightgbm import Booster  # noqa: F401  # here first, for what the error says
except ImportError as error:
    raise import_failed("lightgbm", extra="lightgbm") from error

from drawbar.lightgbm import _native
from drawbar.lightgbm._network.sockets import reset_unless_it_returns
from drawbar.lightgbm._parameters import name_of, value_of, without

HEAD_START_SECONDS = 0.02
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

    library: ClassVar[str] = "lightgbm"
    oldest: ClassVar[str] = "4.5"
    optional: ClassVar[tuple[str, ...]] = ("sklearn", "pandas")

    import_pandas: bool | None = None
    ports: tuple[int, int] | None = None
    timeout_s: float | timedelta = 1800

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = require_duration("LightGBMConfig.timeout_s", self.timeout_s)
        object.__setattr__(self, "timeout_s", seconds)
        if self.ports is None:
            return
        if len(self.ports) != 2 or not all(isinstance(port, int) for port in self.ports):
            raise TypeError(
                f"LightGBMConfig.ports must be the first and the last port, found {self.ports!r}"
            )
        if not 1024 <= self.ports[0] <= self.ports[1] <= 65535:
            raise ValueError(
                "LightGBMConfig.ports must be the first and the last port, both from 1024 to "
                f"65535, found {self.ports!r}"
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

    reentrant = True  # a network that has failed leaves nothing behind in the process


@contextmanager
def _set_up(config: LightGBMConfig) -> Iterator[None]:
    with _network(config):
        _endings.at = []
        yield
        for call in _endings.at:
            call()


# By thread: in the worlds of `drawbar.train.testing` the ranks are threads.
_endings = threading.local()


def at_end(call: Callable[[], None]) -> None:
    """Call something when the training function has returned; not if it has raised."""
    _endings.at.append(call)


@contextmanager
def _network(config: LightGBMConfig) -> Iterator[None]:
    if get_context().get_world_size() == 1:
        yield
        return
    candidates = range(config.ports[0], config.ports[1] + 1) if config.ports else None
    with reserved_port(candidates) as port:
        machines = collective.all_gather(f"{worker_address()}:{port}")
        time.sleep(_head_start())
        try:
            assert not isinstance(config.timeout_s, timedelta)  # seconds, since it was checked
            _native.join_network(machines, port, math.ceil(config.timeout_s / 60))
            with reset_unless_it_returns(machines, port):
                yield
        finally:
            _native.leave_network()


def _head_start() -> float:
    """How many seconds this rank lets higher ones begin to listen.

    LightGBM's lower ranks connect to the higher ones, and wait 0.2 s if nobody listens yet.
    """
    context = get_context()
    return HEAD_START_SECONDS * (1 - context.get_world_rank() / (context.get_world_size() - 1))


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


def with_own_network(params: Mapping[str, object]) -> dict[str, object]:
    """Give the parameters with the run's network and this worker's threads where none are set.

    Raises:
        RuntimeError: Called outside a training function.
        ValueError: The tree learner does not work with workers.
    """
    learner = str(value_of(params, "tree_learner", "data")).removesuffix("_parallel")
    if int(value_of(params, "num_threads", 0)) <= 0:
        params = without(params, "num_threads")
    given = {name: value for name, value in params.items() if value is not None}
    ours = get_network_params(learner)
    return {**{name: ours[name] for name in ours if name_of(given, name) is None}, **given}
