"""Watches a trace with open sizes: which sizes it holds for, and which layer needs others. Has
the sentences for traces that fail or fix the number of samples.

torch adds a guard for each property of a size that a trace relies on. The trace holds for the
sizes for which all guards are true. Models that read a text in chunks divide its length. Their
traces hold for one number of chunks, and take many times as long with a dynamic length as with
a fixed one. So a trace stops early if it would hold for a few lengths only.
"""

import contextlib
import inspect
import linecache
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, PythonMod
from torch.utils._sympy.printers import PythonPrinter

from quantizer.config.wording import listed, with_article
from quantizer.errors import ModelError, SameForAllExamplesError, UntraceableError
from quantizer.graph.ir import Call

_DIVISIONS = (CleanDiv, FloorDiv, Mod, PythonMod)
_BEYOND = 64
"""Lengths are tried from half the traced length to twice the traced length plus this number."""
_FAR = (3, 4, 16, 4096)
"""These multiples of the traced length are tried, too."""

_UNKNOWN_OUTPUT = re.compile(r"Found <class '(?:[\w.]+\.)?(\w+)'> in output, which is not")
"""The beginning of torch's message about an output of a class that it does not know."""
_CONVOLUTIONS = (
    torch.ops.aten.conv1d.default,
    torch.ops.aten.conv2d.default,
    torch.ops.aten.conv3d.default,
)
NOT_USER_CODE = ("/torch/", "/sympy/", "/quantizer/graph/", "contextlib")
"""Parts of the paths of files that are not the user's."""


@dataclass(frozen=True)
class Guard:
    """A condition on sizes that a trace relies on.

    Args:
        condition: its compiled form, over the names of torch's symbols.
        symbols: these names.
        constant: what a size has to be equal to; 0 for other conditions.
        divides: whether it has a quotient or a remainder of sizes.
        layer: the path of the module that ran; None after the call of the model.
        place: ` at line 12 of net.py: …`; empty if it is not known.
    """

    condition: CodeType
    symbols: frozenset[str]
    constant: int
    divides: bool
    layer: str | None
    place: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the condition is true for sizes by torch's symbol.

        A condition on sizes that values decide, such as that of `nonzero`, counts as true.
        """
        if not sizes.keys() >= self.symbols:
            return True
        try:
            return bool(eval(self.condition, {"math": math}, dict(sizes)))
        except ArithmeticError:
            return False


class GuardedTrace:
    """Records the guards of a trace, with the layers that need them.

    Attributes:
        symbols: the names of torch's symbols for sizes of the call, by (leaf, axis).
        guards: the guards in the order of the trace, without repetition.
    """

    def __init__(self, module: nn.Module) -> None:
        self.symbols: dict[tuple[int, int], str] = {}
        self.guards: list[Guard] = []
        self._module = module
        self._running: list[str] = []
        self._conditions: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside the `with` block, in which the module is traced."""
        module = self._module
        attributes = vars(module)
        before = attributes.get("forward")
        # Hooks of the module itself do not run in a trace
        module.forward = self._watched(module.forward)
        with contextlib.ExitStack() as hooks:
            for path, child in module.named_modules():
                if path:
                    self._hook(hooks, path, child)
            try:
                yield
            finally:
                del attributes["forward"]
                if before is not None:
                    attributes["forward"] = before

    def _hook(self, hooks: contextlib.ExitStack, path: str, child: nn.Module) -> None:
        """Follow the calls of one module."""

        def enter(_module: nn.Module, _args: Any) -> None:
            self._running.append(path)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._running.pop()

        hooks.enter_context(child.register_forward_pre_hook(enter))
        hooks.enter_context(child.register_forward_hook(leave))

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` of the model with a record of the guards that its call adds."""

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            """Record the open sizes of the arguments, then call the model."""
            for leaf, value in enumerate(pytree.tree_leaves((args, kwargs))):
                for axis, size in enumerate(getattr(value, "shape", ())):
                    if isinstance(size, torch.SymInt):
                        sym_node = size.node
                        self.symbols[leaf, axis] = str(sym_node.expr)
                        self._record(sym_node.shape_env)
            self._running = [""]
            try:
                return forward(*args, **kwargs)
            finally:
                self._running = []

        return run

    def _record(self, environment: Any) -> None:
        """Make torch's list of guards report each new one."""
        if not isinstance(environment.guards, _ReportingList):
            environment.guards = _ReportingList(environment.guards, self.add)

    def add(self, guard: Any) -> None:
        """Add a guard of torch with the layer and the line that run now."""
        condition = PythonPrinter().doprint(guard.expr)
        if condition in self._conditions:
            return
        self._conditions.add(condition)
        layer: str | None = None
        place = ""
        if self._running:
            layer = self._running[-1]
            place = _user_line()
        compiled = compile(condition, "<guard>", "eval")
        symbols = frozenset(map(str, guard.expr.free_symbols))
        constant = _constant_in(guard.expr)
        divides = bool(guard.expr.has(*_DIVISIONS))
        self.guards.append(Guard(compiled, symbols, constant, divides, layer, place))

    def first_failing(self, sizes: Mapping[str, int]) -> Guard | None:
        """Return the first guard that is false at these sizes, None if all are true."""
        for guard in self.guards:
            if not guard.holds(sizes):
                return guard
        return None

    def layer_name(self, guard: Guard) -> str:
        """Return the path and the class of the layer that needs a guard."""
        kind = type(self._module.get_submodule(guard.layer or "")).__name__
        return f"{guard.layer} ({kind})" if guard.layer else f"{kind}.forward()"


class _ReportingList(list[Any]):
    """A list that reports what is appended."""

    def __init__(self, values: Sequence[Any], report: Callable[[Any], None]) -> None:
        super().__init__(values)
        self._report = report

    def append(self, value: Any) -> None:
        """Append a value, and report it."""
        super().append(value)
        self._report(value)


def _constant_in(condition: Any) -> int:
    """Return what a condition says that a size is equal to, 0 for other conditions."""
    if getattr(condition, "rel_op", "") != "==":
        return 0
    right = condition.rhs
    return int(right) if right.is_Integer else 0


def _user_line() -> str:
    """Return ` at line 12 of net.py: …` for the innermost frame of the user's code that runs
    below the call of the model, "" if there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if path == __file__ and code.co_name == "run":
            return ""
        is_users = not any(part in path for part in NOT_USER_CODE)
        if is_users and not path.startswith("<"):
            number = frame.f_lineno
            line = linecache.getline(path, number)
            _, _, file = path.rpartition("/")
            return f" at line {number} of {file}: {line.strip()}"
        frame = frame.f_back
    return ""


class FewLengthsError(Exception):
    """Stops a trace that would hold for a few lengths only."""


class LengthTrace(GuardedTrace):
    """Records the guards of a trace with dynamic lengths, and stops it at the first one that a
    length does not meet. Bounds of a length do not stop it, because torch keeps them.

    Args:
        module: what is traced.
        shapes: of the leaves of the example.
        stops_if_fixed: whether a fixed length is a reason to stop, too.

    Attributes:
        remark: a sentence on the guard that has stopped the trace, empty without.
    """

    def __init__(
        self, module: nn.Module, shapes: Sequence[Sequence[int]], stops_if_fixed: bool = False
    ) -> None:
        super().__init__(module)
        self.remark = ""
        self._shapes = shapes
        self._stops_if_fixed = stops_if_fixed

    def add(self, guard: Any) -> None:
        """Add a guard of torch.

        Raises:
            FewLengthsError: a length does not meet it.
        """
        count = len(self.guards)
        super().add(guard)
        for new in self.guards[count:]:
            if self._is_met_by_few(new):
                # A second trace, of a shorter example, does not decide what users read
                if not self._stops_if_fixed:
                    self.remark = self._sentence(new)
                raise FewLengthsError

    def _is_met_by_few(self, guard: Guard) -> bool:
        """Return whether a guard is false for one of the lengths that are tried."""
        is_fixed = self._stops_if_fixed and guard.constant > 0
        if not guard.divides and not is_fixed:
            return False
        tried = self._tried_sizes(guard)
        return not all(guard.holds(sizes) for sizes in tried)

    def _tried_sizes(self, guard: Guard) -> Iterator[dict[str, int]]:
        """Yield sizes by torch's symbol: those of the trace, except one length of the guard."""
        traced: dict[str, int] = {}
        for (leaf, axis), symbol in self.symbols.items():
            traced[symbol] = self._shapes[leaf][axis]
        for symbol, length in self._traced_lengths(guard).items():
            end = 2 * length + _BEYOND
            far = [length * factor for factor in _FAR]
            least = max(2, length // 2)
            near = range(least, end)
            for tried_length in (*near, *far):
                yield {**traced, symbol: tried_length}

    def _traced_lengths(self, guard: Guard) -> dict[str, int]:
        """Return what the lengths in a guard were in the trace, by torch's symbol."""
        lengths: dict[str, int] = {}
        for (leaf, axis), symbol in self.symbols.items():
            if axis and symbol in guard.symbols:
                lengths[symbol] = self._shapes[leaf][axis]
        return lengths

    def _sentence(self, guard: Guard) -> str:
        """Return a sentence on the guard that stops the trace."""
        name = self.layer_name(guard) if guard.layer else "forward()"
        model = type(self._module).__name__
        sizes = dict.fromkeys(self._traced_lengths(guard).values())
        return (
            f"{model} fixes its length at {listed(sizes)}: {name} computes with parts of a "
            f"text{guard.place}; give batches of this length"
        )


def explain_failure(module: nn.Module, error: Exception) -> ModelError:
    """Return one sentence for a failed trace, with the line of the user's code if known."""
    text = str(error).strip()
    if "data-dependent" in text.lower():
        return _explain_branch(module, error)
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            return ModelError(
                f"{type(module).__name__} cannot be traced: {path} is compiled by torch.jit",
                help="give the Python module in its place, and compile it after quantization",
            )
    unknown = _UNKNOWN_OUTPUT.search(text)
    if unknown:
        name = unknown[1]
        return SameForAllExamplesError(
            f"{type(module).__name__} cannot be traced: it returns {with_article(name)}, of "
            "which torch does not know the tensors",
            help="return a tensor, tuple, list or dict; or, for a dataclass, call "
            f"torch.export.register_dataclass({name}) in the model's file",
        )
    reason = text.splitlines()[0] if text else type(error).__name__
    return UntraceableError(
        f"{type(module).__name__} cannot be traced: {type(error).__name__}: "
        f"{reason}{place_of(error)}",
        help="write that line with other operators, or keep it outside the quantized model",
    )


def _explain_branch(module: nn.Module, error: Exception) -> ModelError:
    """Return the sentence for control flow that depends on the values of a tensor."""
    text = str(error)
    call = re.search(
        r'File "([^"]+)", line (\d+), in (\w+)\s*\n\s*(.+)',
        text[text.find("The following call") :],
    )
    where = place_of(error)
    if call:
        file = call.group(1).rpartition("/")[2]
        where = f" at line {call.group(2)} of {file}: {call.group(4).strip()}"
    remedy = (
        "compute both branches and choose with torch.where, or keep that part outside "
        "the quantized model"
    )
    # transformers has two other implementations of experts, which can be traced
    if hasattr(module, "set_experts_implementation") and "expert" in where:
        remedy = 'call its set_experts_implementation("grouped_mm")'
    return SameForAllExamplesError(
        f"{type(module).__name__} cannot be traced: its control flow depends on the "
        f"values of a tensor{where}",
        help=remedy,
    )


def place_of(error: BaseException) -> str:
    """Return ` at line 12 of net.py` for the innermost frame outside torch, "" without one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in NOT_USER_CODE):
            file = frame.filename.rpartition("/")[2]
            line = frame.line or ""
            return f" at line {frame.lineno} of {file}: {line}".rstrip(": ")
    return ""


def missing_axis(program: ExportedProgram) -> str:
    """Return the remedy for images that have no axis of samples, "" if they have it."""
    for node in program.graph.find_nodes(op="placeholder"):
        for reader in node.users:
            if reader.target not in _CONVOLUTIONS or reader.args[0] is not node:
                continue
            shape = list(node.meta["val"].shape)
            weight = reader.args[1]
            if len(shape) < weight.meta["val"].dim():
                return f"; {shape} has no axis of samples: add it with unsqueeze(0)"
    return ""


def undeclared_arguments(module: nn.Module, call: Call) -> str:
    """Return the remedy for keyword arguments that `forward` does not declare, "" without."""
    parameters = inspect.signature(module.forward).parameters
    catch_all = [name for name, value in parameters.items() if value.kind == value.VAR_KEYWORD]
    if not catch_all or call[1].keys() <= parameters.keys():
        return ""
    return f"; name the arguments in forward() instead of taking **{catch_all[0]}"
