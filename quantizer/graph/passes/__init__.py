"""Rewrites between tracing and planning: one file each, registered by name, run in the order of `PASSES`.

A pass keeps the float function (to rounding) and the names of the layers that survive; it never sees a scale.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from quantizer.config.model import Settings
from quantizer.graph.ir import Graph

Pass = Callable[[Graph], Graph]

# name -> (module, the setting that switches it on; None: always)
PASSES: dict[str, tuple[str, str | None]] = {
    "remove_dropout": ("remove_dropout", None),
    "convert_relu6_to_relu": ("convert_activations", "convert_relu6_to_relu"),
    "convert_silu_to_hswish": ("convert_activations", "convert_silu_to_hswish"),
    "fold_batch_norm": ("fold_batch_norm", None),
}


def run_passes(graph: Graph, settings: Settings) -> Graph:
    """The graph after every pass that the settings ask for."""
    for name, (_, switch) in PASSES.items():
        if switch is None or getattr(settings, switch):
            graph = load_pass(name)(graph)
    return graph


def load_pass(name: str) -> Pass:
    """The function of a registered pass."""
    function: Pass = getattr(importlib.import_module(f"{__name__}.{PASSES[name][0]}"), name)
    return function
