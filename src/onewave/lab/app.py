"""The lab's HTTP application: static files, and JSON routes that hand the page's questions to tiles."""

import mimetypes
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from onewave.base.errors import InvalidArgumentError, OnewaveError
from onewave.lab import best_path as search
from onewave.lab import decode, game, profiles
from onewave.lab import launches as programs
from onewave.lab.fields import Fields, json_object
from onewave.lab.guard import Guard, TooLarge, json_response
from onewave.tiles.sim.trace import Trace, compare

STATIC = Path(__file__).parent / "static"
"""The page: HTML, CSS and ES modules, served as they are."""

Answer = Callable[[Mapping[str, Any]], Any]


def _read(given: Mapping[str, Any], name: str) -> Trace:
    return Trace.from_dict(given.get(name))


GETS: dict[str, Answer] = {
    "/api/choices": lambda given: programs.choices(),
    "/api/game": game.overview,
    "/api/orders": game.sweep,
    "/api/chain-orders": programs.chain_sweep,
    "/api/staircase": programs.staircase,
    "/api/chain": programs.chain,
    "/api/chain-matrix": programs.chain_matrix,
    "/api/sample-trace": programs.sample_trace,
    "/api/decode-choices": lambda given: decode.choices(),
    "/api/profile-choices": lambda given: profiles.choices(),
    "/api/profile": profiles.profile,
}
"""Routes answered from the query alone."""

POSTS: dict[str, Answer] = {
    "/api/best": search.best_from,
    "/api/decode": decode.step,
    "/api/decode-plan": decode.plan_file,
    "/api/trace": lambda given: _read(given, "trace").to_dict(),
    "/api/perfetto": lambda given: _read(given, "trace").to_perfetto(),
    "/api/compare": lambda given: {"phases": compare(_read(given, "a"), _read(given, "b"))},
}
"""Routes answered from a JSON object in the body."""


def make_app(names: frozenset[str] = frozenset()) -> ASGIApp:
    """Build the lab's ASGI application. names: host names, beside addresses and localhost, that it answers to."""
    # Some Windows machines call .js text/plain, and a browser runs no module of that type.
    for ending, kind in ((".js", "text/javascript"), (".css", "text/css"), (".svg", "image/svg+xml")):
        mimetypes.add_type(kind, ending)
    # The interactive documentation would load scripts from another host.
    app = FastAPI(title="onewave lab", docs_url=None, redoc_url=None, openapi_url=None)
    for path, answer in GETS.items():
        app.add_api_route(path, _get(answer), methods=["GET"], response_model=None)
    for path, answer in POSTS.items():
        app.add_api_route(path, _post(answer), methods=["POST"], response_model=None)
    app.add_api_route("/", _page, methods=["GET"], response_model=None)
    app.mount("/static", StaticFiles(directory=STATIC))
    app.add_exception_handler(OnewaveError, _bad_input)
    app.add_exception_handler(TooLarge, _bad_input)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _mistake)
    return Guard(app, names)


def _get(answer: Answer) -> Callable[[Request], Any]:
    async def route(request: Request) -> Response:
        return json_response(await run_in_threadpool(_answer, answer, dict(request.query_params)))

    return route


def _post(answer: Answer) -> Callable[[Request], Any]:
    async def route(request: Request) -> Response:
        body = await request.body()
        return json_response(await run_in_threadpool(lambda: _answer(answer, json_object(body))))

    return route


def _answer(answer: Answer, given: Mapping[str, Any]) -> Any:
    fields = Fields(given)
    found = answer(fields)
    fields.refuse_unknown()
    return found


async def _page() -> Response:
    return FileResponse(STATIC / "index.html", media_type="text/html")


async def _bad_input(request: Request, error: Exception) -> Response:
    del request
    status = HTTPStatus.BAD_REQUEST if isinstance(error, InvalidArgumentError) else HTTPStatus.UNPROCESSABLE_ENTITY
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE if isinstance(error, TooLarge) else status
    return json_response({"error": str(error)}, status)


async def _http_error(request: Request, error: Exception) -> Response:
    found = cast("HTTPException", error)
    message = f"{request.method} {request.url.path[:80]}: {found.detail}"
    return json_response({"error": message}, found.status_code)


async def _gone(request: Request, error: Exception) -> Response:
    """Answer a client that left while it sent its request: the answer has no reader."""
    del request, error
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _mistake(request: Request, error: Exception) -> Response:
    text = f"internal error: {type(error).__name__} in {request.url.path[:80]}"
    return json_response({"error": text}, HTTPStatus.INTERNAL_SERVER_ERROR)
