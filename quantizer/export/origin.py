"""States in exported files what made them: the package, the config, the metrics of the test."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import quantizer
from quantizer.config.json_types import JsonMapping

ORIGIN_FILE = "quantizer.json"
"""The name of the origin in files that hold further files."""


@dataclass(frozen=True)
class Origin:
    """What a file was made from. It has no names of files, and equal runs have equal ones.

    Attributes:
        config: as config.resolved.json has it.
        metrics: of the test.
        sizes: of images and sounds that the network takes, by the name of their dimension, and
            its number of samples if that is fixed.
    """

    config: JsonMapping = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)

    def texts(self) -> dict[str, str]:
        """Return the texts to store by name; config and metrics are JSON on one line.

        >>> Origin({"exclude": []}, {"top1": 0.99803921}).texts()["metrics"]
        '{"top1":0.998039}'
        """
        texts = {"producer": "quantizer", "version": quantizer.__version__}
        if self.config:
            texts["config"] = _compact(self.config)
        metrics: dict[str, float] = {}
        for name, value in self.metrics.items():
            if math.isfinite(value):
                # More digits may depend on the number of threads
                metrics[name] = float(f"{value:.6g}")
        if metrics:
            texts["metrics"] = _compact(metrics)
        if self.sizes:
            texts["sizes"] = _compact(self.sizes)
        return texts

    def text(self) -> str:
        """Return the same as one JSON object."""
        content: dict[str, object] = {}
        for name, text in self.texts().items():
            is_json = name in ("config", "metrics", "sizes")
            content[name] = json.loads(text) if is_json else text
        return _compact(content)


def _compact(content: Mapping[str, object]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
