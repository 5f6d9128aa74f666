"""Tables on wide and narrow terminals."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from quantizer.report.tables import Listing, damage_table

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


def printed(table: Listing, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_every_letter_survives_every_width(width: int) -> None:
    text = re.sub(r"\s", "", printed(damage_table(ROWS), width))
    for row in ROWS:
        for value in (row["layer"], f"{row['local_sqnr_db']:.2f}", "28.50", "activation"):
            assert re.sub(r"\s", "", str(value)) in text


def test_the_bar_is_the_noise_against_the_worst() -> None:
    bars = [line.count("█") for line in printed(damage_table(ROWS), 200).splitlines()[1:]]
    assert bars == [20, 2, 0], "10 dB better is a tenth of the noise"


def test_tables_of_nothing_and_of_the_perfect() -> None:
    assert "layer" in printed(damage_table([]), 100)
    perfect = damage_table([{**ROWS[0], "local_sqnr_db": float("inf"), "accumulated_sqnr_db": None}])
    assert "█" not in printed(perfect, 200)
