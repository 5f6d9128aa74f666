"""Run `--quant_mode float`: measure the float model alone."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quantizer.calibration.fingerprint import input_shapes
from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import unmoved
from quantizer.cli.session import ReadConfig, read_config_file
from quantizer.cli.terminal.follow import progress
from quantizer.cli.terminal.output import Outcome, metric_lines, show_layers
from quantizer.config.load import default_config
from quantizer.config.model import Settings
from quantizer.distributed import ALONE, Ranks
from quantizer.errors import DataError, ModelError, UsageError
from quantizer.evaluation.scores import measure
from quantizer.export.gates import (
    MEASURED,
    Gate,
    about_all,
    names_in_test,
    not_measured_by_targets,
    parse_gate,
    require_known,
    require_measured,
)
from quantizer.sources.arguments import window_length
from quantizer.sources.directions import BY_NAME, Directions
from quantizer.sources.user_code import import_user_module, split_spec
from quantizer.torch_state import seed_everything


def run_float(options: Options, ranks: Ranks = ALONE) -> Outcome:
    """Measure the float model on the evaluation data, on rank 0 only."""
    if not ranks.is_first:
        return Outcome({}, {})
    loaded = session.open_model(options)
    evaluator = session.evaluator_of(options, loaded)
    gates = [parse_gate(text) for text in options.gate]
    if evaluator is None:
        require_known(gates, MEASURED)
    batches = session.open_data(options, loaded, evaluation=True)
    if evaluator is None:
        require_measured(gates, not_measured_by_targets(batches.first()))
    if options.inspect:
        graph = session.trace_model(options, loaded, batches)
        read = config_to_look(options.config_file)
        plan = session.resolved_plan(read, graph, quiet=options.quiet)
        show_layers(options, plan.graph, plan.tensors, plan.floats)
    metrics = measure(
        loaded.module,
        batches,
        session.device_of(options),
        progress(quiet=options.quiet),
        label="float",
        function=evaluator,
    )
    if not metrics:
        raise UsageError(
            "there is nothing to measure: there is no evaluate(model, data), and the data has "
            "no targets",
            help="add evaluate() to the model's file, give --evaluate, or use data of (input, "
            "target) pairs",
        )
    return Outcome(metrics, {"metrics": metrics}, metric_lines(metrics))


def with_float_metrics(
    opened: session.OpenedRun, options: Options, gates: Sequence[Gate]
) -> session.OpenedRun:
    """Return the run with the user's metrics of the float model, if a gate may be about one of
    them. So a misspelt metric is refused before calibration, which may take long.

    Args:
        opened: the model and its data.
        options: of the test.
        gates: of the run.

    Raises:
        UsageError: the metric of a gate is not among them.
    """
    evaluator = session.evaluator_of(options, opened.loaded)
    known = names_in_test((), options.deploy, exact=options.exact)
    of_user = [gate for gate in about_all(gates) if gate.metric not in known]
    is_on_example = opened.batches.stands_in and not options.eval_data
    if evaluator is None or not of_user or is_on_example:
        return opened
    # The windows of texts that test mode will have
    seq_len = window_length(input_shapes(opened.graph))
    batches = session.open_data(options, opened.loaded, evaluation=True, seq_len=seq_len)
    metrics = measure(
        opened.loaded.module,
        batches,
        session.device_of(options),
        progress(quiet=options.quiet),
        label="evaluate float",
        function=evaluator,
    )
    require_known(of_user, names_in_test(metrics, options.deploy, evaluator.directions))
    seed_everything(options.seed)
    return opened.changed(float_metrics=metrics, evaluation=batches)


def require_directions(gates: Sequence[Gate], options: Options) -> None:
    """Check before the model opens that the direction is known of each metric whose loss is
    bounded. A calibration may take long.

    Raises:
        UsageError: a file has the metric, and nothing says whether less or more is better.
        QuantizerError: a file cannot be imported.
    """
    if all(gate.measured == gate.metric for gate in gates):
        return
    texts = ""
    declared = BY_NAME
    for spec, error in ((options.evaluate, DataError), (options.model, ModelError)):
        location, _ = split_spec(str(unmoved(spec or "")))
        if location.endswith(".py") and Path(location).is_file():
            user = import_user_module(location, error)
            declared = declared.with_fallback(Directions.declared_by(user))
            texts += Path(location).read_text(encoding="utf-8", errors="replace")
    words = set(re.findall(r"\w+", texts))
    for gate in gates:
        name = gate.measured
        is_known = declared.lower_is_better(name) is not None
        is_loss = name != gate.metric and gate.metric not in words
        if is_loss and not is_known and name in words:
            raise gate.of_unknown_direction()


def config_to_look(path: str | None) -> ReadConfig:
    """Return the config of `--config_file`, or one that quantizes all that can be quantized.

    Raises:
        ConfigError: with all findings, when it cannot be used.
    """
    if path is None:
        return ReadConfig(replace(default_config(), settings=Settings()), (), {})
    return read_config_file(path)
