"""Files of the front end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STATIC_DIRECTORY = Path(__file__).parent / "_static"
INDEX_FILE = "index.html"

_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class Asset:
    """A file and its content type."""

    data: bytes
    content_type: str


def find_asset(path: str) -> Asset | None:
    """Return the file for the path of a URL, or None. Only files of the front end are returned."""
    name = INDEX_FILE if path == "/" else path.removeprefix("/static/")
    if path not in ("/", f"/static/{name}"):
        return None
    content_type = _CONTENT_TYPES.get(Path(name).suffix)
    if content_type is None or name not in list_assets():
        return None
    return Asset((STATIC_DIRECTORY / name).read_bytes(), content_type)


def list_assets() -> list[str]:
    """Return the relative paths of all files of the front end."""
    return sorted(
        path.relative_to(STATIC_DIRECTORY).as_posix()
        for path in STATIC_DIRECTORY.rglob("*")
        if path.is_file()
    )
