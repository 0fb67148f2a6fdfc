"""Rules for the requests that a server accepts."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
        "object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # with "no-referrer", browsers may send "Origin: null"
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers of every reply."""


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass
class AccessRules:
    """Rules of a server: its `Host` allow-list and its token.

    Attributes:
        host: Address on which the server listens.
        port: Port of the server.
        token: Token for POST requests and, unless only this machine can reach the server, for all
            requests.
    """

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def needs_token(self) -> bool:
        """True if GET requests need the token too."""
        return not is_loopback(self.host)

    @property
    def cookie_name(self) -> str:
        """Name of the cookie with the token. Cookies do not depend on the port."""
        return f"drawbar_{self.port}"

    def is_allowed_host(self, header: str | None) -> bool:
        """Return True if a `Host` header names this server, which prevents DNS rebinding."""
        name, _, port = (header or "").rpartition(":")
        if port != str(self.port):
            return False
        own = {*_LOOPBACK_NAMES, self.host, f"[{self.host}]"}
        if not self.needs_token:
            return name.lower() in own
        if name.lower() in {*own, socket.gethostname().lower(), socket.getfqdn().lower()}:
            return True
        try:  # an address is no name that an attacker could point to this server
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def has_token(self, cookie_header: str | None, query_token: str | None) -> bool:
        """Return True if a request has the token, in its cookie or its URL."""
        cookie = ""
        try:
            if morsel := SimpleCookie(cookie_header or "").get(self.cookie_name):
                cookie = morsel.value
        except CookieError:
            pass
        candidates = (cookie, query_token or "")
        return any(
            hmac.compare_digest(each.encode(errors="replace"), self.token.encode())
            for each in candidates
        )

    def is_allowed_post(self, headers: Message) -> bool:
        """Return True if a POST request comes from a page of this server that has the token."""
        if not self.has_token(headers.get("Cookie"), None):
            return False
        # Other sites cannot set this header without a permission that the server never gives.
        if headers.get("X-Drawbar") != "1":
            return False
        if headers.get("Sec-Fetch-Site") not in (None, "same-origin"):
            return False
        try:  # browsers send an Origin header with each POST request
            return urlsplit(headers.get("Origin", "")).netloc == headers.get("Host")
        except ValueError:
            return False
