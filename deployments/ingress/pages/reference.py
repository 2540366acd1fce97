"""The API's reference at /docs: Swagger UI, without files from other servers."""

import asyncio
from importlib.resources import files

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from deployments.ingress.http.responses import json_response
from deployments.ingress.pages.playground import inline_digests

# A package with Swagger UI's files, which FastAPI's own page would load from a CDN.
_PACKAGE = "fastapi_offline"
_PARTS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_ALIAS = "/api-doc/openapi.json"

OPEN_PATHS = frozenset({"/docs", "/openapi.json", _ALIAS, *(f"/docs/{name}" for name in _PARTS)})
"""Paths that need no API key."""


def routes(app: FastAPI) -> APIRouter:
    """The page, its files, and the document at LoRAX's path."""
    router = APIRouter(include_in_schema=False)
    page = files("deployments.ingress.pages").joinpath("reference.html").read_text("utf-8")
    headers = _headers(page)

    @router.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(page, headers=headers)

    @router.get("/docs/{name}")
    async def part(name: str) -> Response:
        if name not in _PARTS:
            raise HTTPException(404)
        path = files(_PACKAGE).joinpath("static", name)
        content = await asyncio.to_thread(path.read_bytes)
        return Response(content, media_type=_PARTS[name])

    @router.get(_ALIAS)
    async def document() -> Response:
        return json_response(app.openapi())

    return router


def _headers(page: str) -> dict[str, str]:
    """The headers of the page; they forbid requests to other servers."""
    policy = [
        "default-src 'none'",
        "style-src 'self' 'unsafe-inline'",  # Swagger UI writes style attributes.
        f"script-src 'self' {inline_digests(page)['script']}",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
    }
