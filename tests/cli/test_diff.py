"""`quantizer diff`: configs value by value, what they do to a model, result folders tensor by
tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.configs import document, layer
from test_ranks import MODEL, calib

from quantizer.cli.main import run_command
from quantizer.commands.inspection.difference import Side, compare_sides

Capture = pytest.CaptureFixture[str]
HEAD = "Net::Net/Linear[head]/linear"


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return str(tmp_path / "net.py")


def written(tmp_path: Path, name: str, config: dict[str, Any]) -> str:
    (tmp_path / name).write_text(json.dumps(config))
    return str(tmp_path / name)


def calibrated(net: str, config: str, folder: Path, *, tested: bool = True) -> str:
    assert run_command(calib(net, config, folder, "-q")) == 0
    if tested:
        assert (
            run_command(
                ["--quant_mode", "test", "--model", net, "--output_dir", str(folder), "-q"]
            )
            == 0
        )
    return str(folder)


def test_configs_are_compared_value_by_value_and_entries_by_what_they_are_for(
    tmp_path: Path, capsys: Capture
) -> None:
    relu, head = layer("relu"), layer(HEAD, bit_width=6)
    first = written(tmp_path, "a.json", document(relu, head))
    second = written(
        tmp_path, "b.json", document(layer(HEAD, bit_width=4), relu) | {"include_cle": True}
    )
    assert run_command(["diff", first, second]) == 0
    *lines, count = capsys.readouterr().out.splitlines()
    name = HEAD.replace("/", "~1")
    assert sorted(lines) == [
        "/include_cle: false → true",
        f"/layer_quantize_config/{name}/overall_quantize_config/bit_width: 6 → 4",
    ]
    assert count == "2 values differ"
    assert run_command(["diff", first, first, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"values": {}}


def test_configs_are_compared_by_what_they_do_to_a_model(
    net: str, tmp_path: Path, capsys: Capture
) -> None:
    """Also where they are of different forms."""
    static = {
        "global_quant_config": {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"}}
    }
    first = written(tmp_path, "a.json", document(layer(HEAD, bit_width=6)))
    second, other = written(tmp_path, "b.json", document()), written(tmp_path, "c.json", static)
    assert run_command(["diff", first, second, "--model", net, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(row["layer"], tuple(row["spec"]["bit_width"])) for row in found["tensors"]} == {
        (HEAD, (6, 8))
    }
    assert found["figures"]["weight_bytes"][0] < found["figures"]["weight_bytes"][1]
    assert run_command(["diff", first, second, "--model", net, "--fail-on", "worse"]) == 1
    assert "worse: weight_bytes" in capsys.readouterr().err
    assert run_command(["diff", second, first, "--model", net, "--fail-on", "worse"]) == 0
    assert run_command(["diff", first, other]) == 2
    assert "give --model" in capsys.readouterr().err
    assert run_command(["diff", first, other, "--model", net]) == 0
    assert "only in the first" in capsys.readouterr().out


def test_results_tell_scales_and_damage_and_a_worse_one_fails(
    net: str, tmp_path: Path, capsys: Capture
) -> None:
    eight = calibrated(net, written(tmp_path, "a.json", document()), tmp_path / "eight")
    four = calibrated(
        net, written(tmp_path, "b.json", document(layer(HEAD, bit_width=4))), tmp_path / "four"
    )
    capsys.readouterr()
    assert run_command(["diff", eight, four, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["layer"], row["tensor"]): row for row in found["tensors"]}
    assert rows[HEAD, "weights"]["spec"] == {"bit_width": [8, 4]}
    before, after = rows[HEAD, "weights"]["scale"]
    assert 15 < after / before < 19
    assert "sqnr_db" in found["worse"]
    assert run_command(["diff", eight, four, "--fail-on", "worse"]) == 1
    said = capsys.readouterr()
    assert "bit_width 8 → 4" in said.out and "error: worse: cosine, sqnr_db" in said.err
    assert run_command(["diff", four, eight, "--fail-on", "worse"]) == 1, "it is larger"
    for second, word in ((four, "WORSE"), (eight, "NOT WORSE")):
        page = tmp_path / f"{word}.html"
        assert run_command(["diff", eight, second, "--html", str(page)]) == 0
        html = page.read_text()
        assert f"<strong>{word}</strong> in {second}" in html
        assert ('<tr class="bad"><td class="name">sqnr_db</td>' in html) is (second == four)
        assert ("bit_width 8 → 4" in html) is (second == four)
    capsys.readouterr()
    assert run_command(["diff", eight, four, "--html", str(page)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run_command(["diff", eight, four, "--html", str(page), "--overwrite"]) == 0
    assert "<strong>WORSE</strong>" in page.read_text()
    assert run_command(["diff", eight, eight, "--fail-on", "worse"]) == 0
    untested = calibrated(net, str(tmp_path / "b.json"), tmp_path / "untested", tested=False)
    capsys.readouterr()
    for folders in ([eight, untested], [untested, eight]):
        assert run_command(["diff", *folders, "--fail-on", "worse"]) == 2
        assert f"{untested} was not tested, so --fail-on cannot" in capsys.readouterr().err
        assert run_command(["diff", *folders, "--json"]) == 0
        printed = capsys.readouterr()
        assert f"note: {untested} was not tested" in printed.err
        found = json.loads(printed.out)
        assert list(found["figures"]) == ["weight_bytes"]
        rows = {(row["layer"], row["tensor"]): row for row in found["tensors"]}
        assert "bit_width" in rows[HEAD, "weights"]["spec"]
        assert "local_sqnr_db" not in rows[HEAD, "activation"]


READERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.b, self.c, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Linear(64, 2)
    def forward(self, x):
        x = self.relu(self.norm(self.a(x)))
        return self.head((self.b(x) + self.c(x)).flatten(1))

def model():
    torch.manual_seed(0)
    return Net().eval()
def calibration_data():
    return list(torch.randn(4, 8, 3, 6, 6, generator=torch.Generator().manual_seed(0)))
"""


def test_inputs_of_one_form_are_outputs_of_the_other(tmp_path: Path, capsys: Capture) -> None:
    """What only one of the forms quantizes is left: two results of a sum, and the head's."""
    (tmp_path / "net.py").write_text(READERS)
    net = str(tmp_path / "net.py")
    inputs = {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"}}
    layered = written(tmp_path, "a.json", document())
    hierarchical = written(tmp_path, "b.json", {"global_quant_config": inputs})
    folders = [calibrated(net, layered, tmp_path / "one")]
    folders.append(calibrated(net, hierarchical, tmp_path / "two"))
    capsys.readouterr()
    for words in (folders, [layered, hierarchical, "--model", net]):
        for pair, side in ((words[:2], "first"), (words[1::-1], "second")):
            assert run_command(["diff", *pair, *words[2:], "--json"]) == 0
            rows = json.loads(capsys.readouterr().out)["tensors"]
            left = {
                row["layer"].split("[")[1][0]
                for row in rows
                if row.get("only_in") == side and row["tensor"] == "activation"
            }
            assert left == {"b", "c", "h"}
            assert not [row for row in rows if "only_in" in row and row["tensor"] == "input"]
    assert run_command(["diff", *folders]) == 0
    assert "in the second as input of head" in capsys.readouterr().out


def test_a_network_with_tensors_that_are_no_weights(tmp_path: Path) -> None:
    """Result folders have no values of parameters and buffers."""
    shifted = READERS.replace("(self.b(x) +", "(self.shift * self.b(x) +").replace(
        "super().__init__()", "super().__init__(); self.register_buffer('shift', torch.ones(1))"
    )
    (tmp_path / "net.py").write_text(shifted)
    net = str(tmp_path / "net.py")
    inputs = {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"}}
    config = written(tmp_path, "b.json", {"global_quant_config": inputs})
    folders = [calibrated(net, config, tmp_path / name) for name in ("one", "two")]
    assert run_command(["diff", *folders]) == 0


def test_results_that_other_samples_judged_are_told(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "net.py").write_text(READERS)
    given = ["--model", str(tmp_path / "net.py"), "--output_dir"]
    config = written(tmp_path, "a.json", document())
    folders = [str(tmp_path / name) for name in ("one", "two")]
    for folder, held_back in zip(folders, ([], ["--skip_len", "16"]), strict=True):
        calib = ["calib", *given, folder, "--config_file", config, "--subset_len", "16"]
        assert run_command(calib) == 0
        assert run_command(["test", *given, folder, *held_back]) == 0
    capsys.readouterr()
    assert run_command(["diff", *folders]) == 0
    assert "note: they were judged by other samples, " in capsys.readouterr().err
    assert run_command(["diff", folders[0], folders[0]]) == 0
    assert "judged by" not in capsys.readouterr().err


@pytest.mark.parametrize(("growth", "code"), [(1.001, 0), (1.009, 0), (1.02, 1)])
def test_a_user_calls_sizes_equal_that_differ_by_a_percent(growth: float, code: int) -> None:
    small = Side("Net", {}, {"weight_bytes": 10_000, "sqnr_db": 30.0}, {})
    large = Side("Net", {}, {"weight_bytes": 10_000 * growth, "sqnr_db": 29.98}, {})
    assert bool(compare_sides(small, large).worse) == bool(code)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["a file and a folder", "another model", "no results", "no judge"]
)
def test_what_cannot_be_compared_is_said(
    what: str, net: str, tmp_path: Path, capsys: Capture
) -> None:
    config = written(tmp_path, "a.json", document())
    folder = calibrated(net, config, tmp_path / "out", tested=False)
    other = tmp_path / "other.py"
    other.write_text(MODEL.replace("class Net", "class Other").replace("Net()", "Other()"))
    given, code, said = {
        "a file and a folder": ([config, folder], 2, "one is a folder and the other is not"),
        "another model": (
            [folder, calibrated(str(other), config, tmp_path / "b", tested=False)],
            2,
            "the first is of Net",
        ),
        "no results": ([folder, str(tmp_path)], 5, "quant_info.json does not exist"),
        "no judge": (
            [config, config, "--fail-on", "worse"],
            2,
            "cannot judge two configs alone",
        ),
    }[what]
    capsys.readouterr()
    assert run_command(["diff", *given]) == code
    assert said in capsys.readouterr().err
