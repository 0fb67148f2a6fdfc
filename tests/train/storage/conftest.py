"""Fixtures for tests of remote storage: an S3 server on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyarrow.fs import S3FileSystem


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Run an S3 server on a free port of this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def s3(s3_port: int) -> S3FileSystem:
    """Return a filesystem with a bucket `bucket`."""
    filesystem = S3FileSystem(
        access_key="key",
        secret_key="secret",
        endpoint_override=f"127.0.0.1:{s3_port}",
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    )
    filesystem.create_dir("bucket")
    return filesystem
