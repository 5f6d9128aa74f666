"""Log records of a test are caught at the root alone.

pytest looks through the loggers of all packages, which are thousands, six times for each test:
some do not pass records on to the root. No test reads what such packages log.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from _pytest.logging import catching_logs


def catch_logs_at_the_root(patched: pytest.MonkeyPatch) -> None:
    """Attach the handlers of pytest to no other logger."""

    def enter(catching: Any) -> logging.Handler:
        root = logging.getLogger()
        handler: logging.Handler = catching.handler
        if catching.level is not None:
            handler.setLevel(catching.level)
            catching.orig_level = root.level
            root.setLevel(min(root.level, catching.level))
        root.addHandler(handler)
        catching.attached_loggers.append(root)
        return handler

    patched.setattr(catching_logs, "__enter__", enter)
