"""Questions about the nodes of an exported program, and the marks that stubs leave in it.

Keys and constants of the user's model become values of Python's own types: only those are
written to files, and no `repr` of a class of the user's becomes code.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantizer.errors import ModelError
from quantizer.graph import targets
from quantizer.graph.ir import Call
from quantizer.graph.tracing.lengths import same_shape, same_size, size_in_call

STUB_OPERATORS = {"QuantStub": "quant_stub", "DeQuantStub": "dequant_stub"}
"""Operators by class name: torch's own stubs and those of other tools.

Stubs compute nothing, so torch.export drops them unless they leave a mark.
"""
MARK = "aten.alias.default"
"""Returns its input. Its module says which stub it is."""
_KINDS: Mapping[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    complex: complex,
}
"""What makes a value of Python's own type from one of a subclass, whose methods do not run."""
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format, torch.device)


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


def plain_constant(value: Any, model: str) -> Any:
    """Return a constant of a trace in a type of Python or torch itself.

    Args:
        value: also of a subclass, such as `numpy.float64` or an `IntEnum`.
        model: the class of the model.

    Raises:
        ModelError: a file cannot contain the value.
    """
    if value is None or isinstance(value, (bool, *_OF_TORCH)):
        return value
    for kind, plain in _KINDS.items():
        if isinstance(value, kind) and _is_utf8(plain(value)):
            return plain(value)
    raise ModelError(
        f"{model} cannot be quantized: its trace has a constant of the class "
        f"{type(value).__name__}, which no file can contain",
        help="use numbers and texts of Python, which UTF-8 can encode",
    )


def plain_key(key: Any, model: str) -> str | int:
    """Return a key of an input as a text or an integer that finds the same item.

    Args:
        key: of a dict, an index of a list or a name.
        model: the class of the model.

    Raises:
        ModelError: there is none.
    """
    plain: str | int | None = None
    if isinstance(key, str):
        plain = str.__str__(key)
    elif isinstance(key, int) and not isinstance(key, bool):
        plain = int.__int__(key)
    if plain is not None and _is_utf8(plain) and plain in {key: None}:
        return plain
    raise ModelError(
        f"{model} cannot be quantized: an input has a key of the class {type(key).__name__}, "
        "which no file can contain",
        help="use texts and integers as keys of dicts",
    )


def _is_utf8(value: Any) -> bool:
    if not isinstance(value, str):
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def input_paths(call: Call, model: str) -> tuple[tuple[str | int, ...], ...]:
    """Return where each input is in a call: indices, keys and names.

    Raises:
        ModelError: a key is neither a text nor an integer.
    """
    paths: list[tuple[str | int, ...]] = []
    for entries, _ in pytree.tree_flatten_with_path(call)[0]:
        path: list[str | int] = []
        for entry in entries:
            for attribute in ("idx", "key", "name"):
                if hasattr(entry, attribute):
                    path.append(plain_key(getattr(entry, attribute), model))
                    break
        paths.append(tuple(path))
    return tuple(paths)
