"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}, and which status they have."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from onewave.base.errors import BusyError, CapacityError, InvalidArgumentError, OnewaveError, StoppingError
from onewave.base.errors import TokenizerError as NoTokenizer
from onewave.engine.failures import StepTraceback

_log = logging.getLogger("onewave.server")
_MAX_MESSAGE = 2000
_RETRY_SECONDS = 1
# How pydantic names the branches of a union in an error's place.
_BRANCHES = frozenset({"str", "int", "float", "bool", "constrained-str"})
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


@dataclass
class ApiError(Exception):
    """An error with a status of its own. param: the field to blame. retry_after: seconds."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None
    headers: Mapping[str, str] | None = None

    @property
    def type(self) -> str:
        """OpenAI's word for the kind."""
        return _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """As JSON, in OpenAI's shape."""
        message = self.message[:_MAX_MESSAGE]
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}


def as_anthropic(error: ApiError) -> dict[str, Any]:
    """An error's body in Anthropic's shape, which holds OpenAI's."""
    fields: dict[str, Any] = error.body()["error"]
    return {"type": "error", "error": {**fields, "type": _ANTHROPIC_TYPES.get(error.status, fields["type"])}}


class ClientGone(Exception):
    """The client closed its connection before its answer."""


def as_api_error(error: BaseException) -> ApiError:
    """The status and words for any error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BusyError):
        return ApiError(429, str(error), code="queue_full", retry_after=_RETRY_SECONDS)
    if isinstance(error, StoppingError):
        return ApiError(503, str(error), code="stopping", retry_after=_RETRY_SECONDS)
    if isinstance(error, CapacityError):
        return ApiError(503, str(error), code="out_of_memory", retry_after=_RETRY_SECONDS)
    if isinstance(error, InvalidArgumentError | NoTokenizer):
        param = error.what if error.what.isidentifier() else None
        return ApiError(400, str(error), code="invalid_value", param=param)
    if isinstance(error, RequestValidationError):
        return _of_validation(cast("Sequence[Mapping[str, Any]]", error.errors()))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, OnewaveError):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error.__cause__, StepTraceback):  # the log has the traceback
        return ApiError(500, f"a step of this request failed: {type(error).__name__}: {error}", code="step_failed")
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


def error_response(error: ApiError, path: str) -> Response:
    """An error as an answer, in the shape of the path's API. In ASCII: what was sent, half a surrogate pair too, may
    stand in its message."""
    body = as_anthropic(error) if path.startswith(_ANTHROPIC_PATH) else error.body()
    headers = dict(error.headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return Response(json.dumps(body), error.status, headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Answer every error of an app's endpoints in OpenAI's shape."""
    for kind in (ApiError, OnewaveError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _expected)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _mistake)


async def _expected(request: Request, error: Exception) -> Response:
    found = as_api_error(error)
    if found.status == 500:
        _log.error("%s %s: %s", request.method, request.url.path, found.message, exc_info=error)
    return error_response(found, request.url.path)


async def _gone(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=499)


async def _mistake(request: Request, error: Exception) -> Response:
    # Starlette's own middleware raises it again, so that it stands on uvicorn's log with its traceback.
    return error_response(as_api_error(error), request.url.path)


def _of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first few mistakes in a body, each with its place."""
    # Beside a `type` that is not allowed every other field is unknown: the type is to blame.
    strange = [error for error in errors if error["type"] == "literal_error" and error["loc"][-1] == "type"]
    beside = {tuple(error["loc"][:-1]) for error in errors if error["type"] == "extra_forbidden"}
    errors = [error for error in strange if tuple(error["loc"][:-1]) in beside] or errors
    unknown = [_place(error) for error in errors if error["type"] == "extra_forbidden"]
    if unknown:
        message = (
            f"unknown field {', '.join(unknown[:10])}: it might change the answer, and this server has no such field"
        )
        return ApiError(400, message, code="unknown_field", param=unknown[0])
    if any(error["type"] == "json_invalid" for error in errors):
        return ApiError(400, "the body is no JSON", code="invalid_json")
    lines = [f"{_place(error) or 'body'}: {str(error.get('msg'))[:200]}" for error in errors[:3]]
    param = _place(errors[0]) if errors else None
    return ApiError(400, "; ".join(lines) or "the body can't be read", code="invalid_value", param=param or None)


def _place(error: Mapping[str, Any]) -> str:
    """Where a mistake is, as `messages.0.role`; of a field that may have several types, the field."""
    parts = [str(part)[:100] for part in tuple(error.get("loc", ()))[1:]]
    plain = next(
        (i for i, part in enumerate(parts) if not re.fullmatch(r"[\w-]+", part) or part in _BRANCHES), len(parts)
    )
    return ".".join(parts[: plain or 1])
