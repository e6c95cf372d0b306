"""/health, /version, /metrics, /v1/models."""

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import onewave
from onewave.server.http.errors import ApiError
from onewave.server.http.events import json_response
from onewave.server.protocol.base import ERRORS, Model, Models
from onewave.server.served import Served, served_of

router = APIRouter()


@router.get("/health", responses={200: {}, **ERRORS})
async def health(request: Request) -> Response:
    """200 while requests are taken and steps end well and in time, else 503."""
    served = served_of(request)
    if served.engine.stopping:
        raise ApiError(503, "the server is stopping", code="stopping")
    if served.engine.stalled:
        raise ApiError(503, "a step takes too long; the log says which", code="stalled")
    if served.engine.failing:
        raise ApiError(503, "one step after another fails; the log says why", code="failing")
    return json_response({"status": "ok"})


@router.get("/version")
async def version() -> dict[str, str]:
    """This server's version."""
    return {"version": onewave.__version__}


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}, **ERRORS})
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    served = served_of(request)
    return Response(served.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", responses={200: {"model": Models}, **ERRORS})
async def models(request: Request) -> Response:
    """List the served model under each of its names."""
    served = served_of(request)
    return json_response(Models(data=[_model(served, name) for name in served.names]).model_dump())


@router.get("/v1/models/{name:path}", responses={200: {"model": Model}, **ERRORS})
async def model(name: str, request: Request) -> Response:
    """One of them."""
    served = served_of(request)
    return json_response(_model(served, served.model_of(name)).model_dump())


def _model(served: Served, name: str) -> Any:
    llm = served.engine.llm
    return Model(id=name, created=served.created, root=llm.name, max_model_len=llm.max_model_len)
