"""A gate on a metric that does not exist is refused before anything is run for it; the others
see all metrics.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import calibrate, check

from quantizer.cli.main import run_command
from quantizer.export.gates import MEASURED, names_in_test, parse_gate
from quantizer.report.next_step import try_next

LABELLED = "return [(torch.eye(4, 3), torch.zeros(4, dtype=torch.long))] * 2"
EVALUATE = """
def evaluate(model, data):
    calls = Path(__file__).with_suffix(".calls")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    return {"rows": sum(len(batch[0]) for batch in data)}

HIGHER_IS_BETTER = {"rows"}
"""


@pytest.fixture
def model(toy: Callable[..., str], tmp_path: Path) -> str:
    """A calibrated toy without an evaluate()."""
    path = toy(LABELLED)
    assert calibrate(tmp_path / "out", model=path) == 0
    return path


def extend(model: str, text: str) -> None:
    Path(model).write_text(f"from pathlib import Path\n{Path(model).read_text()}\n{text}")


def test_without_evaluate_no_data_are_read(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extend(
        model,
        "def evaluation_data():\n    raise RuntimeError('these data are not to be read')\n",
    )
    assert check(tmp_path / "out", "--gate", "top1_agrement>=1", model=model) == 2
    assert "did you mean top1_agreement?" in capsys.readouterr().err
    assert check(tmp_path / "out", "--gate", "exact_equal>=1", model=model) == 2
    assert "there is no metric 'exact_equal'" in capsys.readouterr().err
    assert (
        run_command(["--quant_mode", "float", "--model", model, "--gate", "sqnr_db>=20"]) == 2
    )
    assert "known here: perplexity, top1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "holds"), [("a==1", True), ("a == 0.5", False), ("a>1", False), ("a<=1", True)]
)
def test_comparisons(text: str, holds: bool) -> None:
    assert parse_gate(text).holds({"a": 1.0}) is holds


def test_all_that_is_measured_is_known(model: str, tmp_path: Path) -> None:
    assert check(tmp_path / "out", "--gate", "top1_drop<=1", model=model) == 0
    found = {*json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))["metrics"]}
    assert found == {
        name for name in names_in_test(MEASURED, ()) if not name.startswith("perplexity")
    } - {
        "equal_outputs"  # of models whose outputs are integers
    }


def test_metrics_of_evaluate_are_known_after_the_float_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extend(model, EVALUATE)
    calls = Path(model).with_suffix(".calls")
    assert check(tmp_path / "out", "--gate", "row>=8", model=model) == 2
    assert "did you mean rows?" in capsys.readouterr().err
    assert calls.read_text() == "x"
    assert json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))["metrics"] == {}
    assert (
        check(tmp_path / "out", "--gate", "rows_drop<=0", "--gate", "sqnr_db>=1", model=model)
        == 0
    )
    assert calls.read_text() == "xxx"
    assert check(tmp_path / "out", "--gate", "sqnr_db>=1", model=model) == 0
    assert calls.read_text() == "xxxxx"


def test_a_model_that_returns_integers_is_measured_by_them(
    toy: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With weights of two bits an argmax often chooses another class: no gate may call that
    perfect.
    """
    net = (
        "class Net(torch.nn.Linear):\n        def forward(self, x):\n            return "
        "super().forward(x).argmax(1)\n"
    )
    path = toy(
        "return [torch.randn(32, 8, generator=torch.Generator().manual_seed(1))]",
        f"{net}    return Net(8, 9)",
    )
    config = tmp_path / "two.json"
    config.write_text(
        '{"global_quant_config": {"weight": {"dtype": "int2", "qscheme": "per_tensor"}}}'
    )
    assert calibrate(tmp_path / "out", model=path, config=str(config)) == 0
    capsys.readouterr()
    assert check(tmp_path / "out", model=path) == 0
    metrics = json.loads((tmp_path / "out" / "report.json").read_text())["metrics"]
    assert metrics.keys() == {"equal_outputs"}
    assert metrics["equal_outputs"] < 0.95
    for gate in ("sqnr_db>=20", "cosine>=0.9", "top1_agreement>=0.1"):
        assert check(tmp_path / "out", "--gate", gate, model=path) == 2
        assert f"--gate '{gate}' is not measured: the model" in capsys.readouterr().err
    assert check(tmp_path / "out", "--gate", "equal_outputs>=0.95", model=path) == 1
    assert check(tmp_path / "out", "--gate", "equal_outputs>=0.1", model=path) == 0


def test_a_quantized_network_that_gives_infinity_fails_without_a_gate(
    toy: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = (
        "class Net(torch.nn.Module):\n        def forward(self, x):\n            return (x "
        "+ "
        "1) / x\n"
    )
    path = toy("return [torch.tensor([[9.0], [0.001]])]", f"{net}    return Net()")
    preset = Path(__file__).parents[2] / "configs" / "cpu_int8.json"
    config = tmp_path / "inputs.json"
    config.write_text(
        json.dumps(
            json.loads(preset.read_text())
            | {"quantizable_data_type": ["input"], "tensor_quantize_config": {}}
        )
    )
    assert calibrate(tmp_path / "out", model=path, config=str(config)) == 0
    assert check(tmp_path / "out", model=path) == 1
    assert (
        "error: batch 0: only the quantized network gives NaN or infinity"
        in capsys.readouterr().err
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["fault"].startswith("batch 0: only the quantized network gives NaN")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<strong>FAIL</strong> batch 0: only the quantized network" in page


def test_a_test_ends_as_a_run_does(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    capsys.readouterr()
    for gate, code in (("", 0), ("sqnr_db>=10", 0), ("sqnr_db>=500", 1)):
        gates = ["--gate", gate] if gate else []
        where = ["--quant_mode", "test", "--model", model, "-o", str(folder), "-q"]
        assert run_command([*where, *gates, "--color", "always"]) == code
        report = json.loads((folder / "report.json").read_text())
        shown = capsys.readouterr().out.splitlines()
        assert shown[-1] == f"Next: {try_next(report).text}"
        assert run_command([*where, *gates, "--json"]) == code
        verdict = json.loads(capsys.readouterr().out)["verdict"]
        assert verdict[1:] == shown[-len(verdict) + 1 :]
        colors = {"": "1", "sqnr_db>=10": "1;32", "sqnr_db>=500": "1;31"}
        assert f"\x1b[{colors[gate]}m{verdict[0]}\x1b[0m" in shown
        words = {"": "NOT JUDGED", "sqnr_db>=10": "PASS", "sqnr_db>=500": "FAIL"}
        assert verdict[0].startswith(f"{words[gate]}: ")
