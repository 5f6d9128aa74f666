"""Checks what a target can hold, and turns what the libraries of exporters raise into refusals.
Imports no torch by itself.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from quantizer.config.model import Settings
from quantizer.config.wording import first_names
from quantizer.errors import (
    ModelError,
    QuantizerError,
    UsageError,
    first_line,
    lacks_memory,
    lost_worker,
)
from quantizer.export.exporter import Refusal, exporter_of
from quantizer.export.targets import CHECKED_TARGETS, EXPORTERS, checked_target, offered
from quantizer.graph.names import is_operator_name
from quantizer.option_words import marked_text

if TYPE_CHECKING:
    from torch import nn

    from quantizer.config.algorithms import Algorithm
    from quantizer.declarations import CheckedTarget
    from quantizer.graph.ir import Graph
    from quantizer.plan.model import Plan, TensorSpecs

_PACKAGE = Path(__file__).parents[1]
_NODE = re.compile(r"(?:'node_|node '|%)(\w+)")
"""How libraries name a node of a program: `node 'node_split_1'`, or `%split_1`."""
_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")
"""The operator of a node, and which call of it the node is."""
_WRITTEN_AS = {"split": ("chunk", "split_with_sizes")}
"""Further operators that libraries write as another one, by that one."""
_ADDRESS = re.compile(r" object at 0x[0-9a-f]+")
_LEAVE_OUT = f"leave the algorithm or the module out, or use {offered('weights')}"
_IS_RANDOM = "draws random numbers, so no run of a file can be compared with test mode"
_FIX_NUMBERS = (
    "make these numbers an input of forward(), or leave them out in evaluation mode; "
    f"{offered('weights')} holds the weights without the operators"
)
_MAY_BE_NEGATIVE = "may have negative scales, which readers of this file do not expect"
_USE_HALF_RANGE = 'set its symmetric_scale to "half_range"'
_IS_PLAIN = "engines build poolers and classifiers behind the blocks of a model in float"
_IS_COMPUTED = "the model computes the weight, and has no place for a rounded one"


def require_extras(targets: Iterable[str], *, to_plan: bool = False) -> None:
    """Check that the packages of targets are installed.

    Args:
        to_plan: whether only a plan is checked, which some targets do without packages.

    Raises:
        UsageError: naming the packages and how to install them.
    """
    for name in targets:
        target = CHECKED_TARGETS[name].target
        if to_plan and EXPORTERS[target].plans_alone:
            continue
        missing = [name for name in EXPORTERS[target].needs if find_spec(name) is None]
        if missing:
            # Only a missing extra needs it
            from quantizer.installation import pip_line

            raise UsageError(
                f"the target {target} needs {', '.join(missing)}, which this Python does not "
                "have",
                help=pip_line(EXPORTERS[target].extra),
            )


def require_model(target: str, choices: Mapping[str, str], model: nn.Module) -> None:
    """Check that a target's files can hold a model, as far as that is known before its trace.

    Raises:
        UsageError: why they cannot.
    """
    exporter = exporter_of(target, choices)
    try:
        exporter.require_model(model)
    except UsageError as error:
        prefix = f"<--deploy {target}>: "
        message = f"{prefix}{error.message.marked.removeprefix(prefix)}"
        raise UsageError(message, help=error.help) from error


def planned_refusals(
    checked: CheckedTarget, plan: Plan, algorithms: Iterable[Algorithm] = ()
) -> list[Refusal]:
    """Return what a target cannot express of a plan.

    What algorithms will insert is not known yet.

    Args:
        algorithms: those that will round the weights.
    """
    opset = plan.settings.onnx_opset_version
    with refused_by_libraries(checked.target, plan.graph):
        refusals = list(_refusals(checked, plan.graph, plan.specs, opset))
    if not EXPORTERS[checked.target].for_transformers:
        return refusals
    from quantizer.plan.fit.fitted_config import rounded_apart

    for algorithm in algorithms:
        why = f"is of a module that is called several times: {algorithm.name} rounds it for "
        why += "each call on its own, and files have one weight of a module"
        for layer in rounded_apart(algorithm, plan):
            refusals.append(Refusal(why, _LEAVE_OUT, layer, "weights"))
    return refusals


def require_operators(checked: CheckedTarget, graph: Graph) -> None:
    """Check that a target can express a network in float. All other checks need a plan, and
    some plans need the data.

    Args:
        checked: the target.
        graph: the trace of the model.

    Raises:
        UsageError: why it cannot.
    """
    # They need torch
    from quantizer.graph.passes import run_passes

    exporter = EXPORTERS[checked.target]
    if exporter.by_tensor or exporter.for_transformers:
        return
    graph = run_passes(graph, Settings())
    with refused_by_libraries(checked.target, graph):
        refuse(checked.words, _refusals(checked, graph, {}, opset=-1))


def require_expressible(
    checked: CheckedTarget, graph: Graph, specs: TensorSpecs, opset: int
) -> None:
    """Check that a target can express a network.

    Raises:
        UsageError: why it cannot, with the first tensors it holds for.
    """
    refuse(checked.words, _refusals(checked, graph, specs, opset))


def _refusals(
    checked: CheckedTarget, graph: Graph, specs: TensorSpecs, opset: int
) -> Iterator[Refusal]:
    """Yield what a target cannot hold: random numbers if the file has operators, negative
    scales, and the refusals of its exporter.
    """
    has_operators = not EXPORTERS[checked.target].by_tensor
    drawing = [node.name for node in graph.nodes if has_operators and node.is_random]
    for name in drawing:
        yield Refusal(_IS_RANDOM, _FIX_NUMBERS, name)
    if drawing:
        return
    if not EXPORTERS[checked.target].holds_negative_scales:
        for (layer, role), spec in specs.items():
            if spec.dtype == "int" and spec.has_signed_scale:
                yield Refusal(_MAY_BE_NEGATIVE, _USE_HALF_RANGE, layer, role)
    exporter = exporter_of(checked.target, checked.choices)
    yield from exporter.refusals(graph, specs, opset)


def refuse(words: str, refusals: Iterable[Refusal]) -> None:
    """Raise the refusals as one error, if there are any.

    A refusal of the whole network comes first. Tensors with the same reason share a sentence.

    Args:
        words: the options that ask for the file.
        refusals: what cannot be expressed.

    Raises:
        UsageError: there are refusals.
    """
    words = marked_text(words)
    names_by_reason: dict[str, list[str]] = {}
    helps: dict[str, None] = {}
    for refusal in refusals:
        if not refusal.layer:
            raise UsageError(f"{words} {marked_text(refusal.why)}", help=refusal.help)
        name = refusal.layer
        if refusal.role:
            name = f"{refusal.role} of {refusal.layer}"
        names_by_reason.setdefault(marked_text(refusal.why), []).append(name)
        helps[marked_text(refusal.help)] = None
    texts = [
        first_names(names) + (": each " if len(names) > 1 else " ") + why
        for why, names in names_by_reason.items()
    ]
    if texts:
        raise UsageError(f"{words}: {'; '.join(texts)}", help="; ".join(helps))


def planned_values(checked: CheckedTarget, plan: Plan) -> tuple[str, ...]:
    """Return the layers whose rounded weights a target stores as floats."""
    exporter = exporter_of(checked.target, checked.choices)
    return exporter.value_layers(plan.graph, plan.specs)


def plan_remarks(checked: CheckedTarget, plan: Plan) -> Iterator[str]:
    """Yield what users of a target's files have to know, and a sentence on the layers whose
    rounded weights it stores as floats.
    """
    exporter = exporter_of(checked.target, checked.choices)
    yield from exporter.notes(plan.graph, plan.specs)
    layers = planned_values(checked, plan)
    if not layers:
        return
    names = first_names(layers)
    yield (
        f"{checked.target} stores the rounded weights of {names} as floats, "
        "which saves nothing: `exclude` keeps their accuracy"
    )


def layers_to_leave(name: str, choices: Mapping[str, str]) -> Callable[[Plan], dict[str, str]]:
    """Return a function that finds the layers of a plan to leave in float for a target.

    Its files have no place for their rounded weights, or store them as floats, or engines build
    these layers in float. The function returns the reasons by layer.
    """
    checked = checked_target(name, choices)
    as_values = f"{checked.target} stores the weight as floats, so rounding saves nothing"

    def to_leave(plan: Plan) -> dict[str, str]:
        """Return the layers of a plan to leave in float, with the reasons."""
        refusals = planned_refusals(checked, plan)
        layers = [refusal.layer for refusal in refusals if refusal.role == "weights"]
        reasons = {
            layer: _IS_COMPUTED
            for layer in layers
            if is_operator_name(plan.graph.by_name[layer].params.get("weight", ""))
        }
        for layer in planned_values(checked, plan):
            reasons.setdefault(layer, as_values)
        exporter = exporter_of(checked.target, checked.choices)
        for layer in exporter.plain_layers(plan.graph):
            if (layer, "weights") in plan.specs:
                reasons.setdefault(layer, _IS_PLAIN)
        return reasons

    return to_leave


@contextmanager
def refused_by_libraries(target: str, graph: Graph) -> Iterator[None]:
    """Raise what a library raises as `ModelError` with the layer, if the library names it.

    Errors of this package, and those about memory or a lost process, stay as they are.

    Args:
        target: the target of `--deploy` that is written.
        graph: its layers.
    """
    try:
        yield
    except QuantizerError:
        raise
    except Exception as error:
        if not _is_of_a_library(error) or lacks_memory(error) or lost_worker(error):
            raise
        raise _refusal(error, target, graph) from error


def _is_of_a_library(error: Exception) -> bool:
    """Return whether the class of an error is a library's, or code of one has raised it."""
    package = type(error).__module__.partition(".")[0]
    if package not in ("builtins", _PACKAGE.name):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return not Path(frames[-1].filename).is_relative_to(_PACKAGE)


def _refusal(error: Exception, target: str, graph: Graph) -> ModelError:
    """Return the error about a network that a library cannot write."""
    shown: BaseException = error
    layer = ""
    cause: BaseException | None = error
    while cause is not None:
        if _NODE.search(str(cause)):
            shown = cause
            layer = _layer_of(str(cause), graph)
        cause = cause.__cause__ or cause.__context__
    reason = _ADDRESS.sub("", f"{type(shown).__name__}: {first_line(shown)}")
    text = f"<--deploy {target}>: a library that writes it fails at {graph.model}: {reason}"
    if layer:
        text += f"; that is layer {layer}"
    row = EXPORTERS[target]
    if row.for_transformers:
        return ModelError(text, help=f"{offered('weights')} holds all weights")
    other = "network"
    for target_row in EXPORTERS.values():
        if target_row.offered_for == other and set(target_row.needs) & set(row.needs):
            # The same library would write that
            other = "program"
    help_text = f"keep that part outside the quantized model, or use {offered(other)}"
    return ModelError(text, help=help_text)


def _layer_of(message: str, graph: Graph) -> str:
    """Return the layer that a message names by its operator and number; empty if none is."""
    for token in _NODE.findall(message):
        match = _NUMBERED.fullmatch(token.removeprefix("node_"))
        assert match is not None
        operator, number = match.groups()
        operators = (operator, *_WRITTEN_AS.get(operator, ()))
        layers = [node.name for node in graph.nodes if node.op in operators]
        index = int(number or 0)
        if index < len(layers):
            return layers[index]
    return ""
