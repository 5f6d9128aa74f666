"""Runs `quantizer run`: writes a config, calibrates, tests and exports in one call, and ends
with a verdict. Each step is the one that `--quant_mode` runs.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import click

from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import as_typed, from_start
from quantizer.cli.modes.calib_mode import run_calib, with_remedy
from quantizer.cli.modes.float_mode import require_directions, with_float_metrics
from quantizer.cli.modes.run_mode import require_met
from quantizer.cli.modes.test_mode import run_test
from quantizer.cli.run_folder import missing_data
from quantizer.cli.terminal import output
from quantizer.cli.terminal.follow import one_display
from quantizer.cli.terminal.output import Outcome
from quantizer.cli.terminal.render import say_note
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.commands.searching.divided_data import DividedData, data_of_run, divide_data
from quantizer.commands.searching.module_run import RunOnModules, require_weights_only
from quantizer.commands.searching.run import RunOptions
from quantizer.commands.searching.trials import watched_data
from quantizer.commands.searching.tune import TUNED_CONFIG, FinishedRun, loses_most, tune_config
from quantizer.config.load import load_preset
from quantizer.config.run_config import MadeFor, restored_if_refused
from quantizer.errors import UntraceableError, UsageError
from quantizer.export.destinations import (
    DESTINATIONS,
    choices_for,
    default_destination,
    in_words_of_run,
    preset_for,
)
from quantizer.export.gates import (
    Gate,
    about_networks,
    failed_gates,
    not_measured_by_targets,
    parse_gate,
    require_known_names,
    require_known_parts,
    require_measurable,
    require_measured,
)
from quantizer.export.layer_choice import DEPLOY_FILE, asks_for_floats
from quantizer.export.refusals import require_extras, require_model
from quantizer.export.sized_widths import SizedRun, config_file, require_sized, size_gates
from quantizer.export.targets import EXPORTERS, FOLDER, require_choices
from quantizer.export.value_names import require_fitting_names
from quantizer.graph.ir import Graph
from quantizer.graph.modules import module_graph, untraced_part
from quantizer.plan.fit.kept_float import kept_names
from quantizer.printable import json_text
from quantizer.report.next_step import FILE_REMEDY
from quantizer.report.verdict import verdict
from quantizer.results.checkpoint import Checkpoints
from quantizer.results.result_set import mark_result_folder, require_result_folder
from quantizer.torch_state import seed_everything


def full_run(options: RunOptions) -> None:
    """Run all steps, and print the verdict.

    Raises:
        QuantizerError: a step failed, or a gate does not hold.
    """
    asked = [parse_gate(text) for text in options.gate]
    stdout = sys.stderr if options.json else sys.stdout
    with notes_on_stderr(quiet=True), redirect_stdout(stdout), one_display():
        finished = _run(options, asked)
    gates = finished.gates
    _show(finished, verdict(finished.facts()), as_json=options.json)
    remedy = finished.remedy or loses_most(options)
    if not failed_gates(about_networks(gates), finished.tested.metrics):
        remedy = FILE_REMEDY
    require_met(finished.test_options, gates, finished.tested, remedy=remedy)
    if finished.tested.error:
        with in_words_of_run(finished.test_options.deploy[0], finished.destination):
            raise finished.tested.error


def _run(options: RunOptions, gates: Sequence[Gate]) -> FinishedRun:
    """Run all steps.

    Raises:
        QuantizerError: a step failed, or there is no metric of a gate.
    """
    kept = kept_names(options.keep_float, has_config=options.config_file is not None)
    require_result_folder(from_start(options.output_dir))
    seed_everything(options.seed)
    require_directions(gates, options)
    opened = session.open_run(options)
    if opened.batches.way:
        say_note(f"making {opened.batches.way}")
    model = opened.loaded.module
    name = options.to or default_destination(model)
    destination = DESTINATIONS[name]
    has_data = not opened.batches.stands_in
    target = destination.target_of(model)
    opened = replace(
        opened,
        options=replace(options, for_=(target,)),
        improvement=destination.improvement(has_data=has_data),
    )
    has_file = options.config_file is not None
    with in_words_of_run(target, name):
        require_sized(options.max_mb, name, target, has_config=has_file, has_data=has_data)
        gates = [*gates, *size_gates(options.max_mb, name, target)]
        options = replace(options, gate=tuple(gate.text for gate in gates))
        require_extras([target])
        choices = choices_for(name, options.target_choices)
        target_options = {**options.target_options, **destination.choices}
        options = replace(options, target_options=target_options)
        require_choices(options.target_choices, [target])
        _require_checkable(gates, replace(options, deploy=(target,)), opened)
        try:
            graph = opened.graph
        except UntraceableError as error:
            return _on_modules(options, opened, gates, name=name, error=error)
        require_known_parts(gates, graph)
        require_fitting_names(options.target_choices, model, graph)
        require_model(target, choices, model)
        preset: str | None = None
        if options.config_file is None:
            preset = options.preset or preset_for(name, has_data=has_data)
        data = data_of_run(options, opened, preset)
        if data.sentence:
            say_note(f"note: {data.sentence}")
        opened = opened.with_batches(data.calibration)
        _require_figures(gates, options, opened, data)
        opened = with_float_metrics(opened, replace(data.test_options, deploy=(target,)), gates)
        folder = from_start(options.output_dir)
        with restored_if_refused(folder):
            mark_result_folder(folder)
            if preset is not None:
                made_for = MadeFor(name, opened.loaded.name, preset, options.max_mb, kept)
                path = config_of_run(options, made_for, graph, opened, target=target)
                options = replace(options, config_file=path)
                data = data.with_config(path)
            calib_options = data.calibrating(for_=(target,))
            calibrated = run_calib(calib_options, opened=opened, has_next_step=True)
        if_slower = destination.choices_if_slower(options.target_options)
        test_options, tested = _test(data.testing(deploy=(target,)), opened, if_slower)
        if not tested.error:
            Checkpoints(folder).remove()
        finished = FinishedRun(name, test_options, opened, calibrated, tested, gates, data)
        if EXPORTERS[target].holds_whole_model:
            finished = replace(finished, untraced=untraced_part(model, graph))
        if not options.minutes or tested.error or not failed_gates(gates, tested.metrics):
            return finished
        return _tuned(finished, options, gates, has_file=has_file)


def _test(
    options: Options, opened: session.OpenedRun, if_slower: Mapping[str, str]
) -> tuple[Options, Outcome]:
    """Test and export, once more with `if_slower` if the file is slower than in float.

    Returns:
        The options of the test that counts, and its outcome.
    """
    choices = {**options.target_options, **if_slower}
    mixed = replace(options, target_options=choices)
    if if_slower and (from_start(options.output_dir) / FOLDER / DEPLOY_FILE).exists():
        # It has the choice of an earlier run
        options = mixed
    seed_everything(options.seed)
    outcome = run_test(options, opened=opened)
    if if_slower and asks_for_floats(outcome.deployed.values()):
        return _test(mixed, opened, {})
    return options, outcome


def _require_figures(
    gates: Sequence[Gate], options: Options, opened: session.OpenedRun, data: DividedData
) -> None:
    """Refuse a gate about a metric that the network and its data do not allow.

    Raises:
        UsageError: see `require_measurable`.
    """
    has_evaluate = session.evaluator_of(options, opened.loaded) is not None
    # Test mode looks at other data
    is_known = has_evaluate or data.has_other_evaluation
    first = opened.batches.for_shapes().first()
    require_measurable(gates, opened.graph, first, has_evaluate=is_known)


def _require_checkable(
    gates: Sequence[Gate], options: Options, opened: session.OpenedRun
) -> None:
    """Refuse a gate that cannot be checked, before anything is written.

    Raises:
        UsageError: there is no metric of a gate.
    """
    if session.evaluator_of(options, opened.loaded) is None:
        require_known_names(gates, options.deploy)
    if session.evaluates_on_synthetic(options, opened.loaded):
        example = opened.batches.for_shapes().first()
        require_measured(gates, not_measured_by_targets(example))


def _tuned(
    finished: FinishedRun, options: RunOptions, gates: Sequence[Gate], *, has_file: bool
) -> FinishedRun:
    """Return the run with the config that a search ends with.

    Args:
        finished: the run with the first config, for which a gate does not hold.
        options: of the run.
        gates: of the run.
        has_file: whether the config is a file of the user, which stays as it is.
    """
    if options.max_mb is not None:
        say_note("note: no better config is looked for: --max_mb limits the widths")
        return finished
    opened, data = finished.opened, finished.data
    assert data is not None and finished.calibrated.plan is not None
    targets = finished.test_options.deploy
    judged = about_networks(gates)
    try:
        if not failed_gates(judged, finished.tested.metrics):
            raise UsageError("only gates about the written file do not hold")
        if opened.batches.stands_in:
            raise missing_data(options)
        is_judged = bool(data.sentence)
        if not is_judged:
            data = divide_data(options, opened)
            is_judged = not data.sentence
    except UsageError as error:
        say_note(f"note: no better config is looked for: {error.message}")
        return finished
    metrics = finished.tested.metrics
    if not any(gate.is_missed_by_float(metrics) for gate in judged):
        say_note(
            f"{', '.join(failed_gates(judged, metrics))} does not hold: a better config is "
            f"looked for, for up to {options.minutes:g} minutes (--minutes 0 looks for none)"
        )
    path = Path(options.config_file or "")
    if has_file:
        path = from_start(options.output_dir) / TUNED_CONFIG
    run = tune_config(
        opened,
        data,
        judged,
        path,
        minutes=options.minutes,
        targets=targets,
        deploy=targets,
        tested=(finished.tested.metrics, finished.calibrated.plan) if is_judged else None,
        gives_advice=True,
    )
    return replace(
        finished,
        test_options=run.test_options,
        opened=run.opened,
        calibrated=run.calibrated,
        tested=run.tested,
        data=data,
        tuning=run,
    )


def _on_modules(
    options: RunOptions,
    opened: session.OpenedRun,
    gates: Sequence[Gate],
    *,
    name: str,
    error: UntraceableError,
) -> FinishedRun:
    """Return the run of a model that cannot be traced, on its modules.

    Raises:
        UntraceableError: the config or the destination needs a trace.
    """
    model = opened.loaded.module
    destination = DESTINATIONS[name]
    target = destination.target_of(model)
    preset = options.preset or destination.without_data
    if not EXPORTERS[target].holds_modules or preset is None:
        raise with_remedy(error, f"--to {name} needs a trace") from error
    for option_name in ("fast_finetune", "dynamic", "max_mb"):
        if getattr(options, option_name):
            raise with_remedy(error, f"--{option_name} works on a trace") from error
    folder = from_start(options.output_dir)
    with restored_if_refused(folder):
        mark_result_folder(folder)
        if options.config_file is None:
            config = load_preset(preset)
            require_weights_only(model, config, error)
            kept = options.keep_float
            made_for = MadeFor(name, opened.loaded.name, preset, keep_float=kept)
            modules = module_graph(model)
            config_file = config_of_run(options, made_for, modules, opened, target=target)
            options = replace(options, config_file=config_file)
        finished = RunOnModules(options, opened, gates, name, target, error).run()
    if options.minutes and failed_gates(gates, finished.tested.metrics):
        say_note("note: no better config is looked for: that needs a trace")
    return finished


def _show(finished: FinishedRun, lines: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        content = {
            "verdict": list(lines),
            "calibration": finished.calibrated.content,
            "test": finished.tested.content,
        }
        if finished.tuning is not None:
            content["tune"] = finished.tuning.content
        click.echo(as_typed(json_text(content)))
        return
    if finished.tuning is not None:
        finished.tuning.show()
    output.print_verdict(lines)


def config_of_run(
    options: Options, made_for: MadeFor, graph: Graph, opened: session.OpenedRun, *, target: str
) -> str:
    """Return the path of the run's config, and print what was fitted if it is a new one."""
    data = watched_data(options, opened.batches, graph)
    sized = SizedRun(opened.loaded.module, graph, data, say_note)
    folder = from_start(options.output_dir)
    choices = options.target_choices
    path = config_file(folder, made_for, sized, target, choices, overwrite=options.overwrite)
    return str(path)
