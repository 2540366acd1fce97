"""GET /playground: one page to compare adapters side by side, over the public API alone."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response


def routes() -> APIRouter:
    """The page; it asks nobody but this server."""
    router = APIRouter()
    page = files("deployments.ingress").joinpath("playground.html").read_text("utf-8")

    @router.get("/playground", include_in_schema=False)
    async def playground() -> Response:
        return HTMLResponse(page, headers={"Cache-Control": "no-cache"})

    return router
