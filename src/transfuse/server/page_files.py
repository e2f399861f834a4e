"""The page at `/`: files built from `web/`, which hold no data and so are open to everybody."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Response

PAGE_FOLDER: Final = Path(__file__).parent / "page"
_INDEX: Final = "index.html"
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no frames, and no requests but to this server.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page.

    Attributes:
        content: of the file.
        headers: that it is sent with, its type among them.
    """

    content: bytes
    headers: Mapping[str, str]


def load_page(folder: Path = PAGE_FOLDER) -> dict[str, PageFile]:
    """The files of the page, by the path that each is served under; files of other types are left out."""
    return {
        "/" if path.name == _INDEX else f"/{path.relative_to(folder).as_posix()}": _read(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in _MEDIA_TYPES
    }


def _read(path: Path) -> PageFile:
    # Names of all files but the index hold a digest of their content, so a name never means anything else.
    cache = "no-cache" if path.name == _INDEX else "public, max-age=31536000, immutable"
    return PageFile(path.read_bytes(), {**_HEADERS, "content-type": _MEDIA_TYPES[path.suffix], "cache-control": cache})


def add_page(app: FastAPI, page: Mapping[str, PageFile]) -> None:
    """Add a route for each file; they are no part of the API's schema."""
    for path, file in page.items():
        app.add_api_route(path, _sender(file), methods=["GET", "HEAD"], include_in_schema=False)


def _sender(file: PageFile) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(file.content, headers=dict(file.headers))

    return send
