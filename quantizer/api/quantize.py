"""Defines `quantize`, which does in Python what `quantizer run` does."""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from quantizer.api.calibrate import (
    CalibrationData,
    CalibrationSettings,
    calibrate_batches,
    open_batches,
    trace_compared,
)
from quantizer.api.comparison import Comparison
from quantizer.api.config import AnyConfig, path_of, read_config
from quantizer.api.display import called_from_python, follower, in_python
from quantizer.api.result import Quantized, Result, require_real, result_for_file, verified_file
from quantizer.calibration.events import Events
from quantizer.calibration.held_back import (
    MIN_SAMPLES,
    MOST_WINDOWS,
    may_need_data,
    samples_to_calibrate,
)
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.comparison.perplexity import next_tokens
from quantizer.config.load import load_preset
from quantizer.config.run_config import RUN_CONFIG, MadeFor, restored_if_refused
from quantizer.config.wording import counted
from quantizer.declarations import CheckedTarget
from quantizer.errors import GateError, UsageError
from quantizer.evaluation.analyze import WatchedData
from quantizer.export.destinations import (
    DESTINATIONS,
    choices_for,
    default_destination,
    destination_named,
    in_words_of_run,
    preset_for,
)
from quantizer.export.exporting import export_summary, figures_of_file, size_on_disk
from quantizer.export.gates import (
    Gate,
    about_networks,
    gate_lines,
    held_gates,
    not_measured_by_targets,
    not_met_gates,
    parse_gate,
    require_known_names,
    require_measured,
)
from quantizer.export.layer_choice import DEPLOY_FILE, asks_for_floats
from quantizer.export.refusals import (
    planned_refusals,
    refuse,
    require_extras,
    require_model,
    require_operators,
)
from quantizer.export.sized_widths import SizedRun, config_file, require_sized, size_gates
from quantizer.export.targets import EXPORTERS, FOLDER, checked_choices, checked_target
from quantizer.export.value_names import require_fitting_names
from quantizer.graph.ir import Graph
from quantizer.graph.modules import Untraced, untraced_part
from quantizer.nn.layer import check_float
from quantizer.plan.fit.kept_float import kept_names
from quantizer.report.content import write_report
from quantizer.report.next_step import FILE_REMEDY
from quantizer.report.tables import as_csv
from quantizer.report.verdict import VerdictFacts, verdict
from quantizer.results.checkpoint import Checkpoints
from quantizer.results.folder import open_written
from quantizer.results.result_set import locked, mark_result_folder, require_result_folder
from quantizer.sources.arguments import DEFAULT_SEQ_LEN, example_input
from quantizer.sources.data import EXAMPLE_STAMP, Batches
from quantizer.sources.first_batch import remarks_on_data
from quantizer.storage.files import write_json, write_text
from quantizer.storage.permission import replacing

logger = logging.getLogger(__name__)


@called_from_python()
def quantize(
    model: nn.Module,
    data: CalibrationData | None = None,
    to: str | None = None,
    *,
    folder: str | os.PathLike[str] = "quantize_result",
    config: AnyConfig | None = None,
    evaluation_data: Any = None,
    evaluate: Callable[[Callable[..., Any], Iterable[Any]], dict[str, float]] | None = None,
    lower_is_better: Collection[str] = (),
    gates: Collection[str] = (),
    seed: int = 0,
    dynamic: str | None = None,
    max_mb: float | None = None,
    keep_float: Collection[str] = (),
    overwrite: bool = False,
    events: Events | None = None,
    **options: str | os.PathLike[str],
) -> Quantized:
    """Quantize a model in one call, as `quantizer run` does: calibrate, test and write it.

    Args:
        model, data, seed, dynamic, events: as in `calibrate`. Some destinations need no data.
        to: a name of `quantizer targets`. None: "w4" if the model generates text, else "onnx".
        folder, overwrite: for config, results and file; whether others there are replaced.
        config: as in `calibrate`. None for `quantize_config.json` in the folder, or a preset.
        evaluation_data: to test and verify with. None: the last quarter of 16 samples or more.
        evaluate, lower_is_better: as in `Result.test`.
        gates: such as `["top1_drop<=0.01"]`. If one does not hold, `GateError` is raised.
        max_mb: the most 10^6 bytes that the file may have, as `--max_mb` of `quantizer run`.
        keep_float: layers that stay in float, as `exclude` of a config names them.
        options: the options of the target, as in `Result.export`.

    Raises:
        QuantizerError: as of `calibrate` and `Result`; a `UsageError` for a wrong argument.
    """
    check_float(model, traced=True)
    typed = path_of(folder, "folder")
    place = typed.absolute()
    require_result_folder(place)
    name, own_preset = destination_named(to or default_destination(model))
    target = DESTINATIONS[name].target_of(model)
    with (
        replacing(overwrite=overwrite, inputs=_paths_of(config)),
        in_words_of_run(target, name),
    ):
        asked = _asked(gates, target, evaluate) + size_gates(max_mb, name, target)
        kept = kept_names(keep_float, has_config=config is not None)
        choices = choices_for(name, checked_choices(options, target, quantize))
        has_data = data is not None
        require_sized(max_mb, name, target, has_config=config is not None, has_data=has_data)
        preset = own_preset or preset_for(name, has_data=has_data) if config is None else ""
        settings = _settings(target, choices, place, seed=seed, dynamic=dynamic, events=events)
        batches = _batches(model, data, settings)
        graph = _trace(model, batches, target, choices, dynamic=dynamic)
        _require_judged(asked, batches, graph, evaluate, evaluation_data)
        if has_data and evaluation_data is None and _may_need_data(config, preset):
            batches, settings = _divided(model, data, settings, graph)
        with restored_if_refused(place):
            mark_result_folder(place)
            if config is None:
                made_for = MadeFor(name, type(model).__name__, preset, max_mb, kept)
                run = _sized_run(model, graph, batches, events)
                config = config_file(place, made_for, run, target, choices, overwrite=overwrite)
            result = calibrate_batches(model, config, batches, settings, graph=graph)
        result.save(place, overwrite=overwrite)
        measure = partial(_measured, typed, asked, evaluate, lower_is_better)
        write = partial(_with_file, result, evaluation_data, place, target, measure)
        quantized = write(choices, DESTINATIONS[name].choices_if_slower(options))
    return _with_verdict(quantized, name, typed, config, asked, has_data=has_data)


def _paths_of(config: AnyConfig | None) -> list[str | os.PathLike[str]]:
    return [config] if isinstance(config, (str, os.PathLike)) else []


def _asked(gates: str | Collection[str], target: str, evaluate: Any) -> list[Gate]:
    """Return the gates of a call; a single one may stand without a list.

    Args:
        gates: their texts.
        target: of the file.
        evaluate: the user's function, which measures metrics of any names; None if there is
            none.

    Raises:
        UsageError: one is not a comparison, or there is no such metric.
    """
    texts = [gates] if isinstance(gates, str) else gates
    asked = [parse_gate(text) for text in texts]
    if evaluate is None:
        require_known_names(asked, [target])
    return asked


def _with_file(
    result: Result,
    data: Any,
    folder: Path,
    target: str,
    measure: Callable[[Result, Any], Comparison],
    choices: Mapping[str, str],
    if_slower: Mapping[str, str],
) -> Quantized:
    """Write the file of a result, test and verify it. The verdict is empty.

    Args:
        result: of the calibration.
        data: to test and verify with.
        folder: of the run.
        target: of the file.
        measure: tests a result on data.
        choices: values of the target's options, by name.
        if_slower: those with which the file is made again if it is slower than in float.
    """
    path = folder / FOLDER / f"{result.plan.plan.graph.model}{EXPORTERS[target].suffix}"
    path.parent.mkdir(exist_ok=True)
    if if_slower and path.with_name(DEPLOY_FILE).exists():
        # It has the choice of an earlier call
        choices = {**choices, **if_slower}
    # Some profiles leave layers in float where that is faster
    in_file = result_for_file(result, data, target=target, file=path, choices=choices)
    comparison = measure(in_file, data)
    verification = verified_file(in_file, data, target=target, path=path, options=choices)
    if if_slower and asks_for_floats([verification]):
        slower = {**choices, **if_slower}
        return _with_file(result, data, folder, target, measure, slower, {})
    Checkpoints(folder).remove()
    return Quantized(path, folder, result, comparison, verification, ())


def _require_judged(
    gates: Sequence[Gate], batches: Batches, graph: Graph, evaluate: Any, data: Any
) -> None:
    """Raise `UsageError` for what the open data cannot show: see `quantize`."""
    require_real(batches, evaluate, data)
    if evaluate is None and data is None:
        require_measured(gates, not_measured_by_targets(batches.first(), graph))


def _measured(
    folder: Path,
    gates: Sequence[Gate],
    evaluate: Callable[..., Any] | None,
    lower_is_better: Collection[str],
    result: Result,
    data: Any,
) -> Comparison:
    """Return the figures of a test. The arguments are those of `quantize`, and the result.

    Raises:
        GateError: a gate does not hold. The report then has the figures.
    """
    comparison = result.test(data, evaluate, lower_is_better=lower_is_better)
    judged = [gate.text for gate in about_networks(gates)]
    try:
        return comparison.require(*judged)
    except GateError as error:
        place = folder.absolute()
        with locked(place):
            held = held_gates(gates, comparison._scores.gated)
            write_report(open_written(place), {**comparison.to_json(), "gates": held})
        remedy = f"{folder / 'report.html'} shows which layers lose most"
        raise GateError(f"{error.message}; no file is written", help=remedy) from None


def _with_verdict(
    quantized: Quantized,
    name: str,
    folder: Path,
    config: AnyConfig | None,
    gates: Sequence[Gate],
    *,
    has_data: bool,
) -> Quantized:
    """Return the result with the verdict, after the figures are written.

    Args:
        quantized: without a verdict.
        name: of the destination.
        folder: of the run, as its user calls it. It may be relative to a working directory that
            the user's code has changed.
        config: as the user gave it, or the path of the one in the folder.
        gates: of the call. If one about the file does not hold, `GateError` is raised.
        has_data: whether the call has data.
    """
    target = DESTINATIONS[name].target_of(quantized.result._model)
    path, verification = quantized.path, quantized.verification
    size = size_on_disk(target, path)
    of_file = figures_of_file(target, verification, size)
    figures = {**quantized.comparison._scores.gated, **of_file}
    tested = quantized.comparison.to_json()
    tested["gates"] = {gate.text: False for gate in gates} | held_gates(gates, figures)
    tested["exports"] = [export_summary(target, path, verification)]
    tested["improvement"] = DESTINATIONS[name].improvement(has_data=has_data)
    with locked(quantized.folder):
        tested = write_report(open_written(quantized.folder), tested)
        write_text(quantized.folder / "layers.csv", as_csv(quantized.comparison.layers))
        write_json(path.parent / "verify.json", {path.name: verification.to_json()})
    plan = quantized.result.plan.plan
    untraced = Untraced()
    if EXPORTERS[target].holds_whole_model:
        untraced = untraced_part(quantized.result._model, quantized.result._calibrated.original)
    shown = folder / FOLDER / path.name
    # Files have the words of the shell, and what this function returns those of Python
    verification = in_python(verification)
    facts = VerdictFacts.of(
        plan,
        verification,
        untraced=untraced,
        remarks=remarks_on_data(quantized.result._batches),
        path=str(shown),
        size=size,
        tested=tested,
        config=_name_of(config, quantized.folder, folder),
        gates=gate_lines(gates, figures),
    )
    not_met = not_met_gates(gates, figures, is_complete=True)
    if not_met:
        remedies = [text for text in (facts.runtime, FILE_REMEDY) if text]
        raise GateError(f"not met by {shown}: {', '.join(not_met)}", help=remedies)
    return replace(
        quantized,
        path=shown,
        folder=folder,
        verification=verification,
        verdict=tuple(verdict(facts)),
    )


def _trace(
    model: nn.Module,
    batches: Batches,
    target: str,
    choices: Mapping[str, str],
    *,
    dynamic: str | None,
) -> Graph:
    """Return the graph of a model.

    Raises:
        ModelError: the model cannot be traced.
        UsageError: the target cannot hold the model, or the chosen names of inputs and outputs
            do not fit it.
    """
    require_extras([target])
    require_model(target, choices, model)
    graph = trace_compared(model, batches, dynamic, [target])
    require_operators(checked_target(target, choices), graph)
    require_fitting_names(choices, model, graph)
    return graph


def _batches(
    model: nn.Module, data: CalibrationData | None, settings: CalibrationSettings
) -> Batches:
    """Return the batches of the user's data. Without data it is an example input, which
    reports call one.
    """
    if data is not None:
        return open_batches(model, data, settings)
    example = [example_input(model, DEFAULT_SEQ_LEN)]
    return replace(open_batches(model, example, settings), stamp=EXAMPLE_STAMP)


def _may_need_data(config: AnyConfig | None, preset: str) -> bool:
    """Return whether a config, or else a preset, may need the values of data."""
    return may_need_data(
        load_preset(preset) if config is None else read_config(config).require()
    )


def _divided(
    model: nn.Module, data: CalibrationData | None, settings: CalibrationSettings, graph: Graph
) -> tuple[Batches, CalibrationSettings]:
    """Return the data that calibrate, and settings with those that judge. All do both if they
    are few, or are made from the model.
    """
    assert data is not None
    batches = open_batches(model, data, settings)
    if batches.way:
        return batches, settings
    sizes = [batch.size for batch in batches]
    has_name = isinstance(data, str)
    if has_name and sum(sizes) > MOST_WINDOWS and next_tokens(batches.first()) is not None:
        text = "of the %d windows of %s, the first %d are used: give batches to take others"
        logger.info(text, sum(sizes), data, MOST_WINDOWS)
        settings = replace(settings, subset_len=MOST_WINDOWS)
        batches = open_batches(model, data, settings)
        sizes = [batch.size for batch in batches]
    samples = sum(sizes)
    first = samples_to_calibrate(sizes, graph)
    if first is None or samples < MIN_SAMPLES:
        return batches, settings
    held_back = counted(samples - first, "sample")
    logger.info("the last %s of %d judge, and do not calibrate", held_back, samples)
    evaluation = open_batches(model, data, settings)
    evaluation.skip_len = first
    if settings.subset_len is not None:
        evaluation.subset_len = samples - first
    calibration = open_batches(model, data, replace(settings, subset_len=first))
    return calibration, replace(settings, evaluation=evaluation)


def _settings(
    target: str, choices: Mapping[str, str], folder: Path, **others: Any
) -> CalibrationSettings:
    """Return the settings of a calibration that makes a file, with others by name."""
    confirm = partial(_confirm, checked_target(target, choices))
    return CalibrationSettings(confirm=confirm, folder=folder, has_next_step=True, **others)


def _confirm(
    checked: CheckedTarget, request: CalibrationRequest, state: CalibrationState
) -> None:
    """Check a plan before the calibration.

    Raises:
        UsageError: the target cannot hold the plan, or the plan needs data and there is none.
    """
    refuse(checked.words, planned_refusals(checked, state.plan, request.config.algorithms))
    if request.needs_data(state.plan) and request.batches.stamp == EXAMPLE_STAMP:
        raise UsageError(
            "the config needs calibration data, and there is none",
            help="give `data`, or a config without static activations and algorithms",
        )


def _sized_run(
    model: nn.Module, graph: Graph, batches: Batches, events: Events | None
) -> SizedRun:
    """Return what chooses widths within a size."""
    start = partial(batches.without_padding, graph)
    data = WatchedData(start, batches.total, follower(events))
    return SizedRun(model, graph, data, logger.info)


def _name_of(config: AnyConfig | None, folder: Path, typed: Path) -> str:
    """Return the path of a config, or "the config" for one without a file. `typed` is what the
    user calls the folder of the run.
    """
    if config == folder / RUN_CONFIG:
        return str(typed / RUN_CONFIG)
    if isinstance(config, (str, os.PathLike)):
        return os.fspath(config)
    return "the config"
