"""The API's reference at /docs: Swagger UI, without files from other servers."""

import asyncio
from importlib.resources import files

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from deployments.ingress.http.responses import json_response
from deployments.ingress.pages.playground import inline_digests, page_headers, read_page

# A package with Swagger UI's files, which FastAPI's own page would load from a CDN.
_PACKAGE = "fastapi_offline"
_PARTS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_ALIAS = "/api-doc/openapi.json"

OPEN_PATHS = frozenset({"/docs", "/openapi.json", _ALIAS, *(f"/docs/{name}" for name in _PARTS)})
"""Paths that need no API key."""


def routes(app: FastAPI) -> APIRouter:
    """The page, its files, and the document at LoRAX's path."""
    router = APIRouter(include_in_schema=False)
    page = read_page("reference.html")
    scripts = f"'self' {inline_digests(page)['script']}"
    # Swagger UI writes style attributes.
    headers = page_headers("'self' 'unsafe-inline'", scripts, "'self' data:")

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
