"""One page to compare adapters side by side, over the public API alone."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class Page:
    """The playground."""

    def __init__(self) -> None:
        self._text = read_page("playground.html")
        own = inline_digests(self._text)
        self._headers = {
            **page_headers(own["style"], own["script"], images="data:"),
            "Referrer-Policy": "no-referrer",
            "Vary": "Accept",
        }

    def response(self) -> Response:
        """The page itself."""
        return HTMLResponse(self._text, headers=self._headers)


def read_page(name: str) -> str:
    """The text of a page in this folder."""
    return files("deployments.ingress.pages").joinpath(name).read_text("utf-8")


def page_headers(styles: str, scripts: str, images: str) -> dict[str, str]:
    """Headers of a page with these sources; they forbid requests to other servers."""
    policy = {
        "default-src": "'none'",
        "style-src": styles,
        "script-src": scripts,
        "connect-src": "'self'",
        "img-src": images,
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(f"{key} {value}" for key, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
    }


def inline_digests(page: str) -> dict[str, str]:
    """The sources of a page's inline `style` and `script` in a Content-Security-Policy."""
    return {kind: _digest(inline) for kind, inline in _INLINE.findall(page)}


def _digest(inline: str) -> str:
    digest = hashlib.sha256(inline.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def accepts_html(request: Request) -> bool:
    """Whether the client is a browser that navigates to the page."""
    return "text/html" in request.headers.get("accept", "")


def routes(page: Page) -> APIRouter:
    """The page's route; browsers get the page at / too."""
    router = APIRouter()

    @router.get("/playground", include_in_schema=False)
    async def playground() -> Response:
        return page.response()

    return router
