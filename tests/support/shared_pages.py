"""One rendering of report.html for all equal reports of a test process: it takes a tenth of a
small calibration. The page is a function of the values of report.json, which are the key, with
the folder of the results in its commands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quantizer.config.json_types import JsonMapping

PLACE = "/PLACE/OF/THE/RESULTS"
Render = Callable[[JsonMapping], str]


class SharedPages:
    """Stands for the function that renders the page."""

    def __init__(self, render: Render) -> None:
        self.render = render
        self.pages: dict[str, str] = {}

    def __call__(self, content: JsonMapping) -> str:
        """Return what `render` would."""
        commands = " ".join(content.get("commands", ()))
        places = re.findall(r"--output_dir (/[\w/.-]+)", commands)
        place = places[0] if places else PLACE
        key = json.dumps(content).replace(place, PLACE)
        if key not in self.pages:
            self.pages[key] = self.render(json.loads(key))
        return self.pages[key].replace(PLACE, place)
