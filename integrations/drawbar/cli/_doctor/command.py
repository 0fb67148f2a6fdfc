"""`drawbar doctor`: look at this machine, or at all of a cluster."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson
from drawbar.cli._doctor.finding import Finding
from drawbar.cli._output import CommandError, write_json

KNOCK_S = 5.0


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
    from drawbar.cli._doctor import cluster, judge

    try:
        _knock(address)
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
    except OSError as error:
        raise CommandError(f"there is no Ray cluster at {address!r}: {error}") from error


def _knock(address: str) -> None:
    """Look whether somebody listens at `host:port`, since Ray would wait ten minutes for that.

    Raises:
        OSError: Nobody does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


def _write(found: list[Finding], *, everything: bool) -> None:
    for each in found:
        if everything or each.state != "ok":
            where = f" ({each.node})" if each.node else ""
            advice = f"\n         {each.advice}" if each.advice else ""
            print(f"{each.state:8} {each.subject}{where}: {each.found}{advice}")
    count = Counter(each.state for each in found)
    print(f"{count['ok']} well, {count['warning']} warnings, {count['problem']} problems")
