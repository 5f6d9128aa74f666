"""What a call of a user's module may change beside its output: buffers, attributes, modes,
random generators.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quantizer.storage.deferred_tensor import DeferredTensor

_OWN = frozenset(vars(nn.Module())) - {"training"}
_HELD = ("_buffers", "_parameters", "_modules")
_CONTAINERS = (list, dict, set)


class ModuleState:
    """The state of a module as it is now. Values of parameters are not in it, nor what other
    objects hold.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = [
            (part, name, dict(vars(part)[name])) for _, part in _parts(module) for name in _HELD
        ]
        self._values = [
            (each, each.clone())
            for each in module.buffers()
            if not isinstance(each, DeferredTensor)
        ]
        self._attributes = {
            (path, name): (part, value, value.copy() if type(value) in _CONTAINERS else None)
            for path, part in _parts(module)
            for name, value in vars(part).items()
            if name not in _OWN
        }

    def changed(self) -> list[str]:
        """The attributes that are others now, by their paths."""
        names = [
            ".".join(filter(None, key)) for key in self._attributes if self._is_changed(*key)
        ]
        now = {
            (path, name)
            for path, part in _parts(self._module)
            for name in vars(part)
            if name not in _OWN
        }
        return names + sorted(
            ".".join(filter(None, key)) for key in now - self._attributes.keys()
        )

    def _is_changed(self, path: str, name: str) -> bool:
        part, value, content = self._attributes[path, name]
        now = vars(part).get(name)
        return now is not value or (content is not None and not _same(now, content))

    def restore(self) -> None:
        """Make everything what it was."""
        with torch.no_grad():
            for value, before in self._values:
                if not value.is_inference():  # which nobody changes
                    value.copy_(before)
        for part, name, held in self._held:
            _refill(vars(part)[name], held)
        for _, part in _parts(self._module):
            for name in [name for name in vars(part) if name not in _OWN]:
                del vars(part)[name]
        for (_, name), (part, value, content) in self._attributes.items():
            vars(part)[name] = value
            if content is not None:
                _refill(value, content)


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of one by their paths; those compiled by torch.jit hold what they have
    elsewhere.
    """
    return (
        (path, part)
        for path, part in module.named_modules()
        if not isinstance(part, torch.jit.ScriptModule)
    )


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


def _same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects, or equal ones."""
    try:
        return bool(one == other)
    except (
        RuntimeError,
        ValueError,
        TypeError,
    ):  # tensors and arrays say of each value whether it is equal
        return False


@contextmanager
def left_alone(module: nn.Module) -> Iterator[ModuleState]:
    """Whatever runs meanwhile, the module and the global random generators are afterwards what
    they were.
    """
    state, python, numpy = ModuleState(module), random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng():
            yield state
    finally:
        state.restore()
        random.setstate(python)
        if numpy:
            numpy.random.set_state(drawn)
