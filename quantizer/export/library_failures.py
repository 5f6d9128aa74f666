"""Turns what the libraries of exporters raise into refusals. Imports no torch."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quantizer.errors import ModelError, QuantizerError, first_line, lacks_memory, lost_worker
from quantizer.export.targets import EXPORTERS, offered

if TYPE_CHECKING:
    from quantizer.graph.ir import Graph

_PACKAGE = Path(__file__).parents[1]
_NODE = re.compile(r"(?:'node_|node '|%)(\w+)")
"""How libraries name a node of a program: `node 'node_split_1'`, or `%split_1`."""
_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")
"""The operator of a node, and which call of it the node is."""
_WRITTEN_AS = {"split": ("chunk", "split_with_sizes")}
"""Further operators that libraries write as another one, by that one."""
_ADDRESS = re.compile(r" object at 0x[0-9a-f]+")


@contextmanager
def refused_by_libraries(target: str, graph: Graph) -> Iterator[None]:
    """Raise what a library raises as `ModelError` with the layer, if the library names it.

    Errors of this package, and those about memory or a lost process, stay as they are.

    Args:
        target: the target of `--deploy` that is written.
        graph: its layers.
    """
    try:
        yield
    except QuantizerError:
        raise
    except Exception as error:
        if not _is_of_a_library(error) or lacks_memory(error) or lost_worker(error):
            raise
        raise _refusal(error, target, graph) from error


def _is_of_a_library(error: Exception) -> bool:
    """Return whether the class of an error is a library's, or code of one has raised it."""
    package = type(error).__module__.partition(".")[0]
    if package not in ("builtins", _PACKAGE.name):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return not Path(frames[-1].filename).is_relative_to(_PACKAGE)


def _refusal(error: Exception, target: str, graph: Graph) -> ModelError:
    """Return the error about a network that a library cannot write."""
    shown: BaseException = error
    layer = ""
    cause: BaseException | None = error
    while cause is not None:
        if _NODE.search(str(cause)):
            shown = cause
            layer = _layer_of(str(cause), graph)
        cause = cause.__cause__ or cause.__context__
    reason = _ADDRESS.sub("", f"{type(shown).__name__}: {first_line(shown)}")
    text = f"<--deploy {target}>: a library that writes it fails at {graph.model}: {reason}"
    if layer:
        text += f"; that is layer {layer}"
    row = EXPORTERS[target]
    if row.for_transformers:
        return ModelError(text, help=f"{offered('weights')} holds all weights")
    other = "network"
    for target_row in EXPORTERS.values():
        if target_row.offered_for == other and set(target_row.needs) & set(row.needs):
            # The same library would write that
            other = "program"
    help_text = f"keep that part outside the quantized model, or use {offered(other)}"
    return ModelError(text, help=help_text)


def _layer_of(message: str, graph: Graph) -> str:
    """Return the layer that a message names by its operator and number; empty if none is."""
    for token in _NODE.findall(message):
        match = _NUMBERED.fullmatch(token.removeprefix("node_"))
        assert match is not None
        operator, number = match.groups()
        operators = (operator, *_WRITTEN_AS.get(operator, ()))
        layers = [node.name for node in graph.nodes if node.op in operators]
        index = int(number or 0)
        if index < len(layers):
            return layers[index]
    return ""
