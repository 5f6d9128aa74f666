"""`--quant_mode float|calib|test`: from options to an exit code."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch

import quantizer
from quantizer.cli import session, torchrun
from quantizer.cli.annotations import annotate
from quantizer.cli.calib_mode import run_calib
from quantizer.cli.float_mode import run_float
from quantizer.cli.gates import (
    Gate,
    failed,
    met,
    parse_gate,
    require_known,
)
from quantizer.cli.options import RAISING, Options
from quantizer.cli.session import Outcome
from quantizer.cli.test_mode import run_test
from quantizer.distributed import Ranks, require_alike
from quantizer.errors import GateError, UsageError
from quantizer.export import require_extras
from quantizer.export.choices import require_choices
from quantizer.seeding import seed_everything
from quantizer.storage import process_memory

DECIDING = (
    *("quant_mode", "batch_size", "subset_len", "seq_len", "stride", "seed"),
    *("fast_finetune", "dpu_accuracy", "deploy"),
)
"""Options that decide the result, and are the same words on every machine."""


_ONLY_IN_CALIB = {
    "for_": (
        "--for goes with calib mode and with `quantizer plan`: it looks ahead of a calibration"
    ),
    "memory": "--memory goes with calib mode: the others keep no values of earlier batches",
    "resume": "--resume goes with calib mode: it goes on with a calibration that was stopped",
}
_ONLY_IN_TEST = {
    "deploy": (
        "--deploy goes with test mode: it writes the network that was calibrated and tested"
    ),
    "report_dir": "--report_dir goes with test mode: it says where that writes what it finds",
    "exact": (
        "--exact goes with test mode: it runs the integers of the network that was calibrated"
    ),
}
"""Why an option is refused in other modes."""


def run(options: Options) -> int:
    """Run one mode; the exit code is 0, or that of the error raised."""
    gates = [parse_gate(text) for text in options.gate]
    _require_mode(options)
    require_extras((*options.deploy, *options.for_))
    seed_everything(options.seed)
    # With --json, stdout is for the result alone: what the user's own code prints goes to
    # stderr.
    with (
        torchrun.joined(options) as (ranks, own),
        session.notes_on_stderr(own.quiet),
        redirect_stdout(sys.stderr if options.json else sys.stdout),
    ):
        require_alike(ranks, _deciding(options), "the versions and options")
        outcome = MODES[options.quant_mode](own, ranks)
    if not ranks.is_first:
        return 0
    session.show(outcome, options)
    is_measured = options.quant_mode != "float"
    is_silent = options.json or options.quiet
    if is_measured and not is_silent and (size := process_memory.peak()):
        print(f"peak memory {process_memory.in_words(size)}")
    if not options.json:
        for line in met(gates, outcome.metrics):
            print(line)
    _require_met(options, gates, outcome)
    if outcome.error:
        raise outcome.error
    require_known(gates, outcome.metrics)
    return 0


def _require_mode(options: Options) -> None:
    """Raise `UsageError` if an option does not go with the mode, or with the others."""
    mode = options.quant_mode
    if options.gate and mode == "calib":
        raise UsageError("--gate goes with test or float mode: calibration measures nothing")
    for name, refusal in _ONLY_IN_TEST.items():
        if getattr(options, name) and mode != "test":
            raise UsageError(refusal)
    require_choices(options.target_choices, options.deploy)
    for name, refusal in _ONLY_IN_CALIB.items():
        value = getattr(options, name)
        is_given = value is not None and value is not False and value != ()
        if is_given and mode != "calib":
            raise UsageError(refusal)
    for name in RAISING:
        if getattr(options, name) and mode == "float":
            raise UsageError(
                f"--{name} goes with calib mode, and with test mode to say that it was used"
            )


def _require_met(options: Options, gates: list[Gate], outcome: Outcome) -> None:
    """Raise `GateError` if a gate is not met, or has no figure though its name is known."""
    not_met = failed(gates, outcome.metrics)
    if options.quant_mode == "test" and outcome.error is None:
        for gate in gates:
            if gate.metric not in outcome.metrics:
                not_met.append(f"{gate.text} (not measured)")
    if not not_met:
        return
    annotate(options, not_met, outcome.report)
    undeployed = ""
    if options.deploy and "deployed" not in outcome.content:
        undeployed = "; nothing is deployed"
    raise GateError(
        f"not met: {', '.join(not_met)}{undeployed}",
        help="the table above shows which layers lose most",
    )


def _deciding(options: Options) -> dict[str, Any]:
    """What decides the result before a model is there."""
    words = {f"--{name}": getattr(options, name) for name in DECIDING}
    return {"quantizer": quantizer.__version__, "torch": torch.__version__, **words}


MODES: dict[str, Callable[[Options, Ranks], Outcome]] = {
    "float": run_float,
    "calib": run_calib,
    "test": run_test,
}
