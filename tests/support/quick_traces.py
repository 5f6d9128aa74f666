"""Traces that leave the class of all modules as it is.

torch.fx sets two special methods of `nn.Module` for each trace and sets them back. Python then
visits all subclasses, of which packages of models have thousands: a twentieth of the suite's
time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from torch import nn
from torch.fx import _symbolic_trace
from torch.fx._symbolic_trace import _PatchedFnSetAttr

Method = Callable[..., Any]


def keep_the_class_of_modules(patched: pytest.MonkeyPatch) -> None:
    """Let both methods call what a trace has set last, or the methods of torch."""
    methods: dict[str, list[Method]] = {}
    for name in ("__call__", "__getattr__"):
        methods[name] = [vars(nn.Module)[name]]
        patched.setattr(nn.Module, name, _latest(methods[name]))
    set_attribute, set_back = _PatchedFnSetAttr.patch, _PatchedFnSetAttr.revert

    def patch(change: _PatchedFnSetAttr) -> None:
        if change.frame_dict is nn.Module and change.fn_name in methods:
            methods[change.fn_name].append(change.new_fn)
        else:
            set_attribute(change)

    def revert(change: _PatchedFnSetAttr) -> None:
        if change.frame_dict is nn.Module and change.fn_name in methods:
            methods[change.fn_name].remove(change.new_fn)
        else:
            set_back(change)

    patched.setattr(_symbolic_trace._PatchedFnSetAttr, "patch", patch)
    patched.setattr(_symbolic_trace._PatchedFnSetAttr, "revert", revert)


def _latest(methods: list[Method]) -> Method:
    """Return a method that calls the last one of these."""

    @wraps(methods[0])
    def call(module: nn.Module, *arguments: Any, **more: Any) -> Any:
        return methods[-1](module, *arguments, **more)

    # Its frame is no place in a file of the user's, as it would be in one of the tests
    call.__code__ = call.__code__.replace(co_filename=_symbolic_trace.__file__)
    return call
