"""What `ModelQuantizer.quantize_model` does: checks, plans, calibrates and attaches, in place on a module tree."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import torch
from torch import nn

from quantizer.algorithms.adjustment import Rounded
from quantizer.engine.module_algorithms import adjust_in_place, write_rounded
from quantizer.engine.module_attach import attach
from quantizer.api.config import Config
from quantizer.nn.transaction import all_or_nothing
from quantizer.config.diagnostics import ConfigError, Diagnostic
from quantizer.config.document import Document
from quantizer.config.load import check_document
from quantizer.config.model import Config as InternalConfig
from quantizer.config.wording import a_kind, shortened
from quantizer.engine import calibrate
from quantizer.errors import DataError
from quantizer.graph.modules import left_out, module_graph
from quantizer.nn.inplace import ModuleTree, check_float, check_quantizable
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve
from quantizer.sources.batches import Batch, as_batch, positional_inputs

logger = logging.getLogger(__name__)


def quantize(model: Any, config: Config, dataloader: Iterable[Any] | None) -> None:
    """Quantize `model`; see `ModelQuantizer.quantize_model`."""
    check_float(model)
    result = check_document(Document.of(config.to_dict(), "Config"))
    rules = result.require()
    graph = module_graph(model)
    plan = resolve(rules, graph, graph)
    findings = (*result.diagnostics, *plan.diagnostics)
    if any(finding.severity == "error" for finding in findings):
        raise ConfigError(findings)
    _tell(plan, findings)
    for remark in left_float(model, rules, plan):
        logger.warning("%s", remark)
    tree = ModuleTree(model, graph)
    for name, layer in tree.layers.items():
        if roles := plan.of_layer(name):
            check_quantizable(layer, name, roles)
    if dataloader is None and (plan.needs_data or rules.algorithms):
        why, remedy = _wants_data(plan, rules)
        raise DataError(f"no dataloader, but {why}", help=f"give quantize_model(model, dataloader) {remedy}")
    given: Iterator[Batch] = _batches(dataloader, model) if dataloader is not None else iter(())
    batches: Iterable[Batch] = _Kept(given) if rules.algorithms else given
    rounded: dict[str, Rounded] = {}
    with all_or_nothing(model):
        if rules.algorithms:
            with evaluating(model):
                rounded = adjust_in_place(model, rules.algorithms, plan, batches)
            plan = dataclasses.replace(plan, graph=module_graph(model))
        calibration = calibrate.start(plan)
        if plan.needs_data:
            with evaluating(model):
                calibrate.run(calibration, tree, batches)
            calibration = _without_unreached(calibration, tree)
        solution = calibrate.solution(calibration).with_qparams(
            {name: layer.qparams for name, layer in rounded.items()}
        )
        write_rounded(model, plan.graph, rounded)
        attach(model, plan.graph, solution)


class _Kept:
    """Batches for several passes, each read when a pass first comes to it: a trace, and names, need the first alone."""

    def __init__(self, rest: Iterator[Batch]) -> None:
        self._rest, self._read = rest, list[Batch]()

    def __iter__(self) -> Iterator[Batch]:
        for number in count():
            if number == len(self._read):
                self._read.extend(islice(self._rest, 1))
            if number == len(self._read):
                return
            yield self._read[number]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _batches(dataloader: Iterable[Any], model: nn.Module) -> Iterator[Batch]:
    """The user's items as batches, on the model's device."""
    try:
        items = iter(dataloader)
    except TypeError:
        raise DataError(f"dataloader is {a_kind(dataloader)}, which gives no batches") from None
    inputs = positional_inputs(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    index = -1
    for index, item in enumerate(items):
        try:
            yield as_batch(item, inputs).to(device)
        except DataError as error:
            raise DataError(f"batch {index} {error.message}", help=error.help) from error
    if index < 0:
        raise DataError(
            "the dataloader gave no batches",
            help="give quantize_model a dataloader that gives batches; a generator gives its batches only once",
        )


def _wants_data(plan: Plan, rules: InternalConfig) -> tuple[str, str]:
    """What data are for, and what to give."""
    reading = next((settings.name for settings in rules.algorithms if settings.needs_data), None)
    if reading is not None:
        return f"{reading} works on the values that data give", "some batches"
    if plan.needs_data:
        found = next(tensor for tensor in plan.tensors.values() if tensor.is_calibrated)
        instead = "" if rules.algorithms else ", or set is_dynamic=True"
        why = f"the {found.role} of {found.layer} has a static scale, which is found on data"
        return why, f"some batches{instead}"
    return f"{rules.algorithms[0].name} works on a trace of the model, which runs it on one batch", "one batch"


def _without_unreached(calibration: calibrate.Calibration, tree: ModuleTree) -> calibrate.Calibration:
    """The calibration without activations of layers that no batch reached: they become weight-only, with a warning."""
    tensors = calibration.plan.tensors
    silent = [key for key, tensor in tensors.items() if tensor.is_calibrated and key[0] not in tree.reached]
    for layer in dict.fromkeys(layer for layer, _ in silent):
        logger.warning("%s was not reached by the calibration data: its activations stay float", layer)
    kept = {key: tensor for key, tensor in tensors.items() if key not in silent}
    observers = {key: observer for key, observer in calibration.observers.items() if key in kept}
    return dataclasses.replace(
        calibration, plan=dataclasses.replace(calibration.plan, tensors=kept), observers=observers
    )


def _tell(plan: Plan, findings: Iterable[Diagnostic]) -> None:
    """Log what the config does to the model: counts and notes as information, the rest as warnings."""
    for finding in findings:
        level = logging.INFO if finding.severity == "note" else logging.WARNING
        where = f"{finding.place}: " if finding.place else ""
        logger.log(level, "%s%s%s", where, finding.message, f" ({finding.help})" if finding.help else "")
    for rule in plan.rules:
        layers = [name for name in rule.layers if plan.graph.by_name[name].params]
        logger.info("%s: %d layers, %d tensors set", rule.label, len(layers), rule.took_effect)


def left_float(model: nn.Module, config: InternalConfig, plan: Plan) -> Iterator[str]:
    """What stays float although the config may be read otherwise, a sentence each."""
    counts = Counter(left_out(model, plan.graph).values())
    if counts:
        told = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
        yield f"left float, as there are no quantization rules for them: {told}"
    wanted = [
        (role, name)
        for rule, found in zip(config.rules, plan.rules, strict=True)
        for role in rule.adds
        for name in found.layers
        if (name, role) not in plan.tensors
    ]
    unread = [name for role, name in wanted if role == "input" and not plan.graph.by_name[name].inputs]
    tuples = [name for role, name in wanted if role == "activation" and plan.graph.by_name[name].dtype is None]
    for names, reason in (
        (unread, "attention reads its projections' weights itself, so their inputs stay float"),
        (tuples, "what recurrent layers and attention return is not quantized"),
    ):
        layers = [name for name in dict.fromkeys(names) if plan.of_layer(name)]
        if layers:
            yield f"{reason}: {shortened(layers, 1)}"
