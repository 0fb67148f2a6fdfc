"""`drawbar doctor`: look at this machine, or at all of a cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson
from drawbar.cli._doctor.check_result import CheckResult
from drawbar.cli._output import CommandError, escape_control_chars, write_json
from drawbar.cli._ray_connection import check_reachable


def doctor(
    address: Annotated[
        str | None,
        typer.Option(help='Of a Ray cluster, or "auto"; this machine alone if not given.'),
    ] = None,
    storage: Annotated[
        str, typer.Option(metavar="PATH", help="A storage path that nodes should share.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="What is well, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look for what would keep runs from working.

    Versions, GPUs, limits, /dev/shm and disks; of a cluster also clocks, the storage path, and how
    every pair of nodes adds up numbers by gloo and NCCL. The exit code is 1 if there is a problem.
    """
    from drawbar.cli._doctor import checks
    from drawbar.cli._doctor.machine import collect

    if storage and "://" not in storage:
        storage = os.path.abspath(os.path.expanduser(storage))  # each node is in another folder
    if address is None:
        found = [*checks.check_requirements(), *checks.check_machine(collect(storage))]
    else:
        found = list(_of_cluster(address, storage))
    if as_json:
        write_json(found)
    else:
        _write(found, everything=everything)
    if any(each.status == "problem" for each in found):
        raise typer.Exit(1)


def _of_cluster(address: str, storage: str) -> Iterator[CheckResult]:
    from ray.exceptions import RayError

    from drawbar.cli._doctor import checks, cluster

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
    except ConnectionError as error:
        raise CommandError(f"there is no Ray cluster at {address!r}: {error}") from error
    except RayError as error:
        told = str(error).strip().splitlines() or [repr(error)]
        raise CommandError(f"a node of {address!r} cannot be looked at: {told[-1]}") from error


def _write(found: list[CheckResult], *, everything: bool) -> None:
    for each in found:
        if everything or each.status != "ok":
            where = f" ({each.node})" if each.node else ""
            print(escape_control_chars(f"{each.status:8} {each.subject}{where}: {each.value}"))
            print(f"         {escape_control_chars(each.advice)}\n" * bool(each.advice), end="")
    count = Counter(each.status for each in found)
    print(f"{count['ok']} well, {count['warning']} warnings, {count['problem']} problems")
