"""One `torch.export` for all models of a test process that differ only in the values of their
parameters.

Tracing takes most of the time of a small calibration, and says the same each time. A key holds
all that a trace may depend on; what it cannot look into counts as equal only to itself.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OperatorBase, OpOverloadPacket
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from quantizer.config.roles import is_parameter
from quantizer.errors import ModelError
from quantizer.graph.ir import Graph
from quantizer.nn.layer import Layer
from quantizer.nn.quantizer import TensorQuantizer

Export = Callable[..., ExportedProgram]
NOTES_ABOUT_FILES = (
    "_name_or_path",
    "_use_kernels",
    "_weight_conversions",
    "architectures",
    "dtype",
    "model_type",
    "name_or_path",
    "transformers_version",
)
"""What transformers adds to a model and its config when it reads or writes a folder."""


class SharedTraces:
    """Stands for the function that exports a module; hands out an earlier program with the
    module's own tensors.
    """

    def __init__(self, export: Export) -> None:
        self.export = export
        self.programs: dict[Hashable, ExportedProgram] = {}
        self.errors: dict[Hashable, ModelError] = {}
        self.kept: list[object] = []  # what stands in keys by its identity must not go away

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
    ) -> ExportedProgram:
        """The program that `export` would make."""
        look = Look()
        key = (
            look.at(module),
            look.example((args, kwargs)),
            look.example(options),
            torch.get_default_dtype(),
        )
        # What failed may succeed once a class is registered; what succeeded stays as it is
        failure = key, len(pytree.SUPPORTED_NODES)
        if failure in self.errors:
            raise self.errors[failure].with_traceback(None)
        if key not in self.programs:
            self.kept += look.kept
            try:
                # A cache of fake tensors takes a quarter of the time for networks without repeats
                with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
                    program = copy.copy(self.export(module, args, kwargs, **options))
            except ModelError as error:
                self.errors[failure] = error
                raise
            # No memory of the first model's
            program._state_dict = dict.fromkeys(program.state_dict)
            self.programs[key] = program
        return with_tensors_of(module, self.programs[key])


def with_tensors_of(module: nn.Module, program: ExportedProgram) -> ExportedProgram:
    """A copy that holds the module's parameters and buffers; constants of the code stay."""
    own = dict(
        [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
    )
    made = copy.copy(program)
    made._state_dict = {path: own[path] for path in program.state_dict}
    made._constants = {path: own.get(path, value) for path, value in program.constants.items()}
    return made


class Look:
    """Turns objects into keys."""

    def __init__(self) -> None:
        self.kept: list[object] = []
        self.seen: dict[int, int] = {}

    def at(self, value: Any) -> Hashable:
        """A key that two values share only if a trace cannot tell them apart."""
        if value is None or isinstance(
            value, (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
        ):
            return type(value), repr(value)
        if isinstance(value, type):
            return self.of_class(value)
        if isinstance(value, (OperatorBase, OpOverloadPacket)):
            return value  # of its name there is one, which caches what it was called with
        if isinstance(value, (tuple, frozenset)):
            return type(value), tuple(self.at(item) for item in value)
        if isinstance(value, weakref.ref):
            return weakref.ref, self.at(value())
        if id(value) in self.seen:
            return "seen", self.seen[id(value)]
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)  # so that no other object takes its place in `seen`
        return self.inside(value)

    def inside(self, value: Any) -> Hashable:
        """The key of an object that was not met before."""
        if isinstance(value, torch.fx.GraphModule):
            # Its nodes hold each other: a chain as long as the graph
            return "this very one", id(value)
        if isinstance(value, Layer):
            return self.layer(value)
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, Graph):
            return self.graph(value)
        if isinstance(value, Tensor):
            return self.example(value), _digest(value)
        if isinstance(value, (list, set)):
            return type(value), tuple(self.at(item) for item in value)
        if isinstance(value, dict):
            return type(value), tuple(
                (self.at(key), self.at(item)) for key, item in value.items()
            )
        if isinstance(value, FunctionType):
            return self.function(value)
        if isinstance(value, MethodType):
            return self.at(value.__self__), self.at(value.__func__)
        if (
            type(value).__reduce_ex__ is object.__reduce_ex__
            and type(value).__reduce__ is object.__reduce__
        ):
            attributes = getattr(value, "__dict__", {})
            if type(value).__module__.startswith("transformers."):
                attributes = _without_notes(attributes)
            return self.of_class(type(value)), self.at(attributes), self.slots(value)
        return "this very one", id(value)

    def example(self, value: Any) -> Hashable:
        """An input of the call, or a parameter: any values, but its kind."""
        if isinstance(value, Tensor):
            return (
                tuple(value.shape),
                value.stride(),
                value.dtype,
                value.requires_grad,
                value.device,
            )
        if isinstance(value, (list, tuple)):
            return type(value), tuple(self.example(item) for item in value)
        if isinstance(value, dict):
            return type(value), tuple((key, self.example(item)) for key, item in value.items())
        return self.at(value)

    def slots(self, value: Any) -> Hashable:
        """What an object keeps beside its dictionary."""
        names = [
            name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())
        ]
        return self.at(
            tuple(
                getattr(value, name, None)
                for name in names
                if name not in ("__dict__", "__weakref__")
            )
        )

    def module(self, module: nn.Module) -> Hashable:
        """Its code, attributes, children; of parameters and buffers which are one and the
        same.
        """
        rest = {
            k: v
            for k, v in sorted(vars(module).items())
            if k not in ("_parameters", "_buffers")
        }
        if type(module).__module__.startswith("transformers."):
            rest = _without_notes(rest)
        return self.of_class(type(module)), self.tensors(module), self.at(rest)

    def tensors(self, module: nn.Module) -> Hashable:
        """Its own parameters and buffers."""
        own = {**module._parameters, **module._buffers}
        return tuple((name, self.at_parameter(value)) for name, value in own.items())

    def layer(self, layer: Layer) -> Hashable:
        """As a module, but for the specs of parameters: a trace sees parameters that are
        quantized already.
        """
        quantizers: list[Hashable] = []
        for role, quantizer in layer.quantizers.items():
            if is_parameter(role) and isinstance(quantizer, TensorQuantizer):
                quantizers.append((role, self.tensors(quantizer)))
            else:
                quantizers.append((role, self.at(quantizer)))
        self.seen.setdefault(id(layer.quantizers), len(self.seen))
        return tuple(quantizers), self.module(layer)

    def graph(self, graph: Graph) -> Hashable:
        """Its fields; of its tensors, which layers hold as parameters, the kinds. A trace does
        not read what is only for reports.
        """
        values = {
            field.name: getattr(graph, field.name)
            for field in fields(graph)
            if field.name not in ("tensors", "normal", "changes")
        }
        kinds = tuple((path, self.example(tensor)) for path, tensor in graph.tensors.items())
        return Graph, self.at(values), kinds

    def at_parameter(self, value: Tensor | None) -> Hashable:
        """By its kind, and whether it was met before."""
        if value is None:
            return None
        first = self.seen.setdefault(id(value), len(self.seen))
        return first, self.example(value), type(value)

    def of_class(self, kind: type) -> Hashable:
        """A class that can be imported is itself; one of a file that is run again and again is
        what stands there.
        """
        if _is_importable(kind):
            return kind
        file = _source_file(kind)
        self.kept.append(kind)
        source = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else id(kind)
        functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
        bases = tuple(self.of_class(base) for base in kind.__bases__)
        return (
            kind.__name__,
            kind.__qualname__,
            source,
            bases,
            tuple(self.at(each) for each in functions),
        )

    def function(self, function: FunctionType) -> Hashable:
        """Its code, what it has enclosed, and what it finds in its module under the names that
        it uses.
        """
        if _is_importable(function):
            return function
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        known = function.__globals__
        used = {name: known[name] for name in _names(function.__code__) if name in known}
        found = {
            name: value
            for name, value in used.items()
            if not isinstance(value, (ModuleType, type))
        }
        return function.__code__, self.at(cells), self.at(function.__defaults__), self.at(found)


def _without_notes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that a forward() reads, in one order."""
    return {
        name: value
        for name, value in sorted(attributes.items())
        if name not in NOTES_ABOUT_FILES
    }


def _is_importable(named: Any) -> bool:
    """Whether a function or class is what its module has under its name, for good: a user's
    file is run for each command.
    """
    if str(named.__module__).startswith("user_"):
        return False
    found: Any = sys.modules.get(named.__module__)
    for name in named.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is named


def _source_file(kind: type) -> str | None:
    """Where a class stands; None for one of a script that was run and is no module."""
    try:
        return inspect.getsourcefile(kind)
    except TypeError:
        return None


def _digest(tensor: Tensor) -> str:
    """Of its values."""
    return hashlib.sha256(
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    ).hexdigest()


def _names(code: CodeType) -> list[str]:
    inner = [
        name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)
    ]
    return [*code.co_names, *inner]
