"""Private APIs of Ray and Ray Data, read in Ray 2.50 to 2.60.

No other file of Drawbar uses them. Each function gives the reason why the public API is not enough,
and what happens in a Ray version without the private API.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypedDict, cast

if TYPE_CHECKING:
    from ray.data import DataContext, Dataset

WORKER_MODULES = (
    "ray",
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "ray._private.arrow_serialization",
)
"""Modules that each actor of Drawbar imports, for a fork server.

Public modules import only some of them. A worker imports those that are missing here.
"""

_STARTUP_MESSAGES = (
    "Token authentication is ",
    "SIGTERM handler is not set because current thread",
)
_STARTUP_LOGGERS = (
    "ray._private.authentication.authentication_token_setup",
    "ray._private.worker",
)


@contextlib.contextmanager
def suppress_startup_messages() -> Iterator[None]:
    """Suppress messages that Ray logs at every start and that need no action.

    `ray.init(logging_level=...)` applies too late to suppress them. If Ray renames its loggers, the
    messages are printed.
    """

    def is_wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_STARTUP_MESSAGES)

    loggers = [logging.getLogger(name) for name in _STARTUP_LOGGERS]
    for logger in loggers:
        logger.addFilter(is_wanted)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_wanted)


_DEATH = re.compile(
    r"A worker died or was killed .*Node ID: (?P<node>\w+).*Worker PID: (?P<pid>\d+)", re.DOTALL
)
_suppressed_workers: set[tuple[str, str]] = set()  # node ID and process ID


def suppress_death_messages(workers: Iterable[tuple[str, int]]) -> None:
    """Suppress the message that Ray prints in this process when one of these workers dies.

    Drawbar reports the death with its cause. Ray has no setting to suppress the message for single
    workers, so this wraps the function of Ray that prints it. The wrapper stays: Ray prints the
    message seconds later, also after the end of the run. Without that function, Ray's messages are
    printed.

    Args:
        workers: Node ID and process ID of each worker.
    """
    from ray._private import worker as ray_worker

    print_lines: Any = getattr(ray_worker, "print_to_stdstream", None)
    if print_lines is not None and not _suppressed_workers:

        def print_unless_suppressed(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            is_from_raylet = data.get("pid") == "raylet"
            if not (is_from_raylet and all(map(_is_suppressed_death, data["lines"]))):
                print_lines(data, *args, **kwargs)

        ray_worker.print_to_stdstream = print_unless_suppressed
    _suppressed_workers.update((node_id, str(pid)) for node_id, pid in workers)


def _is_suppressed_death(line: str) -> bool:
    death = _DEATH.match(line)
    return death is not None and (death["node"], death["pid"]) in _suppressed_workers


def is_head_of_local_ray() -> bool:
    """Return whether this process has started the Ray that it is connected to.

    Ray's public API does not distinguish `ray.init()` that started Ray from one that joined it.
    """
    from ray._private.worker import _global_node

    return _global_node is not None and bool(_global_node.is_head())


class ActorInfo(TypedDict, total=False):
    """The part of Ray's record of an actor that is used here."""

    ActorClassName: str
    Address: dict[str, str]
    Pid: int
    State: str


def get_actor_id(actor: object) -> str:
    """Return the ID of an actor handle. Only the actor itself can query it with public API."""
    return str(cast("Any", actor)._actor_id.hex())


def get_actor_info(actor_id: str) -> ActorInfo:
    """Return Ray's record of an actor, without a call to its process.

    Empty if Ray lacks the private API. `ray.util.state` needs the dashboard, which a local Ray
    started by Drawbar does not run.
    """
    info: ActorInfo = {}
    with contextlib.suppress(Exception):
        from ray._private.state import actors

        info = actors(actor_id=actor_id)
    return info


def list_actors() -> dict[str, ActorInfo]:
    """Return Ray's records of all actors by ID. See `get_actor_info`."""
    from ray._private.state import actors

    infos: dict[str, ActorInfo] = actors()
    return infos


def is_worker_process_dead(worker_id: str) -> bool:
    """Return whether the process with this ID or its node has died, according to Ray.

    False if Ray lacks the private API. `ray.util.state` needs the dashboard, see `get_actor_info`.
    """
    import ray

    with contextlib.suppress(Exception):
        from ray._private import state as state_module
        from ray.core.generated.gcs_pb2 import WorkerTableData  # type: ignore[attr-defined]  # Protobuf makes it

        state: Any = state_module.state  # the versions of Ray have different methods
        if hasattr(state, "_connect_and_get_accessor"):
            accessor = state._connect_and_get_accessor()
        else:  # before Ray 2.52
            older = cast("Any", state)
            older._check_connected()
            accessor = older.global_state_accessor
        record = accessor.get_worker_info(ray.WorkerID.from_hex(worker_id))
        worker = WorkerTableData.FromString(record)
        # If a process dies with its node, Ray does not record the end of the process.
        worker_node = worker.worker_address.node_id.hex()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
        return not worker.is_alive or not any(
            node["NodeID"] == worker_node and node["Alive"] for node in nodes
        )
    return False


def get_available_resources() -> dict[str, dict[str, float]]:
    """Return the available resources of each node by its ID. Not available in a Ray Client.

    `ray.available_resources()` adds up all nodes, but a bundle must fit on a single one.
    """
    from ray._private.state import available_resources_per_node

    available: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]  # Ray has no types here
    return available


def get_draining_nodes() -> dict[str, int]:
    """Return the draining nodes of the connected cluster, by ID.

    Values are deadlines in milliseconds since the epoch, 0 if unknown. Ray's public API does not
    list them.
    """
    from ray._private.state import state

    draining: dict[str, int] = state.get_draining_nodes()
    return draining


def has_growing_node_group() -> bool:
    """Return whether the configuration of the cluster has a node group that may grow.

    Ray's public API does not describe the autoscaler.
    """
    from ray._private.state import state

    config = state.get_cluster_config()
    return config is not None and any(
        group.max_count == -1 or group.max_count > group.min_count
        for group in config.node_group_configs
    )


def is_autoscaler_v2_enabled() -> bool:
    """Return whether autoscaler v2 runs. Ray's public API does not describe the autoscaler."""
    from ray.experimental.internal_kv import _internal_kv_get

    return bool(_internal_kv_get(b"__autoscaler_v2_enabled", namespace=b"__autoscaler") == b"1")


def get_autoscaler_status() -> bytes:
    """Return the status of autoscaler v1 as JSON; see `is_autoscaler_v2_enabled`."""
    from ray.experimental.internal_kv import _internal_kv_get

    return bytes(_internal_kv_get(b"__autoscaling_status") or b"{}")


def is_owned_by_this_process(reference: object) -> bool:
    """Return whether this process owns an object, which is then lost when this process ends.

    Ray has no public function for the owner. Its address is a serialized protobuf message. One of
    the fields is the ID of the worker process.
    """
    import ray

    worker: Any = ray._private.worker.global_worker
    owner: bytes = worker.core_worker.get_owner_address(reference)
    return bytes.fromhex(ray.get_runtime_context().get_worker_id()) in owner


@contextlib.contextmanager
def current_data_context(context: DataContext) -> Iterator[None]:
    """Make a `DataContext` the current one of this process.

    `DataContext.current` does the same, but Ray 2.50 does not have it.
    """
    from ray.data import DataContext

    previous = DataContext.get_current()
    DataContext._set_current(context)
    try:
        yield
    finally:
        DataContext._set_current(previous)


def count_block_rows(dataset: Dataset) -> list[int]:
    """Return the number of rows of each block of a materialized dataset.

    `iter_internal_ref_bundles` is for developers, and its result changes between Ray versions.
    Ray's public API only counts rows of complete datasets.
    """
    entries = [entry for bundle in dataset.iter_internal_ref_bundles() for entry in bundle.blocks]
    # Before Ray 2.60, an entry was a pair of reference and metadata.
    metadata: list[Any] = [
        entry[1] if isinstance(entry, tuple) else entry.metadata for entry in entries
    ]
    return [block.num_rows for block in metadata]


def set_execution_index(context: DataContext, times: int) -> None:
    """Set how often a dataset was executed, which seeds Ray Data's shuffling of files.

    Ray Data counts executions per process. The public API cannot set the count in a restart.
    """
    cast("Any", context)._execution_idx = times


def get_split_coordinator(iterator: object) -> Any:
    """Return Ray Data's actor that distributes the rows of a `streaming_split`.

    Ray Data ends it with its dataset only. None if the iterator does not have one.
    """
    return getattr(iterator, "_coord_actor", None)


def is_data_iterator(iterator: object) -> bool:
    """Return whether an object has a dataset as Ray Data's iterators have it."""
    return hasattr(iterator, "_base_dataset")


def get_base_dataset(iterator: object) -> Dataset | None:
    """Return the dataset of an iterator of Ray Data, whose rows may be known; None if unknown."""
    dataset: Dataset | None = getattr(iterator, "_base_dataset", None)
    return dataset
