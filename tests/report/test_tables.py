"""Tables on wide and narrow terminals: what they show, what they call it, and what they leave
out.
"""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from quantizer.commands.inspection.difference import Side, compare_sides
from quantizer.commands.inspection.tensor_rows import tensor_table
from quantizer.graph.ir import Graph, Node
from quantizer.report.tables import damage_table, layer_table, usual_specs, usual_text
from quantizer.report.view import Listing, TableView

ROWS = [
    {
        "layer": f"Net::Net/Sequential[layer{index}]/BasicBlock[0]/Conv2d[conv1]/conv2d",
        "tensor": "activation",
        "spec": "int8 per_tensor entropy half_even",
        "local_sqnr_db": 30.0 + 10 * index,
        "accumulated_sqnr_db": 28.5,
    }
    for index in range(3)
]
EXACT = {**ROWS[0], "local_sqnr_db": 200.0, "accumulated_sqnr_db": None}
PATHS = {row["layer"]: f"layer{index}.0.conv1" for index, row in enumerate(ROWS)}
BELOW = "--top all shows them"


def test_a_difference_in_the_zero_point_alone_is_named() -> None:
    sides = []
    for zero_point in (3, 5):
        entry = {"spec": {"dtype": "int"}, "scale": 0.5, "zero_point": zero_point}
        sides.append(Side("net", {("fc", "input"): entry}, {}, {}))
    (row,) = tensor_table(compare_sides(*sides).rows, TableView()).rows
    assert row[:3] == ("fc", "input", "zero point")


def printed(table: Listing, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_every_letter_survives_every_width(width: int) -> None:
    lines = printed(damage_table(ROWS, TableView()), width).splitlines()
    assert max(map(len, lines)) <= width
    figures = re.sub(r"\s", "", "".join(lines))
    names = (
        "".join(line[: lines[0].find("tensor")].strip() for line in lines[1:])
        if "tensor" in lines[0]
        else figures
    )
    for row in ROWS:
        assert str(row["layer"]) in names
        for value in (f"{row['local_sqnr_db']:.2f}", "28.50", "activation", "int8"):
            assert value in figures


@pytest.mark.parametrize(
    ("width", "shown"),
    [(200, ("format", "noise")), (85, ("format", "noise")), (60, ("format",))],
)
def test_a_narrower_terminal_shows_fewer_columns_and_a_line_a_row(
    width: int, shown: tuple[str, ...]
) -> None:
    titles, *rows = printed(damage_table(ROWS, TableView(PATHS)), width).splitlines()
    kept = {"layer", "tensor", "local", "accumulated", "dB"}
    assert set(titles.split()) == kept | {*shown}
    assert [row.split()[:2] for row in rows] == [
        [path, "activation"] for path in PATHS.values()
    ]
    assert "half_even" not in rows[0]


def test_a_spec_that_is_not_the_usual_one_keeps_its_words() -> None:
    other = {**ROWS[0], "spec": "uint8 per_tensor mse"}
    rows = [other, *ROWS]
    lines = printed(damage_table(rows, TableView()), 200).splitlines()
    assert sum("uint8 per_tensor mse" in line for line in lines) == 1
    assert usual_text(usual_specs(rows)) == f"activation: {ROWS[0]['spec']}"


def test_the_text_of_the_last_column_wraps_before_names_do() -> None:
    name, why = (
        "backbone.features.12.projection",
        "a reason of many words that goes on for a while",
    )
    table = Listing(("layer", "why"), [(name, why)])
    for width, first in ((60, name), (55, "backbone.features.12.")):
        titles, *lines = printed(table, width).splitlines()
        at = titles.index("why")
        assert lines[0][:at].strip() == first
        assert "".join(line[:at].strip() for line in lines) == name
        assert " ".join(line[at:].strip() for line in lines) == why
    assert printed(table, 45).splitlines()[0].strip() == name, (
        "each row is its name and, below, the rest"
    )


def test_only_the_worst_rows_are_shown_and_how_to_see_the_others() -> None:
    lines = printed(damage_table([*ROWS, EXACT], TableView(PATHS, top=2)), 100).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["layer0.0.conv1", "layer1.0.conv1"]
    assert lines[3:] == [f"… 2 more tensors in layers.csv, 1 of them without loss; {BELOW}"]
    few = printed(damage_table([*ROWS, EXACT], TableView(PATHS, top=15)), 100).splitlines()
    assert few[-1] == f"… 1 more tensor in layers.csv, all without loss; {BELOW}"
    assert (
        printed(damage_table([EXACT], TableView(top=15)), 100)
        == f"1 tensor in layers.csv, all without loss; {BELOW}\n"
    )
    assert "200.00" in printed(damage_table([*ROWS, EXACT], TableView()), 200), (
        "without a limit nothing is left out"
    )


def test_rows_that_are_left_out_are_those_that_matter_least_and_the_others_keep_their_order() -> (
    None
):
    rows = [(f"Net::Net/{name}", "") for name in "abcde"]
    table = TableView(top=2).listing(
        ("layer", "why"), rows, [3.0, 1.0, None, 2.0, None], idle="in float"
    )
    assert [row[0] for row in table.rows] == ["Net::Net/b", "Net::Net/d"]
    assert table.note == "… 3 more layers, 2 of them in float; --top all shows them"


def test_only_the_layers_asked_for_are_shown() -> None:
    table = TableView(layers=frozenset({"Net::Net/b"})).listing(
        ("layer", "why"), [("Net::Net/a", ""), ("Net::Net/b", "")]
    )
    assert (list(table.rows), table.note) == ([("Net::Net/b", "")], "")


def test_layers_are_called_alike_in_every_column() -> None:
    add = Node("Net::Net/Block[0]/add", "add", "", scope="0", shape=(None, 8, 4))
    relu = Node(
        "Net::Net/Block[0]/ReLU[relu]/relu.1", "relu", "", scope="0.relu", shape=(None, 8, 4)
    )
    graph = Graph("Net", (add, relu), (), {})
    view = TableView({add.name: "0.add", relu.name: "0.relu.1"})
    table = layer_table(
        graph, [(relu.name, "activation")], {add.name: f"quantized at {relu.name}"}, view
    )
    assert list(table.rows) == [
        ("0.add", "add", "bx8x4", "quantized at 0.relu.1"),
        ("0.relu.1", "relu", "bx8x4", "activation"),
    ]


def test_the_bar_is_the_noise_against_the_worst() -> None:
    bars = [
        line.count("█")
        for line in printed(damage_table(ROWS, TableView()), 200).splitlines()[1:]
    ]
    assert bars == [20, 2, 0], "10 dB better is a tenth of the noise"


def test_tables_of_nothing_and_of_the_perfect() -> None:
    assert "layer" in printed(damage_table([], TableView()), 100)
    perfect = damage_table(
        [{**ROWS[0], "local_sqnr_db": float("inf"), "accumulated_sqnr_db": None}], TableView()
    )
    assert "█" not in printed(perfect, 200)
