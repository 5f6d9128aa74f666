"""report.html says what its figures mean, what was exported and what to do next, and can be
read: by colour, on a narrow screen, and with a screen reader.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from support import reports
from support.configs import document
from support.reports import Net

import quantizer
from quantizer.declarations import HIGHER, LOWER
from quantizer.report.next_step import CLOSE_DB, try_next
from quantizer.report.page.figures import page_file
from quantizer.report.page.page import page
from quantizer.report.page.summary import metric_cards
from quantizer.report.rows import severity
from quantizer.report.verdict import VerdictFacts, verdict
from quantizer.sources.directions import BY_NAME
from quantizer.tables import METRICS

VOID = {"meta", "input"}


class Elements(HTMLParser):
    """The elements of a page: tag, attributes, and all text in them."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open[-1]][0] == tag, "each element is closed"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for index in self._open:
            self.elements[index][2].append(data)

    def all(self, tag: str, **wanted: str) -> list[tuple[dict[str, str | None], str]]:
        """Attributes and text of the elements with this tag and these attributes."""
        return [
            (attributes, "".join(texts))
            for name, attributes, texts in self.elements
            if name == tag and wanted.items() <= attributes.items()
        ]

    def section(self, name: str) -> str:
        (found,) = self.all("section", id=name)
        return found[1]


@pytest.fixture(scope="module")
def tested() -> dict[str, Any]:
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    config = document(tensor={"weights": {"per_channel": True}})
    result = quantizer.calibrate(Net().eval(), config, data)
    values: dict[str, Any] = result.report(tested=result.test()).values
    return values | {
        "commands": [
            "quantizer --quant_mode calib --config_file a/net.json --model net.py --seed 3",
            "quantizer --quant_mode test --model net.py --seed 3",
        ]
    }


@pytest.fixture
def content(tested: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(tested)


def with_sqnr(content: dict[str, Any], sqnr_db: float) -> dict[str, Any]:
    content["outputs"][0]["sqnr_db"] = sqnr_db
    content["metrics"]["sqnr_db"] = sqnr_db
    return content


def test_every_metric_has_unit_direction_and_meaning(content: dict[str, Any]) -> None:
    content["pairs"] = {"perplexity": {"float": 9.0, "quantized": 9.5}}
    content["metrics"] |= {"perplexity": 9.5, "perplexity_float": 9.0, "perplexity_drop": 0.5}
    cards = {card.name: card for card in metric_cards(content)}
    assert next(iter(cards)) == "perplexity"
    assert cards["perplexity"].value == "9 → 9.5"
    assert cards["perplexity"].direction == "1 and more; lower is better"
    assert "perplexity_drop, the loss: 0.5" in cards["perplexity"].meaning
    assert cards["sqnr_db"].direction == "dB; higher is better"
    assert "a tenth of the signal's amplitude" in cards["sqnr_db"].meaning
    assert "sqnr_db_pooled" not in cards, "there is one output"
    for card in cards.values():
        assert re.search(r"(higher|lower) is better$", card.direction), card.name
        assert card.meaning
    text = Elements(page(content)).all("header")[0][1]
    for card in cards.values():
        assert card.direction in text and card.meaning in text


def test_the_words_for_metrics_have_the_directions_of_gates() -> None:
    for name, words in METRICS.items():
        if words.better in (HIGHER, LOWER) and not name.endswith(("_drop", "_rise", "_ratio")):
            assert BY_NAME.of_figure(name, []) == (words.better == LOWER), name


def test_a_metric_of_the_user_without_a_direction_says_so(content: dict[str, Any]) -> None:
    content["pairs"] = {"gap": {"float": 2.0, "quantized": 3.0}}
    card = next(iter(metric_cards(content)))
    assert card.direction == "whether higher or lower is better is not known"
    content["lower_is_better"] = {"gap": True}
    assert next(iter(metric_cards(content))).direction == "lower is better"


def test_the_next_step_is_that_of_the_terminal(content: dict[str, Any]) -> None:
    facts = VerdictFacts(
        model="Net",
        formats="",
        path="a/export/Net.onnx",
        size=0,
        float_size=0,
        quantized_size=0,
        tested=content,
        config="a/net.json",
        is_in_shell=True,
    )
    for sqnr_db in (CLOSE_DB + 1, CLOSE_DB - 1):
        with_sqnr(content, sqnr_db)
        assert f"Next: {try_next(content).line}" == verdict(facts)[-1]
    assert try_next(content).commands == (
        "quantizer analyze --tensors --config_file a/net.json --model net.py --seed 3",
    )
    shown = Elements(page(content))
    assert try_next(content).commands[0] in [text for _, text in shown.all("pre")]


def test_a_good_result_is_repeated_with_a_gate(content: dict[str, Any]) -> None:
    calib, test = try_next(with_sqnr(content, 40.7)).commands
    assert calib == content["commands"][0]
    assert test == f"{content['commands'][1]} --gate 'sqnr_db>=37'"


def test_a_gate_that_is_not_met_asks_for_layers_in_float(content: dict[str, Any]) -> None:
    content["gates"] = {"sqnr_db>=90": False}
    (command,) = try_next(content).commands
    assert command == (
        "quantizer analyze --metric 'sqnr_db>=90' --config_file a/net.json --model net.py "
        "--seed 3 --apply"
    )


def test_without_a_config_the_next_command_writes_one(content: dict[str, Any]) -> None:
    content["config"] = None
    content["commands"] = [
        command.replace(" --config_file a/net.json", "") for command in content["commands"]
    ]
    (command,) = try_next(content).commands
    assert command == "quantizer init --preset dpu -o quantize_config.json"


def test_a_calibration_alone_asks_for_a_test(content: dict[str, Any]) -> None:
    content["metrics"] = {}
    (command,) = try_next(content).commands
    assert command == "quantizer --quant_mode test --model net.py --seed 3"


def test_twenty_decibels_are_low_for_8_bits_and_usual_for_4(content: dict[str, Any]) -> None:
    found = [severity({"local_sqnr_db": 20.0, "bits": bits}) for bits in (4, 8, 16)]
    assert found == ["", "low", "low"]
    assert severity({"local_sqnr_db": 4.0, "bits": 4}) == "poor"
    weights = next(row for row in content["layers"] if row["tensor"] == "weights")
    for bits, rows in ((8, 1), (4, 0)):
        weights |= {"local_sqnr_db": 20.0, "bits": bits}
        shown = Elements(page(content))
        assert len(shown.all("tr", **{"class": "warn"})) == rows
        bound = {8: "25 or 15", 4: "10 or 5"}[bits]
        legend = rf"below {bound} dB where values have [\d, ]*\b{bits}\b[\d, ]* bits"
        assert re.search(legend, shown.section("layers"))


@pytest.mark.parametrize(
    ("values", "word", "color", "text"),
    [
        ({"gates": {"a>=1": True, "b>=1": False}}, "FAIL", "bad", "gate b>=1: not met; gate a"),
        ({"gates": {"a>=1": True}}, "PASS", "good", "gate a>=1: met."),
        ({"gates": {"a>=1": True}, "fault": "it is NaN"}, "FAIL", "bad", "it is NaN; gate a"),
        ({"gates": {}}, "NOT JUDGED", "", "no gate says what has to hold."),
        ({"gates": {}, "metrics": {}}, "NOT TESTED", "", "test mode measures"),
    ],
)
def test_the_page_begins_with_what_the_gates_say(
    content: dict[str, Any], values: dict[str, Any], word: str, color: str, text: str
) -> None:
    html = page(content | values).replace("&gt;", ">")
    begins = html.partition("</h1>")[2].strip()
    assert begins.startswith(
        f'<p class="{f"judged {color}".strip()}"><strong>{word}</strong> {text}'
    )


@pytest.mark.parametrize(("quantized", "is_marked"), [(0.9, False), (0.8, True)])
def test_nothing_is_marked_as_a_fault_while_the_task_keeps_its_quality(
    content: dict[str, Any], quantized: float, is_marked: bool
) -> None:
    content = reports.whole(content)
    content["exports"] = []
    content["pairs"] = {"map50": {"float": 0.9, "quantized": quantized}}
    content["metrics"]["map50_drop"] = 0.9 - quantized
    html = page(content)
    assert reports.LOST in html
    assert ('class="bad"' in html) is is_marked
    assert ('class="warning"' in html) is is_marked


def test_the_words_of_specs_are_said_once(content: dict[str, Any]) -> None:
    weights = [row for row in content["layers"] if row["tensor"] == "weights"]
    activations = [row for row in content["layers"] if row["tensor"] == "activation"]
    for row in weights:
        row["spec"] = "int8 per_channel mse"
    for row in activations:
        row["spec"] = "uint8 per_tensor maxmin"
    activations[0]["spec"] = "int16 per_tensor percentile"
    html = page(content)
    assert html.count("int8 per_channel mse") == 1
    assert html.count("per_tensor percentile") == html.count("int16 per_tensor percentile") > 0
    assert len(activations) < 2 or html.count("uint8 per_tensor maxmin") == 1


def test_the_steepest_fall_leads_to_the_line_that_keeps_its_layer_in_float(
    content: dict[str, Any],
) -> None:
    rows = [row for row in content["layers"] if row["accumulated_sqnr_db"] is not None]
    rows = sorted((row for row in rows if row["op"] != "input"), key=lambda row: row["order"])
    for row in rows:
        row["accumulated_sqnr_db"] = 40.0
    fallen = rows[-1]
    fallen["accumulated_sqnr_db"] = 20.0
    html = page(content)
    place = f"row-{fallen['order']}-{fallen['tensor']}"
    assert f'20.0 dB, is at <a href="#{place}">' in html
    row_of_layer = html.partition(f'<tr id="{place}"')[2].partition("</tr>")[0]
    assert 'class="line"><code>' in row_of_layer
    assert html.count('id="next"') == 1


def test_tensors_without_loss_are_folded(content: dict[str, Any]) -> None:
    content["layers"][0]["local_sqnr_db"] = None
    content["layers"][1]["local_sqnr_db"] = 200.0
    for row in content["layers"][2:]:
        row["local_sqnr_db"] = 40.0
    shown = Elements(page(content))
    ((_, folded),) = (found for found in shown.all("details") if "without loss" in found[1])
    assert "2 tensors without loss" in folded
    (whole,) = shown.all("div", **{"aria-label": "Layers by damage"})
    assert whole[1].count("40.00") == len(content["layers"]) - 2


def test_columns_without_a_figure_are_left_out(content: dict[str, Any]) -> None:
    for row in content["layers"]:
        row["accumulated_sqnr_db"] = None
        for name in ("clipped", "histogram"):
            row.pop(name, None)
    layers = Elements(page(content)).section("layers")
    assert "local SQNR, dB" in layers
    assert "accumulated" not in layers and "clipped" not in layers


def test_an_exported_file_has_share_speed_engines_and_reasons(content: dict[str, Any]) -> None:
    content["paths"]["Net::fc"] = "head.fc"
    content["exports"] = [reports.export()]
    shown = Elements(page(content)).section("exports")
    for text in (
        "Net.onnx",
        "8 kB",
        "90 %",
        "9 of 10 multiplications in int8, 75 % of the multiply-adds",
        "1.3 times float",
        "1.2 to 1.4 in 7 rounds",
        "head.fc: its output is in 16 bits",
        "ONNX Runtime, default settings agrees: all are equal",
        "OpenVINO 2026.4 does not agree: 0.1 dB",
        "8-bit weights are stored as uint8",
    ):
        assert text in shown, text
    busy = reports.export()["speed"] | {"is_clear": False, "text": "the machine is too busy"}
    content["exports"] = [reports.export(speed=busy)]
    shown = Elements(page(content)).section("exports")
    assert "not clear" in shown and "times float:" not in shown


def test_a_file_without_an_engine_names_layers_with_float_weights(
    content: dict[str, Any],
) -> None:
    file = reports.export(file="Net.gguf")
    del file["kernels"], file["speed"]
    layer = content["layers"][0]["layer"]
    content |= {"exports": [file], "float_weights": {layer: "excluded"}}
    shown = Elements(page(content)).section("exports")
    assert f"{content['paths'][layer]}: excluded" in shown
    assert "speed" not in shown and "int8 share" not in shown


def test_screen_readers_find_names_and_roles(content: dict[str, Any]) -> None:
    shown = Elements(page(reports.whole(content)))
    regions = shown.all("div", role="region") + shown.all("pre", role="region")
    labels = [attributes["aria-label"] for attributes, _ in regions]
    assert len(labels) == len(set(labels)) > 3
    assert all(attributes["tabindex"] == "0" for attributes, _ in regions), "keys scroll it"
    for attributes, _ in shown.all("svg"):
        assert attributes["role"] == "img" and attributes["aria-label"]
    for attributes, _ in shown.all("th"):
        assert attributes["scope"] in ("col", "row")
    inputs = [attributes["aria-label"] for attributes, _ in shown.all("input")]
    assert len(inputs) == len(set(inputs)) == 3
    levels = [int(tag[1]) for tag, _, _ in shown.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_each_drawing_has_named_axes_a_legend_and_values(content: dict[str, Any]) -> None:
    drawings = Elements(page(reports.whole(content))).all("svg")
    assert len(drawings) > 10
    for attributes, text in drawings:
        assert "↑" in text and "→" in text, "both axes have a name"
        assert "■" in text, "colours have a meaning"
        count = len((attributes["data-positions"] or "").split())
        assert count == len((attributes["data-texts"] or "").split("\n")) > 0


def test_the_text_of_a_bar_is_shown_over_its_middle(content: dict[str, Any]) -> None:
    drawing: dict[str, str | None] = {}
    widths: list[float] = []
    for tag, attributes, _ in Elements(page(reports.whole(content))).elements:
        if tag == "svg":
            drawing = attributes
        if tag != "path" or attributes["class"] != "bars":
            continue
        outline = attributes["d"] or ""
        start = re.match(r"M([\d.]+) ", outline)
        assert start is not None
        shown = [float(position) for position in (drawing["data-positions"] or "").split()]
        width = sum(map(float, re.findall(r"h([\d.]+)", outline))) / len(shown)
        middles = [float(start[1]) + width * (index + 0.5) for index in range(len(shown))]
        assert shown == pytest.approx(middles, abs=1), "positions are whole units"
        widths.append(width)
    assert len(widths) > 3 and max(widths) > 4


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_contrast(theme: str) -> None:
    """WCAG 2.2 asks for 4.5 of texts and 3 of drawings."""
    css = page_file("drawing.css").split("@media")[theme == "dark"]
    colours = dict(re.findall(r"--(\w+): (#\w+);", css))
    for name in ("text", "dim", "first", "second", "good", "warn", "bad"):
        for ground in ("back", "panel"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    assert contrast(colours["bars"], colours["back"]) >= 3


def test_texts_of_drawings_are_large_enough_on_a_narrow_screen() -> None:
    """A drawing of 720 units is 358 pixels wide on a screen of 390."""
    narrow = re.search(
        r"@media \(max-width: 640px\) \{ svg text \{ font-size: (\d+)px", page_file("page.css")
    )
    assert narrow is not None
    assert int(narrow[1]) * 358 / 720 >= 11


def contrast(first: str, second: str) -> float:
    darker, lighter = sorted(map(luminance, (first, second)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    red, green, blue = channels(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def channels(colour: str) -> Iterator[float]:
    digits = colour.removeprefix("#")
    if len(digits) == 3:
        digits = "".join(digit * 2 for digit in digits)
    for start in (0, 2, 4):
        value = int(digits[start : start + 2], 16) / 255
        yield value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
