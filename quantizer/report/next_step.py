"""Says what to do after a test, with the command for it."""

import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantizer.comparison.output_figures import WORST_SAMPLES
from quantizer.comparison.samples import BELOW_DB
from quantizer.config.json_types import JsonMapping
from quantizer.config.roles import is_parameter
from quantizer.declarations import DROP, RATIO, RISE
from quantizer.evaluation.scores import MAX_RELATIVE_CHANGE
from quantizer.option_words import TEST_OPTIONS, Sentence
from quantizer.plugins import commands
from quantizer.tables import OF_FILES

CLOSE_DB = 30.0
"""Above this SQNR of the worst output, networks of 8 bits keep their accuracy."""
NARROW_CLOSE_DB = 12.0
"""The same where weights have 4 bits or fewer."""
NARROW_BITS = 4
PLACEHOLDER = "MODEL"
"""Stands for the model in commands if it is a Python object."""
DATA_OPTIONS = (
    "weights",
    "trust",
    "data",
    "eval_data",
    "evaluate",
    "preprocess",
    "batch_size",
    "tokenizer",
    "seq_len",
    "shuffle",
    "max_unpacked",
    "subset_len",
    "skip_len",
    "seed",
    "device",
)
"""The options about a model and its data that all commands of the next step take."""
PLACES = ("output_dir", "report_dir", "output")
"""The options about where results are written."""
FILE_REMEDY = Sentence("choose a smaller model, another <--to>, or other options of the target")
"""What to do if only gates about the written file do not hold."""
_MAKE_CONFIG = "quantizer init --preset dpu -o quantize_config.json"
_FOLDER = "quantize_result"
"""The result folder of commands that name none."""
_GATE_MARGIN_DB = 3.0
"""By how much the SQNR may fall before a gate that the page proposes fails."""
OptionValues = Mapping[str, Sequence[str]]
"""The values of a command's options, by name. A flag has none."""


@dataclass(frozen=True)
class NextStep:
    """What to do next.

    Attributes:
        text: a sentence, with commands in backticks.
        commands: to copy, each complete.
    """

    text: str
    commands: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The sentence with all commands."""
        others = [f"`{command}`" for command in self.commands if command not in self.text]
        return f"{self.text} {' and '.join(others)}".rstrip()


def next_step(tested: JsonMapping, config: str | None, not_met: Sequence[str]) -> NextStep:
    """Return what to do after a test.

    Args:
        tested: the content of report.json. Python has no commands there.
        config: the path of the config; None for the built-in default.
        not_met: the gates that do not hold.
    """
    if tested.get("improvement"):
        return NextStep(tested["improvement"])
    options = _options_of_run(tested, config)
    if _has_default_config(tested) and "init" in commands():
        text = (
            f"`{_MAKE_CONFIG}` writes a config for the DPU, which was the default here. "
            "`quantizer analyze` and CI need it as --config_file."
        )
        return NextStep(text, (_MAKE_CONFIG,))
    of_networks = [gate for gate in not_met if _metric_of(gate) not in OF_FILES]
    if not_met and not of_networks:
        return NextStep(f"{FILE_REMEDY}.")
    missed = of_networks[0] if of_networks else _lost_metric(tested)
    if missed is not None and "analyze" in commands():
        command = f"quantizer analyze --metric {shlex.quote(missed)} {option_words(options)}"
        if "config_file" in options:
            command += " --apply"
        text = f"`{command}` finds the layers that have to stay in float."
        return NextStep(text, (command,))
    if _is_far_from_float(tested) and "analyze" in commands():
        command = f"quantizer analyze --tensors {option_words(options, without=TEST_OPTIONS)}"
        text = (
            f"`{command}` lists the tensors that lose most. An evaluate() in the model's file "
            "measures the loss of the task."
        )
        return NextStep(text, (command,))
    [config] = options.get("config_file", [config or "the config"])
    if not tested.get("commands"):
        skipped = (tested.get("judged_on") or {}).get("skipped", 0)
        arguments = f" and subset_len={skipped}" if skipped else ""
        return NextStep(
            f"check in {config}; `quantizer.calibrate` with it{arguments} repeats this."
        )
    files = " and ".join([config, *_choice_files(tested)])
    return NextStep(f"check in {files}, and repeat this in CI:", tuple(_repeating(tested)))


def _has_default_config(tested: JsonMapping) -> bool:
    """Return whether a command of the shell has calibrated without a config."""
    for command in tested.get("commands", ()):
        options = _options_of_command(command)
        if options.get("quant_mode") == ["calib"] and "config_file" not in options:
            return True
    return False


def try_next(content: JsonMapping) -> NextStep:
    """Return what to do next, as the terminal says it."""
    config = content["config"]["name"] if content["config"] else None
    if not content["metrics"]:
        options = _options_of_run(content, config)
        for place in options_of(content["commands"], PLACES).values():
            options["output_dir"] = place
        words = option_words(options, without=("config_file",))
        command = f"quantizer --quant_mode test {words}"
        return NextStep("test mode measures what quantization costs.", (command,))
    not_met = [gate for gate, is_met in content["gates"].items() if not is_met]
    return next_step(content, config, not_met)


def _options_of_run(tested: JsonMapping, config: str | None) -> dict[str, list[str]]:
    """Return the options of commands that read the config, the model and its data."""
    options = options_of(tested.get("commands", ()))
    if not options:
        if config is not None:
            options["config_file"] = [config]
        options["model"] = [PLACEHOLDER]
    return options


def option_words(options: OptionValues, without: Collection[str] = ()) -> str:
    """Return options as a command has them, but those of some names.

    >>> option_words({"model": ["m.py"], "trust": [], "seed": ["1"]}, without=["seed"])
    '--model m.py --trust'
    """
    words: list[str] = []
    for name, values in options.items():
        if name not in without:
            words += [f"--{name}", *values]
    return shlex.join(words)


def without_places(words: Sequence[str]) -> list[str]:
    """Return the words of a command without the options about where results are written."""
    kept: list[str] = []
    for word in words:
        if kept and kept[-1].removeprefix("--") in PLACES:
            kept.pop()
        else:
            kept.append(word)
    return kept


def _options_of_command(command: str) -> dict[str, list[str]]:
    """Return the options of a command of report.json."""
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in shlex.split(command):
        if word.startswith("--"):
            values = options.setdefault(word.removeprefix("--"), [])
        else:
            values.append(word)
    return options


def options_of(
    commands: Sequence[str], names: Collection[str] = ("config_file", "model", *DATA_OPTIONS)
) -> dict[str, list[str]]:
    """Return the options of commands that say which config, model and data to use, or those of
    other names.

    >>> options_of(
    ...     [
    ...         "quantizer --quant_mode calib --config_file a.json --model m.py --resume",
    ...         "quantizer --quant_mode test --model m.py --trust --to onnx",
    ...     ]
    ... )
    {'config_file': ['a.json'], 'model': ['m.py'], 'trust': []}
    """
    values: dict[str, list[str]] = {}
    for command in commands:
        values = {**_options_of_command(command), **values}
    return {name: values[name] for name in names if name in values}


def _is_far_from_float(tested: JsonMapping) -> bool:
    """Return whether the outputs are far from float, if no metric of the task is known."""
    if tested.get("pairs"):
        return False
    bound_db = CLOSE_DB
    for row in tested.get("layers", ()):
        is_weight = is_parameter(row["tensor"]) and row["tensor"] != "bias"
        if is_weight and row["bits"] <= NARROW_BITS:
            bound_db = NARROW_CLOSE_DB
    for row in measured_parts(tested):
        figures = (row["sqnr_db"], row.get("sqnr_db_median"), 2 * judged_db(row))
        if min(figure for figure in figures if figure is not None) < bound_db:
            return True
    return False


def _choice_files(tested: JsonMapping) -> Iterator[str]:
    """Yield the files that repeat which layers of a file stay in float for speed."""
    folders = options_of(tested.get("commands", ()), PLACES).get("output_dir", [_FOLDER])
    for export in tested.get("exports", ()):
        if "choice" in export:
            yield f"{folders[0]}/{export['choice']}"


def _repeating(tested: JsonMapping) -> Iterator[str]:
    """Yield the commands of a run, with a gate for test mode if there is none."""
    gate = _proposed_gate(tested)
    for command in tested.get("commands", ()):
        options = _options_of_command(command)
        if options.get("quant_mode") == ["test"] and gate and "gate" not in options:
            command += f" --gate {shlex.quote(gate)}"
        yield command


def _proposed_gate(tested: JsonMapping) -> str:
    """Return a gate that a test meets with a margin; empty if no metric fits."""
    for name, pair in tested.get("pairs", {}).items():
        if tested["metrics"].get(f"{name}{DROP}") is not None and pair["float"]:
            return _gate_on_loss(tested, name)
    metric = "sqnr_db"
    lowest_db = tested["metrics"].get(metric)
    if lowest_db is None:
        return ""
    samples_db = tested["metrics"].get(WORST_SAMPLES)
    if samples_db is not None and samples_db <= lowest_db - BELOW_DB:
        metric, lowest_db = WORST_SAMPLES, samples_db
    return f"{metric}>={math.floor(lowest_db - _GATE_MARGIN_DB)}"


def leaf_rows(tested: JsonMapping) -> list[JsonMapping]:
    """Return the rows of parts, and of outputs that have no parts."""
    rows = tested.get("outputs", ())
    wholes = {row["output"] for row in rows if row["name"] != row["output"]}
    return [row for row in rows if row["name"] not in wholes]


def measured_parts(tested: JsonMapping) -> list[JsonMapping]:
    """Return those of `leaf_rows` that have an SQNR, the lowest first."""
    measured = [row for row in leaf_rows(tested) if row["sqnr_db"] is not None]
    return sorted(measured, key=judged_db)


def hides_samples(row: JsonMapping) -> bool:
    """Return whether the worst samples of an output have a much lower SQNR than all values."""
    worst_db = row.get(WORST_SAMPLES)
    return worst_db is not None and worst_db <= row["sqnr_db"] - BELOW_DB


def judged_db(row: JsonMapping) -> float:
    """Return the SQNR of an output, or that of its worst samples where it is much lower."""
    return float(row[WORST_SAMPLES if hides_samples(row) else "sqnr_db"])


def relative_loss(tested: JsonMapping, name: str) -> float:
    """Return the loss of a metric as a share of its float value. Without a known direction, any
    change is a loss; so is a value that is not finite.
    """
    pair = tested["pairs"][name]
    before = pair["float"]
    after = pair["quantized"]
    if before is None or after is None:
        return math.inf
    drop = tested["metrics"].get(f"{name}{DROP}")
    loss = abs(after - before) if drop is None else drop
    return float(loss / abs(before)) if before else float(loss)


def _lost_metric(tested: JsonMapping) -> str | None:
    """Return a gate that the metric with the largest loss does not meet; None if no metric of
    known direction lost more than 1 %. Gates of the user say what a metric may lose.
    """
    lost: dict[str, float] = {}
    for name, pair in tested.get("pairs", {}).items():
        is_known = tested["metrics"].get(f"{name}{DROP}") is not None
        if is_known and pair["float"] is not None and not _is_gated(tested, name):
            lost[name] = relative_loss(tested, name)
    worst = max(lost, key=lambda name: lost[name], default=None)
    if worst is None or lost[worst] <= MAX_RELATIVE_CHANGE:
        return None
    return _gate_on_loss(tested, worst)


def _metric_of(gate: str) -> str:
    return re.split("[<>=]", gate)[0].strip()


def _is_gated(tested: JsonMapping, name: str) -> bool:
    """Return whether a gate is about a metric, its drop or its ratio.

    >>> _is_gated({"gates": {"perplexity_ratio<=1.2": True}}, "perplexity")
    True
    """
    names = (name, f"{name}{DROP}", f"{name}{RISE}", f"{name}{RATIO}")
    metrics = [_metric_of(gate) for gate in tested.get("gates", {})]
    return not set(names).isdisjoint(metrics)


def _gate_on_loss(tested: JsonMapping, name: str) -> str:
    """Return the gate that a metric may lose 1 %.

    >>> tested = {"pairs": {"wer": {"float": 0.5}}, "metrics": {"wer_rise": 0.1}}
    >>> _gate_on_loss(tested, "wer")
    'wer_rise<=0.005'
    """
    allowed = MAX_RELATIVE_CHANGE * abs(tested["pairs"][name]["float"])
    rounded = float(f"{allowed:.2g}")
    suffix = RISE if f"{name}{RISE}" in tested["metrics"] else DROP
    return f"{name}{suffix}<={rounded:g}"
