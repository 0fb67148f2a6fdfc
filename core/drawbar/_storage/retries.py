"""Retry transient storage errors with exponential backoff."""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

MAX_TRIES = 6
INITIAL_DELAY_S = 0.1
SLOW_WARNING_PERIOD_S = 30.0

_logger = logging.getLogger("drawbar.train")

_TRANSIENT_ERRNOS = {
    errno.EAGAIN,
    errno.EINTR,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.EPIPE,
}

# Messages of object stores: pyarrow raises S3's errors as an OSError without an errno.
_TRANSIENT_TEXT = re.compile(
    r"slow_?down|throttl|too ?many ?requests|service_?unavailable|internal_?(failure|error)"
    r"|request_?timeout|timed? ?out|network_connection|connection (reset|refused|aborted)"
    r"|\b(http|status|code|response)\D{0,20}(429|500|502|503|504)\b",
    re.IGNORECASE,
)


def is_transient(error: BaseException) -> bool:
    """Return True if a retry of the same call may succeed.

    Disk errors (EIO), full disks, and missing permissions are not transient, and a retry would only
    hide them.
    """
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if not isinstance(error, OSError):
        return False
    # Do not match the text if there is an errno: a path in it can look like a transient error.
    if error.errno is not None:
        return error.errno in _TRANSIENT_ERRNOS
    return _TRANSIENT_TEXT.search(str(error)) is not None


def retry_transient(action: Callable[[], T], description: str) -> T:
    """Call a function, and retry it up to 5 times after transient errors with growing delays.

    The delays are 0.1, 0.2, 0.4, ... seconds. The first failure is logged.

    Args:
        action: Function to call.
        description: Operation with path and size, such as "writing 12 bytes to s3://b/x".

    Raises:
        OSError: The error is not transient, or the last try failed. The message begins with
            `description`.
    """
    for attempt in range(1, MAX_TRIES + 1):
        try:
            return action()
        except FileNotFoundError:
            raise  # a result, not a failure
        except OSError as error:
            if attempt == MAX_TRIES or not is_transient(error):
                raise add_context(error, description, tries=attempt) from error
            if attempt == 1:
                _logger.warning("%s failed and will be retried: %s", description, error)
        time.sleep(INITIAL_DELAY_S * 2 ** (attempt - 1))
    raise AssertionError("the last try returns or raises")


def add_context(error: OSError, description: str, *, tries: int = 1) -> OSError:
    """Return an error with the same errno whose message describes the operation."""
    times = f" {tries} times" if tries > 1 else ""
    reason = error.strerror or str(error) or type(error).__name__
    text = f"{description} failed{times}: {reason}"
    return OSError(error.errno, text) if error.errno is not None else OSError(text)


@contextmanager
def warn_if_slow(description: str) -> Iterator[None]:
    """Log a warning every 30 seconds while the operation is in progress."""
    done = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        while not done.wait(SLOW_WARNING_PERIOD_S):
            _logger.warning("%s is slow: %.0f s so far", description, time.monotonic() - began)

    thread = threading.Thread(target=watch, name="drawbar-slow-storage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
