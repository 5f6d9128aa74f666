"""The parts of the page, each from the content of report.json; None where there is nothing to
show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from quantizer.evaluation.pass_loss import sentence
from quantizer.report.page import figures
from quantizer.report.page.charts import number
from quantizer.report.page.html import Child, Markup, element, fragment
from quantizer.report.page.parts import (
    Json,
    filter_input,
    folded,
    in_order,
    link,
    most_damaged,
    name_of,
    number_cell,
    of,
    plain,
    searched,
    severity,
    summary_of,
    table,
    weakest_output,
)

NO_COMMANDS = (
    "No command is known that makes these results: Python has written them, or run.json is "
    "of others."
)
ABOUT_COMMANDS = (
    "The config is the one shown above. Options that change no result are left out, as "
    "--output_dir is. Paths are relative to the folder where the command ran; files "
    "elsewhere are named without their folder."
)
UNSTABLE = 40
"""Tensors whose curves over batches are drawn: those that are the last to become stable."""
SATURATED = 0.01
"""A share of values cut off that is worth a look."""


def verdict(content: Json) -> Markup:
    """One line, and the figures it stands on."""
    metrics, rows = content["metrics"], content["layers"]
    layers = {row["layer"] for row in rows}
    said = [f"{len(rows)} tensors of {len(layers)} layers quantized"]
    if (ratio := metrics.get("sqnr_db")) is not None:
        measured = content.get("outputs", ())
        weakest = weakest_output(measured)
        name = (
            "output"
            if weakest is None or len(measured) == 1
            else f"worst output {weakest['name']}:"
        )
        said.append(f"{name} SQNR {ratio:.1f} dB")
    if (worst := most_damaged(rows)) is not None:
        said.append(f"worst: {of(content, worst)}, {worst['local_sqnr_db']:.1f} dB")
    if content.get("passes"):
        said.append(sentence(content["passes"]))
    said += [
        f"gate {text} {'met' if holds else 'not met'}"
        for text, holds in content["gates"].items()
    ]
    if content["stamp"]:
        said.append(content["stamp"])
    sizes = content["weight_bytes"]
    shown = {name: number(value) for name, value in metrics.items() if value is not None}
    for name, pair in content["pairs"].items():
        shown[name] = " → ".join(map(_figure, (pair["float"], pair["quantized"])))
    shown["weights"] = f"{sizes['float'] / 1e6:.2f} → {sizes['quantized'] / 1e6:.2f} MB"
    shown["compression"] = f"{sizes['float'] / max(1, sizes['quantized']):.2f}"
    cells = [
        element("div", element("dt", name), element("dd", text)) for name, text in shown.items()
    ]
    warnings = [
        element("p", warning["text"], class_="warning")
        for warning in content.get("warnings", ())
    ]
    verdict_line = element("p", "; ".join(said), class_="verdict")
    return fragment(verdict_line, warnings, element("dl", cells, class_="figures"))


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def outputs(content: Json) -> Markup | None:
    """Show the figures of each output and of its parts."""
    rows = content.get("outputs")
    if not rows:
        return None
    warned = {
        warning["output"]
        for warning in content.get("warnings", ())
        if warning["kind"] != "rows"
    }
    titles = ("output", "index", "kind", "made by", "values", "SQNR dB", "cosine", "equal %")
    lines = []
    for row in rows:
        equal = row["equal"]
        name = row["name"] if row["pooled"] == 1 else f"{row['name']} ({row['pooled']} sources)"
        cells: list[Child] = [
            element("td", name, class_="name"),
            element("td", row["index"] or ""),
            element("td", row["kind"]),
            element("td", name_of(content, row["layer"]), title=row["layer"]),
            number_cell(row["values"], "{}"),
            number_cell(row["sqnr_db"], "{:.2f}"),
            number_cell(row["cosine"], "{:.6f}"),
            number_cell(None if equal is None else 100 * equal, "{:.4g}"),
        ]
        lines.append(element("tr", cells, class_="bad" if row["name"] in warned else None))
    return table(titles, lines, numbers=titles[4:])


def layers(content: Json) -> Markup | None:
    """The table of tensors, the most damaged first."""
    titles = (
        "layer",
        "tensor",
        "spec",
        "local dB",
        "accumulated dB",
        "range",
        "clipped %",
        "codes used %",
        "kB",
    )
    lines = []
    for row in content["layers"]:
        clipped, used, size = row.get("clipped"), row.get("codes_used"), row.get("bytes")
        spread = f"{number(row['low'])} … {number(row['high'])}" if "low" in row else ""
        cells: list[Child] = [
            element("td", link(content, row), class_="name"),
            element("td", row["tensor"]),
            element("td", row["spec"], class_="spec"),
            number_cell(row["local_sqnr_db"], "{:.2f}"),
            number_cell(row["accumulated_sqnr_db"], "{:.2f}"),
            element("td", spread, class_="range"),
            number_cell(None if clipped is None else 100 * clipped, "{:.3g}"),
            number_cell(None if used is None else 100 * used, "{:.0f}"),
            number_cell(None if size is None else size / 1e3, "{:.1f}"),
        ]
        lines.append(
            element("tr", cells, class_=severity(row), data_name=searched(content, row))
        )
    return fragment(
        filter_input("layers"), table(titles, lines, numbers=titles[3:5] + titles[6:])
    )


def depth(content: Json) -> Markup | None:
    """SQNR of activations in the order of execution."""
    inside = figures.measured(content)
    falls = [
        (before["accumulated_sqnr_db"] - after["accumulated_sqnr_db"], after)
        for before, after in itertools.pairwise(inside)
    ]
    steepest = max(falls, key=lambda pair: pair[0], default=None)
    said = None
    if steepest is not None and steepest[0] > 3:
        said = element(
            "p", f"The steepest fall, {steepest[0]:.1f} dB, is at {of(content, steepest[1])}."
        )
    drawn = figures.depth(content)
    return None if drawn is None else fragment(drawn, said)


def activations(content: Json) -> Markup | None:
    """The distribution of each activation, folded."""
    parts = [_activation(content, row) for row in in_order(content) if "histogram" in row]
    if not parts:
        return None
    said = (
        "Counts are logarithmic. Solid lines are the least and the greatest value that has a "
        "code; dashed ones where other range methods would have put them, given all batches "
        "at once."
    )
    return fragment(element("p", said, class_="dim"), filter_input("activations"), parts)


def _activation(content: Json, row: Json) -> Markup:
    facts = f"{row['spec']}, step {number(row['step'])}, {100 * row['clipped']:.3g} % clipped"
    ranges = [
        element(
            "tr", element("td", name), element("td", number(least)), element("td", number(most))
        )
        for name, (least, most) in {"chosen": row["limits"], **row["methods"]}.items()
    ]
    return element(
        "details",
        summary_of(content, row, facts),
        figures.histogram(content, row),
        table(("method", "from", "to"), ranges, is_sortable=False),
        data_name=searched(content, row),
    )


def weights(content: Json) -> Markup | None:
    """The ranges of each weight's channels, folded."""
    parts = []
    for row in in_order(content):
        if "channels" in row:
            channels = row["channels"]
            least, most = channels["widths"]
            facts = f"{channels['count']} channels, {channels['dead']} of them dead"
            facts += (
                f", the widest range {number(most / least)} times the narrowest"
                if least
                else ""
            )
            drawn, summary = figures.channels(content, row), summary_of(content, row, facts)
            parts.append(element("details", summary, drawn, data_name=searched(content, row)))
    return fragment(filter_input("weights"), parts) if parts else None


def sufficiency(content: Json) -> Markup | None:
    """From how many batches on ranges stay."""
    rows = [row for row in content["layers"] if "batches" in row]
    if not rows:
        return None
    total = max(row["batches"]["total"] for row in rows)
    late = sorted(rows, key=lambda row: -row["batches"]["stable_after"])
    growing = [
        row for row in rows if row["batches"]["stable_after"] == row["batches"]["total"] > 1
    ]
    said = (
        f"After {late[0]['batches']['stable_after']} of {total} batches no scale changes by "
        "more than 2 %."
    )
    if growing:
        said = (
            f"{len(growing)} of {len(rows)} tensors still change with the last batches: more "
            "data may help."
        )
    parts = []
    for row in late[:UNSTABLE]:
        batches = row["batches"]
        summary = summary_of(
            content,
            row,
            f"stable after {batches['stable_after']} of {batches['total']} batches",
        )
        drawn = figures.limits(content, row), figures.quality(content, row)
        parts.append(element("details", summary, drawn, data_name=searched(content, row)))
    others = [
        f"{of(content, row)}: {row['batches']['stable_after']}" for row in late[UNSTABLE:]
    ]
    if others:
        parts.append(
            folded(others, "more tensors, and the batches after which they are stable")
        )
    return fragment(element("p", said), parts)


def coverage(content: Json) -> Markup | None:
    """What was not seen, or is of no use: floats, dead and constant tensors, and those that are
    cut off.
    """
    tests: dict[str, Callable[[Json], bool]] = {
        "always zero": lambda row: row.get("low") == 0 == row.get("high"),
        "constant": lambda row: "low" in row and row["low"] == row["high"] != 0,
        f"more than {100 * SATURATED:g} % cut off": lambda row: (
            row.get("clipped", 0) > SATURATED
        ),
        "with dead channels": lambda row: row.get("channels", {}).get("dead", 0) > 0,
    }
    found = {
        what: [of(content, row) for row in content["layers"] if test(row)]
        for what, test in tests.items()
    }
    floats = {
        name: why
        for name, why in content["floats"].items()
        if not why.startswith("quantized at")
    }
    found["in float"] = [f"{name_of(content, name)}: {why}" for name, why in floats.items()]
    return fragment(
        folded(names, f"tensor{'' if len(names) == 1 else 's'} {what}")
        for what, names in found.items()
    )


def algorithms(content: Json) -> Markup | None:
    """By layer, what rounding algorithms left of round-to-nearest's error, and all remarks."""
    ran = content["algorithms"]
    if ran is None:
        return None
    rows = sorted(ran["rounded"].items(), key=lambda item: -item[1]["error_rtn"])
    lines = [
        element(
            "tr",
            element("td", name_of(content, name), class_="name", title=name),
            number_cell(row["error_rtn"], "{:.3g}"),
            number_cell(row["error"], "{:.3g}"),
            number_cell(
                100 * row["error"] / row["error_rtn"] if row["error_rtn"] else None, "{:.0f}"
            ),
        )
        for name, row in rows
    ]
    titles = ("layer", "round-to-nearest's error", "error", "of it %")
    said = ", then ".join(each["name"] for each in ran["algorithms"])
    remarks = [f"{name_of(content, each['layer'])}: {each['text']}" for each in ran["remarks"]]
    return fragment(
        element("p", f"{said}; errors are shares of the energy of a layer's outputs."),
        table(titles, lines, numbers=titles[1:]) if lines else None,
        folded(remarks, "remarks"),
    )


def sensitivity(content: Json) -> Markup | None:
    """What `analyze` found: each tensor's effect on the output, each width's, and the curve of
    sizes.
    """
    found = content.get("analysis")
    if found is None:
        return None
    parts: list[Child] = [figures.size_curve(content)]
    if tensors := found.get("tensors"):
        floor = tensors["noise_floor_db"]
        said = (
            f"Output {number(tensors['output_sqnr_db'] or 0)} dB with all of them quantized. "
        )
        said += (
            "One batch does not tell what is noise."
            if floor is None
            else f"Gains below {floor:.2f} dB are noise."
        )
        rows = [
            element(
                "tr",
                element(
                    "td", name_of(content, row["layer"]), class_="name", title=row["layer"]
                ),
                element("td", row["tensor"]),
                number_cell(row["alone_db"], "{:.1f}"),
                number_cell(row["gain_db"], "{:+.2f}"),
            )
            for row in tensors["tensors"]
        ]
        titles = ("layer", "tensor", "it alone quantized, dB", "gain if it were float, dB")
        parts += [element("p", said), table(titles, rows, numbers=titles[2:])]
    if widths := [*found.get("uniform", ())]:
        columns = ("weight", "values", *(f"{width}: noise" for width in widths))
        rows = [
            element(
                "tr",
                element(
                    "td",
                    name_of(content, row["layers"][0]),
                    class_="name",
                    title=row["layers"][0],
                ),
                number_cell(row["weights"], "{}"),
                [number_cell(row["noise"][width], "{:.3g}") for width in widths],
            )
            for row in found["layers"]
        ]
        parts += [
            element("p", "Noise at the output, as a share of its energy."),
            table(columns, rows, numbers=columns[1:]),
        ]
    return fragment(parts)


def config(content: Json) -> Markup | None:
    """The file, each line with a name that layers link to."""
    file = content["config"]
    if file is None:
        return None
    lines = file["text"].splitlines()
    numbered = [
        fragment(element("span", line, id=f"line-{at}"), "\n")
        for at, line in enumerate(lines, 1)
    ]
    return fragment(element("p", file["name"], class_="dim"), element("pre", numbered))


def reproduce(content: Json) -> Markup | None:
    """Commands, versions and digests."""
    commands: Child = element("p", NO_COMMANDS, class_="dim")
    if content["commands"]:
        said = element("p", ABOUT_COMMANDS, class_="dim")
        commands = fragment(element("pre", "\n".join(content["commands"])), said)
    rows = [
        element("tr", element("td", name), element("td", plain(value)))
        for name, value in content["header"].items()
    ]
    return fragment(commands, table(("", ""), rows, is_sortable=False))
