"""Quantizes and exports a model in place, for `ModelQuantizer`."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, tee
from typing import Any

import torch
from torch import nn

from quantizer.api.config import AnyConfig, path_of, read_config
from quantizer.api.display import follower
from quantizer.calibration import steps
from quantizer.calibration.module_target import ModuleTarget
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.config.model import ResolvedConfig
from quantizer.config.wording import a_kind
from quantizer.errors import DataError, UsageError
from quantizer.export.agreement import Verification
from quantizer.export.destinations import in_words_of_checkpoint
from quantizer.export.exporting import export_modules
from quantizer.nn.inplace import all_or_nothing
from quantizer.nn.layer import check_float
from quantizer.plan.model import Plan
from quantizer.sources.arguments import arguments_of, example_input
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.first_batch import layer_remedies
from quantizer.sources.tensor_kinds import check_kinds
from quantizer.sources.user_code import frames_of, user_errors
from quantizer.sources.user_data import batches_of, iterable_of

_EXAMPLE_LENGTH = 32
"""Tokens of an example input."""


class _Passes:
    """The passes over a dataloader, which may be a generator that gives its batches once.

    Args:
        items: the batches.
        is_repeated: whether there are several passes, so that batches are kept for them.
    """

    def __init__(self, items: Iterator[Batch], *, is_repeated: bool) -> None:
        self._items = items
        self._is_repeated = is_repeated

    def first(self) -> Batch:
        """Return the first batch, which the next pass gives again."""
        batch = next(self._items)
        self._items = chain([batch], self._items)
        return batch

    def start(self) -> Iterator[Batch]:
        """Start a pass."""
        if not self._is_repeated:
            return self._items
        self._items, again = tee(batch.stable() for batch in self._items)
        return again


def quantize(model: Any, config: AnyConfig, dataloader: Iterable[Any] | None) -> None:
    """Quantize a model, or leave it unchanged if that fails; see
    `ModelQuantizer.quantize_model`.
    """
    check_float(model)
    check_kinds(model)
    read = read_config(config)
    rules = read.require()
    target = ModuleTarget.of(model)
    data = () if dataloader is None else dataloader
    items = _items(data, model)
    passes = _Passes(items, is_repeated=bool(rules.algorithms))

    def confirm(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
        """Check that the plan has the data it needs, and place quantizers of outputs.

        Raises:
            DataError: there is no dataloader, and the plan or an algorithm needs one.
        """
        plan = state.plan
        target.check(plan)
        has_outputs = any(tensor.role == "activation" for tensor in plan.tensors.values())
        if dataloader is None and (plan.needs_data or rules.algorithms or has_outputs):
            why, remedy = _need_of_data(rules, plan)
            raise DataError(
                f"no dataloader, but {why}",
                help=f"give quantize_model(model, dataloader) {remedy}",
            )
        if not has_outputs:
            return state
        placed, plan = target.place_outputs(plan, passes.first())
        return replace(state, target=placed, plan=plan)

    request = CalibrationRequest(
        target=target,
        config=rules,
        batches=Batches(passes.start, "the dataloader", arguments=arguments_of(model)),
        events=follower(),
        findings=read.diagnostics,
        confirm=confirm,
    )
    with all_or_nothing(model), _failed_layers(model):
        steps.run_calibration(request)


@contextmanager
def _failed_layers(model: nn.Module) -> Iterator[None]:
    """Name the layer in which a call of the model failed, in errors of the code inside."""
    try:
        yield
    except DataError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        remedies = list(layer_remedies(model, cause))
        if not remedies:
            raise
        raise DataError(error.message, help=[*remedies, *frames_of(cause)]) from cause


def export(
    model: nn.Module, folder: str | os.PathLike[str], dataloader: Iterable[Any] | None
) -> Verification:
    """Write a checkpoint; see `ModelQuantizer.export`."""
    place = path_of(folder, "folder")
    if not hasattr(model, "config"):
        raise UsageError(
            f"the model is {a_kind(model)}, not a model of transformers",
            help="`save` writes any model; a result of `calibrate` has more targets",
        )
    if dataloader is None:
        dataloader = [example_input(model, _EXAMPLE_LENGTH)]
    with in_words_of_checkpoint():
        return export_modules(model, place, _items(dataloader, model))


def _need_of_data(config: ResolvedConfig, plan: Plan) -> tuple[str, str]:
    """Return why data is needed, and what to give."""
    algorithms = config.algorithms
    for algorithm in algorithms:
        if algorithm.needs_data:
            return f"{algorithm.name} needs activations of the data", "some batches"
    tensors = plan.tensors.values()
    if plan.needs_data:
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
    with user_errors("the dataloader", DataError):
        items = iter(iterable_of(dataloader, "the dataloader"))
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
