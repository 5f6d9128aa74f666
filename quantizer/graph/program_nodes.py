"""Questions about the nodes of an exported program, and the marks that stubs leave in it."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantizer.graph import targets
from quantizer.graph.lengths import same_shape, same_size, size_in_call

STUB_OPERATORS = {"QuantStub": "quant_stub", "DeQuantStub": "dequant_stub"}
"""Operators by class name: torch's own stubs and those of other tools.

Stubs compute nothing, so torch.export drops them unless they leave a mark.
"""
MARK = "aten.alias.default"
"""Returns its input. Its module says which stub it is."""


@contextlib.contextmanager
def mark_stubs(module: nn.Module) -> Iterator[None]:
    """Make each stub inside `module` leave an operator in traces."""
    with contextlib.ExitStack() as hooks:
        for child in module.modules():
            if type(child).__name__ in STUB_OPERATORS:
                hooks.enter_context(child.register_forward_hook(_leave_mark))
        yield


def _leave_mark(_module: nn.Module, _args: Any, output: Any) -> Any:
    if not isinstance(output, Tensor):
        return output
    return torch.ops.aten.alias.default(output)


def takes_whole_length(node: fx.Node, sizes: Mapping[Any, int]) -> bool:
    """Return whether the node slices nothing off a length.

    Along a fixed size, torch drops such a slice.

    Args:
        node: of an exported program.
        sizes: the values of torch's symbols, without the batch's.
    """
    if node.target is not torch.ops.aten.slice.Tensor:
        return False
    arguments: dict[str, Any] = {"dim": 0, "start": None, "end": None, "step": 1}
    arguments |= targets.named_arguments(node)
    value = arguments["input"].meta["val"]
    size = value.shape[arguments["dim"]]
    if isinstance(size, int) or size_in_call(size, sizes) is None:
        return False
    if arguments["start"] not in (None, 0):
        return False
    if arguments["step"] != 1:
        return False
    end = arguments["end"]
    if isinstance(end, fx.Node):
        end = end.meta["val"]
    if end is None:
        return True
    return same_size(end, sys.maxsize) or same_size(end, size)


def writes_all(node: fx.Node) -> bool:
    """Return whether a node writes a tensor over all of another one."""
    if targets.target_name(node) != "aten.slice_scatter.default":
        return False
    result = node.meta["val"]
    written: Any = node.args[1]
    source = written.meta["val"]
    if result.dtype != source.dtype:
        return False
    return same_shape(result, source)


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module in which the node ran."""
    modules = node.meta.get("nn_module_stack") or {}
    if not modules:
        return ""
    path, _ = list(modules.values())[-1]
    if str(path).startswith("_empty"):
        return ""
    return str(path).partition("@")[0]
