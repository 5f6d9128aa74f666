"""One rendering of report.html for all equal reports of a test process: it takes a tenth of a
small calibration. The page is a function of the values of report.json, which are the key.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from quantizer.config.json_types import JsonMapping

Render = Callable[[JsonMapping], str]


class SharedPages:
    """Stands for the function that renders the page."""

    def __init__(self, render: Render) -> None:
        self.render = render
        self.pages: dict[str, str] = {}

    def __call__(self, content: JsonMapping) -> str:
        """Return what `render` would."""
        key = json.dumps(content)
        if key not in self.pages:
            self.pages[key] = self.render(content)
        return self.pages[key]
