"""What `ModelQuantizer.quantize_model` does: runs the pipeline on a module tree, all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quantizer.api.dataloader import batches_of
from quantizer.api.read_config import AnyConfig, read_config
from quantizer.engine import pipeline
from quantizer.engine.job import Job
from quantizer.engine.module_target import ModuleTarget
from quantizer.errors import DataError
from quantizer.nn.inplace import check_float
from quantizer.nn.transaction import all_or_nothing


def quantize(model: Any, config: AnyConfig, dataloader: Iterable[Any] | None) -> None:
    """Quantize `model`; see `ModelQuantizer.quantize_model`."""
    check_float(model)
    read = read_config(config)
    rules = read.require()
    target = ModuleTarget(model)

    def confirm(job: Job) -> None:
        target.check(job.plan)
        if dataloader is None and (job.plan.needs_data or rules.algorithms):
            why, remedy = _wants_data(job)
            raise DataError(f"no dataloader, but {why}", help=f"give quantize_model(model, dataloader) {remedy}")

    batches = batches_of(() if dataloader is None else dataloader, model, several_passes=bool(rules.algorithms))
    job = Job(target, rules, batches, findings=read.diagnostics, confirm=confirm)
    with all_or_nothing(model):
        target.apply(pipeline.run(job))


def _wants_data(job: Job) -> tuple[str, str]:
    """What data are for, and what to give."""
    algorithms = job.config.algorithms
    reading = next((settings.name for settings in algorithms if settings.needs_data), None)
    if reading is not None:
        return f"{reading} works on the values that data give", "some batches"
    if job.plan.needs_data:
        found = next(tensor for tensor in job.plan.tensors.values() if tensor.is_calibrated)
        instead = "" if algorithms else ", or set is_dynamic=True"
        why = f"the {found.role} of {found.layer} has a static scale, which is found on data"
        return why, f"some batches{instead}"
    return f"{algorithms[0].name} works on a trace of the model, which runs it on one batch", "one batch"
