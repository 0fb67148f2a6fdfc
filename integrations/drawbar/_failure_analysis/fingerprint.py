"""Find the kind of a failure, and its place in the code and in the data."""

from __future__ import annotations

import re

from drawbar._base.frames import format_user_location
from drawbar._process.ranks import WorkerInfo
from drawbar._process.worker_failure import CONNECTION_LOST, WorkerFailure
from drawbar._records.verdict import FailureFingerprint, FailureNature
from drawbar._recovery.failure_policy import AttemptFailures

_MAX_ERROR_CHARS = 1000

# Names of exception classes, also of causes in a chain: requests, urllib3, botocore, gRPC, torch.
_NETWORK_TYPES = re.compile(
    r"Connect|Timeout|TimedOut|Network|Unavailable|Unreachable|Socket|Proxy|SSL|Throttl|RateLimit"
    r"|BrokenPipe|Disconnect|IncompleteRead|EndpointError|TransportError|RpcError|URLError"
    r"|HTTPError|HttpError|gaierror|herror|DistBackendError|DistStoreError|ServiceRequest"
)
_NETWORK_TEXTS = re.compile(
    rf"{CONNECTION_LOST.pattern}|connection (aborted|error|lost)|no route to host|unreachable"
    r"|timed? ?out|temporarily|temporary failure|name resolution|name or service not known"
    r"|too many requests|service unavailable|bad gateway|internal server error"
    r"|NCCL error|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
_CODE_ERRORS: tuple[type[BaseException], ...] = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, NameError, UnboundLocalError,
    AssertionError, ZeroDivisionError, SyntaxError,
)  # fmt: skip
_OTHER_PERMANENT_ERRORS: tuple[type[BaseException], ...] = (
    ImportError, ModuleNotFoundError, NotImplementedError, RecursionError, SystemExit,
)  # fmt: skip

_CODE_TYPES = {error.__name__ for error in _CODE_ERRORS}
"""Types of errors in the code, also if their messages mention a timeout."""

_NEVER_TEMPORARY = _CODE_TYPES | {error.__name__ for error in _OTHER_PERMANENT_ERRORS}
"""Types of errors that no service can cause by being unavailable for a while."""

EX_TEMPFAIL = 75
"""Exit code with which a program requests another try (sysexits.h)."""

_TEMPORARY_EXIT = re.compile(rf"(SystemExit: |[\w ]+: exited with code ){EX_TEMPFAIL}\b")

_MEMORY_TYPES = re.compile(r"^MemoryError$|OutOfMemory")
_MEMORY_TEXTS = re.compile(
    r"out of memory|cannot allocate memory|can't allocate memory|unable to allocate"
    r"|RESOURCE_EXHAUSTED|ALLOC_FAILED|by the kernel's OOM killer: |Ray's memory monitor"
    r"|is killed by signal: Killed",
    re.IGNORECASE,
)
_DISK_TEXTS = re.compile(r"No space left on device|\[Errno 28\]|Disk quota exceeded", re.IGNORECASE)
_HARDWARE_TEXTS = re.compile(
    r"uncorrectable|\bECC\b|\bXid\b|\bNVLink\b|unspecified launch failure|hardware (error|failure)"
    r"|device is lost|fallen off the bus|CUDA-capable device\(s\) is/are busy|Input/output error"
    r"|Stale file handle|Remote I/O error|\d requested and \d+ written",  # the last: NumPy
    re.IGNORECASE,
)
_SYSTEM_TYPES = {"OSError", "BlockingIOError", "InterruptedError"}
"""Types of errors of the operating system. Libraries raise OSError without a number, too, for
example Transformers for a model name that does not exist."""

_MISSING_FILE_TYPES = {
    *("FileNotFoundError", "NotADirectoryError", "IsADirectoryError"),
    *("FileExistsError", "PermissionError"),
}
_SIGNAL = re.compile(r"killed by (SIG\w+)")
_CRASH_SIGNALS = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"}
_CRASH_FRAME = re.compile(r'^\s*File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_CHAINED_TYPE = re.compile(r"^(?:[\w.]+\.)?(\w+)(?::|$)", re.MULTILINE)
# Addresses, identifiers, and numbers differ between two runs of the same code.
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\b(?=\w*\d)[0-9a-fA-F-]{8,}\b|\d+")
_HANG_SECONDS = re.compile(r"no rank made progress for [\d.e+]+ s")
_COLLECTIVE_NUMBER = re.compile(r"(?<=\w) #\d+")


def make_fingerprints(failed: AttemptFailures) -> list[FailureFingerprint]:
    """Return the fingerprints of the failures of an attempt, in the same order.

    They are empty if the failures are never retried, or are no failures of ranks.
    """
    if failed.cause not in ("worker", "hang", "preemption"):
        return []
    workers = failed.workers
    num_nodes = len({worker.node_id for worker in workers})
    fingerprints = []
    for failure in failed.failures:
        # After a failed recovery in place, the rank has another process, maybe on another node.
        has_worker = failure.rank >= 0 and not failure.node_id
        worker: WorkerInfo | WorkerFailure = workers[failure.rank] if has_worker else failure
        nature = "preemption" if failed.cause == "preemption" else find_nature(failure)
        since = failed.last_report_times.get(failure.rank, failure.time)
        fingerprints.append(
            FailureFingerprint(
                rank=failure.rank,
                nature=nature,
                error=_describe_error(failure, nature),
                location=_find_location(failure, nature),
                report_index=failed.first_report_index + failure.num_reports,
                num_batches=failure.num_batches,
                num_reports=failure.num_reports,
                seconds=max(failure.time - since, 0.0),
                world_size=len(workers),
                num_nodes=num_nodes,
                node_id=worker.node_id,
                hostname=worker.hostname,
                pid=failure.pid,
                data_position=failure.data_position,
                is_missing_file=failure.builtin_type in _MISSING_FILE_TYPES,
                is_code_error=failure.builtin_type in _NEVER_TEMPORARY,
            )
        )
    return fingerprints


def find_nature(failure: WorkerFailure) -> FailureNature:
    """Return the kind of a single failure."""
    if _TEMPORARY_EXIT.match(f"{failure.type_name}: {failure.message}"):
        return "temporary"
    match failure.kind:
        case "hang":
            return "hang"
        case "died":
            return _find_nature_of_death(failure.message)
        case "exit":
            return "exit"
    types = {failure.type_name, failure.builtin_type, *_CHAINED_TYPE.findall(failure.traceback)}
    text = failure.message
    if _DISK_TEXTS.search(text):
        return "full_disk"
    if any(map(_MEMORY_TYPES.search, types)) or _MEMORY_TEXTS.search(text):
        return "out_of_memory"
    if _HARDWARE_TEXTS.search(text):
        return "hardware"
    has_network_text = bool(_NETWORK_TEXTS.search(text)) and failure.builtin_type not in _CODE_TYPES
    if has_network_text or any(map(_NETWORK_TYPES.search, types)):
        return "network"
    if failure.builtin_type in _SYSTEM_TYPES and text.startswith("[Errno "):
        return "hardware"  # such as EIO: the code did not cause it
    return "exception"


def _find_nature_of_death(message: str) -> FailureNature:
    if _MEMORY_TEXTS.search(message):
        return "out_of_memory"
    killed = _SIGNAL.match(message)
    if killed:
        return "crash" if killed[1] in _CRASH_SIGNALS else "killed"
    return "exit" if message.startswith("exited with code") else "killed"


def _describe_error(failure: WorkerFailure, nature: FailureNature) -> str:
    if nature == "hang":
        message = failure.message.partition("\nstacks:")[0]
        # After a restart, the same collective has another number.
        return _COLLECTIVE_NUMBER.sub("", _HANG_SECONDS.sub("no progress", message))
    if failure.kind == "died":
        killed = _SIGNAL.match(failure.message)
        return killed[0] if killed else failure.message.splitlines()[0]
    if failure.kind == "exit":
        return f"{failure.type_name}: {failure.message}"  # the exit code is significant
    message = _VARYING.sub("#", failure.message.strip())[:_MAX_ERROR_CHARS]
    return f"{failure.type_name}: {message}"


def _find_location(failure: WorkerFailure, nature: FailureNature) -> str:
    if nature != "crash" or failure.location:
        return failure.location
    # faulthandler writes the innermost frame first; the crashed thread comes first, too.
    stack = failure.message.partition("\n\n")[2].partition("\n\n")[0]
    frames = [(file, int(line), name) for file, line, name in _CRASH_FRAME.findall(stack)]
    return format_user_location(frames[::-1])
