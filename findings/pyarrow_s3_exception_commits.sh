#!/usr/bin/env bash
# Library: pyarrow 26.0.1, moto 5.2.5 (a local S3 server).
# Guess: if an exception leaves `with S3FileSystem().open_output_stream(...)`, nothing is stored. S3
#   stores an object only when the upload is completed, and a multipart upload can be aborted.
# Behaviour: the end of the `with` block completes the upload also after an exception. The
#   truncated object replaces the earlier complete object of the same name. This is the same for
#   a multipart upload of 12 MiB.
# Output:
#   before: 100 bytes
#   after an exception in a small upload: 10 bytes
#   after an exception in a multipart upload: 12582912 bytes
# Why it matters: an error while a checkpoint is being written destroys the last good checkpoint of
#   this name, and the new object looks valid.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pyarrow==26.0.1" "moto[server]==5.2.5"
cd "$folder"
AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test AWS_EC2_METADATA_DISABLED=true \
    venv/bin/python - <<'PROGRAM'
import logging

from moto.server import ThreadedMotoServer
from pyarrow.fs import S3FileSystem

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
store = S3FileSystem(
    endpoint_override=f"{host}:{port}",
    scheme="http",
    region="us-east-1",
    allow_bucket_creation=True,
)
store.create_dir("checkpoints")
with store.open_output_stream("checkpoints/model.bin") as stream:
    stream.write(b"x" * 100)


def read_size(name):
    size = store.get_file_info("checkpoints/model.bin").size
    print(f"{name}: {size} bytes")
    return size


def write_and_fail(data):
    try:
        with store.open_output_stream("checkpoints/model.bin") as stream:
            stream.write(data)
            raise RuntimeError("The rest of the checkpoint cannot be serialized.")
    except RuntimeError:
        pass


assert read_size("before") == 100
write_and_fail(b"y" * 10)
assert read_size("after an exception in a small upload") == 10
write_and_fail(b"y" * (12 << 20))
assert read_size("after an exception in a multipart upload") == 12 << 20
server.stop()
PROGRAM
