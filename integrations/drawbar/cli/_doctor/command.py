"""The doctor command."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson
from drawbar.cli._doctor.check_result import CheckResult
from drawbar.cli._output import CommandError, escape_control_chars, write_json


def doctor(
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ray cluster to check; 'auto' finds a running one.  [default: this machine only]",
        ),
    ] = None,
    storage: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="With --address, check that all nodes share this directory."
        ),
    ] = "",
    show_all: Annotated[bool, typer.Option("--all", help="Include checks that passed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check that this machine or a Ray cluster is ready for training.

    Checks versions, GPUs, ulimits, forked workers, /dev/shm, and disks. On a cluster, also checks
    clocks, shared storage, and the bandwidth of gloo and NCCL between all pairs of nodes. Exits
    with code 1 if there is an error.
    """
    from drawbar.cli._doctor import checks
    from drawbar.cli._doctor.machine import collect

    if storage and "://" not in storage:
        # Probes on other nodes have other working directories.
        storage = os.path.abspath(os.path.expanduser(storage))
    if address is None:
        results = [*checks.check_requirements(), *checks.check_machine(collect(storage))]
    else:
        results = list(_check_cluster(address, storage))
    if as_json:
        write_json(results)
    else:
        _print_results(results, show_all=show_all)
    if any(result.status == "error" for result in results):
        raise typer.Exit(1)


def _check_cluster(address: str, storage: str) -> Iterator[CheckResult]:
    from ray.exceptions import RayError

    from drawbar.cli._doctor import checks, cluster
    from drawbar.train.run_modes import check_reachable

    try:
        check_reachable(address)
        with cluster.start_probes(address) as probes:
            machines, offsets = cluster.collect_machines(probes, storage)
            yield from checks.check_requirements()
            yield from checks.check_consistency(machines, offsets)
            for machine in machines:
                yield from checks.check_machine(machine)
            if storage:
                yield from cluster.check_storage(probes, storage)
            if all("torch" in machine.packages for machine in machines):
                yield from cluster.check_node_pairs(probes, "gloo")
                if all(machine.torch_gpus for machine in machines):
                    yield from cluster.check_node_pairs(probes, "nccl")
    except PermissionError as error:
        raise CommandError(str(error)) from error
    except ConnectionError as error:
        raise CommandError(f"Cannot connect to a Ray cluster at {address!r}: {error}") from error
    except RayError as error:
        lines = str(error).strip().splitlines() or [repr(error)]
        raise CommandError(f"Cannot inspect a node of {address!r}: {lines[-1]}") from error


def _print_results(results: list[CheckResult], *, show_all: bool) -> None:
    for result in results:
        if show_all or result.status != "ok":
            node = f" ({result.node})" if result.node else ""
            line = f"{result.status:8} {result.subject}{node}: {result.value}"
            print(escape_control_chars(line))
            print(f"         {escape_control_chars(result.advice)}\n" * bool(result.advice), end="")
    count = Counter(result.status for result in results)
    print(f"{count['ok']} passed, {count['warning']} warnings, {count['error']} errors")
