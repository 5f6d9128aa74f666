"""Post-training quantization of PyTorch models, driven by a JSON file.

Importing this package imports no torch: the heavy rooms are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
_LAZY = ("nn",)


def __getattr__(name: str) -> Any:
    """Load `quantizer.nn` on first use, so that generated code needs only `import quantizer`."""
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
