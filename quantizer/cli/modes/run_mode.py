"""Runs `--quant_mode float|calib|test`, and returns the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import quantizer
from quantizer.cli.arguments.options import RAISING, Options
from quantizer.cli.terminal import output, process
from quantizer.cli.terminal.output import Outcome
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.distributed import ALONE, Ranks, require_alike
from quantizer.errors import GateError, UsageError
from quantizer.export.targets import require_choices
from quantizer.report.next_step import try_next
from quantizer.report.rows import float_lines, judgement, layer_name, measured_lines
from quantizer.storage import process_memory
from quantizer.torch_state import seed_everything

if TYPE_CHECKING:
    from quantizer.export.gates import Gate

_COMPARED_OPTIONS = (
    "quant_mode",
    "batch_size",
    "subset_len",
    "skip_len",
    "seq_len",
    "stride",
    "shuffle",
    "seed",
    "fast_finetune",
    "dpu_accuracy",
    "dynamic",
    "deploy",
    "to_",
)
"""Options that affect the result, and have to be the same on all ranks."""
_ONLY_IN_CALIB = {
    "for_": "--for needs calib mode: it checks a plan before calibration; --to works in both",
    "dynamic": "--dynamic needs calib mode: results say which sizes are open",
    "memory": "--memory needs calib mode: the other modes keep no activations",
    "resume": "--resume needs calib mode: it continues an interrupted calibration",
}
_ONLY_IN_TEST = {
    "deploy": "--deploy needs test mode: it writes what is tested; --to works in both",
    "report_dir": "--report_dir needs test mode: it is the folder of its report",
    "exact": "--exact needs test mode: it compares with the network that is tested",
}
"""Why an option is refused in other modes."""


def run_mode(options: Options) -> int:
    """Run one mode and return exit code 0; errors are raised."""
    gates: list[Gate] = []
    if options.gate:
        # Few runs have gates
        from quantizer.export.gates import parse_gate

        gates = [parse_gate(text) for text in options.gate]
    _require_mode(options)
    if options.deploy or options.for_:
        # Only runs for a target need it
        from quantizer.export.refusals import require_extras

        require_extras(options.deploy)
        require_extras(options.for_, to_plan=True)
    seed_everything(options.seed)
    run_one: Callable[[Options, Ranks], Outcome] = process.load(_MODES[options.quant_mode])
    # With --json only the result is printed to stdout. Output of the user's code goes to
    # stderr.
    stdout = sys.stderr if options.json else sys.stdout
    with (
        _joined_ranks(options) as (ranks, rank_options),
        notes_on_stderr(rank_options.quiet),
        redirect_stdout(stdout),
    ):
        require_alike(ranks, _compared_facts(options), "the versions and options")
        if gates and options.quant_mode == "test":
            # Only gates need it
            from quantizer.cli.modes.float_mode import require_directions

            require_directions(gates, options)
        outcome = run_one(rank_options, ranks)
    if not ranks.is_first:
        return 0
    lines = _verdict(options, gates, outcome)
    if lines:
        outcome = replace(outcome, content={**outcome.content, "verdict": lines})
    output.show(outcome, options)
    is_silent = options.json or options.quiet or options.quant_mode == "float"
    peak = process_memory.peak_bytes()
    if peak and not is_silent:
        print(f"peak memory {process_memory.size_text(peak)}")
    if not options.json:
        output.print_verdict(lines)
    require_met(options, gates, outcome)
    if outcome.error:
        raise outcome.error
    if gates:
        # As above
        from quantizer.export.gates import require_known

        require_known(gates, outcome.metrics)
    return 0


def _joined_ranks(options: Options) -> AbstractContextManager[tuple[Ranks, Options]]:
    """Join the other ranks, if torchrun has started some."""
    if not process.is_rank():
        return nullcontext((ALONE, options))
    from quantizer.cli.modes.torchrun import joined_ranks

    return joined_ranks(options)


def _require_mode(options: Options) -> None:
    """Raise `UsageError` if an option has no effect in this mode, or without another option."""
    mode = options.quant_mode
    if options.gate and mode == "calib":
        raise UsageError("--gate needs test or float mode: calibration measures no metrics")
    if options.skip_len and mode == "calib":
        raise UsageError("--skip_len needs test or float mode: it leaves out calibration data")
    for name, refusal in _ONLY_IN_TEST.items():
        if getattr(options, name) and mode != "test":
            raise UsageError(refusal)
    written = [*options.deploy]
    if options.to_:
        if mode == "float":
            raise UsageError("--to needs calib or test mode: the float model is not written")
        # Only runs for a target need it
        from quantizer.export.destinations import possible_targets

        written += possible_targets(options.to_)
    require_choices(options.target_choices, written)
    for name, refusal in _ONLY_IN_CALIB.items():
        value = getattr(options, name)
        is_set = value is not None and value is not False and value != ()
        if is_set and mode != "calib":
            raise UsageError(refusal)
    for name in RAISING:
        if getattr(options, name) and mode == "float":
            raise UsageError(
                f"--{name} needs calib mode; test mode accepts it to check that it was used"
            )


def _verdict(options: Options, gates: Sequence[Gate], outcome: Outcome) -> list[str]:
    """Return the lines that a test ends with, as `quantizer run` does; of float mode, only
    whether its gates hold.
    """
    is_test = options.quant_mode == "test"
    line = judgement([], is_failed=outcome.error is not None)
    if gates:
        line = judged(gates, outcome, is_test=is_test)
    if not is_test:
        return [line] if gates else []
    report = outcome.report
    before, after = map(process_memory.size_text, report["weight_bytes"].values())
    left = {layer_name(report, name): why for name, why in report["float_weights"].items()}
    return [
        line,
        f"Weights take {before} in float, {after} quantized.",
        *measured_lines(report),
        *float_lines(left),
        f"Next: {try_next(report).line}",
    ]


def judged(gates: Sequence[Gate], outcome: Outcome, *, is_test: bool = True) -> str:
    """Return the line that the verdict of an outcome begins with."""
    # As in `run_mode`
    from quantizer.export.gates import gate_lines, not_met_gates

    is_complete = is_test and outcome.error is None
    not_met = not_met_gates(gates, outcome.metrics, is_complete=is_complete)
    lines = gate_lines(gates, outcome.metrics)
    return judgement(lines, is_failed=bool(outcome.error or not_met))


def require_met(
    options: Options,
    gates: Sequence[Gate],
    outcome: Outcome,
    *,
    remedy: str = "the table of layers shows which lose most",
) -> None:
    """Raise `GateError` if a gate does not hold, or its metric was not measured. GitHub Actions
    get a summary of the run before.

    Args:
        options: of the run.
        gates: of the run.
        outcome: of the run.
        remedy: what to do.
    """
    if not gates:
        output.append_summary(outcome.report, ())
        return
    # As in `run_mode`
    from quantizer.export.gates import gate_lines, not_met_gates

    output.append_summary(outcome.report, gate_lines(gates, outcome.metrics))
    is_complete = options.quant_mode == "test" and outcome.error is None
    not_met = not_met_gates(gates, outcome.metrics, is_complete=is_complete)
    if not not_met:
        return
    output.annotate(options, not_met, outcome.report)
    text = f"not met: {', '.join(not_met)}"
    if (options.deploy or options.to_) and "deployed" not in outcome.content:
        text += "; nothing is deployed"
    raise GateError(text, help=remedy)


def _compared_facts(options: Options) -> dict[str, Any]:
    """Return versions and options, which have to be the same on all ranks."""
    values = {f"--{name}": getattr(options, name) for name in _COMPARED_OPTIONS}
    return {"quantizer": quantizer.__version__, "torch": torch.__version__, **values}


_MODES = {
    "float": "quantizer.cli.modes.float_mode:run_float",
    "calib": "quantizer.cli.modes.calib_mode:run_calib",
    "test": "quantizer.cli.modes.test_mode:run_test",
}
"""The module and the function of each mode. A run imports only its own, which saves time."""
