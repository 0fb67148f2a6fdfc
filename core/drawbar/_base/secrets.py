"""Redact secrets from settings before they are stored or shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence

REDACTED = "<secret>"

# Lengths are bounded and matches begin at a word boundary: a config may hold megabytes of text.
_SECRET_KEY = (
    r"[\w-]{0,80}(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credential|authorization)s?"
    r"(?:[_-]?(?:\d{1,3}|one|two|three|old|new))?"
)
_SECRET_KEY_PATTERN = re.compile(_SECRET_KEY, re.IGNORECASE)
_ANY_KEY = r"[\w-]{0,80}key(?:[_-]?\d{1,3})?"
_ANY_KEY_PATTERN = re.compile(_ANY_KEY, re.IGNORECASE)
# Generated keys, such as 40 hexadecimal digits, but no words, paths, or numbers.
_GENERATED_PATTERN = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w+=-]{16,}")
_ASSIGNMENT_PATTERN = re.compile(
    rf"(?i)(?<![\w-])((?:{_SECRET_KEY}|{_ANY_KEY})['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,)}}\]]+)"
)
_CREDENTIAL_PAIR_KEYS = ("auth", "basic_auth", "http_auth")  # (user, password)
_URL_PASSWORD_PATTERN = re.compile(r"\b(\w+://[^\s/:@'\"]*:)[^\s/@'\"]+@")
_TOKEN_SETTING_PATTERN = re.compile(
    r"(?i)(?:num|max|min|n|pad|bos|eos|unk|mask|sep|cls)_\w*tokens?(?:_id)?s?"
)


def redact_settings(
    settings: Mapping[str, object], secret_keys: Collection[str] = ()
) -> dict[str, str]:
    """Return the reprs of settings by key, with secrets redacted.

    At any depth, the following are redacted:

    - values of keys in `secret_keys`
    - values, except numbers, bools, and None, of keys that end in a word such as "token", "secret",
      "password", or "api_key", optionally followed by a number
    - values that look like generated keys, if the name of their key ends in "key"
    - passwords in URLs
    - the second item of an "auth" pair

    Args:
        settings: Settings by key.
        secret_keys: Additional keys whose values are redacted.
    """
    return {
        _key_to_text(key): _format_redacted(_key_to_text(key), value, secret_keys)
        for key, value in settings.items()
    }


def _format_redacted(key: str, value: object, secret_keys: Collection[str]) -> str:
    redacted = _redact_value(key, value, secret_keys)
    return REDACTED if redacted is REDACTED else redact_text(repr(redacted))


def _key_to_text(key: object) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)


def _redact_value(key: str, value: object, secret_keys: Collection[str]) -> object:
    if key in secret_keys or (is_secret_key(key) and not isinstance(value, int | float | None)):
        return REDACTED
    if isinstance(value, str) and _is_generated_key(key, value):
        return REDACTED
    # Only these exact types: the constructor of a subclass may take other arguments.
    if type(value) is dict:
        return {k: _redact_value(_key_to_text(k), v, secret_keys) for k, v in value.items()}
    if type(value) is list or type(value) is tuple:
        is_pair = key.lower() in _CREDENTIAL_PAIR_KEYS and len(value) == 2
        items = (
            [value[0], REDACTED] if is_pair else [_redact_value("", v, secret_keys) for v in value]
        )
        return type(value)(items)
    return value


def redact_arguments(arguments: Sequence[str], secret_keys: Collection[str] = ()) -> str:
    """Return the text of a command, with the options redacted that `redact_settings` redacts.

    Args:
        arguments: The command. Options are `--name value` or `--name=value`.
        secret_keys: Additional names of options whose values are redacted.

    Returns:
        The text, quoted for a shell.

    Example:
        >>> redact_arguments(["train.py", "--hf-token", "abc"])
        'train.py --hf-token <secret>'
    """
    texts = []
    option = ""  # that the next argument is the value of
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            texts.append(_redact_argument(option, argument, secret_keys))
            option = ""
        elif equals:
            texts.append(f"{name}={_redact_argument(name, value, secret_keys)}")
            option = ""
        else:
            texts.append(shlex.quote(argument))
            option = argument
    return " ".join(texts)


def _redact_argument(option: str, value: str, secret_keys: Collection[str]) -> str:
    key = option.lstrip("-").replace("-", "_")
    redacted = _redact_value(key, value, secret_keys)
    return REDACTED if redacted is REDACTED else redact_text(shlex.quote(value))


def redact_text(text: str) -> str:
    """Redact secrets in a text, such as the repr of a dataclass of settings."""

    def redact(match: re.Match[str]) -> str:
        name = re.split(r"['\"\s=:]", match[1])[0]
        is_number = re.fullmatch(r"[-+\d.eE]+|True|False|None", match[2])
        is_secret = is_secret_key(name) or _is_generated_key(name, match[2].strip("'\""))
        return match[1] + REDACTED if is_secret and not is_number else match[0]

    return _URL_PASSWORD_PATTERN.sub(rf"\1{REDACTED}@", _ASSIGNMENT_PATTERN.sub(redact, text))


def is_secret_key(key: str) -> bool:
    """Return whether a key names a secret, such as `hf_token`, but not `max_tokens`."""
    return (
        _SECRET_KEY_PATTERN.fullmatch(key) is not None
        and _TOKEN_SETTING_PATTERN.fullmatch(key) is None
    )


def _is_generated_key(key: str, value: str) -> bool:
    """Return whether a value looks like a secret: `wandb_key` with random characters."""
    return (
        _ANY_KEY_PATTERN.fullmatch(key) is not None
        and _GENERATED_PATTERN.fullmatch(value) is not None
    )
