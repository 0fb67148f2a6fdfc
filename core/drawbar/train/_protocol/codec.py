"""Encode messages and commands as msgpack.

Decoding creates only the expected types and never executes code of the sender. User objects stay
`Serialized`. msgpack has no integers beyond 64 bits and only valid Unicode, so these values are
encoded as msgpack extensions.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from drawbar.train._serialization import Serialized, SerializedParts

T = TypeVar("T")

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
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_serialized)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            message_type, dec_hook=_decode_serialized, ext_hook=_decode_extension
        )

    def encode(self, message: T) -> bytes:
        """Return a message as bytes.

        Raises:
            ProtocolError: The message contains an object that cannot be encoded.
        """
        try:
            try:
                return self._encoder.encode(message)
            except (OverflowError, UnicodeEncodeError):
                return msgspec.msgpack.encode(_make_extensions(_to_builtins(message)))
        except Exception as error:
            name = type(message).__name__
            raise ProtocolError(f"{name} cannot be encoded: {error}") from error

    def decode(self, data: bytes | bytearray) -> T:
        """Return the message that was encoded.

        Raises:
            ProtocolError: The data is no message of the expected type.
        """
        # All exceptions, because `__post_init__` of a struct may raise any of them.
        try:
            try:
                return self._decoder.decode(data)
            except msgspec.ValidationError:
                # An extension may represent a string or dict, which the typed decoder rejects.
                decoded = msgspec.msgpack.decode(data, ext_hook=_decode_extension)
                message: T = msgspec.convert(
                    decoded, self._message_type, dec_hook=_decode_serialized
                )
                return message
        except Exception as error:
            raise ProtocolError(f"received data is no valid message: {error}") from error


def _encode_serialized(value: object) -> object:
    if isinstance(value, Serialized):
        return value.to_parts()
    raise TypeError(f"{type(value).__qualname__} is not supported")


def _decode_serialized(expected: type, value: Any) -> object:
    if expected is Serialized:
        return Serialized.from_parts(msgspec.convert(value, SerializedParts))
    return value  # a field of type `object`


def _to_builtins(message: object) -> object:
    return msgspec.to_builtins(
        message, builtin_types=(bytes, bytearray, memoryview), enc_hook=_encode_serialized
    )


def _make_extensions(value: object) -> object:
    """Replace values that msgpack does not support by extensions."""
    if type(value) is int and not -(2**63) <= value < 2**64:
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_BIG_INTEGER, value.to_bytes(size, "big", signed=True))
    if isinstance(value, str) and not _is_valid_unicode(value):
        return msgspec.msgpack.Ext(_INVALID_UNICODE, value.encode(errors="surrogatepass"))
    if isinstance(value, list | tuple):
        return [_make_extensions(item) for item in value]
    if isinstance(value, dict):
        pairs = [(_make_extensions(key), _make_extensions(item)) for key, item in value.items()]
        if any(isinstance(key, msgspec.msgpack.Ext) for key, _ in pairs):
            return msgspec.msgpack.Ext(_MAPPING, msgspec.msgpack.encode(pairs))
        return dict(pairs)
    return value


def _is_valid_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode_extension(code: int, data: memoryview) -> object:
    if code == _BIG_INTEGER:
        return int.from_bytes(data, "big", signed=True)
    if code == _INVALID_UNICODE:
        return str(data, errors="surrogatepass", encoding="utf-8")
    if code == _MAPPING:
        return dict(msgspec.msgpack.decode(data, ext_hook=_decode_extension))
    raise ValueError(f"unknown extension {code}")
