"""Checks what a target can hold, and writes its files. Imports no torch by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from quantizer.calibration.events import NO_FOLLOWER, Events, RunStage
from quantizer.config.model import Settings
from quantizer.config.wording import first_names
from quantizer.declarations import CheckedTarget
from quantizer.errors import ModelError, UsageError, VerificationError, pip_line
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.library_failures import refused_by_libraries
from quantizer.export.targets import CHECKED_TARGETS, EXPORTERS, checked_target, offered
from quantizer.option_words import marked_text
from quantizer.plugins import loaded
from quantizer.storage.folder_list import LIST_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from quantizer.calibration.solution import Solution
    from quantizer.config.algorithms import Algorithm
    from quantizer.declarations import CheckedTarget
    from quantizer.export.agreement import Verification
    from quantizer.export.deployment import Deployment
    from quantizer.export.layer_choice import LayerChoice
    from quantizer.graph.ir import Graph
    from quantizer.plan.model import Plan, TensorSpecs
    from quantizer.results.calibrated import Calibrated
    from quantizer.sources.batches import Batch

_logger = logging.getLogger(__name__)
_LEAVE_OUT = f"leave the algorithm or the module out, or use {offered('weights')}"
_IS_RANDOM = "draws random numbers, so no run of a file can be compared with test mode"
_FIX_NUMBERS = (
    "make these numbers an input of forward(), or leave them out in evaluation mode; "
    f"{offered('weights')} holds the weights without the operators"
)
_MAY_BE_NEGATIVE = "may have negative scales, which readers of this file do not expect"
_USE_HALF_RANGE = 'set its symmetric_scale to "half_range"'


def exporter_of(target: str, choices: Mapping[str, str] | None = None) -> Exporter[Any]:
    """Return the exporter of a target; its module, which needs torch, is imported now.

    Args:
        choices: values of the target's options, by name.
    """
    return cast(Exporter[Any], loaded(EXPORTERS[target].exporter)(choices))


def export_modules(model: nn.Module, folder: Path, batches: Iterable[Batch]) -> Verification:
    """Write a model that was quantized in place, and verify what was written.

    Args:
        model: a model of transformers.
        folder: to write.
        batches: of calls; at least one.

    Raises:
        QuantizerError: the exporter of the target raises it.
        UsageError: no plug-in is there that writes such models.
    """
    for row in EXPORTERS.values():
        if row.modules_exporter:
            return cast("Verification", loaded(row.modules_exporter)(model, folder, batches))
    raise UsageError(
        "no plug-in is there that writes a model that was quantized in place",
        help="`save` writes the state of its modules",
    )


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
    texts: list[str] = []
    for why, names in names_by_reason.items():
        separator = ": each " if len(names) > 1 else " "
        texts.append(first_names(names) + separator + why)
    if texts:
        raise UsageError(f"{words}: {'; '.join(texts)}", help="; ".join(helps))


def as_run(
    targets: Iterable[str],
    graph: Graph,
    solution: Solution,
    choices: Mapping[str, str] | None = None,
) -> Solution:
    """Return the solution with what the runtimes of these targets round in addition.

    Test mode runs this solution, so that its metrics count that rounding.

    Args:
        choices: values of the targets' options, by name.
    """
    for target in targets:
        solution = exporter_of(target, choices).as_run(graph, solution)
    return solution


def chosen_layers(
    calibrated: Calibrated,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    targets: Iterable[str],
    choices: Mapping[str, str],
    folder: Path,
) -> LayerChoice | None:
    """Return which layers stay in float because integers are slower there.

    Args:
        calibrated: with all its quantizations.
        model: the float model.
        batches: of the evaluation data. The first one is measured.
        targets: those that are written.
        choices: values of their options, by name, one of which chooses layers.
        folder: of the files.

    Returns:
        None if no target chooses.

    Raises:
        ResultError: a deploy.json does not fit the network.
        UsageError: the machine is too busy to measure.
    """
    # It needs torch
    from quantizer.export.deployment import Deployment

    deployment = Deployment.of(calibrated, model, batches, {}, choices=choices, metrics={})
    for target in targets:
        exporter = exporter_of(target, choices)
        path = folder / f"{deployment.graph.model}{EXPORTERS[target].suffix}"
        with refused_by_libraries(target, deployment.graph):
            choice = exporter.layer_choice(deployment, path)
        if choice is not None:
            return choice
    return None


def export(
    target: str,
    deployment: Deployment,
    path: Path,
    events: Events = NO_FOLLOWER,
    *,
    total: int | None = None,
) -> Verification:
    """Write one file, read it back, and return how far it is from test mode.

    A file that fails is not written, and one of an earlier export is removed, if a list of
    quantizer's has it.

    Args:
        events: receives the progress of verification, counted in batches.
        total: the number of batches, if it is known.

    Raises:
        UsageError: the target cannot express what the config asks of a layer; nothing is
            written then.
        ModelError: the target cannot translate a layer, or a library fails.
        VerificationError: the file does not compute what test mode does.
        ResultError: the file cannot be written.
    """
    # They need torch
    from quantizer.export.publishing import new_files
    from quantizer.plan.remarks import size_remarks

    exporter = exporter_of(target, deployment.choices)
    checked = checked_target(target, deployment.choices)
    if not EXPORTERS[target].by_tensor:
        deployment = deployment.in_memory()
    try:
        with (
            RunStage(events, f"verify {target}", total) as stage,
            refused_by_libraries(target, deployment.graph),
        ):
            deployment = deployment.followed(stage)
            require_expressible(
                checked, deployment.graph, deployment.solution.specs, deployment.opset
            )
            with (
                new_files(exporter, path, deployment.model) as new_path,
                exporter.write(deployment, new_path) as written,
            ):
                verification = exporter.verify(deployment, written)
    except (UsageError, ModelError, VerificationError):
        exporter.remove(path)
        raise
    losses = [f"in test mode already: {text}" for text in deployment.warnings]
    return replace(
        verification,
        remarks=(*verification.remarks, *size_remarks(deployment.graph), *losses),
        asides=(*verification.asides, *losses),
        activation_codes=verification.activation_codes or exporter.activation_codes,
    )


def size_on_disk(target: str, path: Path) -> int:
    """Return the bytes of a target's files at `path`, or of the files in its folder."""
    files: Iterable[Path] = exporter_of(target).files(path)
    if path.is_dir():
        files = [file for file in path.iterdir() if file.name != LIST_FILE]
    return sum(file.stat().st_size for file in files if file.exists())


def exportable(
    graph: Graph, batch: Batch, targets: Iterable[str], trace_fixed: Callable[[], Graph]
) -> Graph:
    """Return the graph of a model, or one with a fixed batch if torch.export needs that.

    All targets share one program. A network whose weights stay in files has none: to make it
    takes all of them into memory.

    Args:
        graph: as traced.
        batch: that it was traced on.
        targets: of files.
        trace_fixed: traces the model with the number of samples of the batch.

    Raises:
        ModelError: torch.export refuses the network.
    """
    rows = [EXPORTERS[CHECKED_TARGETS[target].target] for target in targets]
    has_operators = any(not (row.by_tensor or row.for_transformers) for row in rows)
    if graph.is_deferred or not has_operators:
        return graph
    # It needs torch
    from quantizer.graph.tracing.batch_axes import has_open_batch

    try:
        _make_program(graph, batch)
        return graph
    except ModelError as error:
        if not has_open_batch(graph):
            raise
        reason = error.message
    _logger.warning(
        "%s; its batch size is fixed at %d, and only such batches can run", reason, batch.size
    )
    fixed = trace_fixed()
    _make_program(fixed, batch)
    return fixed


def _make_program(graph: Graph, batch: Batch) -> None:
    """Make the program of a network in float.

    Raises:
        ModelError: torch.export refuses it.
    """
    # They need torch
    import torch

    from quantizer.calibration.solution import Solution
    from quantizer.export.deployment import Deployment
    from quantizer.export.programs.program import float_program
    from quantizer.export.value_names import in_traced_order

    graph = graph.on(torch.device("cpu"))
    batch = batch.to("cpu")
    args, kwargs = in_traced_order(graph, batch.args, batch.kwargs)
    float_program(Deployment(graph, Solution({}), args, kwargs))
