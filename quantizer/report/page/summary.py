"""Compute the first things on the page from report.json: the verdict, the next step, the
metrics, and the exported files. Lists the metrics with unit, direction and meaning, also for
docs/metrics.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantizer.config.json_types import JsonMapping
from quantizer.config.roles import is_parameter
from quantizer.config.wording import counted
from quantizer.declarations import DROP, HIGHER, LOWER, RATIO
from quantizer.report.next_step import (
    PLACEHOLDER,
    PLACES,
    NextStep,
    measured_parts,
    next_step,
    option_words,
    options_of,
)
from quantizer.report.page.axes import number
from quantizer.report.rows import (
    layer_name,
    measured_lines,
    most_damaged,
    pair_texts,
    tensor_name,
)
from quantizer.sources.directions import Directions
from quantizer.storage.process_memory import size_text
from quantizer.tables import METRICS, POOLED_METRICS

_COSINE = "cosine"
"""It is so near to 1 that three digits show nothing."""


def verdict(content: JsonMapping) -> list[str]:
    """Return the sentences that the page begins with."""
    rows = content["layers"]
    sentences = list(measured_lines(content))
    for gate, is_met in content["gates"].items():
        outcome = "met" if is_met else "not met"
        sentences.append(f"Gate {gate}: {outcome}.")
    layers = {row["layer"] for row in rows}
    text = f"{counted(len(rows), 'tensor')} of {counted(len(layers), 'layer')} quantized"
    worst = most_damaged(rows)
    if worst is not None:
        name = tensor_name(content, worst)
        text += f"; {name} has the largest loss ({worst['local_sqnr_db']:.1f} dB)"
    sentences.append(f"{text}.")
    if content.get("passes"):
        # Only passes that change the function need it
        from quantizer.evaluation.pass_loss import pass_loss_line

        sentences.append(f"{pass_loss_line(content['passes'])}.")
    return sentences


def try_next(content: JsonMapping) -> NextStep:
    """Return what to do next, as the terminal says it."""
    commands = content["commands"]
    options = options_of(commands)
    config = content["config"]["name"] if content["config"] else "the config"
    if not options:
        if content["config"]:
            options["config_file"] = [config]
        options["model"] = [PLACEHOLDER]
    config = options.get("config_file", [config])[0]
    if not content["metrics"]:
        for place in options_of(commands, PLACES).values():
            options["output_dir"] = place
        words = option_words(options, without=("config_file",))
        command = f"quantizer --quant_mode test {words}"
        return NextStep("test mode measures what quantization costs.", (command,))
    widths = [
        row["bits"]
        for row in content["layers"]
        if is_parameter(row["tensor"]) and row["tensor"] != "bias"
    ]
    return next_step(
        content,
        config,
        options,
        has_model_file=bool(commands),
        not_met=[gate for gate, is_met in content["gates"].items() if not is_met],
        weight_bits=min(widths, default=None),
        improvement=content.get("improvement", ""),
    )


@dataclass(frozen=True)
class Card:
    """One figure.

    Attributes:
        name: of the metric.
        value: with the float network's before it, if there is one.
        direction: the unit, and which direction is better.
        meaning: what it is.
    """

    name: str
    value: str
    direction: str
    meaning: str


def metric_cards(content: JsonMapping) -> Iterator[Card]:
    """Yield the metrics, those of the task first, and the size of the weights."""
    metrics = content["metrics"]
    pairs = content["pairs"]
    directions = Directions.from_json(content.get("lower_is_better", {}))
    shown = set()
    for name, pair in pairs.items():
        before, after = pair_texts(pair)
        meaning = f"{metric_meaning(name)}: float → quantized"
        for figure, what in ((f"{name}{DROP}", "the loss"), (f"{name}{RATIO}", "the ratio")):
            if metrics.get(figure) is not None:
                meaning += f"; {figure}, {what}: {number(metrics[figure])}"
        shown |= {name, f"{name}_float", f"{name}{DROP}", f"{name}{RATIO}"}
        direction = metric_sentence(name, pairs, directions)
        yield Card(name, f"{before} → {after}", direction, meaning)
    if len(measured_parts(content)) <= 1:
        # It equals the SQNR of the only output
        shown.update(POOLED_METRICS)
    for name, value in sorted(metrics.items(), key=lambda item: item[0] != "sqnr_db"):
        if value is not None and name not in shown:
            direction = metric_sentence(name, pairs, directions)
            text = f"{value:.6g}" if name == _COSINE else number(value)
            if direction.startswith("dB"):
                text += " dB"
            yield Card(name, text, direction, metric_meaning(name))
    yield _size_card(content)


def _size_card(content: JsonMapping) -> Card:
    before, after = content["weight_bytes"]["float"], content["weight_bytes"]["quantized"]
    compression = before / max(1, after)
    return Card(
        "weights",
        f"{_bytes_text(before)} → {_bytes_text(after)}",
        "lower is better",
        f"all weights, float → quantized with their scales: {compression:.2f} times smaller",
    )


def _bytes_text(size: int) -> str:
    return size_text(size) if size >= 1000 else f"{size} bytes"


def export_cards(content: JsonMapping, export: JsonMapping) -> Iterator[Card]:
    """Yield the figures of an exported file."""
    yield Card("size", _bytes_text(export["bytes"]), "lower is better", "of the file")
    kernels = export.get("kernels")
    if kernels is not None and kernels["count"]:
        yield Card(
            "int8 share",
            f"{100 * kernels['share']:.3g} %",
            "0 to 100 %; higher is better",
            kernels["text"],
        )
    speed = export.get("speed")
    if speed is not None:
        yield Card(
            "speed",
            f"{speed['ratio']:.2g} times float" if speed["is_clear"] else "not clear",
            "times the speed of float; higher is better",
            f"on the machine of the export: {speed['text']}",
        )


def floats_of_export(content: JsonMapping, export: JsonMapping) -> dict[str, list[str]]:
    """Return the layers that the file multiplies in float, by the reason.

    Without figures of an engine, they are the layers whose weights stay in float.
    """
    kernels = export.get("kernels")
    reasons = content.get("float_weights", {}) if kernels is None else kernels["floating"]
    layers: dict[str, list[str]] = {}
    for layer, reason in reasons.items():
        layers.setdefault(reason, []).append(layer_name(content, layer))
    return layers


def metric_sentence(name: str, pairs: Mapping[str, object], directions: Directions) -> str:
    """Return unit and direction of a metric.

    Args:
        name: of the metric.
        pairs: the metrics of the task, by name.
        directions: the declared directions of these metrics.

    >>> metric_sentence("sqnr_db", {}, Directions())
    'dB; higher is better'
    >>> metric_sentence("ripple", {"ripple": 0}, Directions())
    'whether higher or lower is better is not known'
    """
    is_lower = directions.of_figure(name, list(pairs))
    direction = "whether higher or lower is better is not known"
    if is_lower is not None:
        direction = f"{LOWER if is_lower else HIGHER} is better"
    words = METRICS.get(name)
    return direction if words is None else f"{words.unit}; {direction}"


def metric_meaning(name: str) -> str:
    """Return what a metric is, for the page.

    >>> metric_meaning("top1"), metric_meaning("ripple")
    ('accuracy against the labels of the data', 'of your evaluate()')
    """
    words = METRICS.get(name)
    if words is None:
        return "of your evaluate()"
    return words.short or words.meaning
