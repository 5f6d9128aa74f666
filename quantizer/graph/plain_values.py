"""Keys and constants of the user's model as values of Python's own types: only those are
written to files, and no `repr` of a class of the user's becomes code.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from quantizer.errors import ModelError
from quantizer.graph.ir import Call

_KINDS: Mapping[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    complex: complex,
}
"""What makes a value of Python's own type from one of a subclass, whose methods do not run."""
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format, torch.device)


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
