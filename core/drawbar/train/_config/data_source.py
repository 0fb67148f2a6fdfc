"""`DataSource`: interface between a run and the data that it distributes to its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from drawbar.train._config.run_config import RunContext
from drawbar.train._config.scaling_config import ScalingConfig

TRAIN_DATASET_KEY = "train"
"""Name of the dataset used for training."""

OpenShards = Callable[[], Mapping[str, Any]]
"""Function that returns the shards of a worker by name, in the process of the worker."""


class DataSource(ABC):
    """Data that a run distributes to its workers. Pass a subclass as `datasets` of a trainer.

    The controller calls the methods of the source, in the process of the controller and one at a
    time. A detached run pickles the source first. A source serves one run at a time: if `fit()` is
    called again, `open()` is called again.

    To resume within the data, the shard of a worker registers its position with
    `register_data_position()`. Checkpoints store the position of one rank, so all ranks must have
    read equally many batches at each report with a checkpoint. `assign` receives the position in
    the resume checkpoint, and `register_data_position()` returns the same value. Checkpoints keep
    it while no shard is open.

    Attributes:
        notices: Lines that the console shows: after `open()`, and after each `assign()`.
        metadata: JSON-serializable values that are known after `open()`, such as statistics of the
            data. They are added to the metadata of the workers and of each checkpoint.

    Example:
        Distribute the rows of a NumPy file. Each worker reads every n-th row, and continues there
        after a restart:

            class Rows(DataSource):
                def __init__(self, path):
                    self.path = path

                def assign(self, node_ids, positions):
                    size = len(node_ids)
                    return [partial(open_shards, self.path, rank, size) for rank in range(size)]

            def open_shards(path, rank, size):
                return {"train": RowShard(np.load(path, mmap_mode="r"), rank, size)}

            class RowShard:
                def __init__(self, rows, rank, size):
                    self.rows, self.rank, self.size = rows, rank, size
                    # Rows that all workers together have read in this epoch.
                    self.num_read = register_data_position("rows", lambda: self.num_read) or 0

                def __iter__(self):
                    while self.num_read + self.size <= len(self.rows):
                        row = self.num_read + self.rank
                        self.num_read += self.size
                        yield self.rows[row]
                    self.num_read = 0

            DataParallelTrainer(train_func, datasets=Rows("/data/rows.npy")).fit()
    """

    notices: Sequence[str] = ()
    metadata: Mapping[str, object] = MappingProxyType({})

    # Not abstract: sources whose data needs no preparation only override `assign`.
    def check(self, scaling_config: ScalingConfig) -> None:  # noqa: B027
        """Check before the run opens that its workers can read the data.

        Args:
            scaling_config: Number of workers and their resources.

        Raises:
            Exception: Any error; `fit()` raises it.
        """

    def open(self, run: RunContext) -> None:  # noqa: B027
        """Do the work that all attempts share, before the first attempt.

        Args:
            run: Description of the run.

        Raises:
            Exception: Any error; `fit()` raises it.
        """

    @abstractmethod
    def assign(
        self, node_ids: Sequence[str], positions: Mapping[str, object]
    ) -> Sequence[OpenShards]:
        """Distribute the data to the workers of an attempt, before their functions start.

        Args:
            node_ids: Node id of each worker, in rank order. The length is the number of workers.
            positions: Positions in the resume checkpoint, by the names that the workers passed to
                `register_data_position()`. Empty if the attempt starts from scratch. Use them if
                the data must be split before the workers start.

        Returns:
            For each rank, a function that can be pickled. The worker calls it once, on its first
            `get_dataset_shard()`. It returns the shards that `get_dataset_shard()` returns, by
            name.

        Raises:
            Exception: Any error; the attempt fails.
        """

    def close(self) -> None:  # noqa: B027
        """Release what `open()` and `assign()` have acquired, after the run has ended."""
