"""Values that are not to be written down: pure functions from settings to settings without them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

REDACTED = "<secret>"

# Bounded, as the name of a URL's scheme begins at a word: a config may hold megabytes of text.
_SECRET_KEY = (
    r"[\w-]{0,80}(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credential|authorization)s?"
    r"(?:[_-]?(?:\d{1,3}|one|two|three|old|new))?"
)
_SECRET_KEY_PATTERN = re.compile(_SECRET_KEY, re.IGNORECASE)
_ANY_KEY = r"[\w-]{0,80}key(?:[_-]?\d{1,3})?"
_ANY_KEY_PATTERN = re.compile(_ANY_KEY, re.IGNORECASE)
# What a service gives out, such as 40 hex digits; no word, path or number.
_GENERATED_PATTERN = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w+=-]{16,}")
_ASSIGNMENT_PATTERN = re.compile(
    rf"(?i)(?<![\w-])((?:{_SECRET_KEY}|{_ANY_KEY})['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,)}}\]]+)"
)
_CREDENTIAL_PAIR_KEYS = ("auth", "basic_auth", "http_auth")  # of a user and a password
_URL_PASSWORD_PATTERN = re.compile(r"\b(\w+://[^\s/:@'\"]*:)[^\s/@'\"]+@")
_TOKEN_SETTING_PATTERN = re.compile(
    r"(?i)(?:num|max|min|n|pad|bos|eos|unk|mask|sep|cls)_\w*tokens?(?:_id)?s?"
)


def redact_settings(
    settings: Mapping[str, object], secret_keys: Collection[str] = ()
) -> dict[str, str]:
    """Give settings as reprs, key by key, without what looks like a secret.

    That is the value of a key that is among `names` or ends like "token", "secret", "password" or
    "api_key", perhaps with a number, at any depth, unless it is a number, a bool or None; what a
    service gives out, by its looks, where the key ends like "key"; the password in a URL; and the
    second half of an "auth".
    """
    return {
        _key_to_text(key): _format_redacted(_key_to_text(key), value, secret_keys)
        for key, value in settings.items()
    }


def _format_redacted(key: str, value: object, secret_keys: Collection[str]) -> str:
    shown = _redact_value(key, value, secret_keys)
    return REDACTED if shown is REDACTED else redact_text(repr(shown))


def _key_to_text(key: object) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)


def _redact_value(key: str, value: object, secret_keys: Collection[str]) -> object:
    if key in secret_keys or (is_secret_key(key) and not isinstance(value, int | float | None)):
        return REDACTED
    if isinstance(value, str) and _is_generated_key(key, value):
        return REDACTED
    # Of exactly these types: a subclass may not be made from such arguments.
    if type(value) is dict:
        return {each: _redact_value(_key_to_text(each), value[each], secret_keys) for each in value}
    if type(value) is list or type(value) is tuple:
        is_pair = key.lower() in _CREDENTIAL_PAIR_KEYS and len(value) == 2
        shown = (
            [value[0], REDACTED] if is_pair else [_redact_value("", v, secret_keys) for v in value]
        )
        return type(value)(shown)
    return value


def redact_text(text: str) -> str:
    """Leave secrets out of a text, such as the repr of a dataclass of settings."""

    def hide(match: re.Match[str]) -> str:
        name = re.split(r"['\"\s=:]", match[1])[0]
        plain = re.fullmatch(r"[-+\d.eE]+|True|False|None", match[2])
        secret = is_secret_key(name) or _is_generated_key(name, match[2].strip("'\""))
        return match[1] + REDACTED if secret and not plain else match[0]

    return _URL_PASSWORD_PATTERN.sub(rf"\1{REDACTED}@", _ASSIGNMENT_PATTERN.sub(hide, text))


def is_secret_key(key: str) -> bool:
    """Whether a key names a secret, as `hf_token` does and `max_tokens` does not."""
    return (
        _SECRET_KEY_PATTERN.fullmatch(key) is not None
        and _TOKEN_SETTING_PATTERN.fullmatch(key) is None
    )


def _is_generated_key(key: str, value: str) -> bool:
    """Whether a value is a secret by its looks: a sort_key is none, the random wandb_key is one."""
    return (
        _ANY_KEY_PATTERN.fullmatch(key) is not None
        and _GENERATED_PATTERN.fullmatch(value) is not None
    )
