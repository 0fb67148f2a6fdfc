"""`drawbar doctor`: look at this machine, or at all of a cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson
from drawbar.cli._cluster import knock
from drawbar.cli._doctor.finding import Finding
from drawbar.cli._output import CommandError, visible, write_json


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
    from drawbar.cli._doctor import judge
    from drawbar.cli._doctor.machine import look

    if storage and "://" not in storage:
        storage = os.path.abspath(os.path.expanduser(storage))  # each node is in another folder
    if address is None:
        found = [*judge.of_requirements(), *judge.of_machine(look(storage))]
    else:
        found = list(_of_cluster(address, storage))
    if as_json:
        write_json(found)
    else:
        _write(found, everything=everything)
    if any(each.state == "problem" for each in found):
        raise typer.Exit(1)


def _of_cluster(address: str, storage: str) -> Iterator[Finding]:
    from ray.exceptions import RayError

    from drawbar.cli._doctor import cluster, judge

    try:
        knock(address)
        with cluster.probes(address) as probes:
            machines, offsets = cluster.machines(probes, storage)
            yield from judge.of_requirements()
            yield from judge.of_all(machines, offsets)
            for machine in machines:
                yield from judge.of_machine(machine)
            if storage:
                yield from cluster.storage_findings(probes, storage)
            if all("torch" in machine.packages for machine in machines):
                yield from cluster.pair_findings(probes, "gloo")
                if all(machine.torch_gpus for machine in machines):
                    yield from cluster.pair_findings(probes, "nccl")
    except ConnectionError as error:
        raise CommandError(f"there is no Ray cluster at {address!r}: {error}") from error
    except RayError as error:
        told = str(error).strip().splitlines() or [repr(error)]
        raise CommandError(f"a node of {address!r} cannot be looked at: {told[-1]}") from error


def _write(found: list[Finding], *, everything: bool) -> None:
    for each in found:
        if everything or each.state != "ok":
            where = f" ({each.node})" if each.node else ""
            print(visible(f"{each.state:8} {each.subject}{where}: {each.found}"))
            print(f"         {visible(each.advice)}\n" * bool(each.advice), end="")
    count = Counter(each.state for each in found)
    print(f"{count['ok']} well, {count['warning']} warnings, {count['problem']} problems")
