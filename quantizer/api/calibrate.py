"""Defines `calibrate` and `load`, which do in Python what the shell does."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from quantizer.api.config import AnyConfig, read_config
from quantizer.api.display import called_from_python, follower
from quantizer.api.result import Result
from quantizer.calibration.events import Events, ForkedEvents
from quantizer.calibration.request import CalibrationRequest, CalibrationState, Confirm
from quantizer.calibration.target import Target
from quantizer.config.algorithms import MAX_SEED
from quantizer.config.diagnostics import pointing_into
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.run_options import dynamic_sizes, with_finetuning
from quantizer.config.wording import a_kind
from quantizer.errors import DataError, UsageError
from quantizer.export.exporting import exportable
from quantizer.graph.ir import Graph
from quantizer.nn.layer import check_float
from quantizer.plan.resolve import resolve_plan
from quantizer.results.calibrated import (
    Calibrated,
    check_plan,
    reopen_calibration,
    stored_config,
)
from quantizer.results.checkpoint import Checkpoints, calibrated
from quantizer.results.folder import read_info
from quantizer.results.graph_file import example_batch, reuse_or_trace, trace_module
from quantizer.results.result_set import locked, require_result_folder
from quantizer.results.write import write_results
from quantizer.sources.arguments import DEFAULT_SEQ_LEN, example_input
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches, load_batches
from quantizer.sources.module_state import evaluating, without_cache
from quantizer.sources.tensor_kinds import check_finite
from quantizer.storage.process_memory import parse_size

_logger = logging.getLogger(__name__)
_FACTS = ("seed", "batch_size", "subset_len")
"""The settings that results record, which are whole numbers."""

CalibrationData = str | Iterable[Any] | Callable[[], Any]


@called_from_python()
def calibrate(
    model: nn.Module,
    config: AnyConfig | None,
    data: CalibrationData,
    *,
    batch_size: int | None = None,
    subset_len: int | None = None,
    seed: int = 0,
    fast_finetune: Literal["adaround", "adaquant"] | str | None = None,
    dpu_accuracy: Literal["high"] | str | None = None,
    dynamic: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    memory: int | str | None = None,
    events: Events | None = None,
) -> Result:
    """Quantize a traced copy of a model, as `quantizer --quant_mode calib` does.

    Args:
        model: any `torch.nn.Module`, as of `from_pretrained`. It is traced and stays unchanged.
        config: a path, a dict or a `Config`; None for the built-in default for the DPU.
        data: an iterable of batches (tensors, tuples, dicts, with or without targets), a
            function that returns one, or a text as for `--data`. Each pass has to give the same
            batches. If no ranges are calibrated, only the shape of the first batch matters.
        batch_size: samples per batch, if `data` is a text.
        subset_len: how many samples to use, from the first on; None for all.
        seed: the seed of all random numbers.
        fast_finetune: "adaround" or "adaquant" to learn how to round the weights.
        dpu_accuracy: "high" to also equalize layers, correct biases and finetune, for the DPU.
        dynamic: sizes to leave open: "height,width", "height", "width" or "length".
        folder: the folder for checkpoints; None for no checkpoints.
        resume: whether to continue from the checkpoint in `folder`.
        memory: the memory for activations, in bytes or as "8GB". What does not fit is written
            to files. None for half of the free memory.
        events: receives progress and messages; None for bars in a notebook and log records
            elsewhere.

    Raises:
        ConfigError: the config cannot be used, alone or with this model. It has all findings.
        ModelError: the model cannot be traced, fixes `dynamic`, or has NaN or Inf as weights.
        DataError: there is no data, or the model cannot take it.
        ResultError: another run uses `folder`, or it has links among its files.
        UsageError: an argument cannot be used, alone or with this data or config.

    >>> import torch, quantizer
    >>> network = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> config = {"global_quant_config": {"weight": {"dtype": "int8"}}}
    >>> batches = [torch.linspace(-1, 1, 32).view(4, 8)]
    >>> result = quantizer.calibrate(network, config, batches)
    >>> print(result)
    Result(1 tensor of Sequential quantized)
      1 weights int8
      11.1% of the parameters stay float; weights 0.00 MB -> 0.00 MB
    >>> result.test().require(sqnr_db=30).metrics["sqnr_db"] > 30
    True
    """
    check_float(model, traced=True)
    settings = CalibrationSettings(
        seed=seed,
        batch_size=batch_size,
        subset_len=subset_len,
        fast_finetune=fast_finetune,
        dpu_accuracy=dpu_accuracy,
        dynamic=dynamic,
        folder=folder,
        resume=resume,
        memory=memory,
        events=events,
    )
    return calibrate_batches(model, config, open_batches(model, data, settings), settings)


@dataclass(frozen=True)
class CalibrationSettings:
    """The arguments of `calibrate` except the model, the config and the data.

    Attributes:
        confirm: checks the plan before calibration.
        has_next_step: whether the checkpoints stay, because the same call continues with a
            test.
        evaluation: the data that the result is tested on by default; those of the calibration
            if None.
    """

    seed: int = 0
    batch_size: int | None = None
    subset_len: int | None = None
    fast_finetune: str | None = None
    dpu_accuracy: str | None = None
    dynamic: str | None = None
    folder: str | os.PathLike[str] | None = None
    resume: bool = False
    memory: int | str | None = None
    events: Events | None = None
    confirm: Confirm = lambda request, state: None
    has_next_step: bool = False
    evaluation: Batches | None = None

    def __post_init__(self) -> None:
        for name in _FACTS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise UsageError(f"{name} is {a_kind(value)}, not an int")
        if self.resume and self.folder is None:
            raise UsageError("resume=True needs `folder`, which has the checkpoint")
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed is {self.seed}, not from 0 to {MAX_SEED}")


def calibrate_batches(
    model: nn.Module,
    config: AnyConfig | None,
    batches: Batches,
    settings: CalibrationSettings,
    *,
    graph: Graph | None = None,
) -> Result:
    """Quantize a traced copy of a model whose data is open; see `calibrate`.

    Args:
        model: the float model.
        config: as in `calibrate`.
        batches: the data, from `open_batches`.
        settings: the other arguments of `calibrate`.
        graph: the model's graph, from `trace_compared`; None to trace here.
    """
    config_result = read_config(config)
    memory = _bytes_of(settings.memory)
    checked_config, finetuning_mode = with_finetuning(
        config_result.require(), settings.dpu_accuracy, settings.fast_finetune
    )
    checkpoints: Checkpoints | None = None
    if settings.folder is not None:
        folder = Path(settings.folder).absolute()
        require_result_folder(folder)
        checkpoints = Checkpoints(folder, resume=settings.resume)
    events = follower(settings.events)

    request = CalibrationRequest(
        target=Target(graph or trace_compared(model, batches, settings.dynamic)),
        config=checked_config,
        batches=batches,
        events=ForkedEvents(*filter(None, (events, checkpoints))),
        checkpoints=checkpoints,
        seed=settings.seed,
        fast_finetune=finetuning_mode,
        facts={name: getattr(settings, name) for name in _FACTS},
        findings=config_result.diagnostics,
        confirm=settings.confirm,
        memory=memory,
        dpu_accuracy=settings.dpu_accuracy,
    )
    lock = locked(checkpoints.folder) if checkpoints else nullcontext()
    with lock, pointing_into(config_result.sources):
        state = calibrated(request, must_resume=settings.resume)
        if checkpoints and not settings.has_next_step:
            checkpoints.remove()
    original = request.target.original
    document = resolved_document(checked_config)
    data = request.data_of(state.plan)
    return Result(
        model,
        Calibrated(original, checked_config.settings, state.solution, document, data),
        state.plan,
        settings.evaluation or batches,
        events=events,
        write=partial(_write, request=request, state=state),
        calibration_stamp=request.data_stamp(state.plan),
    )


def _write(folder: Path, *, request: CalibrationRequest, state: CalibrationState) -> None:
    """Write the result of a calibration."""
    original, config = request.target.original, request.config
    header = request.header(state)
    write_results(
        folder, original, state.calibration, state.solution, config=config, run=header
    )


def _bytes_of(memory: int | str | None) -> int | None:
    """Return the argument `memory` of `calibrate` in bytes; None if it is None."""
    try:
        if memory is None or (isinstance(memory, int) and memory >= 0):
            return memory
        return parse_size(str(memory))
    except ValueError:
        raise UsageError(
            f"memory={memory!r} is not a size", help='give bytes, or a text such as "8GB"'
        ) from None


@called_from_python()
def load(
    folder: str | os.PathLike[str], model: nn.Module, data: CalibrationData | None = None
) -> Result:
    """Load a result folder for the same float model.

    The network adds biases in float. A file for an engine that adds them as int32 is verified
    against a network that rounds them, too. Both are equally far from the float model. In a
    deep network they differ from each other: `export` and `--deploy` have the figures of the
    file.

    Args:
        folder: a result folder, which `Result.save` or the shell has written.
        model: the float model that was calibrated, with the same weights.
        data: as in `calibrate`, and the default of `Result.test`; None if no data is needed.

    Raises:
        ResultError: the folder is incomplete or damaged, or of another model.

    >>> import tempfile, torch, quantizer
    >>> network = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> config = {"global_quant_config": {"weight": {"dtype": "int8"}}}
    >>> batches = [torch.linspace(-1, 1, 32).view(4, 8)]
    >>> result = quantizer.calibrate(network, config, batches)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result.save(folder)
    ...     loaded = quantizer.load(folder, network)
    >>> torch.equal(loaded.network(batches[0]), result.network(batches[0]))
    True
    """
    check_float(model, traced=True)
    info = read_info(Path(folder))
    if data is None:
        example = example_batch(info.header)
        batches = Batches(lambda: iter((example,)), "an example input", stands_in=True)
    else:
        batches = open_batches(model, data, CalibrationSettings(seed=info.header["seed"]))
    batch = _first_batch(model, batches)
    with evaluating(model), without_cache(model):
        original = reuse_or_trace(model, batch, info)
        calibrated = reopen_calibration(model, batch, original, info)
    config = stored_config(info)
    plan = resolve_plan(config, calibrated.graph, original)
    plan = check_plan(info, config, plan)
    return Result(
        model,
        calibrated,
        plan,
        batches,
        events=follower(),
        opened=info,
        calibration_stamp=info.header.get("stamp"),
    )


def open_batches(
    model: nn.Module, data: CalibrationData, settings: CalibrationSettings
) -> Batches:
    """Return the batches of the user's data.

    Raises:
        DataError: there is no data, or it cannot be read.
    """
    if data is None:
        raise DataError(
            "data is None",
            help="give a list of batches, a DataLoader, or a function that returns one",
        )
    if settings.batch_size is not None and not isinstance(data, str):
        raise UsageError(
            "batch_size is for data that a text names, and these batches have their sizes",
            help="leave `batch_size` out, or set it where the batches are made",
        )

    def example() -> Batch | None:
        """Return an input of a model of transformers; None for other models."""
        if not hasattr(model, "main_input_name"):
            return None
        return load_batches([example_input(model, DEFAULT_SEQ_LEN)], module=model).first()

    return load_batches(
        data,
        module=model,
        batch_size=settings.batch_size,
        subset_len=settings.subset_len,
        seed=settings.seed,
        example=example,
        label="data",
    )


def trace_compared(
    model: nn.Module, batches: Batches, dynamic: str | None, targets: Sequence[str] = ()
) -> Graph:
    """Trace a model on the first batch, and compare the graph's outputs with the model's.

    Args:
        model: the float model.
        batches: the data.
        dynamic: as in `calibrate`.
        targets: of files that will be written.

    Raises:
        ModelError: a weight is not finite, or the model cannot be traced or exported.
    """
    sizes = dynamic_sizes(dynamic)
    check_finite(model)
    if model.training:
        _logger.info("the model is in train mode; it runs in eval mode here, as when deployed")
    batch = _first_batch(model, batches)
    traced = partial(trace_module, model, batch, compared=True, sizes=sizes)
    with evaluating(model), without_cache(model):
        return exportable(traced(), batch, targets, partial(traced, fixed=True))


def _first_batch(model: nn.Module, batches: Batches) -> Batch:
    """Return the first batch on the device of the model."""
    batch = batches.first()
    parameter = next(model.parameters(), None)
    return batch if parameter is None else batch.to(parameter.device)
