"""One `torch.export` and one set of decompositions for all deployed networks of a test process
that differ only in the values of their tensors.

Files are still translated, optimized and verified one by one, as these steps read values.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Hashable
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from quantizer.graph.ir import Graph
from support.shared_traces import Look, with_tensors_of

Export = Callable[..., ExportedProgram]
Rewrite = Callable[..., ExportedProgram]


class SharedExports:
    """Stands for the function that exports a network; returns an earlier program with the
    tensors of this network.
    """

    def __init__(self, export: Export) -> None:
        self.export = export
        self.programs: dict[Hashable, ExportedProgram] = {}
        self.referenced: list[object] = []  # objects that keys identify by their id

    def __call__(
        self, module: nn.Module, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ExportedProgram:
        """Return the program that `export` would make."""
        look = Look()
        key = (
            look.at(module),
            look.at(graph),
            look.example((args, kwargs)),
            torch.get_default_dtype(),
        )
        if key not in self.programs:
            program = copy.copy(self.export(module, graph, args, kwargs))
            program._state_dict = dict.fromkeys(program.state_dict)
            self.programs[key] = program
            self.referenced += look.kept
        return with_tensors_of(module, self.programs[key])


class SharedRewrites:
    """Stands for a function that rewrites a program; rewrites programs with one graph once.

    `kind` returns what a rewrite depends on besides the graph, from the function's options.
    """

    def __init__(
        self, rewrite: Rewrite, kind: Callable[..., Hashable] = lambda **options: ()
    ) -> None:
        self.rewrite = rewrite
        self.kind = kind
        self.programs: dict[Hashable, ExportedProgram] = {}
        self.referenced: list[object] = []  # objects that keys identify by their id

    def __call__(self, program: ExportedProgram, **options: Any) -> ExportedProgram:
        """Return the program that `rewrite` would make."""
        key = id(program.graph_module), self.kind(**options)
        if key not in self.programs:
            rewritten = copy.copy(self.rewrite(program, **options))
            rewritten._state_dict = dict.fromkeys(rewritten.state_dict)
            self.programs[key] = rewritten
            self.referenced.append(program.graph_module)
        result = copy.copy(self.programs[key])
        result._state_dict = {path: program.state_dict[path] for path in result.state_dict}
        result._constants = {**result.constants, **program.constants}
        return result


def share_exports(patched: pytest.MonkeyPatch) -> None:
    """Export networks that differ only in their values once."""
    from torch.export import decomp_utils, exported_program

    from quantizer.export.programs import program

    patched.setattr(program, "_with_open_sizes", SharedExports(program._with_open_sizes))
    # torch walks through all its operators for each set of decompositions
    collect = exported_program._collect_all_valid_cia_ops
    operators = cache(lambda libraries: collect())
    for module in (exported_program, decomp_utils):
        patched.setattr(
            module, "_collect_all_valid_cia_ops", lambda: operators(tuple(torch.ops._dir))
        )
    share_type_hints(patched)
    register_kernels_plainly(patched)


def register_kernels_plainly(patched: pytest.MonkeyPatch) -> None:
    """Register a kernel of an operator without the decorator that torch makes for each: a set of
    decompositions registers six thousand.
    """
    from torch._ops import DispatchKey, OperatorBase

    decorator = OperatorBase.py_impl

    def register(operator: OperatorBase, key: DispatchKey, kernel: Any) -> Any:
        operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()
        return kernel

    def py_impl(operator: OperatorBase, key: Any) -> Callable[[Any], Any]:
        is_plain = isinstance(key, DispatchKey) and key != DispatchKey.Python
        if is_plain and key not in operator.py_kernels:
            return partial(register, operator, key)
        return decorator(operator, key)

    patched.setattr(OperatorBase, "py_impl", py_impl)


def share_type_hints(patched: pytest.MonkeyPatch) -> None:
    """Evaluate the type hints of a class of torch's schema once, not for each of its objects,
    which takes a quarter of reading a .pt2.
    """
    from torch._export.serde import serialize

    shared = ModuleType("typing")
    vars(shared).update(vars(typing))
    hints: dict[type, dict[str, Any]] = {}

    def get_type_hints(of: type, **more: Any) -> dict[str, Any]:
        if of not in hints:
            hints[of] = typing.get_type_hints(of, **more)
        return hints[of]

    shared.get_type_hints = get_type_hints  # type: ignore[attr-defined]
    patched.setattr(serialize, "typing", shared, raising=False)


def share_translations(patched: pytest.MonkeyPatch) -> None:
    """Decompose programs with one graph once, and make the tables of torch.onnx once."""
    from torch.onnx._internal.exporter import _core, _decomp, _registration, _schemas
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from quantizer.export.onnx import translation

    patched.setattr(
        ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib))
    )
    # What its functions take is the same for each operator set
    for owner, name in (
        (_registration.onnxscript_apis, "get_torchlib_ops"),
        (_schemas, "op_signature_from_function"),
    ):
        patched.setattr(owner, name, cache(getattr(owner, name)))
    patched.setattr(translation, "translatable", SharedRewrites(translation.translatable))
    prepare = SharedRewrites(
        _core._prepare_exported_program_for_export,
        lambda registry: frozenset(_decomp.get_onnx_implemented_overloads(registry)),
    )
    patched.setattr(_core, "_prepare_exported_program_for_export", prepare)
    made = cache(_decomp.create_onnx_friendly_decomposition_table)
    patched.setattr(
        _decomp,
        "create_onnx_friendly_decomposition_table",
        lambda operators: dict(made(frozenset(operators))),
    )


def measure_single_runs(patched: pytest.MonkeyPatch) -> None:
    """Measure the speed of files by a few single runs: no test reads how fast a file is."""
    from quantizer.export.onnx import speed

    patched.setattr(speed, "_ROUNDS", speed.MIN_ROUNDS)
    # Its value was bound when the function was defined
    patched.setitem(speed.speeds_in_turns.__kwdefaults__, "shortest", 0.0)


def run_on_one_thread(patched: pytest.MonkeyPatch) -> None:
    """Run sessions without threads of their own: these wait for work in a loop, which takes more
    time of processors than the small networks of tests.
    """
    import onnxruntime

    start = onnxruntime.InferenceSession.__init__

    def start_alone(
        session: Any, model: Any, sess_options: Any = None, *arguments: Any, **more: Any
    ) -> None:
        options = sess_options or onnxruntime.SessionOptions()
        # 0 stands for as many as the machine has
        options.intra_op_num_threads = options.intra_op_num_threads or 1
        start(session, model, options, *arguments, **more)

    patched.setattr(onnxruntime.InferenceSession, "__init__", start_alone)
