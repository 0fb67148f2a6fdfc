"""Storage that fails now and then: what is tried again, how often, and how the rest is told."""

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

# How the object stores word it: pyarrow gives S3's errors as an OSError without a number.
_TRANSIENT_TEXT = re.compile(
    r"slow_?down|throttl|too ?many ?requests|service_?unavailable|internal_?(failure|error)"
    r"|request_?timeout|timed? ?out|network_connection|connection (reset|refused|aborted)"
    r"|\b(http|status|code|response)\D{0,20}(429|500|502|503|504)\b",
    re.IGNORECASE,
)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may well work in a moment.

    A disk's own read or write error (EIO), a full disk and a refused permission are not: trying
    again would only hide them.
    """
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if not isinstance(error, OSError):
        return False
    # The number says all: such an error's text may have a path in it that reads like a failure.
    if error.errno is not None:
        return error.errno in _TRANSIENT_ERRNOS
    return _TRANSIENT_TEXT.search(str(error)) is not None


def retry_transient(action: Callable[[], T], description: str) -> T:
    """Do it, and again after 0.1, 0.2, 0.4 ... seconds while it fails transiently, 6 times in all.

    The first failure is logged; `what` says in words what is being done, with path and bytes.

    Raises:
        OSError: It failed in another way, or too often. The message begins with `what`.
    """
    for number in range(1, MAX_TRIES + 1):
        try:
            return action()
        except FileNotFoundError:
            raise  # an answer rather than a failure
        except OSError as error:
            if number == MAX_TRIES or not is_transient(error):
                raise add_context(error, description, tries=number) from error
            if number == 1:
                _logger.warning("%s failed and is tried again: %s", description, error)
        time.sleep(INITIAL_DELAY_S * 2 ** (number - 1))
    raise AssertionError("the last try returns or raises")


def add_context(error: OSError, what: str, *, tries: int = 1) -> OSError:
    """Give the error as one of the same kind that says what was being done."""
    times = f" {tries} times" if tries > 1 else ""
    reason = error.strerror or str(error) or type(error).__name__
    text = f"{what} failed{times}: {reason}"
    return OSError(error.errno, text) if error.errno is not None else OSError(text)


@contextmanager
def warn_if_slow(what: str) -> Iterator[None]:
    """Log that `what` is still going on, every 30 seconds."""
    done = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        while not done.wait(SLOW_WARNING_PERIOD_S):
            _logger.warning("%s takes long: %.0f s so far", what, time.monotonic() - began)

    thread = threading.Thread(target=watch, name="drawbar-slow-storage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
