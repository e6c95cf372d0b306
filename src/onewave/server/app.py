"""The app: its endpoints, and how they are put together."""

from __future__ import annotations

from fastapi import FastAPI

import onewave
from onewave.server.api import chat, status
from onewave.server.http import errors
from onewave.server.served import Served

ROUTERS = (status.router, chat.router)


def make_app(served: Served) -> FastAPI:
    """Build the app that serves one model."""
    app = FastAPI(
        title="onewave",
        version=onewave.__version__,
        description="LLaMA inference behind OpenAI's API.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.served = served
    for router in ROUTERS:
        app.include_router(router)
    errors.install(app)
    return app
