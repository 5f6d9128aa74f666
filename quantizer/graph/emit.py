"""Write a graph as a readable `<Model>.py`: a line per layer that ends in its name, and a
forward without control flow. All values are literals.
"""

import keyword
import math
from collections.abc import Iterable, Mapping
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


def emit(graph: Graph) -> str:
    """Return the Python source of the network.

    `<Model>()` reads its weights and scales from the folder that contains the file. Calls take
    the same arguments as the traced model. The output is made of dicts, lists and tuples.
    """
    modules = {node.name: f"module_{index}" for index, node in enumerate(graph.nodes)}
    paths = iter(graph.input_paths)
    lines = [_HEADER.format(model=graph.model)]
    calls: list[str] = []
    for node in graph.nodes:
        module = modules[node.name]
        layer = describe(graph, node)
        arguments = [_literal(value, {}) for value in layer.args]
        arguments += _keywords(layer.kwargs, {})
        constructor = f"quantizer.nn.{layer.cls}({', '.join(arguments)})"
        lines.append(f"        self.{module} = {constructor} #{node.name}\n")
        if node.op == "input":
            read = f"input={_access(next(paths))}"
        else:
            read = _arguments(node, modules)
        calls.append(f"        output_{module} = self.{module}({read})\n")
    lines.append("        quantizer.nn.load(self, __file__)\n\n")
    lines.append("    def forward(self, *args, **kwargs):\n")
    lines += calls
    lines.append(f"        return {_literal(graph.output, modules)}\n")
    return "".join(lines)


def _access(path: tuple[Any, ...]) -> str:
    """Return how to read an input of the call, for example `kwargs['opts'][0]`."""
    is_keyword, *keys = path
    text = "kwargs" if is_keyword else "args"
    for key in keys:
        text += f"[{_literal(key, {})}]"
    return text


def _keywords(values: Mapping[str, Any], modules: Mapping[str, str]) -> list[str]:
    """Return the arguments of a call by name, as a dict if a name is not an identifier."""
    if all(key.isidentifier() and not keyword.iskeyword(key) for key in values):
        return [f"{key}={_literal(value, modules)}" for key, value in values.items()]
    return [f"**{_literal(dict(values), modules)}"]


def _arguments(node: Node, modules: Mapping[str, str]) -> str:
    """Return the arguments of a call. A single input is positional, others are named as the
    function names them.
    """
    if node.inputs.keys() == {"input"} and isinstance(node.inputs["input"], Ref):
        return _literal(node.inputs["input"], modules)
    return ", ".join(_keywords(node.inputs, modules))


def _literal(value: Any, modules: Mapping[str, str]) -> str:
    """Return the source text of a nested constant or reference.

    Args:
        value: what to write.
        modules: the attribute of each layer, by name.

    Raises:
        TypeError: this kind of value has no literal.
    """
    if isinstance(value, Ref):
        return f"output_{modules[value.name]}"
    if isinstance(value, dict):
        items: list[str] = []
        for key, item in value.items():
            items.append(f"{_literal(key, {})}: {_literal(item, modules)}")
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{_literals(value, modules)}]"
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return f"({_literals(value, modules)}{comma})"
    if type(value) is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if type(value) is complex:
        # The repr loses the sign of a zero
        return f"complex({_literals((value.real, value.imag), {})})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return "torch.device('cpu')"  # where a generated network is loaded
    # The repr of a subclass may be any code
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    raise TypeError(f"{type(value).__name__} has no literal")


def _literals(values: Iterable[Any], modules: Mapping[str, str]) -> str:
    return ", ".join(_literal(value, modules) for value in values)
