"""What every export target promises; a new row of EXPORTERS is tested without a new test."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch
from support.deployments import FILES, Written
from support.extended import extended_except
from support.onnx_files import quick_files  # noqa: F401 - a fixture
from support.toys import built

from quantizer.cli.main import cli
from quantizer.errors import UsageError
from quantizer.export.exporter import Exporter, exporter_of
from quantizer.export.exporting import export
from quantizer.export.refusals import require_extras, require_operators
from quantizer.export.targets import (
    CHECKED_TARGETS,
    EXPORTERS,
    checked_choices,
    checked_target,
    require_choices,
)
from quantizer.graph.tracing.trace import trace
from quantizer.installation import pip_line

pytestmark = pytest.mark.usefixtures("quick_files")

Exported = Callable[[str, str], Written]
OPERATORS = ["residual", "mobile", "transposed", "branches"]
CALLS = ["nested_inputs", "several_outputs", "tied", "static_batch"]
"""Toys with other inputs, outputs, weights and batches."""
SOME_OPERATORS = {
    "pt2": ["mobile", "transposed"],
    "pt2_float": ["mobile", "branches"],
    "openvino": ["transposed"],
    "encodings": ["residual", "mobile", "branches"],
}
"""For the two targets that hand the layers of test mode to torch.export, and for two that are
written as the .onnx is. The toy with transposed convolutions has scales along their inputs,
which encodings do not hold.
"""
FILES_OF_TOYS = [
    (target, name)
    for target in FILES
    for name in [*SOME_OPERATORS.get(target, OPERATORS), *CALLS]
]
ROUNDED_OTHERWISE = ["openvino"]
"""Targets whose reader multiplies by the reciprocal of a scale."""
LIKE_PT2 = [
    ("pt2_float", name) for name in ("nested_inputs", "several_outputs", "tied", "mobile")
]
"""One exporter writes both kinds of programs, and takes calls and shared weights in one way."""
LIKE_ONNX = [
    ("openvino", name) for name in ("static_batch", "several_outputs", "tied", "nested_inputs")
]
"""OpenVINO's files are translated from the .onnx, where these are decided."""
ALIKE = [*LIKE_PT2, *LIKE_ONNX]
USUAL = [row for row in FILES_OF_TOYS if row[1] != "branches" and row not in ALIKE]
REPRODUCIBLE = [
    "onnx",
    "openvino",
    "encodings",
    "safetensors",
]  # torch writes a .pt2 as a zip file of its own


def needing(target: str) -> None:
    for package in EXPORTERS[target].needs:
        pytest.importorskip(
            package, reason=f"--to {target} needs it (extra: {EXPORTERS[target].extra})"
        )


def contents(path: Path) -> bytes:
    """All bytes a reader can get out of a file."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return b"".join(name.encode() + archive.read(name) for name in archive.namelist())


@pytest.mark.slow
@pytest.mark.parametrize(("target", "name"), extended_except(FILES_OF_TOYS, *USUAL))
def test_a_file_read_back_equals_test_mode(target: str, name: str, exported: Exported) -> None:
    needing(target)
    file = exported(target, name)
    assert file.path.stat().st_size
    if target in ROUNDED_OTHERWISE:
        assert file.found.sqnr_db is not None
        assert file.found.sqnr_db > 40
        return
    assert (file.found.max_difference, file.found.mean_difference, file.found.equal) == (
        0.0,
        0.0,
        1.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", FILES)
def test_a_file_holds_no_place_no_source_and_no_data(target: str, exported: Exported) -> None:
    needing(target)
    file = exported(target, "mobile")
    stored = contents(file.path)
    sample = file.given.args[0][0].flatten()[:8].view(torch.uint8)
    for unwanted in (
        str(Path.cwd()),
        str(file.path.parent),
        "toys.py",
        "self.act",
        "site-packages",
    ):
        assert unwanted.encode() not in stored
    assert bytes(sample.tolist()) not in stored


@pytest.mark.slow
@pytest.mark.parametrize("target", REPRODUCIBLE)
def test_two_files_of_one_network_are_equal(
    target: str, exported: Exported, tmp_path: Path
) -> None:
    """Whatever call they are verified with."""
    needing(target)
    first, (args, kwargs) = exported(target, "mobile"), built("mobile").call(4)
    export(target, replace(first.given, args=args, kwargs=kwargs), tmp_path / "again")
    exporter = exporter_of(target)
    files = zip(exporter.files(first.path), exporter.files(tmp_path / "again"), strict=True)
    for one, other in files:
        assert one.exists() == other.exists()
        assert not one.exists() or one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("target", CHECKED_TARGETS)
def test_no_operator_of_a_usual_network_is_refused_before_there_is_a_plan(target: str) -> None:
    if not EXPORTERS[CHECKED_TARGETS[target].target].plans_alone:
        needing(CHECKED_TARGETS[target].target)
    toy = built("mobile")
    require_operators(checked_target(target, {}), trace(toy.module, toy.args))


@pytest.mark.parametrize("target", EXPORTERS)
def test_every_row_says_what_it_needs(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantizer.export.refusals.find_spec", lambda name: None)
    if not EXPORTERS[target].needs:
        require_extras([target])
        return
    with pytest.raises(UsageError, match=EXPORTERS[target].needs[0]) as refused:
        require_extras([target])
    assert refused.value.help == pip_line(EXPORTERS[target].extra)


def test_suffixes_are_distinct_and_modules_exist() -> None:
    rows = list(EXPORTERS.values())
    assert len({row.suffix for row in rows}) == len(rows)
    for target in EXPORTERS:
        needing(target)
        assert isinstance(exporter_of(target), Exporter)


def test_options_are_declared_once() -> None:
    """The command line takes help, values and default from the row."""
    options = {parameter.name: parameter for parameter in cli.params}
    for target, row in EXPORTERS.items():
        for option in row.options:
            assert option.target == target
            shown = options[option.name]
            assert isinstance(shown, click.Option)
            assert shown.help == option.help
            assert shown.to_info_dict()["default"] == (option.default or None)


def test_an_unknown_option_or_value_is_refused() -> None:
    with pytest.raises(UsageError, match="no target has the option onnx_weight") as refused:
        checked_choices({"onnx_weight": "int8"}, "onnx", print)
    assert refused.value.help == "did you mean onnx_weights?"
    with pytest.raises(UsageError, match="onnx_weights is 'int4'"):
        require_choices({"onnx_weights": "int4"}, ["onnx"])
    with pytest.raises(UsageError, match="--onnx_weights is only for --to onnx"):
        require_choices({"onnx_weights": "int8"}, ["pt2"])
