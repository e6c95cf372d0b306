"""The chat page: one page and its files, as they are."""

import mimetypes
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.responses import FileResponse, Response

STATIC = Path(__file__).parents[1] / "static"
# Everything comes from this server, and no other page may frame it.
_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"

router = APIRouter()


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page itself; it asks for an API key where one is needed."""
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return FileResponse(STATIC / "index.html", media_type="text/html", headers=headers)


def mount(app: FastAPI) -> None:
    """Serve its files below /static."""
    # Some machines call .js text/plain, and a browser runs no module of that type.
    for ending, kind in ((".js", "text/javascript"), (".css", "text/css"), (".svg", "image/svg+xml")):
        mimetypes.add_type(kind, ending)
    app.mount("/static", StaticFiles(directory=STATIC))
