"""Tables and figures of an analysis: what each weight's width costs, and which was chosen. Runs
nothing.
"""

from collections.abc import Sequence
from typing import Any

from quantizer.evaluation.ablation import Ablation
from quantizer.evaluation.analyze import Analysis, WeightRow, budget_curve
from quantizer.report.tables import finite
from quantizer.report.view import Listing, View


def table(found: Analysis, picked: Sequence[int] | None, view: View) -> Listing:
    """One line per weight: with a choice, its width; without one, what each width costs, most
    sensitive first.
    """
    return (
        _sensitivity_table(found, view)
        if picked is None
        else _choice_table(found, picked, view)
    )


def _sensitivity_table(found: Analysis, view: View) -> Listing:
    """At each width, how far the noise lies below the output, in dB."""
    total = sum(row.noise[0] for row in found.rows)
    rows = [
        (
            *_about(row),
            *(f"{found.db(noise):.1f}" for noise in row.noise),
            _percent(row.noise[0], total),
        )
        for row in sorted(found.rows, key=lambda row: (-row.noise[0], row.name))
    ]
    costs = (*(f"dB at {width}" for width in found.widths), f"share at {found.widths[0]}")
    layouts = tuple((*_ABOUT[:count], *costs) for count in (3, 2, 1))
    return view.listing(layouts[0], rows, numbers=layouts[0][1:], layouts=layouts)


def _choice_table(found: Analysis, picked: Sequence[int], view: View) -> Listing:
    """The width picked, and its share of the predicted noise; the first to show are those with
    the largest.
    """
    total = found.total(picked)
    noises = [row.noise[at] for row, at in zip(found.rows, picked, strict=True)]
    rows = [
        (*_about(row), str(found.widths[at]), f"{found.db(noise):.1f}", _percent(noise, total))
        for row, at, noise in zip(found.rows, picked, noises, strict=True)
    ]
    titles = (*_ABOUT, "bits", "dB", "share")
    return view.listing(titles, rows, [-noise for noise in noises], numbers=titles[1:])


_ABOUT = ("layer", "weights", "config bits")


def _about(row: WeightRow) -> tuple[str, ...]:
    return row.name, str(row.values), str(row.own)


def kept_lines(found: Analysis, view: View) -> list[str]:
    """One line for each quantized weight that has no choice."""
    return [view.text(f"not analysed: {name}: {why}") for name, why in found.kept.items()]


def analysis_json(found: Analysis, picked: Sequence[int] | None = None) -> dict[str, Any]:
    """The same for programs; noise relative to the output's energy."""
    layers = []
    for index, row in enumerate(found.rows):
        entry: dict[str, Any] = {
            "layers": list(row.candidate.layers),
            "weights": row.values,
            "config_bits": row.own,
        }
        entry["noise"] = {
            str(width): finite(noise / found.energy)
            for width, noise in zip(found.widths, row.noise, strict=True)
        }
        entry["bytes"] = {
            str(width): size for width, size in zip(found.widths, row.sizes, strict=True)
        }
        layers.append(entry | ({"bits": found.widths[picked[index]]} if picked else {}))
    return {
        "passes": found.passes,
        "layers": layers,
        "kept": dict(found.kept),
        "curve": [_size(found, choice) for choice in budget_curve(found)],
        "uniform": {
            str(width): _size(found, (at,) * len(found.rows))
            for at, width in enumerate(found.widths)
        },
    }


def _size(found: Analysis, picked: Sequence[int]) -> dict[str, Any]:
    """What a choice takes, and its predicted SQNR."""
    return {
        "weight_bytes": found.bytes(picked),
        "predicted_db": finite(found.db(found.total(picked))),
    }


def ablation_json(found: Ablation) -> dict[str, Any]:
    """What each tensor does to the output, those first without which it would gain most."""
    rows = [
        {
            "layer": e.key[0],
            "tensor": e.key[1],
            "alone_db": finite(found.alone_db(e)),
            "gain_db": finite(found.gain_db(e)),
        }
        for e in sorted(found.effects, key=lambda effect: (-found.gain_db(effect), effect.key))
    ]
    return {
        "output_sqnr_db": finite(found.sqnr_db),
        "noise_floor_db": found.floor_db,
        "tensors": rows,
    }


def ablation_table(found: Ablation, view: View) -> Listing:
    """The same for people."""
    effects = sorted(found.effects, key=lambda effect: (-found.gain_db(effect), effect.key))
    texts = [(*e.key, f"{found.alone_db(e):.1f}", f"{found.gain_db(e):+.2f}") for e in effects]
    titles = ("layer", "tensor", "alone dB", "gain in float dB")
    return view.listing(
        titles, texts, [-found.gain_db(e) for e in effects], numbers=titles[2:], what="tensor"
    )


def ablation_line(found: Ablation) -> str:
    """What gains mean nothing below."""
    floor = (
        "one batch does not tell what is noise"
        if found.floor_db is None
        else f"noise floor {found.floor_db:.2f} dB"
    )
    return f"output {found.sqnr_db:.2f} dB with all of them quantized; {floor}"


def choice_json(found: Analysis, picked: Sequence[int], measured: float) -> dict[str, Any]:
    """What a choice takes and gives; `measured` is the energy of its noise."""
    return {
        "mean_bits": found.mean_bits(picked),
        "weight_bytes": found.bytes(picked),
        "predicted_db": finite(found.db(found.total(picked))),
        "measured_db": finite(found.db(measured)),
    }


def choice_line(label: str, found: Analysis, picked: Sequence[int], measured: float) -> str:
    """One line on a choice."""
    line = (
        f"{label}: {found.mean_bits(picked):.3f} bits per weight, weights "
        f"{found.bytes(picked) / 1e6:.3f} MB"
    )
    return (
        f"{line}, output {found.db(found.total(picked)):.2f} dB predicted, "
        f"{found.db(measured):.2f} dB measured"
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
