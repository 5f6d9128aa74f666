"""Change a module tree as a whole or not at all."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (dict, OrderedDict, list)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Undo what the block does to the modules of `model` and to their parameters if it raises
    or is interrupted.

    Classes, attributes and the values of parameters are restored, and the objects stay the
    same. Values are stored without a copy: the block must replace the `data` of a parameter and
    write nothing into it.
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
                if isinstance(container, list):
                    container.extend(content)
                else:
                    container.update(content)
        for parameter, value in values:
            parameter.data = value
        raise


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return the module's attributes and the plain containers among them (its parameters,
    buffers, hooks), each with a copy.
    """
    attributes = vars(module)
    containers = [value for value in attributes.values() if type(value) in _CONTAINERS]
    return [(container, container.copy()) for container in (attributes, *containers)]
