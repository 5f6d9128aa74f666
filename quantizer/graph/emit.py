"""The readable `<Model>.py`: a line per layer, ending in its name, and a straight forward;
literals only.
"""

import json
import keyword
import re
from typing import Any

import torch

from quantizer.graph.describe import describe
from quantizer.graph.ir import Graph, Node, Ref

_HEADER = (
    '"""{model} as traced and quantized, written by quantizer. '
    'The layer names are those a config may use."""\n'
    """
import quantizer
import torch


class {model}(torch.nn.Module):
    def __init__(self):
        super().__init__()
"""
)


def is_emitted(text: str) -> bool:
    """Whether a text begins as those of `emit` do."""
    return (
        re.match(r'"""\S+ as traced and quantized, written by quantizer\. ', text) is not None
    )


def emit(graph: Graph) -> str:
    """Python source of the network; `<Model>()` reads its weights and scales from the folder
    the file lies in.

    Calls take the same arguments as the traced model; the output is made of dicts, lists and
    tuples.
    """
    modules = {node.name: f"module_{index}" for index, node in enumerate(graph.nodes)}
    inputs = {
        # `kwargs['opts'][0]`
        node.name: ("kwargs" if root else "args") + "".join(f"[{key!r}]" for key in keys)
        for node, (root, *keys) in zip(
            (n for n in graph.nodes if n.op == "input"), graph.input_paths, strict=True
        )
    }
    lines = [_HEADER.format(model=graph.model)]
    for node in graph.nodes:
        call = describe(graph, node)
        arguments = [_literal(value, {}) for value in call.args]
        arguments += [f"{key}={_literal(value, {})}" for key, value in call.kwargs.items()]
        made = f"quantizer.nn.{call.cls}({', '.join(arguments)})"
        lines.append(f"        self.{modules[node.name]} = {made} #{node.name}\n")
    lines.append(
        "        quantizer.nn.load(self, __file__)\n\n    def forward(self, *args, **kwargs):\n"
    )
    for node in graph.nodes:
        given = (
            f"input={inputs[node.name]}" if node.name in inputs else _arguments(node, modules)
        )
        lines.append(
            f"        output_{modules[node.name]} = self.{modules[node.name]}({given})\n"
        )
    lines.append(f"        return {_literal(graph.output, modules)}\n")
    return "".join(lines)


def _arguments(node: Node, modules: dict[str, str]) -> str:
    """A single tensor is positional; several are named, as the function names them."""
    if (
        len(node.inputs) == 1
        and isinstance(next(iter(node.inputs.values())), Ref)
        and "input" in node.inputs
    ):
        return _literal(node.inputs["input"], modules)
    if all(key.isidentifier() and not keyword.iskeyword(key) for key in node.inputs):
        return ", ".join(
            f"{key}={_literal(value, modules)}" for key, value in node.inputs.items()
        )
    items = [
        f"{json.dumps(key)}: {_literal(value, modules)}" for key, value in node.inputs.items()
    ]
    return f"**{{{', '.join(items)}}}"


def _literal(value: Any, modules: dict[str, str]) -> str:
    """Source text of a nested constant or reference; TypeError for a kind of value that has no
    literal.
    """
    if isinstance(value, Ref):
        return f"output_{modules[value.name]}"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{key!r}: {_literal(item, modules)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, (list, tuple)):
        items = ", ".join(_literal(item, modules) for item in value)
        return (
            f"[{items}]"
            if isinstance(value, list)
            else f"({items}{',' if len(value) == 1 else ''})"
        )
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return "torch.device('cpu')"  # where a generated network is loaded
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise TypeError(f"{type(value).__name__} has no literal")
