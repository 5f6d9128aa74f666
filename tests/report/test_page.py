"""report.html: what report.json says, escaped, complete without a script, and loading
nothing.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from torch import Tensor, nn

import quantizer
from quantizer.cli.main import run_command
from quantizer.evaluation.network_comparison import NetworkComparison
from quantizer.evaluation.scores import Scores
from quantizer.report import tables
from quantizer.report.content import make_report
from quantizer.report.page.page import SECTIONS, coverage, page
from quantizer.results.folder import open_results

ABSENT = ("outputs", "exports", "depth", "algorithms", "sensitivity", "config")
"""Sections of which a calibration alone has nothing to show."""
HOSTILE = '<img src=x onerror="alert(1)">&'


class Net(nn.Module):
    """One of its channels is dead, and one tensor is nothing but zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.zero, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 2)
        with torch.no_grad():
            self.first.weight[1] = 0
            self.zero.weight.zero_()
            self.zero.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu().mean((2, 3)) + self.zero(x[:, 0, 0, :4]))


class Texts(HTMLParser):
    """The tags of a page with their attributes, and its texts."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrated."""
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 8, 8) * (1 + at) for at in range(5)]
    tensor = {
        "weights": {"per_channel": True},
        "activation": {"method": "percentile", "percentage": 99},
    }
    result = quantizer.calibrate(Net().eval(), document(tensor=tensor), data)
    place = tmp_path_factory.mktemp("page") / "quantize_result"
    result.save(place)
    return place


def content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


def test_texts_are_texts_and_nothing_is_loaded(folder: Path) -> None:
    """Names in a model are plain words; a folder may say anything."""
    values = content(folder)
    values["model"], values["config"] = HOSTILE, {"name": HOSTILE, "text": f"</pre>{HOSTILE}"}
    values["paths"] = {name: f"{HOSTILE}{path}" for name, path in values["paths"].items()}
    for row in values["layers"]:
        row["spec"] = f"{HOSTILE}{row['spec']}"
    row = {
        "name": HOSTILE,
        "index": HOSTILE,
        "layer": HOSTILE,
        "kind": HOSTILE,
        "values": 1,
        "pooled": 1,
    }
    values["outputs"] = [row | {"output": HOSTILE, "sqnr_db": 1.0, "cosine": 1.0, "equal": 1.0}]
    values["warnings"] = [
        {"kind": "below", "output": HOSTILE, "text": HOSTILE, "layer": "", "tensor": ""}
    ]
    made = page(values)
    found = Texts(made)
    assert {HOSTILE, f"</pre>{HOSTILE}"} <= set(found.texts)
    assert any(text.startswith(HOSTILE) and text != HOSTILE for text in found.texts)
    assert not {"img", "link", "iframe", "object"} & {tag for tag, _ in found.tags}
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        assert not {"src", "srcset", "data", "action"} & set(attributes), tag
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in made


def test_the_page_says_what_the_values_say(folder: Path) -> None:
    values = content(folder)
    found = Texts((folder / "report.html").read_text(encoding="utf-8"))
    cells = set(found.texts)
    for row in values["layers"]:
        assert values["paths"][row["layer"]] in cells
        assert row["spec"].partition(" ")[0] in cells
        assert any(row["spec"] in cell for cell in cells)
        if "clipped" in row:
            assert f"{100 * row['clipped']:.3g}" in cells
    sections = [attributes["id"] for tag, attributes in found.tags if tag == "section"]
    assert sections == [name for name in SECTIONS if name not in ABSENT]


class Repeated(nn.Module):
    """One of its modules is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twice(self.twice(x)))


def test_the_line_beside_a_layer_keeps_it_alone_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Repeated().eval()
    data = [torch.randn(4, 4)]
    config = document(quantizable_data_type=["weights", "activation"])
    quantizer.calibrate(model, config, data).save(tmp_path / "all")
    values = content(tmp_path / "all")
    made = Texts((tmp_path / "all" / "report.html").read_text(encoding="utf-8"))
    lines = {text for text in made.texts if text.startswith('"exclude": [')}
    rows = {(row["layer"], row["tensor"]) for row in values["layers"]}
    assert len(lines) == len({layer for layer, _ in rows})
    quantized = set()
    for index, line in enumerate(sorted(lines)):
        place = tmp_path / str(index)
        changed = config | json.loads(f"{{{line}}}")
        quantizer.calibrate(model, changed, data).save(place)
        left = {(row["layer"], row["tensor"]) for row in content(place)["layers"]}
        assert len({layer for layer, _ in rows - left}) == 1
        assert left < rows
        quantized.add(frozenset(left))
        # Such a config has the list, and a second one would be an error
        page_of_changed = (place / "report.html").read_text(encoding="utf-8")
        assert not any(text.startswith('"exclude": [') for text in Texts(page_of_changed).texts)
    assert len(quantized) == len(lines)


def test_figures_are_those_of_the_data(folder: Path) -> None:
    rows = {
        (row["layer"].rpartition("/")[2], row["tensor"]): row
        for row in content(folder)["layers"]
    }
    relu = rows["relu", "activation"]
    assert 0 < relu["clipped"] < 0.02
    assert relu["methods"]["maxmin"][1] > relu["limits"][1] > 0
    assert relu["batches"]["total"] == 5
    assert relu["batches"]["stable_after"] == 5, "each batch is larger than the one before"
    assert sum(relu["histogram"]["counts"]) > 0
    assert relu["histogram"]["low"] == 0
    assert 0.4 < relu["codes_used"] <= 0.51, "a signed spec of values that are not negative"


def test_a_test_adds_its_figures_and_report_makes_the_same_bytes(tmp_path: Path) -> None:
    model = tmp_path / "net.py"
    model.write_text(
        "import torch\n\ndef model():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), "
        "torch.nn.Linear(7, 3)).eval()\n\n"
        "def calibration_data():\n    return [torch.randn(4, 5, "
        "generator=torch.Generator().manual_seed(1))] * 2\n"
        "evaluation_data = calibration_data\n"
    )
    config = tmp_path / "q.json"
    config.write_text(json.dumps(document(), indent=2))
    given = ["--model", str(model), "--output_dir", str(tmp_path / "out")]
    assert run_command(["--quant_mode", "calib", "--config_file", str(config), *given]) == 0
    before = content(tmp_path / "out")
    assert before["metrics"] == {}
    assert all(row["local_sqnr_db"] is None for row in before["layers"])
    assert (
        run_command(
            ["--quant_mode", "test", *given, "--gate", "sqnr_db>=20", "--gate", "cosine>=0.5"]
        )
        == 0
    )
    after = content(tmp_path / "out")
    assert after["metrics"]["sqnr_db"] > 20
    assert after["gates"] == {"sqnr_db>=20": True, "cosine>=0.5": True}
    judged = '<p class="judged good"><strong>PASS</strong> gate cosine>=0.5: met; gate sqnr_db>=20: met.'
    assert judged in (tmp_path / "out" / "report.html").read_text("utf-8").replace("&gt;", ">")
    files = [tmp_path / "out" / name for name in ("report.json", "report.html")]
    written = [path.read_bytes() for path in files]
    files[1].unlink()
    assert run_command(["report", str(tmp_path / "out")]) == 0
    assert [path.read_bytes() for path in files] == written
    found = Texts(written[1].decode())
    assert f"{after['metrics']['sqnr_db']:.3g} dB" in found.texts
    links = {attributes["href"] for tag, attributes in found.tags if tag == "a"}
    names = {f"#{attributes['id']}" for _, attributes in found.tags if "id" in attributes}
    assert links <= names
    assert any(re.fullmatch(r"#line-\d+", link or "") for link in links)


def test_each_dead_channel_counts_and_each_reader_of_a_value_shows_it(tmp_path: Path) -> None:
    """Strips of many channels are of runs of them; tensors of one value and spec have their
    statistics in common.
    """

    class Readers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many, self.other = nn.Linear(4, 600), nn.Linear(4, 600)
            with torch.no_grad():
                self.many.weight[17] = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.many(x) + self.other(x)

    weight = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
    static = {"weight": weight, "input_tensors": {"dtype": "int8", "qscheme": "per_tensor"}}
    result = quantizer.calibrate(
        Readers().eval(), {"global_quant_config": static}, [torch.randn(9, 4)] * 2
    )
    result.save(tmp_path / "out")
    rows = content(tmp_path / "out")["layers"]
    channels = {
        row["layer"].rpartition("[")[2]: row["channels"] for row in rows if "channels" in row
    }
    assert {name: found["dead"] for name, found in channels.items()} == {
        "many]/linear": 1,
        "other]/linear": 0,
    }
    assert len(channels["many]/linear"]["low"]) <= 240
    assert [("histogram" in row) for row in rows if row["tensor"] == "input"] == [True, True]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 12.5])
def test_metrics_that_are_not_finite_are_shown(folder: Path, value: float) -> None:
    pairs = {"perplexity": {"float": 9.0, "quantized": value}}
    tested = tables.report_values(Scores(NetworkComparison([]), pairs), [], None)
    texts = Texts(make_report(open_results(folder), tested)[1]).texts
    assert f"9 → {'12.5' if value == 12.5 else 'not finite'}" in texts


def test_python_writes_the_page_of_the_shell(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    result = quantizer.calibrate(Net().eval(), document(), data)
    result.save(tmp_path / "out")
    result.report(tmp_path / "calibrated.html")
    assert (tmp_path / "calibrated.html").read_bytes() == (
        tmp_path / "out" / "report.html"
    ).read_bytes()
    tested = result.test(data)
    result.report(tmp_path / "tested.html", tested)
    texts = Texts((tmp_path / "tested.html").read_text(encoding="utf-8")).texts
    assert f"{tested.metrics['sqnr_db']:.3g} dB" in texts
    assert "Error along the network" in texts


def test_a_page_of_little_is_a_page() -> None:
    nothing: dict[str, Any] = {
        key: {} for key in ("metrics", "pairs", "gates", "floats", "header", "paths")
    }
    nothing |= {
        "model": "Net",
        "commands": [],
        "stamp": None,
        "layers": [],
        "algorithms": None,
        "config": None,
    }
    nothing["weight_bytes"] = {"float": 0, "quantized": 0}
    assert "0 tensors" in page(nothing)


def test_the_page_lists_float_layers_and_not_those_that_others_quantize() -> None:
    floats = {"Net::a": "excluded by layer name", "Net::b": "quantized at Net::relu"}
    values = {"layers": [], "floats": floats, "paths": {"Net::a": "block.a"}}
    assert coverage(values)["in float"] == ["block.a: excluded by layer name"]
