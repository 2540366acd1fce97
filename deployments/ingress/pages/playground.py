"""One page to compare adapters side by side, over the public API alone."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class Page:
    """The playground; its headers forbid requests to other servers."""

    def __init__(self) -> None:
        self._text = (
            files("deployments.ingress.pages").joinpath("playground.html").read_text("utf-8")
        )
        parts = inline_digests(self._text)
        self._policy = "; ".join(
            [
                "default-src 'none'",
                f"style-src {parts['style']}",
                f"script-src {parts['script']}",
                "connect-src 'self'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            ]
        )

    def response(self) -> Response:
        """The page itself."""
        headers = {
            "Cache-Control": "no-cache",
            "Content-Security-Policy": self._policy,
            "Referrer-Policy": "no-referrer",
            "Vary": "Accept",
            "X-Content-Type-Options": "nosniff",
        }
        return HTMLResponse(self._text, headers=headers)


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
