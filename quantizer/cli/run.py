"""`quantizer run`: writes a config, calibrates, tests and exports in one call, and ends with a
verdict. Each step is the one that `--quant_mode` runs.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.text import Text

from quantizer.cli import made_config, session, torchrun
from quantizer.cli.calib_mode import run_calib
from quantizer.cli.follow import one_display
from quantizer.cli.gates import Gate, failed, met, parse_gate, require_known
from quantizer.cli.modes import require_met
from quantizer.cli.options import Options, command, option, takes
from quantizer.cli.places import PathType
from quantizer.cli.session import OpenedRun, Outcome
from quantizer.cli.test_mode import run_test
from quantizer.config.resources import presets
from quantizer.config.roles import is_parameter
from quantizer.errors import UsageError
from quantizer.export import require_extras, size_on_disk
from quantizer.export.choices import require_choices
from quantizer.export.destinations import DESTINATIONS, Destination, without_data
from quantizer.graph.module_names import path_names
from quantizer.numerics.codes import bits_of
from quantizer.plan.model import Plan
from quantizer.plan.resolve import NO_RULES
from quantizer.plan.size import weight_bytes
from quantizer.printable import json_text, one_line
from quantizer.report.verdict import VerdictFacts, verdict
from quantizer.seeding import seed_everything

_LANGUAGE_MODEL = "w4"
_NETWORK = "onnx"
"""The destinations without `--to`."""
_MORE_WITH_DATA = (
    "give --data TEXT.txt or calibration_data(): GPTQ then recovers most of what rounding to "
    "the nearest code loses."
)


@dataclass(frozen=True)
class RunOptions(Options):
    """The options of `quantizer run`."""

    to: str | None = option(
        "What to make: int8 ONNX, a .pt2 program, weights in 8 or 4 bits, weights and "
        "activations in int8 or fp8, or a GGUF.  [default: w4 for language models, else onnx]",
        type=click.Choice(list(DESTINATIONS)),
    )
    preset: str | None = option(
        "The preset to start from, instead of the one that --to stands for.",
        type=click.Choice(presets()),
        metavar="NAME",
    )
    config_file: str | None = option(
        "The config to use.  [default: quantize_config.json in the result folder, written if "
        "it is not there]",
        "--config",
        type=PathType(),
        metavar="FILE",
    )
    output_dir: str = option(
        "The folder of config, results and files.",
        "-o",
        default="quantize_result",
        type=PathType(),
        metavar="DIR",
        group="Output",
    )


@command()
@click.argument("model", type=PathType())
@takes(
    "to",
    "preset",
    "config_file",
    "weights",
    "trust",
    "device",
    "data",
    "eval_data",
    "evaluate",
    "preprocess",
    "max_unpacked",
    "subset_len",
    "batch_size",
    "tokenizer",
    "seq_len",
    "stride",
    "memory",
    "seed",
    "output_dir",
    "overwrite",
    "pt2_activations",
    "onnx_profile",
    "onnx_weights",
    "input_names",
    "output_names",
    "gguf_template",
    "gate",
    "json",
    "quiet",
    "debug",
    kind=RunOptions,
)
def run(model: str, options: RunOptions) -> None:
    """Quantize MODEL in one call: write a config for it, calibrate, test, export, check the
    gates, and say what came out.

    MODEL is what --model takes. The config lies in the result folder; check it in, and
    `--quant_mode calib` and `--quant_mode test` repeat the run.

    \b
    quantizer run my_model.py
    quantizer run my_model.py --to onnx --gate 'top1_drop<=0.01' -o quantized
    quantizer run TinyLlama --to w4 --data texts.txt
    """
    gates = [parse_gate(text) for text in options.gate]
    if torchrun.is_used():
        raise UsageError(
            "`quantizer run` works in one process",
            help="use --quant_mode calib and --quant_mode test under torchrun",
        )
    options = replace(options, model=model)
    stdout = sys.stderr if options.json else sys.stdout
    with session.notes_on_stderr(quiet=True), redirect_stdout(stdout), one_display():
        finished = _run(options)
    lines = verdict(_facts(finished, gates))
    _show(finished, lines, as_json=options.json)
    page = Path(options.output_dir) / "report.html"
    require_met(finished.test_options, gates, finished.tested, shown_in=str(page))
    if finished.tested.error:
        raise finished.tested.error
    require_known(gates, finished.tested.metrics)


@dataclass(frozen=True)
class _Finished:
    """A run after its last step.

    Attributes:
        destination: of the run.
        test_options: the options of its test.
        opened: the model and its data.
        calibrated, tested: the results of both modes.
        plan: of the calibration.
    """

    destination: Destination
    test_options: Options
    opened: OpenedRun
    calibrated: Outcome
    tested: Outcome
    plan: Plan

    @property
    def is_without_data(self) -> bool:
        """Return whether there was only an example input."""
        return self.opened.batches.stands_in


def _run(options: RunOptions) -> _Finished:
    """Run all steps.

    Raises:
        QuantizerError: a step failed.
    """
    seed_everything(options.seed)
    opened = session.open_run(options)
    name = options.to or _default_destination(opened)
    destination = DESTINATIONS[name]
    is_folder = Path(options.model or "").is_dir()
    target = destination.target_of(is_folder=is_folder)
    require_extras([target])
    require_choices(options.target_choices, [target])
    preset = options.preset or _preset(name, has_data=not opened.batches.stands_in)
    made = made_config.MadeConfig(name, type(opened.loaded.module).__name__)
    config_file = made_config.config_file(options, made, preset, opened)
    calib_options = replace(
        options, quant_mode="calib", config_file=config_file, for_=(target,), gate=()
    )
    calibrated = run_calib(calib_options, opened=opened)
    test_options = replace(
        options, quant_mode="test", config_file=config_file, deploy=(target,), overwrite=False
    )
    seed_everything(options.seed)
    tested = run_test(test_options, opened=opened)
    assert calibrated.plan is not None
    return _Finished(destination, test_options, opened, calibrated, tested, calibrated.plan)


def _default_destination(opened: OpenedRun) -> str:
    """Return the destination without `--to`."""
    can_generate = getattr(opened.loaded.module, "can_generate", None)
    if callable(can_generate) and can_generate():
        return _LANGUAGE_MODEL
    return _NETWORK


def _preset(name: str, *, has_data: bool) -> str:
    """Return the preset of a destination.

    Raises:
        UsageError: it needs calibration data, and there is none.
    """
    preset = DESTINATIONS[name].preset_of(has_data=has_data)
    if preset is None:
        others = ", ".join(f"--to {other}" for other in without_data())
        raise UsageError(
            f"--to {name} needs calibration data, and there is none",
            help="give --data, or add calibration_data() to the model's file; without data "
            f"there are {others}",
        )
    return preset


def _facts(finished: _Finished, gates: Sequence[Gate]) -> VerdictFacts:
    """Return what the verdict is about."""
    tested = finished.tested
    options = finished.test_options
    plan = finished.plan
    path: Path | None = None
    runtime = ""
    left_float = _left_float(plan)
    for written, verified in tested.deployed.items():
        path = written
        in_engine = verified.default_session
        if in_engine is not None and in_engine.kernels is not None:
            runtime = in_engine.lines[0]
            left_float = in_engine.kernels.floating
    not_met = failed(gates, tested.metrics)
    gate_lines = met(gates, tested.metrics)
    gate_lines += [f"gate {text}: not met" for text in not_met]
    names = path_names(plan.graph)
    destination = finished.destination
    improvement = ""
    if finished.is_without_data and destination.preset != destination.without_data:
        improvement = _MORE_WITH_DATA
    return VerdictFacts(
        model=plan.graph.model,
        made=destination.made,
        path=None if path is None else str(path),
        size=0 if path is None else size_on_disk(path),
        float_size=weight_bytes(plan)[0],
        tested=tested.report,
        config=options.config_file or "",
        model_option=options.model or "",
        runtime=runtime,
        left_float={names.get(layer, layer): why for layer, why in left_float.items()},
        gates=gate_lines,
        not_met=not_met,
        weight_bits=_weight_bits(plan),
        improvement=improvement,
    )


def _left_float(plan: Plan) -> dict[str, str]:
    """Return the reasons why layers with weights stay in float."""
    reasons = {}
    for node in plan.graph.nodes:
        is_quantized = (node.name, "weights") in plan.tensors
        if node.row.kind == "mac" and node.row.weight and not is_quantized:
            reasons[node.name] = plan.floats.get(node.name, NO_RULES)
    return reasons


def _weight_bits(plan: Plan) -> int | None:
    """Return the smallest width of quantized weights."""
    widths = []
    for (_, role), tensor in plan.tensors.items():
        if is_parameter(role) and role != "bias":
            widths.append(bits_of(tensor.spec))
    return min(widths, default=None)


def _show(finished: _Finished, lines: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        content = {
            "verdict": list(lines),
            "calibration": finished.calibrated.content,
            "test": finished.tested.content,
        }
        print(json_text(content))
        return
    console = session.console()
    for line in lines:
        console.print(Text(one_line(line)))
