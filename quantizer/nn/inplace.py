"""Quantizers for modules where they stand: the object stays, its class becomes a subclass of its own class.

Finds no scales and decides nothing. The quantized layers of traced graphs are in `weighted` and `recurrent`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quantizer.errors import DataError
from quantizer.graph.ir import Graph
from quantizer.nn.layer import Layer
from quantizer.observers import ObservationError

Watcher = Callable[[Tensor], None]


class InPlace(Layer):
    """What a quantized module is besides what it was: its first argument and its output pass quantizers.

    Its parameters are on their grids already. A tuple (of a recurrent layer) passes unchanged.
    """

    float_class: ClassVar[type[nn.Module]]
    path = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, between its quantizers.

        Raises:
            DataError: a dynamic tensor with NaN or infinity has no range; the layer is named.
        """
        role = "input"
        try:
            if role in self.quantizers:
                args, kwargs = on_first(self.quantizers[role], args, kwargs)
            output = super().forward(*args, **kwargs)
            role = "output"
            return self.finish(output) if isinstance(output, Tensor) else output
        except ObservationError as error:
            raise DataError(f"{role} of {self.path}: {error}", help="check the data and the weights") from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copy and pickle, which cannot import a class that is made while a program runs."""
        reduced: Any = super().__reduce_ex__(2)
        return (_blank, (self.float_class,), *reduced[2:])


@functools.cache
def quantized_class(cls: Any) -> type[InPlace]:
    """The class that modules of class `cls` get. It has the same name."""
    make: Any = type(cls)
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: type[InPlace] = make(cls.__name__, (InPlace, cls), {**members, "float_class": cls})
    return made


def _blank(cls: Any) -> InPlace:
    made = quantized_class(cls)
    return made.__new__(made)


def make_quantizable(module: nn.Module, path: str) -> InPlace:
    """Give the module at `path`, in place, room for quantizers; what it computes does not change."""
    if not isinstance(module, InPlace):
        cls: Any = type(module)
        module.__class__ = quantized_class(cls)
        module.quantizers = nn.ModuleDict()
        object.__setattr__(module, "_output", None)
        object.__setattr__(module, "path", path)
    assert isinstance(module, InPlace)
    return module


def on_first(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the first one changed, if it is a tensor of floating point or a packed sequence."""
    if args:
        return (_changed(function, args[0]), *args[1:]), dict(kwargs)
    first = next(iter(kwargs), None)
    return args, {key: _changed(function, value) if key == first else value for key, value in kwargs.items()}


def _changed(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return PackedSequence(function(value.data), *value[1:])
    return function(value) if isinstance(value, Tensor) and value.is_floating_point() else value


class ModuleTree:
    """The layers of a module graph by name, which can be watched while the model runs; `reached` are those that ran."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.model = model
        modules = dict(model.named_modules())
        self.layers = {node.name: modules[node.scope] for node in graph.nodes if node.params}
        self.readers = {source: node.name for node in graph.nodes for source in node.refs()}
        self.reached: set[str] = set()

    def observe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: Mapping[str, Watcher]) -> Any:
        """Run the model and show each watched node's value to its watcher; returns the output.

        Raises:
            DataError: the model cannot run on these arguments.
        """
        with ExitStack() as hooks, torch.no_grad():
            fused = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)  # it would pass the layers by
            hooks.callback(torch.backends.mha.set_fastpath_enabled, fused)
            for name, watcher in watch.items():
                layer = self.readers.get(name)
                hooks.callback((self._watch_input if layer else self._watch_output)(layer or name, watcher))
            try:
                return self.model(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise DataError(
                    f"the model cannot run on this batch: {type(error).__name__}: {reason}",
                    help="check shapes, dtypes and devices of the data; a dict gives keyword arguments",
                ) from error

    def _watch_input(self, layer: str, watcher: Watcher) -> Callable[[], None]:
        def look(value: Tensor) -> Tensor:
            watcher(value)
            return value

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.reached.add(layer)
            on_first(look, args, kwargs)

        remove: Callable[[], None] = self.layers[layer].register_forward_pre_hook(before, with_kwargs=True).remove
        return remove

    def _watch_output(self, layer: str, watcher: Watcher) -> Callable[[], None]:
        def after(_: nn.Module, __: Any, output: Any) -> None:
            self.reached.add(layer)
            if isinstance(output, Tensor) and output.is_floating_point():
                watcher(output)

        remove: Callable[[], None] = self.layers[layer].register_forward_hook(after).remove
        return remove


def keep_layers_called(model: nn.Module) -> None:
    """Switch torch's fused encoder layers off, which read weights directly and would pass input quantizers by."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
