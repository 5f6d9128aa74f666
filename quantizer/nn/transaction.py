"""A module tree changes as a whole or not at all. Knows nothing of quantizers."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (dict, OrderedDict, list)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """What the block does to the modules of `model` and to their parameters is undone if it
    raises, or is interrupted.

    Classes, attributes and the values of parameters come back, the objects staying the same.
    Values are kept, not copied: the block must replace the `data` of a parameter and write
    nothing into it.
    """
    modules = [(module, type(module), _contents(module)) for module in model.modules()]
    values = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, cls, contents in modules:
            module.__class__ = cls
            for container, content in contents:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        for parameter, value in values:
            parameter.data = value
        raise


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """The module's attributes and plain containers among them (its parameters, buffers, hooks),
    each with a copy.
    """
    found = [
        vars(module),
        *(value for value in vars(module).values() if type(value) in _CONTAINERS),
    ]
    return [(container, container.copy()) for container in found]
