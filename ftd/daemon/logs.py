"""Logs of the daemon: standard error, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time

#: Environment variable with the path of a detached daemon's log.
DETACHED_LOG = "FTD_DETACHED_LOG"


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = f"{stamp} {level}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(level: str, style: str) -> None:
    """Sends the log of ftd to standard error.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        style: `text` or `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
