"""What `ModelQuantizer.quantize_model` does: runs the pipeline on a module tree, all of it or
nothing.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, tee
from typing import Any

import torch
from torch import nn

from quantizer.api.config import AnyConfig, path_of, read_config
from quantizer.calibration import steps
from quantizer.calibration.module_target import ModuleTarget
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.config.model import Config
from quantizer.config.wording import a_kind
from quantizer.errors import DataError, ModelError
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.modules import export_modules
from quantizer.nn.inplace import check_float
from quantizer.nn.transaction import all_or_nothing
from quantizer.plan.model import Plan
from quantizer.sources.arguments import arguments_of
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.hugging_face import example_input
from quantizer.sources.user_code import user_errors, user_exits
from quantizer.sources.user_data import batches_of
from quantizer.sources.weights import check_kinds

EXAMPLE_LENGTH = 32
"""Tokens of a made-up input."""


@user_exits("the model", ModelError)
def quantize(model: Any, config: AnyConfig, dataloader: Iterable[Any] | None) -> None:
    """Quantize `model`; see `ModelQuantizer.quantize_model`."""
    check_float(model)
    check_kinds(model)
    read = read_config(config)
    rules = read.require()
    target = ModuleTarget.of(model)

    items = _items(() if dataloader is None else dataloader, model)

    def confirm(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
        nonlocal items
        plan = state.plan
        target.check(plan)
        outputs = any(tensor.role == "activation" for tensor in plan.tensors.values())
        if dataloader is None and (plan.needs_data or rules.algorithms or outputs):
            why, remedy = _wants_data(rules, plan)
            raise DataError(
                f"no dataloader, but {why}",
                help=f"give quantize_model(model, dataloader) {remedy}",
            )
        if not outputs:
            return state
        first = next(items)
        items = chain([first], items)
        placed, plan = target.place_outputs(plan, first)
        return replace(state, target=placed, plan=plan)

    def batches() -> Iterator[Batch]:
        """A pass; algorithms take several, so batches are kept for them, each read when a pass
        first comes to it.
        """
        nonlocal items
        if not rules.algorithms:
            return items
        items, again = tee(batch.stable() for batch in items)
        return again

    read_by = Batches(batches, "the dataloader", given=arguments_of(model))
    request = CalibrationRequest(
        target=target,
        config=rules,
        batches=read_by,
        findings=read.diagnostics,
        confirm=confirm,
    )
    with all_or_nothing(model):
        steps.run(request)


@user_exits("the model", ModelError)
def export(
    model: nn.Module, folder: str | os.PathLike[str], dataloader: Iterable[Any] | None
) -> Verification:
    """Write a checkpoint; see `ModelQuantizer.export`."""
    place = path_of(folder, "folder")
    items = (
        [example_input(model, EXAMPLE_LENGTH)]
        if dataloader is None and hasattr(model, "config")
        else dataloader
    )
    return export_modules(model, place, _items(items or (), model))


def _wants_data(config: Config, plan: Plan) -> tuple[str, str]:
    """What data are for, and what to give."""
    algorithms = config.algorithms
    reading = next((settings.name for settings in algorithms if settings.needs_data), None)
    if reading is not None:
        return f"{reading} works on the values that data give", "some batches"
    if plan.needs_data:
        found = next(tensor for tensor in plan.tensors.values() if tensor.is_calibrated)
        why = f"the {found.role} of {found.layer} has a static scale, which is found on data"
        return why, "some batches" + ("" if algorithms else ", or set is_dynamic=True")
    if algorithms:
        return (
            f"{algorithms[0].name} works on a trace of the model, which runs it on one batch",
            "one batch",
        )
    found = next(tensor for tensor in plan.tensors.values() if tensor.role == "activation")
    return (
        f"whether a ReLU follows {found.layer}, whose output is quantized, one batch shows",
        "one batch",
    )


def _items(dataloader: Iterable[Any], model: nn.Module) -> Iterator[Batch]:
    """The user's items (tensors, tuples, lists or dicts) as batches on the model's device."""
    if not isinstance(dataloader, Iterable) and not hasattr(dataloader, "__getitem__"):
        raise DataError(f"dataloader is {a_kind(dataloader)}, which gives no batches")
    with user_errors("the dataloader", DataError):
        items = iter(dataloader)
    given = arguments_of(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    is_empty = True
    for batch in batches_of(items, "the dataloader", given):
        is_empty = False
        yield batch.to(device)
    if is_empty:
        raise DataError(
            "the dataloader gave no batches",
            help="give quantize_model a dataloader that gives batches; a generator gives its "
            "batches only once",
        )
