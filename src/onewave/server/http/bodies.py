"""How a request's body is read, and the short way to the endpoints that take one."""

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, get_type_hints

import pydantic_core
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from onewave.server.http.errors import EXPECTED, ClientGone, answer_of, is_json, no_json

_Endpoint = Callable[..., Coroutine[Any, Any, Response]]


class Direct:
    """Middleware that calls endpoints of the form (body: a pydantic model, request) itself. Routes of their paths are
    for FastAPI to describe, and for other methods: its own way there takes longer than a prompt of 4,096 ids to read.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._endpoints: dict[str, tuple[_Endpoint, type[BaseModel]]] = {}
        for route in routes:
            if isinstance(route, APIRoute) and (model := get_type_hints(route.endpoint).get("body")) is not None:
                assert route.methods == {"POST"}
                self._endpoints[route.path] = route.endpoint, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        found = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        endpoint, model = found
        request = Request(scope, receive, send)
        try:
            response = await endpoint(body=_checked(model, request, await _read(receive)), request=request)
            await response(scope, receive, send)
        except EXPECTED as error:
            await answer_of(request, error)(scope, receive, send)


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _checked(model: type[BaseModel], request: Request, body: bytes) -> BaseModel:
    """A body as its model. What pydantic's parser refuses, such as UTF-16 or half a surrogate pair, is the json
    module's to judge. Raises ApiError, RequestValidationError."""
    if not is_json(request.headers.get("content-type", "")):
        raise no_json()
    try:
        given = pydantic_core.from_json(body)
    except ValueError:
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise no_json() from None
    try:
        return model.model_validate(given)
    except ValidationError as error:
        places = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(places) from None
