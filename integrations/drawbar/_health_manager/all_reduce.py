"""All-reduce between two nodes, to measure its speed and check its result."""

from __future__ import annotations

import time

_ROUNDS = 5
_BYTES = 16 * 2**20


class AllReducePeer:
    """One of two processes that run an all-reduce of torch. Base class of Ray actors.

    Example:
        ```python
        address, port = ray.get(first.start_store.remote())
        first.measure_allreduce.remote(address, port, 0, "gloo")
        second.measure_allreduce.remote(address, port, 1, "gloo")
        ```
    """

    def start_store(self) -> tuple[str, int]:
        """Start a TCPStore for a pair of nodes on a free port. Returns its address and port."""
        import ray
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its __all__

        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray has no types here
        self._store = TCPStore(address, 0, 2, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def measure_allreduce(self, address: str, port: int, rank: int, backend: str) -> float | str:
        """Run all-reduce with another node. Returns bytes per second, or an error message.

        Errors are returned because Ray prints raised errors of results that are never retrieved.
        """
        try:
            return self._allreduce_bandwidth(address, port, rank, backend)
        except Exception as error:
            return last_line(error)

    def _allreduce_bandwidth(self, address: str, port: int, rank: int, backend: str) -> float:
        import torch
        from torch import distributed
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its __all__

        store = self._store if rank == 0 else TCPStore(address, port, 2)
        device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        distributed.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=2,
            # Otherwise, NCCL of torch 2.15 would use the GPU whose index is the rank.
            device_id=device if backend == "nccl" else None,
        )
        try:
            numbers = torch.ones(_BYTES // 4, device=device)
            distributed.all_reduce(numbers)
            start = time.perf_counter()
            for _ in range(_ROUNDS):
                distributed.all_reduce(numbers)
            is_correct = bool((numbers == 2.0 ** (_ROUNDS + 1)).all().item())  # waits for the GPU
            seconds = time.perf_counter() - start
            if not is_correct:
                raise ArithmeticError("the sum of an all-reduce is wrong")
            return _ROUNDS * _BYTES / seconds
        finally:
            distributed.destroy_process_group()


def last_line(error: Exception) -> str:
    """Return the last line of an error message."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else repr(error)
