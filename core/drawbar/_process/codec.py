"""Encode messages and commands as msgpack.

Decoding creates only the expected types and never executes code of the sender. User objects stay
`Serialized`. Ray sends their references and large buffers as attachments next to the encoded data;
no other connection can send references. msgpack has no integers beyond 64 bits and only valid
Unicode, so these values are encoded as msgpack extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from drawbar._base.wording import is_encodable
from drawbar._process.serialization import Serialized, SerializedParts

T = TypeVar("T")

RayValue = bytes | tuple[bytes, list[object]]
"""Encoded message, alone or with attachments. Ray sends bytes as they are, without pickling."""

_BIG_INTEGER = 1
_INVALID_UNICODE = 2
_MAPPING = 3


class ProtocolError(RuntimeError):
    """A message cannot be sent, or received data is no valid message."""


class Codec(Generic[T]):
    """Encoder and decoder of messages.

    Args:
        message_type: Type of the messages, or a union of tagged structs.
    """

    def __init__(self, message_type: Any) -> None:
        self._message_type = message_type
        self._encode_hook = partial(_encode_serialized, None)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_hook)
        self._decode_hook = partial(_decode_serialized, ())
        self._decoder = self._make_decoder(self._decode_hook)

    def _make_decoder(
        self, decode_hook: Callable[[type, Any], object]
    ) -> msgspec.msgpack.Decoder[T]:
        return msgspec.msgpack.Decoder(
            self._message_type, dec_hook=decode_hook, ext_hook=_decode_extension
        )

    def encode(self, message: T) -> bytes:
        """Return a message as bytes. References to Ray objects are replaced by descriptions.

        Raises:
            ProtocolError: The message contains an object that cannot be encoded.
        """
        return self._encode(message, self._encoder, self._encode_hook)

    def encode_for_ray(self, message: T) -> RayValue:
        """Return a message as a value for Ray, with attachments if it has user objects with any.

        Raises:
            ProtocolError: The message contains an object that cannot be encoded.
        """
        attachments: list[object] = []
        encode_hook = partial(_encode_serialized, attachments)
        encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)  # takes less than 1 us
        data = self._encode(message, encoder, encode_hook)
        return (data, attachments) if attachments else data

    def _encode(
        self, message: T, encoder: msgspec.msgpack.Encoder, encode_hook: Callable[[object], object]
    ) -> bytes:
        try:
            try:
                return encoder.encode(message)
            except (OverflowError, UnicodeEncodeError):
                # Attachments of the first try are sent in vain: the new indexes follow theirs.
                builtins = msgspec.to_builtins(
                    message, builtin_types=(bytes, bytearray, memoryview), enc_hook=encode_hook
                )
                return msgspec.msgpack.encode(_make_extensions(builtins))
        except Exception as error:
            name = type(message).__name__
            raise ProtocolError(f"{name} cannot be encoded: {error}") from error

    def decode(self, data: bytes | bytearray) -> T:
        """Return the message that `encode` has encoded.

        Raises:
            ProtocolError: The data is no message of the expected type.
        """
        return self._decode(data, self._decoder, self._decode_hook)

    def decode_from_ray(self, value: RayValue) -> T:
        """Return the message that `encode_for_ray` has encoded.

        Raises:
            ProtocolError: The value is no message of the expected type.
        """
        if isinstance(value, bytes):
            return self.decode(value)
        data, attachments = value
        decode_hook = partial(_decode_serialized, attachments)
        return self._decode(data, self._make_decoder(decode_hook), decode_hook)

    def _decode(
        self,
        data: bytes | bytearray,
        decoder: msgspec.msgpack.Decoder[T],
        decode_hook: Callable[[type, Any], object],
    ) -> T:
        # All exceptions, because `__post_init__` of a struct may raise any of them.
        try:
            try:
                return decoder.decode(data)
            except msgspec.ValidationError:
                # An extension may represent a string or dict, which the typed decoder rejects.
                decoded = msgspec.msgpack.decode(data, ext_hook=_decode_extension)
                message: T = msgspec.convert(decoded, self._message_type, dec_hook=decode_hook)
                return message
        except Exception as error:
            raise ProtocolError(f"received data is no valid message: {error}") from error


def _encode_serialized(attachments: list[object] | None, value: object) -> object:
    if isinstance(value, Serialized):
        body, buffers, references = value.to_parts(attachments)
        return (body, buffers, references) if buffers or references else body
    raise TypeError(f"{type(value).__qualname__} is not supported")


def _decode_serialized(attachments: Sequence[object], expected: type, value: Any) -> object:
    if expected is Serialized:
        if type(value) is bytes:  # fast, because a result of `all_gather` has one from each rank
            return Serialized(value)
        parts = (value, (), ()) if type(value) is int else msgspec.convert(value, SerializedParts)
        return Serialized.from_parts(parts, attachments)
    return value  # a field of type `object`


def _make_extensions(value: object) -> object:
    """Replace values that msgpack does not support by extensions."""
    if type(value) is int and not -(2**63) <= value < 2**64:
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_BIG_INTEGER, value.to_bytes(size, "big", signed=True))
    if isinstance(value, str) and not is_encodable(value):
        return msgspec.msgpack.Ext(_INVALID_UNICODE, value.encode(errors="surrogatepass"))
    if isinstance(value, list | tuple):
        return [_make_extensions(item) for item in value]
    if isinstance(value, dict):
        pairs = [(_make_extensions(key), _make_extensions(item)) for key, item in value.items()]
        if any(isinstance(key, msgspec.msgpack.Ext) for key, _ in pairs):
            return msgspec.msgpack.Ext(_MAPPING, msgspec.msgpack.encode(pairs))
        return dict(pairs)
    return value


def _decode_extension(code: int, data: memoryview) -> object:
    if code == _BIG_INTEGER:
        return int.from_bytes(data, "big", signed=True)
    if code == _INVALID_UNICODE:
        return str(data, errors="surrogatepass", encoding="utf-8")
    if code == _MAPPING:
        return dict(msgspec.msgpack.decode(data, ext_hook=_decode_extension))
    raise ValueError(f"unknown extension {code}")
