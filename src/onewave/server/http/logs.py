"""The server's log: lines of text or JSON on stderr, and one line every five seconds while requests run."""

import asyncio
import json
import logging
import sys
import time
from typing import Any

from onewave.engine.aio import AsyncLLM

_log = logging.getLogger("onewave.server")
_SECONDS = 5.0
_USUAL = frozenset(vars(logging.makeLogRecord({})))


def set_up(*, as_json: bool) -> None:
    """Have onewave's and uvicorn's loggers write to stderr. uvicorn's say only what is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("onewave", logging.INFO), ("uvicorn", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(level)


class JsonLines(logging.Formatter):
    """One JSON object a record: time, level, logger, message, what the record carries beside, and its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


async def report(engine: AsyncLLM) -> None:
    """Log a line every five seconds in which something ran, for as long as the task lives."""
    before, at = engine.totals, time.monotonic()
    while True:
        await asyncio.sleep(_SECONDS)
        totals, now = engine.totals, time.monotonic()
        prompt, generated = totals.prompt - before.prompt, totals.generated - before.generated
        if engine.num_requests or generated:
            rates = prompt / (now - at), generated / (now - at)
            more = {"requests": engine.num_requests, "prompt_tokens": prompt, "generated_tokens": generated}
            line = "%d requests; prompts %.1f tokens/s, answers %.1f tokens/s"
            _log.info(line, engine.num_requests, *rates, extra=more)
        before, at = totals, now
