"""Make tables and JSON of an analysis: the noise of each weight at each bit width, and the
chosen widths.
"""

import math

from quantizer.config.json_types import JsonObject
from quantizer.evaluation.ablation import Ablation, Effect
from quantizer.evaluation.analyze import Analysis, WeightRow, WidthChoice
from quantizer.evaluation.width_choice import budget_curve
from quantizer.report.tables import finite_or_none
from quantizer.report.view import Listing, TableView

_WEIGHT_TITLES = ("layer", "weights", "config bits")


def analysis_table(analysis: Analysis, choice: WidthChoice | None, view: TableView) -> Listing:
    """Return a table with a row for each weight.

    With a choice, it has the chosen widths. Without one, it has the SQNR at the output if only
    one weight is quantized, at each width, the most sensitive weight first.
    """
    if choice is not None:
        return _choice_table(analysis, choice, view)
    total = sum(row.noise[0] for row in analysis.rows)
    lines = []
    for row in sorted(analysis.rows, key=lambda row: (-row.noise[0], row.name)):
        figures = [f"{analysis.db(noise):.1f}" for noise in row.noise]
        share = _percent(row.noise[0], total)
        lines.append((*_weight_texts(row), *figures, share))
    costs = [f"dB at {width}" for width in analysis.widths]
    costs.append(f"share at {analysis.widths[0]}")
    layouts = (
        (*_WEIGHT_TITLES, *costs),
        (*_WEIGHT_TITLES[:2], *costs),
        (*_WEIGHT_TITLES[:1], *costs),
    )
    titles = layouts[0]
    return view.listing(titles, lines, numbers=titles[1:], layouts=layouts)


def _choice_table(analysis: Analysis, choice: WidthChoice, view: TableView) -> Listing:
    """Return the chosen widths and their shares of the predicted noise. The largest shares are
    shown first.
    """
    total = analysis.total(choice)
    lines = []
    ranks = []
    for row, index in zip(analysis.rows, choice, strict=True):
        noise = row.noise[index]
        width = str(analysis.widths[index])
        figures = (width, f"{analysis.db(noise):.1f}", _percent(noise, total))
        lines.append((*_weight_texts(row), *figures))
        ranks.append(-noise)
    titles = (*_WEIGHT_TITLES, "bits", "dB", "share")
    return view.listing(titles, lines, ranks, numbers=titles[1:])


def _weight_texts(row: WeightRow) -> tuple[str, str, str]:
    return row.name, str(row.values), str(row.config_bits)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def analysis_json(analysis: Analysis, choice: WidthChoice | None = None) -> JsonObject:
    """Return an analysis as JSON. Noise is relative to the energy of the output; it is None if
    the output is zero.
    """
    layers = []
    energy = analysis.energy or math.nan
    widths = list(map(str, analysis.widths))
    for position, row in enumerate(analysis.rows):
        noises = [finite_or_none(noise / energy) for noise in row.noise]
        entry: JsonObject = {
            "layers": list(row.candidate.layers),
            "weights": row.values,
            "config_bits": row.config_bits,
            "noise": dict(zip(widths, noises, strict=True)),
            "bytes": dict(zip(widths, row.sizes, strict=True)),
        }
        if choice:
            entry["bits"] = analysis.widths[choice[position]]
        layers.append(entry)
    uniform = {}
    for index, width in enumerate(widths):
        uniform[width] = _size_json(analysis, [index] * len(analysis.rows))
    return {
        "passes": analysis.passes,
        "layers": layers,
        "kept": dict(analysis.fixed_widths),
        "curve": [_size_json(analysis, best) for best in budget_curve(analysis)],
        "uniform": uniform,
    }


def _size_json(analysis: Analysis, choice: WidthChoice) -> JsonObject:
    """Return the size of a choice, and its predicted SQNR."""
    noise = analysis.total(choice)
    return {
        "weight_bytes": analysis.bytes(choice),
        "predicted_db": finite_or_none(analysis.db(noise)),
    }


def choice_json(analysis: Analysis, choice: WidthChoice, measured: float) -> JsonObject:
    """Return the size and the SQNR of a choice as JSON.

    Args:
        analysis: of the model.
        choice: the index of the width of each weight.
        measured: the energy of the noise that was measured with this choice.
    """
    return {
        "mean_bits": analysis.mean_bits(choice),
        **_size_json(analysis, choice),
        "measured_db": finite_or_none(analysis.db(measured)),
    }


def ablation_json(ablation: Ablation) -> JsonObject:
    """Return the effect of each tensor on the output as JSON, in the order of
    `ablation_table`.
    """
    rows = []
    for effect in _by_gain(ablation):
        layer, role = effect.key
        row = {
            "layer": layer,
            "tensor": role,
            "alone_db": finite_or_none(ablation.alone_db(effect)),
            "gain_db": finite_or_none(ablation.gain_db(effect)),
        }
        rows.append(row)
    return {
        "output_sqnr_db": finite_or_none(ablation.sqnr_db),
        "noise_floor_db": ablation.floor_db,
        "tensors": rows,
    }


def ablation_table(ablation: Ablation, view: TableView) -> Listing:
    """Return a table of the effect of each tensor on the output. First is the tensor whose
    quantization costs most SQNR.
    """
    lines = []
    ranks = []
    for effect in _by_gain(ablation):
        gain_db = ablation.gain_db(effect)
        lines.append((*effect.key, f"{ablation.alone_db(effect):.1f}", f"{gain_db:+.2f}"))
        ranks.append(-gain_db)
    titles = ("layer", "tensor", "alone dB", "gain in float dB")
    return view.listing(titles, lines, ranks, numbers=titles[2:], what="tensor")


def _by_gain(ablation: Ablation) -> list[Effect]:
    return sorted(ablation.effects, key=lambda effect: (-ablation.gain_db(effect), effect.key))


def ablation_line(ablation: Ablation) -> str:
    """Return a line with the SQNR of the output and the noise floor, below which gains mean
    nothing.
    """
    floor_db = ablation.floor_db
    floor = "one batch does not show what is noise"
    if floor_db is not None:
        floor = f"noise floor {floor_db:.2f} dB"
    return f"output {ablation.sqnr_db:.2f} dB with all of them quantized; {floor}"
