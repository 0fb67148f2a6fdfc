"""Values that are not to be written down: pure functions from settings to settings without them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

HIDDEN = "<secret>"

# Bounded, as the name of a URL's scheme begins at a word: a config may hold megabytes of text.
_NAMES = (
    r"[\w-]{0,80}(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credential|authorization)s?"
    r"(?:[_-]?(?:\d{1,3}|one|two|three|old|new))?"
)
_IS_SECRET = re.compile(_NAMES, re.IGNORECASE)
_KEYS = r"[\w-]{0,80}key(?:[_-]?\d{1,3})?"
_IS_KEY = re.compile(_KEYS, re.IGNORECASE)
# What a service gives out, such as 40 hex digits; no word, path or number.
_IS_RANDOM = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w+=-]{16,}")
_ASSIGNED = re.compile(
    rf"(?i)(?<![\w-])((?:{_NAMES}|{_KEYS})['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,)}}\]]+)"
)
_PAIRS = ("auth", "basic_auth", "http_auth")  # of a user and a password
_IN_URL = re.compile(r"\b(\w+://[^\s/:@'\"]*:)[^\s/@'\"]+@")
_NOT_SECRET = re.compile(r"(?i)(?:num|max|min|n|pad|bos|eos|unk|mask|sep|cls)_\w*tokens?(?:_id)?s?")


def without_secrets(settings: Mapping[str, object], names: Collection[str] = ()) -> dict[str, str]:
    """Give settings as reprs, key by key, without what looks like a secret.

    That is the value of a key that is among `names` or ends like "token", "secret", "password" or
    "api_key", perhaps with a number, at any depth, unless it is a number, a bool or None; what a
    service gives out, by its looks, where the key ends like "key"; the password in a URL; and the
    second half of an "auth".
    """
    return {_text(key): _shown(_text(key), value, names) for key, value in settings.items()}


def _shown(key: str, value: object, names: Collection[str]) -> str:
    shown = _without_secrets(key, value, names)
    return HIDDEN if shown is HIDDEN else cleaned(repr(shown))


def _text(key: object) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)


def _without_secrets(key: str, value: object, names: Collection[str]) -> object:
    if key in names or (looks_secret(key) and not isinstance(value, int | float | None)):
        return HIDDEN
    if isinstance(value, str) and _is_given_out(key, value):
        return HIDDEN
    # Of exactly these types: a subclass may not be made from such arguments.
    if type(value) is dict:
        return {each: _without_secrets(_text(each), value[each], names) for each in value}
    if type(value) is list or type(value) is tuple:
        is_pair = key.lower() in _PAIRS and len(value) == 2
        shown = [value[0], HIDDEN] if is_pair else [_without_secrets("", v, names) for v in value]
        return type(value)(shown)
    return value


def cleaned(text: str) -> str:
    """Leave secrets out of a text, such as the repr of a dataclass of settings."""

    def hide(match: re.Match[str]) -> str:
        name = re.split(r"['\"\s=:]", match[1])[0]
        plain = re.fullmatch(r"[-+\d.eE]+|True|False|None", match[2])
        secret = looks_secret(name) or _is_given_out(name, match[2].strip("'\""))
        return match[1] + HIDDEN if secret and not plain else match[0]

    return _IN_URL.sub(rf"\1{HIDDEN}@", _ASSIGNED.sub(hide, text))


def looks_secret(key: str) -> bool:
    """Whether a key names a secret, as `hf_token` does and `max_tokens` does not."""
    return _IS_SECRET.fullmatch(key) is not None and _NOT_SECRET.fullmatch(key) is None


def _is_given_out(key: str, value: str) -> bool:
    """Whether a value is a secret by its looks: a sort_key is none, the random wandb_key is one."""
    return _IS_KEY.fullmatch(key) is not None and _IS_RANDOM.fullmatch(value) is not None
