"""docs/family_results.md shows what families gave in `make engines`: each consumer has a row for each of
its families and schemes, and another run gives the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.extended import extended_except
from support.runs import ROOT

for package in ("transformers", "compressed_tensors", "gguf"):
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "docs")]

from engines.families.cases import written_case
from engines.families.consumers import CONSUMERS, Consumer
from engines.families.models import FAMILIES
from engines.families.outcomes import row_of
from engines.families.run import chosen_pairs
from engines.families.schemes import SCHEMES
from family_table import EQUAL_DB, stored_rows

ALL_CONSUMERS = pytest.mark.parametrize("name", CONSUMERS)
EXPORTER = CONSUMERS["transformers"]
CHEAP = ("llama-w4", "falcon-nvfp4", "granite_moe-w8", "opt-q8_0")
"""A file, one that is dequantized, and what two targets lack."""
AT_RUN_TIME = ("w8a8_dynamic", "fp8")
"""Schemes with ranges that are found at run time, which move values between two codes."""
LEAST_DB = 20
"""Of an engine that rounds inputs or sums of its own."""


def pairs_of(consumer: Consumer) -> list[tuple[str, str]]:
    return chosen_pairs(consumer, [*FAMILIES], [*SCHEMES])


def test_there_are_24_families() -> None:
    assert len(FAMILIES) == 24
    assert [family for family, _ in pairs_of(EXPORTER)][:: len(EXPORTER.schemes)] == [*FAMILIES]


@ALL_CONSUMERS
def test_a_consumer_has_a_row_for_each_family_and_scheme(name: str) -> None:
    consumer = CONSUMERS[name]
    assert [*stored_rows(consumer)] == pairs_of(consumer), f"families/run.py --consumer {name}"


KNOWN_FAILURES = {
    ("vllm", "llama", "widths_16"),
    ("vllm", "mixtral", "w4_16"),
    ("vllm", "qwen3_moe", "w4_16"),
}
"""The CPU build of vLLM cannot multiply experts, nor int8 weights with float inputs."""


@ALL_CONSUMERS
def test_a_file_that_is_written_is_loaded(name: str) -> None:
    """What is the family's is refused before calibration, so nothing fails later."""
    for pair, row in stored_rows(CONSUMERS[name]).items():
        assert ("failure" in row) == ((name, *pair) in KNOWN_FAILURES), pair
        assert len({"failure", "refusal", "version"} & {*row}) == 1, pair


def test_transformers_computes_what_test_mode_does_in_float32() -> None:
    for (family, scheme), row in stored_rows(EXPORTER).items():
        is_exact = scheme not in AT_RUN_TIME and SCHEMES[scheme].dtype == "float32"
        least = EQUAL_DB if is_exact else LEAST_DB
        assert row.get("sqnr_db", least) >= least, (family, scheme)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", extended_except(["-".join(pair) for pair in pairs_of(EXPORTER)], *CHEAP)
)
def test_another_run_gives_the_row(case: str, tmp_path: Path) -> None:
    family, scheme = case.split("-")
    row = row_of(EXPORTER, written_case(family, scheme, tmp_path / "case"), tmp_path / "case")
    found, stored = without_figures(row), without_figures(stored_rows(EXPORTER)[family, scheme])
    if scheme in AT_RUN_TIME:
        # Whether a value moves between two codes depends on the processor
        found["equal"] = stored["equal"]
    assert found == stored


def without_figures(row: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the machine, and whether outputs are equal."""
    lasting = ("family", "scheme", "share", "refusal", "dequantized", "unread")
    is_equal = row.get("sqnr_db", EQUAL_DB) >= EQUAL_DB
    return {**{name: row[name] for name in lasting if name in row}, "equal": is_equal}
