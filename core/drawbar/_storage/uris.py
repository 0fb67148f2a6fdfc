"""Convert between URIs and paths.

Paths in pyarrow's URIs are percent-encoded and followed by an optional query, as in
`s3://bucket/my%20runs?region=us-east-1`. fsspec's URIs contain the path unchanged.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote, urlsplit

# Characters that a path in a URI may contain, in addition to letters and digits.
_SAFE_CHARACTERS = "/!$&'()*+,;=:@"


def quote_path(path: str) -> str:
    """Return a path as a percent-encoded part of a URI."""
    return quote(path, safe=_SAFE_CHARACTERS, errors="surrogateescape")


def quote_uri(uri: str) -> str:
    """Percent-encode the characters of a URI's path that a URI cannot contain.

    Percent-encoded characters stay unchanged. A "?" begins the query.
    """
    start, mark, query = uri.partition("?")
    scheme, _, rest = start.partition("://")
    authority, slash, path = rest.partition("/")
    path = re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", path)
    path = quote(path, safe=f"{_SAFE_CHARACTERS}%", errors="surrogateescape")
    return f"{scheme}://{authority}{slash}{path}{mark}{query}"


def unquote_path(uri: str) -> str:
    """Return the decoded path of one of pyarrow's URIs, with its bucket or host."""
    return unquote(uri.partition("://")[2].partition("?")[0], errors="surrogateescape")


def get_local_path(uri: str) -> str:
    """Return the path of a `file://` URI, in which "#" and "?" may be unquoted."""
    path = urlsplit(uri.replace("#", "%23").replace("?", "%3F")).path
    return unquote(path, errors="surrogateescape")


def join_uri(uri: str, name: str, *, is_quoted: bool) -> str:
    """Return the URI of a file or directory in the directory of a URI."""
    base, query = _split(uri, is_quoted=is_quoted)
    return f"{base}/{quote_path(name) if is_quoted else name}{query}"


def get_parent_uri(uri: str, *, is_quoted: bool) -> str:
    """Return the URI of the parent directory."""
    base, query = _split(uri, is_quoted=is_quoted)
    return f"{base.rpartition('/')[0]}{query}"


def _split(uri: str, *, is_quoted: bool) -> tuple[str, str]:
    base, mark, query = uri.partition("?") if is_quoted else (uri, "", "")
    return base if base.endswith("://") else base.rstrip("/"), f"{mark}{query}"
