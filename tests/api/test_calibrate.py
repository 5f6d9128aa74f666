"""`calibrate` and `load` do from Python what the shell does, with the same files and the same
sentences.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configs import document
from support.runs import calibrate as at_the_shell
from support.runs import check as check_at_the_shell
from support.runs import differing
from torch import Tensor, nn

import quantizer
from quantizer import (
    CLEConfig,
    Config,
    Dtype,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
)
from quantizer.calibration.events import RunStage, Snapshot
from quantizer.config.diagnostics import ConfigError
from quantizer.errors import DataError, GateError, ModelError, ResultError, UsageError
from quantizer.sources.models import load_model

MODEL = """
import torch
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).eval()


def calibration_data():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, 8, 8, generator=generator), torch.arange(8)) for _ in range(3)]
"""
LAYERED = document(
    include_bias_corr=True, tensor={"weights": {"per_channel": True, "bit_width": 4}}
)
HIERARCHICAL: dict[str, Any] = {
    "global_quant_config": {
        "input_tensors": {"dtype": "int8", "qscheme": "per_tensor"},
        "weight": {"dtype": "int4", "qscheme": "per_group", "ch_axis": 1, "group_size": 16},
    },
    "layer_quant_config": {
        "0": {"weight": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}}
    },
    "algo_config": {"name": "gptq"},
}
FORMS = {"layered": LAYERED, "hierarchical": HIERARCHICAL}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def network(source: Path) -> nn.Module:
    return load_model(str(source)).module


@pytest.fixture
def data(source: Path) -> Any:
    offered = load_model(str(source)).calibration_data
    assert offered is not None
    return offered()


def test_equalization_is_the_same_switch_in_both_forms(network: nn.Module, data: Any) -> None:
    weight = QuantizationConfig(weight=QuantizationSpec(Dtype.int8))
    listed = quantizer.calibrate(
        network, Config(weight, pre_quant_opt_config=CLEConfig()), data
    )
    switched = quantizer.calibrate(
        network, document(include_cle=True, quantizable_data_type=["weights"]), data
    )
    assert torch.equal(listed.network(data[0][0]), switched.network(data[0][0]))
    assert not torch.equal(
        listed.network(data[0][0]),
        quantizer.calibrate(network, Config(weight), data).network(data[0][0]),
    )
    with pytest.raises(ConfigError, match="cle_steps: pairs of layers are equalized until"):
        quantizer.calibrate(
            network, Config(weight, pre_quant_opt_config=CLEConfig(cle_steps=3)), data
        )


def test_a_budget_of_memory_changes_no_result(
    network: nn.Module, data: Any, tmp_path: Path
) -> None:
    for name, memory in {"plenty": None, "little": "1KB", "none": 0}.items():
        quantizer.calibrate(network, HIERARCHICAL, data, memory=memory).save(tmp_path / name)
    assert not differing(tmp_path / "plenty", tmp_path / "little")
    assert not differing(tmp_path / "plenty", tmp_path / "none")
    with pytest.raises(UsageError, match="memory='lots' is not a size"):
        quantizer.calibrate(network, HIERARCHICAL, data, memory="lots")
    with pytest.raises(UsageError, match="is not a size"):
        quantizer.calibrate(network, HIERARCHICAL, data, memory="9" * 300 + "GB")


@pytest.mark.parametrize("form", FORMS)
def test_shell_and_python_write_the_same_bytes(
    form: str, source: Path, network: nn.Module, data: Any, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FORMS[form]))
    assert at_the_shell(tmp_path / "shell", model=str(source), config=str(path)) == 0
    found = quantizer.calibrate(network, path, data)
    found.save(tmp_path / "python")
    reports = {"report.json", "report.html"}
    assert differing(tmp_path / "shell", tmp_path / "python") == reports
    loaded = quantizer.load(tmp_path / "shell", network, data)
    loaded.save(tmp_path / "copied")
    assert differing(tmp_path / "shell", tmp_path / "copied") == reports
    assert not differing(tmp_path / "python", tmp_path / "copied")
    values = [
        json.loads((tmp_path / name / "report.json").read_text())
        for name in ("shell", "python")
    ]
    assert [len(report.pop("checksum")) for report in values] == [64, 64]
    assert [len(report.pop("commands")) for report in values] == [1, 0], (
        "a command, and none, has made them"
    )
    assert values[0] == values[1]
    assert check_at_the_shell(tmp_path / "copied", model=str(source)) == 0
    images = data[0][0]
    for again in (loaded, quantizer.load(tmp_path / "shell", network)):
        assert torch.equal(again.network(images), found.network(images))
    assert not torch.equal(found.network(images), network(images))
    decided = [
        {key: tensor.decided() for key, tensor in each.plan.plan.tensors.items()}
        for each in (loaded, found)
    ]
    assert decided[0] == decided[1]


def test_a_config_is_a_path_a_dict_or_dataclasses(
    network: nn.Module, data: Any, tmp_path: Path
) -> None:
    weight = QuantizationSpec(Dtype.int8, qscheme=QSchemeType.per_channel, ch_axis=0)
    config = Config(QuantizationConfig(weight=weight))
    config.save(tmp_path / "config.json")
    expected = quantizer.calibrate(network, config, data[:1]).network(data[0][0])
    for same in (str(tmp_path / "config.json"), tmp_path / "config.json", config.to_dict()):
        assert torch.equal(
            quantizer.calibrate(network, same, data[:1]).network(data[0][0]), expected
        )
    assert "DPU" in json.dumps(quantizer.calibrate(network, None, data).plan.to_json())
    with pytest.raises(UsageError, match="config is an int"):
        quantizer.calibrate(network, 3, data)  # type: ignore[arg-type]


def test_it_tests_with_the_users_metric_and_gates(network: nn.Module, data: Any) -> None:
    found = quantizer.calibrate(network, LAYERED, data)

    def evaluate(model: Callable[[Tensor], Tensor], batches: Iterable[Any]) -> dict[str, float]:
        return {"mean": float(torch.cat([model(images) for images, _ in batches]).mean())}

    tested = found.test(data[1:], evaluate)
    assert {"mean", "mean_float", "sqnr_db"} <= tested.metrics.keys()
    with pytest.raises(
        UsageError, match="whether less or more of 'mean' is better is not known"
    ):
        tested.require(mean_drop=0.1)
    assert tested.metrics["mean"] != tested.metrics["mean_float"]
    assert {"top1", "top1_float"} <= found.test().metrics.keys()
    assert tested.require(sqnr_db=5.0) is tested
    with pytest.raises(GateError, match="not met: sqnr_db>=1000"):
        tested.require(sqnr_db=1000.0)
    with pytest.raises(UsageError, match="no metric 'sqnr'"):
        tested.require(sqnr=1.0)
    losses = [row["local_sqnr_db"] for row in tested.layers]
    assert losses == sorted(losses)


def test_it_exports_what_loads_again(network: nn.Module, data: Any, tmp_path: Path) -> None:
    found = quantizer.calibrate(network, LAYERED, data)
    verified = found.export("safetensors", tmp_path / "net.safetensors")
    assert verified.equal == 1.0
    with pytest.raises(UsageError, match="no export target 'onyx'"):
        found.export("onyx", tmp_path / "net.onyx")


def test_the_model_stays_as_it_was(network: nn.Module, data: Any) -> None:
    network.train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    quantizer.calibrate(network, LAYERED, data).test()
    assert network.training
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items()
    )


def test_weights_that_are_no_numbers_are_refused_wherever_they_are(data: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(1, 4)).eval()
    model[1].weight.data[2] = torch.inf
    with pytest.raises(
        ModelError, match=r"the weights hold NaN or Inf: 1 of 4 values of 1\.weight"
    ):
        quantizer.calibrate(model, None, data)


def test_findings_are_the_sentences_of_the_shell(
    source: Path,
    network: nn.Module,
    data: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = LAYERED | {"layer_quantize_config": [{"layer_name": "nowhere", "layer_type": None}]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(wrong))
    assert at_the_shell(tmp_path / "shell", model=str(source), config=str(path)) == 2
    said = capsys.readouterr().err
    with pytest.raises(ConfigError) as raised:
        quantizer.calibrate(network, path, data)
    assert raised.value.diagnostics
    assert all(finding.message in said for finding in raised.value.diagnostics)


def test_data_that_are_missing_or_can_be_read_but_once_are_refused(
    network: nn.Module, data: Any
) -> None:
    with pytest.raises(DataError, match="data is None"):
        quantizer.calibrate(network, LAYERED, None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="data is an iterator, which can be read only once"):
        quantizer.calibrate(network, LAYERED, iter(data))


class Several(nn.Module):
    """Tokens, a pair and a named mask go in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, pair: tuple[Tensor, Tensor], *, mask: Tensor) -> Tensor:
        embedded = self.embedding(tokens).masked_fill(mask.unsqueeze(-1), 0.0)
        return self.linear(embedded + pair[0] * pair[1])


def test_a_folder_is_loaded_without_data(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Several().eval()
    tokens, mask = torch.randint(5, (6, 7)), torch.rand(6, 7) > 0.5
    call = {
        "tokens": tokens,
        "pair": (torch.randn(6, 7, 4), torch.randn(6, 7, 4)),
        "mask": mask,
    }
    found = quantizer.calibrate(model, LAYERED, [call])
    found.save(tmp_path / "out")
    loaded = quantizer.load(tmp_path / "out", model)
    assert torch.equal(loaded.network(**call), found.network(**call))
    for needs_data in (
        loaded.test,
        lambda: loaded.export("safetensors", tmp_path / "file.safetensors"),
    ):
        with pytest.raises(
            DataError, match="there is no data\nhelp: give it here or to `load`"
        ):
            needs_data()
    assert not (tmp_path / "file.safetensors").exists()
    assert loaded.test([call]).metrics == found.test().metrics
    loaded.export("safetensors", tmp_path / "file.safetensors", [call])
    loaded.save(tmp_path / "copied")
    assert not differing(tmp_path / "out", tmp_path / "copied")


def test_a_call_with_more_than_tensors_needs_data_to_be_loaded(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, factor: int) -> Tensor:
            return self.linear(x) * factor

    model, call = Scaled().eval(), {"x": torch.ones(2, 4), "factor": 2}
    quantizer.calibrate(model, LAYERED, [call]).save(tmp_path / "out")
    with pytest.raises(
        ResultError, match="do not say how the model is called\nhelp: give data"
    ):
        quantizer.load(tmp_path / "out", model)
    assert quantizer.load(tmp_path / "out", model, [call]).test().metrics["sqnr_db"] > 10


def test_another_model_is_refused(network: nn.Module, data: Any, tmp_path: Path) -> None:
    quantizer.calibrate(network, LAYERED, data).save(tmp_path / "out")
    network.get_parameter("4.bias").data.add_(1)
    with pytest.raises(
        ResultError, match=r"the weights are not those that were calibrated: 4\.bias"
    ):
        quantizer.load(tmp_path / "out", network, data)


class Recorder:
    """Follows a run and stops it where it is told to."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        self.stages: list[str] = []
        self.texts: list[tuple[int, str]] = []
        self.snapshots: list[Snapshot] = []
        self.errors: list[BaseException | None] = []
        self._stop_at = stop_at

    def started(self, stage: RunStage) -> None:
        self.stages.append(stage.name)

    def advanced(self, stage: RunStage) -> None:
        if stage.snapshot is not None:
            self.snapshots.append(stage.snapshot())
        if (stage.name, stage.done) == self._stop_at:
            raise KeyboardInterrupt

    def message(self, level: int, text: str, finding: Any = None) -> None:
        self.texts.append((level, text))

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        self.errors.append(error)


def test_events_follow_every_stage(network: nn.Module, data: Any) -> None:
    recorder = Recorder()
    quantizer.calibrate(network, LAYERED, data, events=recorder, fast_finetune="adaround")
    assert recorder.stages == ["calib", "fast finetune", "bias correction"]
    assert recorder.errors == [None] * 3
    assert [snapshot.state["batches"] for snapshot in recorder.snapshots[:3]] == [1, 2, 3]
    assert any(
        "biases of 2 layers corrected" in text
        for level, text in recorder.texts
        if level == logging.INFO
    )


@pytest.mark.parametrize("where", [("calib", 2), ("fast finetune", 4)])
def test_a_run_that_was_stopped_goes_on(
    where: tuple[str, int], network: nn.Module, data: Any, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"folder": tmp_path / "work", "fast_finetune": "adaround"}
    (tmp_path / "work").mkdir()
    with pytest.raises(KeyboardInterrupt):
        quantizer.calibrate(network, LAYERED, data, events=Recorder(where), **more)
    assert list((tmp_path / "work").glob("checkpoint.*"))
    resumed = quantizer.calibrate(network, LAYERED, data, resume=True, **more)
    assert not list((tmp_path / "work").glob("checkpoint.*"))
    resumed.save(tmp_path / "resumed")
    quantizer.calibrate(network, LAYERED, data, fast_finetune="adaround").save(
        tmp_path / "whole"
    )
    assert not differing(tmp_path / "resumed", tmp_path / "whole")


def test_plans_results_and_comparisons_show_as_tables(network: nn.Module, data: Any) -> None:
    found = quantizer.calibrate(network, LAYERED, data)
    name = "Sequential::Sequential/Conv2d[0]/conv2d"
    for shown in (found.plan, found.test(), found):
        page = shown._repr_html_()  # type: ignore[attr-defined]
        assert page.count("<table>") == page.count("</table>") > 0
        assert name in page


def test_results_print_as_a_few_lines(network: nn.Module, data: Any, tmp_path: Path) -> None:
    found = quantizer.calibrate(network, LAYERED, data)
    title, formats, sizes = repr(found).splitlines()
    assert title == "Result(7 tensors of Sequential quantized)"
    assert formats == "  2 weights int4, 2 bias int8, 2 activation int8, 1 input int8"
    assert sizes.startswith("  0.0% of the parameters stay float; weights ")
    assert repr(found.plan).splitlines() == ["Plan(7 tensors of Sequential)", formats, sizes]
    tested = found.test()
    metrics, judged_on, worst = repr(tested).splitlines()
    assert metrics.startswith(f"Comparison(sqnr_db={tested.metrics['sqnr_db']:.6g}, ")
    lowest = tested.layers[0]
    assert worst.startswith(f"  lowest local SQNR: {lowest['local_sqnr_db']:.1f} dB ")
    assert worst.count(" dB ") == 3
    assert judged_on == "  measured on the calibration data"
    verified = found.export("safetensors", tmp_path / "network.safetensors")
    title, remarks = repr(verified).splitlines()
    assert title == f"Verification({verified.figures()})"
    assert remarks == "  1 remark: see .remarks", "no engine runs int4 of such a network"
    assert repr(found.plan.plan) == "Plan(7 tensors of Sequential)"


def test_text_in_tables_is_escaped() -> None:
    from quantizer.api.display import html_table
    from quantizer.report.view import Listing

    page = html_table(Listing(("a",), [("<script>",)]))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_notebook_shows_progress_as_bars(
    network: nn.Module, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what IPython documents of `display`: `display_id=True` returns a handle with
    `update`.
    """
    pages: list[str] = []
    handle = SimpleNamespace(update=pages.append)
    shell = type("ZMQInteractiveShell", (), {})()

    def display(page: str, *, display_id: bool) -> Any:
        assert display_id
        pages.append(page)
        return handle

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(
        sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display)
    )
    monkeypatch.setattr("quantizer.api.display._SECONDS_BETWEEN_DRAWINGS", 0)
    found = quantizer.calibrate(network, LAYERED, data)
    assert any(f'<progress value="1" max="{len(data)}">' in page for page in pages)
    assert pages[-1] == ""
    pages.clear()
    found.test()
    assert "<progress" in "".join(pages)
    assert pages[-1] == ""
