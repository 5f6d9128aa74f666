"""An algorithm is what a plug-in declares: a made-up one is listed here, and everything knows
it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantizer import Config, Dtype, ModelQuantizer, QuantizationConfig, QuantizationSpec
from quantizer.cli.main import run_command
from quantizer.config.algorithms import ALIASES, LISTED, PLUGINS, algorithm_entry, entry_kinds
from quantizer.config.document.document import Text
from quantizer.config.document.read import parse_document
from quantizer.config.load import LoadResult, check_document
from quantizer.declarations import ListedAlgorithm
from quantizer.errors import UsageError

Capture = pytest.CaptureFixture[str]
WEIGHT = {"weight": {"dtype": "int8"}}
ALGORITHM = """
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from quantizer.layerwise.adjustment import Adjustment, RoundedWeight, Task
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams
from quantizer.config.algorithms import AlgoConfig, setting
from quantizer.config.typed_fields import type_checked


@type_checked
@dataclass
class StretchConfig(AlgoConfig):
    '''Stretch: weights are rounded with scales of another size.'''

    run: ClassVar[str] = "made_up_algorithm:stretch"
    needs_data: ClassVar[bool] = False

    name: str = "stretch"
    factor: float = setting(2.0, "What scales are multiplied by.", minimum=1, exclusiveMaximum=8)
    factors: list[float] | None = setting(None, "One factor for each layer instead.", minimum=1)
    axis: Literal["rows", "columns"] = setting("rows", "Which way to stretch.", title="way to stretch")
    twice: bool = setting(False, "Whether to do it twice; needs again.", needs="again")
    again: bool = setting(False, "Whether to do it again.")
    cycles: int = setting(3, "How often.", minimum=1, maximum=10)
    model_decoder_layers: str | None = None


def stretch(task: Task, settings: StretchConfig, found: Adjustment) -> Adjustment:
    '''Round each weight to nearest on the scales of its range times `factor`.'''
    for number, group in enumerate(task.structure.groups):
        for name in group.layers:
            spec, weight = task.specs[name, "weights"], task.graph.tensors[task.graph.by_name[name].params["weight"]]
            qparams = nearest_qparams(spec, weight)
            qparams = replace(qparams, scale=qparams.scale * settings.factor)
            rounded = RoundedWeight(nearest(weight, spec, qparams), qparams, 0.5, 0.25)
            found = found.with_rounded({name: rounded})
        task.after_group(found, number + 1)
    return found
"""
MODEL = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def calibration_data():
    return [torch.ones(2, 8)]
"""


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The made-up algorithm's settings, registered as long as a test runs."""
    (tmp_path / "made_up_algorithm.py").write_text(ALGORITHM)
    monkeypatch.syspath_prepend(tmp_path)
    row = ListedAlgorithm("made_up_algorithm:StretchConfig", aliases=("elongate",))
    monkeypatch.setitem(LISTED, "stretch", row)
    monkeypatch.setitem(PLUGINS, "stretch", "stretch")
    monkeypatch.setitem(ALIASES, "elongate", "stretch")
    yield importlib.import_module("made_up_algorithm").StretchConfig
    del sys.modules["made_up_algorithm"]


def check(entry: dict[str, Any], form: str = "hierarchical") -> LoadResult:
    block = {"global_quant_config": WEIGHT, "algo_config": entry}
    return check_document(parse_document(Text("net.json", json.dumps(block, indent=1))))


def test_a_file_may_list_it_and_its_defaults_are_those_of_the_class(kind: Any) -> None:
    [found] = check({"name": "stretch"}).require().algorithms
    assert (found.settings, found.stage, found.needs_data) == (kind(), "round", False)
    [found] = (
        check({"name": "elongate", "factor": 3, "cycles": 2.0, "axis": "columns"})
        .require()
        .algorithms
    )
    assert found.settings == kind(factor=3.0, cycles=2, axis="columns")
    assert type(found.settings.factor) is float and type(found.settings.cycles) is int  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("entry", "line", "code", "message", "hint"),
    [
        (
            {"factor": 0.5},
            9,
            "QZ104",
            "0.5 is out of range for factor (at least 1, less than 8)",
            '"factor": 2.0',
        ),
        (
            {"factor": 8},
            9,
            "QZ104",
            "8 is out of range for factor (at least 1, less than 8)",
            '"factor": 2.0',
        ),
        ({"factor": "2"}, 9, "QZ103", '"factor" is a number, not the string "2"', "write 2"),
        ({"factors": [2, 0]}, 11, "QZ104", "0 is out of range for factors (at least 1)", ""),
        ({"cycles": 1.5}, 9, "QZ103", '"cycles" is a whole number, not 1.5', '"cycles": 3'),
        (
            {"axis": "colums"},
            9,
            "QZ101",
            '"colums" is not a way to stretch (one of: rows, columns)',
            "columns",
        ),
        ({"twice": 1}, 9, "QZ103", '"twice" is true or false, not 1', "write true"),
        ({"factr": 1}, 9, "QZ102", 'unknown key "factr"', 'did you mean "factor"?'),
        (
            {"damp_percent": 1},
            9,
            "QZ102",
            'unknown key "damp_percent"',
            "belongs in the algorithm gptq",
        ),
        (
            {"twice": True, "again": False},
            10,
            "QZ333",
            "twice is on and needs again, which is off: it has no effect",
            'write "again": true',
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("kind")
def test_its_keys_are_checked_with_sentences_and_places(
    entry: dict[str, Any], line: int, code: str, message: str, hint: str
) -> None:
    [found] = check({"name": "stretch", **entry}).diagnostics
    remark = f" ({found.remark})" if found.remark else ""
    assert (found.code, found.place and found.place.line, found.message + remark) == (
        code,
        line,
        message,
    )
    assert hint in str(found.help)


@pytest.mark.usefixtures("kind")
def test_other_entries_get_it_in_their_hints() -> None:
    [found] = check({"name": "gptq", "cycles": 1}).diagnostics
    assert found.help == '"cycles" belongs in the algorithm stretch'
    [found] = check({"name": "stretchh"}).diagnostics
    assert (
        found.remark == f"one of: {', '.join(entry_kinds('hierarchical'))}"
        and found.help == 'did you mean "stretch"?'
    )


def test_its_class_works_in_python(kind: Any, tmp_path: Path) -> None:
    config = Config(
        QuantizationConfig(weight=QuantizationSpec(Dtype.int8)),
        algo_config=[kind(factor=4.0, cycles=3)],
    )
    assert config.to_dict()["algo_config"] == [{"name": "stretch", "factor": 4.0}]
    config.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json") == config
    for make, message in (
        (lambda: kind(cycles=1.5), "StretchConfig.cycles is 1.5, not an int"),
        (lambda: kind(factr=2), "StretchConfig has no field 'factr'"),
    ):
        with pytest.raises(UsageError, match=message):
            make()
    scales = []
    for algorithms in ([], config.algo_config):
        layer = nn.Linear(8, 4)
        torch.nn.init.ones_(layer.weight)
        wanted = Config(config.global_quant_config, algo_config=algorithms)
        ModelQuantizer(wanted).quantize_model(layer, [torch.ones(2, 8)])
        scales.append(float(layer.quantizers["weights"].scale))
    assert scales[1] == pytest.approx(4 * scales[0])


def test_one_form_is_converted_to_the_other(kind: Any, tmp_path: Path, capsys: Capture) -> None:
    path, there = tmp_path / "one.json", tmp_path / "two.json"
    path.write_text(
        json.dumps(
            {"global_quant_config": WEIGHT, "algo_config": {"name": "stretch", "factor": 3}}
        )
    )
    assert run_command(["convert", str(path), "--to", "layered", "-o", str(there)]) == 0
    assert json.loads(there.read_text())["algorithms"] == [algorithm_entry(kind(factor=3.0))]
    assert run_command(["convert", str(there), "--to", "hierarchical"]) == 0
    assert json.loads(capsys.readouterr().out)["algo_config"] == [
        algorithm_entry(kind(factor=3.0))
    ]


def test_plan_lists_it_and_calibration_runs_it(
    kind: Any, tmp_path: Path, capsys: Capture
) -> None:
    config, model = tmp_path / "config.json", tmp_path / "net.py"
    config.write_text(
        json.dumps(
            {"global_quant_config": WEIGHT, "algo_config": {"name": "stretch", "factor": 3}}
        )
    )
    model.write_text(MODEL)
    given = ["--config_file", str(config), "--model", str(model)]
    assert run_command(["plan", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["algorithms"] == ["stretch"]
    out = tmp_path / "out"
    assert run_command(["--quant_mode", "calib", *given, "--output_dir", str(out)]) == 0
    report = json.loads((out / "algorithms.json").read_text())
    assert report["algorithms"] == [algorithm_entry(kind(factor=3.0))]
    assert {row["error"] for row in report["rounded"].values()} == {0.25}
    assert run_command(["--quant_mode", "test", *given, "--output_dir", str(out)]) == 0


@pytest.mark.usefixtures("kind")
def test_it_has_a_page(capsys: Capture) -> None:
    assert run_command(["explain", "stretch"]) == 0
    page = capsys.readouterr().out
    assert "Stretch: weights are rounded with scales of another size." in page
    assert '| `axis` | "rows" or "columns" | `"rows"` | Which way to stretch. |' in page
    assert (
        "| `factor` | a number, at least 1, less than 8 | `2.0` | What scales are multiplied "
        "by. |" in page
    )


def test_nothing_of_it_stays() -> None:
    [found] = check({"name": "stretch"}).diagnostics
    assert found.code == "QZ101"
