"""Quantizes and exports a model in place, for `ModelQuantizer`."""

import os
from collections.abc import Iterable, Iterator
from itertools import chain, tee
from typing import Any

import torch
from torch import nn

from quantizer.api.config import AnyConfig, path_of, read_config
from quantizer.calibration import steps
from quantizer.calibration.job import Job
from quantizer.calibration.module_target import ModuleTarget
from quantizer.config.wording import a_kind
from quantizer.errors import DataError, ModelError
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.modules import export_modules
from quantizer.nn.inplace import check_float
from quantizer.nn.transaction import all_or_nothing
from quantizer.sources.arguments import arguments_of
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.hugging_face import example_input
from quantizer.sources.user_code import user_errors, user_exits
from quantizer.sources.user_data import batches_of
from quantizer.sources.weights import check_kinds

_EXAMPLE_LENGTH = 32
"""Tokens of an example input."""


@user_exits("the model", ModelError)
def quantize(model: Any, config: AnyConfig, dataloader: Iterable[Any] | None) -> None:
    """Quantize a model, or leave it unchanged if that fails; see
    `ModelQuantizer.quantize_model`.
    """
    check_float(model)
    check_kinds(model)
    read = read_config(config)
    rules = read.require()
    target = ModuleTarget(model)

    data = () if dataloader is None else dataloader
    items = _items(data, model)

    def confirm(job: Job) -> None:
        nonlocal items
        target.check(job.plan)
        outputs = any(tensor.role == "activation" for tensor in job.plan.tensors.values())
        if dataloader is None and (job.plan.needs_data or rules.algorithms or outputs):
            why, remedy = _need_of_data(job)
            raise DataError(
                f"no dataloader, but {why}",
                help=f"give quantize_model(model, dataloader) {remedy}",
            )
        if outputs:
            first = next(items)
            items = chain([first], items)
            job.plan = target.place_outputs(job.plan, first)

    def batches() -> Iterator[Batch]:
        """Start a pass. Algorithms take several passes, so batches are kept for them."""
        nonlocal items
        if not rules.algorithms:
            return items
        items, again = tee(batch.stable() for batch in items)
        return again

    read_by = Batches(batches, "the dataloader", given=arguments_of(model))
    job = Job(target, rules, read_by, findings=read.diagnostics, confirm=confirm)
    with all_or_nothing(model):
        steps.run(job)


@user_exits("the model", ModelError)
def export(
    model: nn.Module, folder: str | os.PathLike[str], dataloader: Iterable[Any] | None
) -> Verification:
    """Write a checkpoint; see `ModelQuantizer.export`."""
    place = path_of(folder, "folder")
    if dataloader is None:
        dataloader = ()
        if hasattr(model, "config"):
            dataloader = [example_input(model, _EXAMPLE_LENGTH)]
    return export_modules(model, place, _items(dataloader, model))


def _need_of_data(job: Job) -> tuple[str, str]:
    """Return why data is needed, and what to give."""
    algorithms = job.config.algorithms
    for algorithm in algorithms:
        if algorithm.needs_data:
            return f"{algorithm.name} needs activations of the data", "some batches"
    tensors = job.plan.tensors.values()
    if job.plan.needs_data:
        tensor = next(tensor for tensor in tensors if tensor.is_calibrated)
        why = f"the {tensor.role} of {tensor.layer} has a static scale, which data determines"
        remedy = "some batches" if algorithms else "some batches, or set is_dynamic=True"
        return why, remedy
    if algorithms:
        return f"{algorithms[0].name} traces the model, which runs it on one batch", "one batch"
    tensor = next(tensor for tensor in tensors if tensor.role == "activation")
    why = f"the output of {tensor.layer} is quantized: a batch shows if a ReLU follows"
    return why, "one batch"


def _items(dataloader: Iterable[Any], model: nn.Module) -> Iterator[Batch]:
    """Yield the user's items (tensors, tuples, lists or dicts) as batches on the model's
    device.
    """
    if not isinstance(dataloader, Iterable) and not hasattr(dataloader, "__getitem__"):
        raise DataError(
            f"dataloader is {a_kind(dataloader)}, which gives no batches",
            help="give a DataLoader, or a list of batches",
        )
    with user_errors("the dataloader", DataError):
        items = iter(dataloader)
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    is_empty = True
    for batch in batches_of(items, "the dataloader", arguments_of(model)):
        is_empty = False
        yield batch.to(device)
    if is_empty:
        raise DataError(
            "the dataloader gave no batches",
            help="give quantize_model a dataloader that gives batches; a generator gives its "
            "batches only once",
        )
