"""Who calls the gateway: an API key in a header or, for what a page's elements fetch, in a cookie."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from h3stream.errors import UnauthenticatedError

COOKIE = "h3stream_key"
SAFE_METHODS = ("GET", "HEAD")


def key_of(request: Request) -> str | None:
    """The API key that a call carries.

    The cookie serves only to read. What changes something needs the header, which no other site's page can send.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.cookies.get(COOKIE) if request.method in SAFE_METHODS else None


def header_key(request: Request) -> str:
    """The API key in the header of a call. Raises UnauthenticatedError where there is none."""
    if "authorization" not in request.headers or not (key := key_of(request)):
        raise UnauthenticatedError("this call needs the header Authorization: Bearer KEY")
    return key


def keep_key(response: Response, request: Request, key: str) -> None:
    """Lets what the caller's browser fetches by itself carry the key, until the browser is closed."""
    is_encrypted = request.url.scheme == "https"
    response.set_cookie(COOKIE, key, httponly=True, samesite="strict", secure=is_encrypted)


def forget_key(response: Response) -> None:
    """Takes that back."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
