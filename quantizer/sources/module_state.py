"""Save and restore what a call of the user's module may change: its buffers, its attributes,
its hooks, its mode, its KV cache, and the global random generators.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantizer.storage.deferred_tensor import DeferredTensor

_ATTRIBUTES_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_REGISTRIES = (
    "_buffers",
    "_parameters",
    "_modules",
    # transformers adds hooks in the first call, and an attribute that says so
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass(frozen=True)
class _Attribute:
    """The value of an attribute at one moment.

    Args:
        part: the module that has the attribute.
        name: of the attribute.
        value: the same object, not a copy.
        content: a copy of the value if it is a list, dict or set, else None.
    """

    part: nn.Module
    name: str
    value: Any
    content: Any

    @property
    def is_changed(self) -> bool:
        """Return whether it has another value or content now."""
        now = vars(self.part).get(self.name)
        if now is not self.value:
            return True
        return self.content is not None and not _are_equal(now, self.content)

    def restore(self) -> None:
        """Give the attribute back its value and content."""
        vars(self.part)[self.name] = self.value
        if self.content is not None:
            _refill(self.value, self.content)


class ModuleState:
    """The state of a module at one moment. The values of parameters and the state of objects
    that are not modules are not included.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._registries = []
        for _, part in _parts(module):
            for name in _REGISTRIES:
                registry = vars(part)[name]
                self._registries.append((part, name, dict(registry)))
        self._buffers = []
        for buffer in module.buffers():
            # A forward pass cannot change deferred tensors and inference tensors
            if isinstance(buffer, DeferredTensor) or buffer.is_inference():
                continue
            self._buffers.append((buffer, buffer.clone()))
        self._attributes = {}
        for path, part, name in _named_attributes(module):
            value = vars(part)[name]
            content = None
            if type(value) in (list, dict, set):
                content = value.copy()
            self._attributes[path] = _Attribute(part, name, value, content)

    def changed(self) -> list[str]:
        """Return the paths of attributes that are different now."""
        attributes = self._attributes.items()
        changed = [path for path, attribute in attributes if attribute.is_changed]
        now = {path for path, _, _ in _named_attributes(self._module)}
        new = now - self._attributes.keys()
        return changed + sorted(new)

    def restore(self) -> None:
        """Undo all changes."""
        with torch.no_grad():
            for buffer, values in self._buffers:
                buffer.copy_(values)
        for part, name, content in self._registries:
            _refill(vars(part)[name], content)
        for _, part, name in list(_named_attributes(self._module)):
            del vars(part)[name]
        for attribute in self._attributes.values():
            attribute.restore()


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules by path, except those compiled by torch.jit: their state is not in
    their `__dict__`.
    """
    for path, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):
            yield path, part


def _named_attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, submodule, name) of each attribute that is not one of `nn.Module`."""
    for prefix, part in _parts(module):
        for name in vars(part):
            if name not in _ATTRIBUTES_OF_TORCH:
                path = f"{prefix}.{name}" if prefix else name
                yield path, part, name


def _refill(container: Any, content: Any) -> None:
    """Give a list, dict or set a content. It stays the same object: others may refer to it."""
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _are_equal(container: Any, other: Any) -> bool:
    """Return whether two containers hold the same or equal objects."""
    try:
        return bool(container == other)
    # Comparing containers of tensors or arrays raises an error
    except (RuntimeError, ValueError, TypeError):
        return False


@contextmanager
def preserve_module_state(module: nn.Module) -> Iterator[ModuleState]:
    """Restore a module and the global random generators when the `with` block ends."""
    state = ModuleState(module)
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy_state = numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield state
    finally:
        state.restore()
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode for a while; each module gets its mode back."""
    modes = [(module, module.training) for module in model.modules()]
    # An exported program has no modes
    with suppress(NotImplementedError):
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def prepare_for_traces(module: nn.Module) -> nn.Module:
    """Return the module in eval mode and without a KV cache: each call runs a whole window, and
    a trace cannot contain a cache.
    """
    for config in _configs_with_cache(module):
        config.use_cache = False
    return module.eval()


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """Disable the KV cache of a model while it is traced."""
    configs = _configs_with_cache(module)
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True


def _configs_with_cache(module: nn.Module) -> list[Any]:
    """Return the configs that enable a KV cache. A decoder may have its own config."""
    configs: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", False) is True:
            configs[id(config)] = config
    return list(configs.values())
