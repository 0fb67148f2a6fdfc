"""Tests of _protocol: encoding of messages and commands."""

from __future__ import annotations

import math
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import cloudpickle
import pytest

from benchmarks._random_messages import describe, draw
from drawbar import train
from drawbar._modes.torchrun_messages import (
    COMMANDS,
    HELLO,
    MESSAGES,
    PeerCommand,
    PeerHello,
    PeerMessage,
)
from drawbar._process.codec import Codec, ProtocolError
from drawbar._process.output_lines import OutputLine
from drawbar._process.serialization import MIN_SHARED_BYTES, Serialized, serialize
from drawbar.train._protocol.commands import Command
from drawbar.train._protocol.messages import (
    MESSAGE_BATCHES,
    FileChunk,
    Message,
    RankFinished,
    Report,
    WorkerDied,
)
from tests.train.test_unpickling_safety import Bomb

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

DRAWS = 100
CODECS: dict[Any, Codec[Any]] = {
    PeerHello: HELLO,
    **dict.fromkeys(get_args(PeerMessage), MESSAGES),
    **dict.fromkeys(get_args(PeerCommand), COMMANDS),
}
"""Codec of each type of message and command."""


def make_report(value: object) -> Report:
    return Report(index=0, metrics={"value": value}, time=0.0, location="")


@pytest.mark.parametrize("message_type", CODECS, ids=lambda message_type: message_type.__name__)
def test_codec_random_message_is_decoded_unchanged(message_type: Any) -> None:
    rng, codec = random.Random(message_type.__name__), CODECS[message_type]
    for _ in range(DRAWS):
        message = draw(rng, message_type)
        assert describe(codec.decode(codec.encode(message))) == describe(message)


@pytest.mark.parametrize("value", [2**63, 2**64, -(2**63) - 1, 10**4000, -(10**400), math.inf])
def test_codec_metric_of_any_size_is_decoded_unchanged(value: float) -> None:
    message = make_report(value)
    assert MESSAGES.decode(MESSAGES.encode(message)) == message


@pytest.mark.parametrize("text", ["\udc80", "a\ud83d", "漢\udcffß"])
def test_codec_invalid_unicode_is_decoded_unchanged(text: str) -> None:
    messages: list[Message] = [OutputLine(text=text), make_report({text: {text: [text]}})]
    codec = Codec[list[Message]](list[Message])
    assert codec.decode(codec.encode(messages)) == messages


def test_codec_unsupported_object_raises_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="Report cannot be encoded: PosixPath"):
        MESSAGES.encode(make_report(Path("file")))


def test_codec_message_of_the_controller_itself_is_rejected() -> None:
    data = Codec[WorkerDied](WorkerDied).encode(WorkerDied(detail="", time=0.0))
    with pytest.raises(ProtocolError):
        MESSAGES.decode(data)


def test_codec_path_outside_checkpoint_is_rejected() -> None:
    chunk = FileChunk(request_id=0, checkpoint_name="a", path="x/y", offset=0, data=b"")
    data = MESSAGES.encode(chunk)
    with pytest.raises(ProtocolError, match="not a valid path"):
        MESSAGES.decode(data.replace(b"x/y", b"../"))


def test_codec_attachments_are_sent_beside_message_and_decoded_unchanged() -> None:
    reference, body, buffer = object(), bytes(MIN_SHARED_BYTES), b"buffer"
    payload = Serialized(body, [buffer], [reference])
    batch: list[Message] = [make_report(2**64), RankFinished(time=0.0, return_value=payload)]
    value: Any = MESSAGE_BATCHES.encode_for_ray(batch)
    assert len(value[0]) < 1000
    decoded: Any = MESSAGE_BATCHES.decode_from_ray(value)[1]
    received: list[Any] = []
    decoded.return_value.to_parts(received)
    assert [bytes(received[0]), bytes(received[1])] == [body, buffer]
    assert received[2] is reference


def test_codec_message_without_attachments_is_sent_as_bytes() -> None:
    batch: list[Message] = [RankFinished(time=0.0, return_value=serialize([1]))]
    data = MESSAGE_BATCHES.encode_for_ray(batch)
    assert isinstance(data, bytes)
    assert describe(MESSAGE_BATCHES.decode_from_ray(data)) == describe(batch)


def test_codec_missing_attachment_raises_protocol_error() -> None:
    message = RankFinished(time=0.0, return_value=Serialized(b"", [b"x"]))
    value: Any = MESSAGES.encode_for_ray(message)
    with pytest.raises(ProtocolError):
        MESSAGES.decode(value[0])
    with pytest.raises(ProtocolError):
        MESSAGES.decode_from_ray((value[0], []))


def test_codec_command_and_message_have_different_types() -> None:
    assert not set(get_args(Command)) & set(get_args(Message))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,  # nested too deeply
        b"\xdd\xff\xff\xff\xff",  # 4 billion items, none of which follow
        b"\xc7\x01\x09x",  # unknown extension
        b"\xc7\x02\x03\x91\x90",  # mapping without pairs
        b"\x81\xa4type\xa6Report",
    ],
)
def test_codec_malformed_data_raises_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="no valid message"):
        MESSAGES.decode(data)


def test_codec_pickle_bomb_is_rejected_and_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "exploded"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ProtocolError):
            MESSAGES.decode(pickle.dumps(Bomb(marker), protocol))
    assert not marker.exists()


def forbid_pickling(struct: type, patch: Callable[..., object] = setattr) -> None:
    """Let an instance of a struct raise when this process pickles it."""

    def fail(self: object) -> None:
        raise AssertionError(f"{type(self).__name__} is pickled")

    patch(struct, "__reduce__", fail)


@pytest.mark.usefixtures("ray_cluster")
def test_messages_and_commands_of_ray_workers_are_not_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function() -> list[str]:
        for struct in get_args(Message):
            forbid_pickling(struct)
        with train.checkpoint_dir() as path:
            (path / "model").touch()
            train.report({"loss": 1.0}, checkpoint=path)
        values: list[str] = train.collective.all_gather("value")
        return values

    for struct in get_args(Command):
        forbid_pickling(struct, monkeypatch.setattr)
    result = train.DataParallelTrainer(
        function,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=tmp_path),
    ).fit()
    assert result.return_values == [["value"] * 2] * 2
    assert result.checkpoint is not None
