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
_MAX_LINES = 4
_RETRY_SECONDS = 1
# How pydantic names the branches of a union in an error's place, beside classes, "list[...]" and the like.
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


EXPECTED = (ApiError, OnewaveError, RequestValidationError, HTTPException, ClientGone)
"""Errors that are no mistake of the server's."""


def install(app: FastAPI) -> None:
    """Answer every error of an app's endpoints in OpenAI's shape."""
    for kind in EXPECTED:
        app.add_exception_handler(kind, _expected)
    app.add_exception_handler(Exception, _mistake)


async def _expected(request: Request, error: Exception) -> Response:
    return answer_of(request, error)


def answer_of(request: Request, error: Exception) -> Response:
    """The answer to a request that ended with one of the expected errors."""
    if isinstance(error, ClientGone):
        return Response(status_code=499)
    found = as_api_error(error)
    if found.code == "invalid_json" or isinstance(error, RequestValidationError):
        found = _of_headers(request) or found
    if found.status == 500:
        _log.error("%s %s: %s", request.method, request.url.path, found.message, exc_info=error)
    return error_response(found, request.url.path)


async def _mistake(request: Request, error: Exception) -> Response:
    # Starlette's own middleware raises it again, so that it stands on uvicorn's log with its traceback.
    return error_response(as_api_error(error), request.url.path)


def _of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first few mistakes in a body, each with its place."""
    # Beside a `type` that is not allowed every other field is unknown: the type is to blame.
    strange = [error for error in errors if error["type"] == "literal_error" and error["loc"][-1] == "type"]
    beside = {tuple(error["loc"][:-1]) for error in errors if error["type"] == "extra_forbidden"}
    if beside and beside <= {tuple(error["loc"][:-1]) for error in strange}:
        errors = strange
    unknown = [*dict.fromkeys(_place(error) for error in errors if error["type"] == "extra_forbidden")]
    if unknown:
        message = (
            f"unknown field {', '.join(unknown[:10])}: it might change the answer, and this server has no such field"
        )
        return ApiError(400, message, code="unknown_field", param=unknown[0])
    # Beside a mistake within a list, that the list is no text, say, is no news.
    places = [_place(error) + "." for error in errors]
    errors = [
        error
        for error, own in zip(errors, places, strict=True)
        if not (error["type"].endswith("_type") and any(place != own and place.startswith(own) for place in places))
    ]
    # Keep the first mistake for each type where a field may have several.
    firsts = {_branch(error): error for error in reversed(errors)}
    firsts = [error for error in errors if firsts[_branch(error)] is error]
    lines = dict.fromkeys(f"{_place(error) or 'body'}: {str(error.get('msg'))[:200]}" for error in firsts)
    param = _place(errors[0]) if errors else None
    message = "; ".join([*lines][:_MAX_LINES]) or "the body can't be read"
    return ApiError(400, message, code="invalid_value", param=param or None)


def no_json() -> ApiError:
    """The error of a body that can't be read."""
    return ApiError(400, "the body is no JSON in UTF-8", code="invalid_json")


def is_json(content_type: str) -> bool:
    """Whether a body is JSON by its type. Others, such as text/plain, pages of any site may send unasked."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _of_headers(request: Request) -> ApiError | None:
    """Return the error when the content encoding or type is why a body can't be read; else None."""
    encoding, kind = (request.headers.get(name, "") for name in ("content-encoding", "content-type"))
    if encoding.lower() not in ("", "identity"):
        got, allowed = f"content-encoding: {encoding[:100]}", "the body as it is"
    elif not is_json(kind):
        got, allowed = f"content-type: {kind[:100] or 'none'}", "application/json"
    else:
        return None
    return ApiError(415, f"{got}; allowed: {allowed}", code="unsupported_media_type")


def _place(error: Mapping[str, Any]) -> str:
    """Where a mistake is, as `messages.0.role`. A field that is not known is named whatever its name."""
    parts = _parts(error)
    last = len(parts) - 1 if error["type"] == "extra_forbidden" else None
    return ".".join(part for i, part in enumerate(parts) if i == last or not _is_branch(part))


def _branch(error: Mapping[str, Any]) -> tuple[str, ...]:
    """A mistake's place up to the last branch of a union in it; all of it where there is none."""
    parts = _parts(error)
    last = max((i for i, part in enumerate(parts) if _is_branch(part)), default=len(parts))
    return tuple(parts[: last + 1])


def _parts(error: Mapping[str, Any]) -> list[str]:
    return [str(part)[:100] for part in tuple(error.get("loc", ()))[1:]]


def _is_branch(part: str) -> bool:
    return part in _BRANCHES or not re.fullmatch(r"[a-z0-9_-][\w-]*", part)
