"""`calibrate` and `load`: the pipeline from Python, for both file forms, with the files and
sentences of the shell.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from quantizer.api.config import AnyConfig, read_config
from quantizer.api.notebook import follower
from quantizer.api.result import Result
from quantizer.calibration import steps
from quantizer.calibration.events import Events, Forked
from quantizer.calibration.finetuning import as_asked
from quantizer.calibration.job import Job
from quantizer.calibration.module_target import evaluating
from quantizer.calibration.target import TracedTarget
from quantizer.config.diagnostics import pointing_into
from quantizer.errors import DataError, ModelError, UsageError
from quantizer.graph.ir import Graph
from quantizer.nn.inplace import check_float
from quantizer.plan.resolve import resolve
from quantizer.results.calibrated import (
    Calibrated,
    example_batch,
    recalled,
    reopened,
    stored_config,
    traced,
)
from quantizer.results.checkpoint import Checkpoints
from quantizer.results.folder import QuantInfo, read_info
from quantizer.results.result_set import locked
from quantizer.results.same_calibration import check_plan
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches, load_batches
from quantizer.sources.hugging_face import without_cache
from quantizer.sources.user_code import user_exits
from quantizer.sources.weights import check_finite
from quantizer.storage.process_memory import parsed

Data = str | Iterable[Any] | Callable[[], Any]


@user_exits("the model", ModelError)
def calibrate(
    model: nn.Module,
    config: AnyConfig | None,
    data: Data,
    *,
    batch_size: int | None = None,
    subset_len: int | None = None,
    seed: int = 0,
    fast_finetune: str | None = None,
    dpu_accuracy: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    memory: int | str | None = None,
    events: Events | None = None,
) -> Result:
    """Quantize a traced copy of `model`, as `quantizer --quant_mode calib` does; the model
    stays as it is.

    Args:
        model: any `torch.nn.Module`; it is traced on the first batch, in evaluation mode.
        config: a path, a dict or a `Config`, of either file form; None for the built-in default
            of the DPU.
        data: an iterable of batches (tensors, tuples, dicts, with or without targets), a
            function that returns one, or what `--data` takes as text; the same batches each
            time. Without ranges to find, the first gives the shape.
        batch_size: samples per batch, of data that come as text; of any data, `subset_len`
            samples are used.
        seed: of all randomness.
        fast_finetune: "adaround" or "adaquant" to learn how to round the weights.
        dpu_accuracy: "high" to equalize layers, correct biases and finetune as well, for the
            DPU.
        folder: where checkpoints go while it runs, and where `resume` looks for them to go on
            with a stopped run.
        memory: bytes of activations kept in memory, or "8GB"; more go to files. None for half
            of what is free.
        events: who follows the run; None for bars in a notebook and log records elsewhere.

    Raises:
        ConfigError: all findings on the config, alone and with this model.
        ModelError: the model cannot be traced, or has NaN or Inf in its weights.
        DataError: there are no data, or they are not what the model takes.
        ResultError: another run uses `folder`, or it has links among its files.
        UsageError: `memory` is no size, or `fast_finetune` or `dpu_accuracy` does not go with
            the config.
    """
    check_float(model, traced=True)
    read, budget = read_config(config), _budget(memory)
    rules, fast_finetune = as_asked(read.require(), dpu_accuracy, fast_finetune)
    cut = {"batch_size": batch_size, "subset_len": subset_len}
    checkpoints = Checkpoints(Path(folder), resume=resume) if folder is not None else None
    watching, batches = events or follower(), _batches(model, data, seed=seed, **cut)
    job = Job(
        TracedTarget(_traced(model, batches)),
        rules,
        batches,
        Forked(*filter(None, (watching, checkpoints))),
        checkpoints,
        seed,
        fast_finetune,
        {"seed": seed, **cut},
        read.diagnostics,
        memory=budget,
        dpu_accuracy=dpu_accuracy,
    )
    lock = locked(checkpoints.folder) if checkpoints else nullcontext()
    with lock, pointing_into(read.sources):
        found = Calibrated(job.target.original, rules.settings, steps.run(job))
        if checkpoints:
            checkpoints.remove()
    return Result(model, found, job.plan, batches, watching, job=job)


def _budget(memory: int | str | None) -> int | None:
    """In bytes."""
    try:
        if memory is None or (isinstance(memory, int) and memory >= 0):
            return memory
        return parsed(str(memory))
    except ValueError:
        raise UsageError(
            f"memory={memory!r} is no size", help='give bytes, or a text such as "8GB"'
        ) from None


@user_exits("the model", ModelError)
def load(folder: str | os.PathLike[str], model: nn.Module, data: Data | None = None) -> Result:
    """What `calibrate` saved, or the shell wrote, for the same float model.

    Args:
        folder: the result folder.
        model: the float model that was calibrated, with the same weights.
        data: as in `calibrate`; the first batch is read for its shape, all are the default of
            `Result.test`. None for what needs a shape only, which the folder knows.

    Raises:
        ResultError: the folder is incomplete or damaged, or of another model.
    """
    check_float(model, traced=True)
    info = read_info(Path(folder))
    batches = (
        _shape_alone(info) if data is None else _batches(model, data, seed=info.header["seed"])
    )
    batch = _first_batch(model, batches)
    with evaluating(model), without_cache(model):
        original = recalled(model, batch, info)
        calibrated = reopened(model, batch, original, info)
    rules = stored_config(info)
    plan = check_plan(info, rules, resolve(rules, calibrated.graph, original))
    return Result(model, calibrated, plan, batches, follower(), opened=info)


def _batches(
    model: nn.Module,
    data: Data,
    *,
    seed: int,
    batch_size: int | None = None,
    subset_len: int | None = None,
) -> Batches:
    if data is None:
        raise DataError(
            "data is None",
            help="give a list of batches, a DataLoader, or a function that returns one",
        )
    return load_batches(
        data,
        module=model,
        batch_size=batch_size,
        subset_len=subset_len,
        seed=seed,
        label="data",
    )


def _shape_alone(info: QuantInfo) -> Batches:
    batch = example_batch(info.header)
    return Batches(lambda: iter((batch,)), "an example input", stands_in=True)


def _traced(model: nn.Module, batches: Batches) -> Graph:
    """Return the graph of a model whose weights are finite, compared with the model."""
    check_finite(model)
    batch = _first_batch(model, batches)
    with evaluating(model), without_cache(model):
        return traced(model, batch, compared=True)


def _first_batch(model: nn.Module, batches: Batches) -> Batch:
    """Return the first batch on the device of the model."""
    batch = batches.first()
    device = next((parameter.device for parameter in model.parameters()), None)
    return batch if device is None else batch.to(device)
