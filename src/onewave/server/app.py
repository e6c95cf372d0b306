"""The app: its endpoints, and how they are put together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import onewave
from onewave.server.api import chat, completions, messages, page, responses, status, tokens
from onewave.server.http import errors
from onewave.server.http.bodies import Direct
from onewave.server.http.guard import Guard
from onewave.server.http.logs import report
from onewave.server.served import Served

# In the order in which they are asked whether a request is theirs: those that wait for tokens first.
ROUTERS = tuple(one.router for one in (chat, completions, responses, messages, tokens, status, page))


def make_app(served: Served) -> FastAPI:
    """Build the app that serves one model."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        reporting = asyncio.create_task(report(served.engine))
        yield
        reporting.cancel()

    app = FastAPI(
        lifespan=lifespan,
        title="onewave",
        version=onewave.__version__,
        description="LLaMA inference behind OpenAI's API.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.served = served
    for router in ROUTERS:
        app.include_router(router)
    page.mount(app)
    errors.install(app)
    options = served.options
    app.add_middleware(Direct, routes=[route for router in ROUTERS for route in router.routes])
    app.add_middleware(Guard, options=options)
    if options.cors_origins:  # outside of the guard: its refusals too have to be read by pages
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
