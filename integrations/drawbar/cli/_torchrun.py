"""Translate torchrun options.

The options are those of `torch.distributed.run.get_args_parser` in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from drawbar.cli._output import CommandError

_RENDEZVOUS = "Drawbar sets up the rendezvous."
_LOGS = "rank 0 prints here; the output of every rank is in <run>/logs."

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "--rdzv-backend": _RENDEZVOUS,
        "--rdzv-endpoint": _RENDEZVOUS,
        "--rdzv-id": _RENDEZVOUS,
        "--rdzv-conf": _RENDEZVOUS,
        "--master-addr": _RENDEZVOUS,
        "--master-port": _RENDEZVOUS,
        "--local-addr": _RENDEZVOUS,
        "--redirects": _LOGS,
        "--tee": _LOGS,
        "--local-ranks-filter": _LOGS,
        "--duplicate-stdout-filters": _LOGS,
        "--duplicate-stderr-filters": _LOGS,
        "--logs-specs": _LOGS,
        "--role": "Drawbar has no roles.",
        "--monitor-interval": "process exits are detected immediately.",
        "--start-method": "every rank is a separate Python process.",
        "--event-log-handler": "events are in the run's journal.",
        "--signals-to-handle": "SIGINT, SIGTERM, and SIGHUP stop the run.",
        "--shutdown-timeout": "a script has 5 s to end when the run is stopped.",
        "--run-path": "the script always runs as __main__.",
    }
)
"""Options without effect, with the reason that is printed."""

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "--node-rank": "Run the command once with --address: Ray starts the workers of all nodes.",
        "--log-dir": "Use --storage-path; logs are in <storage path>/<name>/logs.",
        "--no-python": "Write a Python script that starts the program.",
        "--virtual-local-rank": "Each rank sees the GPUs that the run has on its node.",
        "--numa-binding": "Bind processes in the script.",
    }
)
"""Options that are rejected, with the replacement that is printed."""

_SHORT = {"-r": "--redirects", "-t": "--tee"}
FLAGS = frozenset({"--run-path", "--no-python", "--virtual-local-rank"})
"""Options of torchrun that take no value."""

NAMES = frozenset({*IGNORED, *UNSUPPORTED, *_SHORT})
"""Options of torchrun that Drawbar does not have."""


def remove_torchrun_options(
    arguments: Sequence[str], flags: Collection[str]
) -> tuple[list[str], list[str]]:
    """Remove ignored torchrun options before the script name.

    Args:
        arguments: Options, the script, and the arguments of the script, which are not changed.
        flags: Drawbar's options that take no value.

    Returns:
        The remaining arguments, with hyphens instead of underscores in options, and the names of
        the ignored options.

    Raises:
        CommandError: An option is not supported.
    """
    remaining, passed_through, ignored = list(arguments), list[str](), list[str]()
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-", "--"):
        option, equals, value = remaining.pop(0).partition("=")
        name = _SHORT.get(option, option.replace("_", "-"))
        values = [] if equals or name in flags or name in FLAGS else remaining[:1]
        del remaining[: len(values)]
        if name in UNSUPPORTED:
            raise CommandError(f"{name} is not supported. {UNSUPPORTED[name]}")
        if name in IGNORED:
            ignored.append(name)
        else:
            passed_through += [name + equals + value, *values]
    return passed_through + remaining, ignored


def resolve_num_workers(
    nproc_per_node: str, nnodes: str, *, gpus: int, cpus: int
) -> tuple[int | tuple[int, int], bool]:
    """Return the number of workers for torchrun's options, and whether they run on a single node.

    Args:
        nproc_per_node: A number, "gpu", "cpu", or "auto".
        nnodes: A number, or a range such as "1:4" for an elastic run.
        gpus: GPUs of a node.
        cpus: CPUs of a node.

    Raises:
        CommandError: A value has another form.
    """
    per_node = _processes_per_node(nproc_per_node, gpus, cpus)
    low, high = parse_range("--nnodes", nnodes)
    if low == high:
        return low * per_node, low == 1
    return (low * per_node, high * per_node), False


def parse_range(option: str, text: str) -> tuple[int, int]:
    """Parse a number, or a range such as 2:8.

    Raises:
        CommandError: The text is neither.
    """
    low, colon, high = text.partition(":")
    numbers = [int(part) if part.isdecimal() else 0 for part in (low, high if colon else low)]
    if not 0 < numbers[0] <= numbers[1]:
        raise CommandError(f"{option} must be N or MIN:MAX, found {text!r}.")
    return numbers[0], numbers[1]


def _processes_per_node(text: str, gpus: int, cpus: int) -> int:
    if text == "gpu" and not gpus:
        raise CommandError(
            "--nproc-per-node gpu needs GPUs, but there are none. Use --nproc-per-node cpu."
        )
    if text in ("gpu", "auto", "cpu"):
        return gpus if gpus and text != "cpu" else cpus
    if not text.isdecimal() or not int(text):
        raise CommandError(f"--nproc-per-node must be N, gpu, cpu, or auto, found {text!r}.")
    return int(text)
