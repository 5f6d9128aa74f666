"""One file form turned into the other: the plan is the same where both can say it, and what
cannot be said is told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import SETTINGS, document, layer
from support.toys import traced
from torch import Tensor, nn

from quantizer.cli.main import run_command
from quantizer.commands.start.findings import WEIGHTED, ConvertedDocument
from quantizer.commands.start.start import WRITERS, convert_config
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.document.document import Document
from quantizer.config.load import check_document, load_config
from quantizer.config.model import ResolvedConfig
from quantizer.config.resources import presets
from quantizer.graph.ops import OPS
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

ROOT = Path(__file__).parents[2]
INT8 = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
INPUT = {"dtype": "int8", "qscheme": "per_tensor", "symmetric": False}
BIAS = {"dtype": "int32", "qscheme": "per_tensor"}


def config(value: dict[str, Any]) -> ResolvedConfig:
    return check_document(Document.of(value, "Config")).require()


def plans_alike(value: dict[str, Any], other: dict[str, Any]) -> None:
    """The plans, and the networks that passes make, are the same."""
    ours, theirs = plan(value, "residual"), plan(other, "residual")
    assert {key: tensor.spec for key, tensor in theirs.tensors.items()} == {
        key: tensor.spec for key, tensor in ours.tensors.items()
    }
    assert ours.tensors
    assert ours.graph.changes == theirs.graph.changes


def plan(value: dict[str, Any], toy: str) -> Plan:
    found = config(value)
    return resolve_plan(found, run_passes(traced(toy), found.settings), traced(toy))


def to_layered(found: ResolvedConfig) -> tuple[dict[str, Any], tuple[Diagnostic, ...]]:
    other = convert_config(found, "layered")
    return other.document, other.findings


def to_hierarchical(found: ResolvedConfig) -> tuple[dict[str, Any], tuple[Diagnostic, ...]]:
    other = convert_config(found, "hierarchical")
    return other.document, other.findings


def codes(findings: Any) -> list[str]:
    return [found.code for found in findings if found.severity == "error"]


SAYABLE: dict[str, dict[str, Any]] = {
    "weights": {"global_quant_config": {"weight": INT8}},
    "every role": {
        "global_quant_config": {
            "weight": INT8,
            "input_tensors": INPUT,
            "output_tensors": INPUT,
            "bias": BIAS,
        }
    },
    "a type": {
        "global_quant_config": {"weight": INT8, "target_device": "GPU"},
        "layer_type_quant_config": {
            "Linear": {"weight": {"dtype": "int4"}, "input_tensors": INPUT}
        },
    },
    "a name": {
        "global_quant_config": {"weight": INT8},
        "layer_quant_config": {
            "conv1": {"weight": {"dtype": "int4", "symmetric": False}, "output_tensors": INPUT}
        },
    },
    "few bits": {
        "global_quant_config": {"weight": {"dtype": "int4"}, "input_tensors": INPUT},
        "layer_quant_config": {
            "conv1": {"weight": {"dtype": "int3", "symmetric_scale": "quant_max"}}
        },
    },
    "excluded": {
        "global_quant_config": {"weight": INT8, "bias": BIAS},
        "exclude": ["fc", "layer1.*"],
    },
    "methods": {
        "global_quant_config": {
            "weight": {
                "dtype": "int4",
                "observer_cls": "PerTensorMSEObserver",
                "scale_type": "pof2",
            },
            "bias": {
                "dtype": "int8",
                "observer_cls": "PerTensorPercentileObserver",
                "percentage": 99.9,
            },
            "output_tensors": {"dtype": "bfloat16"},
        }
    },
    "only a layer": {
        "global_quant_config": {},
        "layer_quant_config": {"fc": {"weight": {"dtype": "uint4"}}},
    },
    "a tensor switched off": {
        "global_quant_config": {"weight": INT8, "bias": BIAS},
        "layer_quant_config": {"conv1": {"bias": {"dtype": "float32"}}},
    },
    "a tensor of a type switched off": {
        "global_quant_config": {"weight": INT8, "bias": BIAS},
        "layer_type_quant_config": {"Linear": {"weight": {"dtype": "float32"}}},
    },
    "bfloat16": {"global_quant_config": {"weight": {"dtype": "bfloat16"}}},
    "equalized": {
        "global_quant_config": {"weight": INT8},
        "pre_quant_opt_config": [{"name": "cle"}],
    },
    "integers of a type among bfloat16": {
        "global_quant_config": {"weight": {"dtype": "bfloat16"}},
        "layer_type_quant_config": {"Linear": {"weight": {"dtype": "int8"}}},
    },
    "bfloat16 of a name among integers": {
        "global_quant_config": {"weight": INT8, "bias": {"dtype": "float16"}},
        "layer_quant_config": {
            "fc": {"weight": {"dtype": "bfloat16"}, "bias": {"dtype": "int8"}}
        },
    },
}


@pytest.mark.parametrize("name", SAYABLE)
def test_the_layered_file_gives_the_same_plan(name: str) -> None:
    written, findings = to_layered(config(SAYABLE[name]))
    assert codes(findings) == []
    plans_alike(SAYABLE[name], written)


@pytest.mark.parametrize("name", SAYABLE)
def test_the_layered_file_is_valid_without_warnings(name: str) -> None:
    written, _ = to_layered(config(SAYABLE[name]))
    assert check_document(Document.of(written, "Config")).diagnostics == ()


def test_the_entries_are_those_of_layers_with_weights() -> None:
    weighted = {name for name, op in OPS.items() if op.weight}
    assert set(WEIGHTED) == weighted - {"channel_scale", "parameter"}


BACK: dict[str, dict[str, Any]] = {
    "types": document(
        layer(type="torch.nn.Linear", roles=["weights", "activation"], bit_width=4),
        layer(
            type="torch.nn.Conv2d", roles=["weights"], tensor={"weights": {"per_channel": True}}
        ),
        quantizable_data_type=[],
    ),
    "names": document(
        layer("fc", roles=["weights", "input"], symmetry=False, signed=False),
        layer("conv1", roles=["bias"], method="percentile", percentage=99.5),
        quantizable_data_type=[],
    ),
    "weights": document(
        layer("fc", roles=[]),
        quantizable_data_type=["weights"],
        overall={"round_mode": "std_round"},
    ),
    "a role that a layer leaves out": document(
        layer("fc", roles=["bias"]), quantizable_data_type=["weights"]
    ),
    "a type in float": document(
        layer(type="torch.nn.Linear", roles=[]), quantizable_data_type=["weights", "bias"]
    ),
    "the whole network": document(),
    "equalized": document(include_cle=True),
    "activations of the network, others of types": document(
        layer("l*", roles=["activation"]),
        layer(type="torch.nn.Conv2d", roles=["weights", "activation"], bit_width=4),
        layer(type="Linear", roles=[]),
    ),
    "excluded layers, one with an entry": document(
        layer("fc", roles=["weights"], bit_width=4), exclude=["fc", "layer1.*"]
    ),
    "the whole network but a layer": document(
        layer("fc", roles=["weights"], bit_width=4), layer("conv1", roles=[])
    ),
    "inputs, and weights of a type": document(
        layer(type="Linear", roles=["weights", "activation"], bit_width=4),
        quantizable_data_type=["input", "weights", "activation"],
        tensor={"activation": {"bit_width": 4}},
    ),
    "a percentage of the top": document(
        layer("fc", roles=["weights"], method="percentile"),
        quantizable_data_type=["weights"],
        overall={"method": "percentile", "percentage": 99},
    ),
    "a pattern in float, and a name that is stronger": document(
        layer("*c*", roles=[]),
        layer("fc", roles=["weights"]),
        quantizable_data_type=["weights"],
    ),
    "two entries for a layer": document(
        layer("fc", roles=["weights"], bit_width=4),
        layer("conv1", roles=["weights"]),
        layer("fc", roles=["bias"]),
        quantizable_data_type=[],
    ),
}


@pytest.mark.parametrize("name", BACK)
def test_the_hierarchical_file_gives_the_same_plan(name: str) -> None:
    written, findings = to_hierarchical(config(BACK[name]))
    assert codes(findings) == []
    plans_alike(BACK[name], written)


def test_the_whole_network_is_planned_alike_where_there_is_no_residual_stream() -> None:
    written, [finding] = to_hierarchical(config(document()))
    assert (finding.code, finding.severity) == ("QZ125", "warning")
    assert finding.message.startswith("sums that only normalizations read")
    assert plan(written, "preactivated").diagnostics == ()
    # With a concatenation and a norm
    ours, theirs = plan(document(), "preactivated"), plan(written, "preactivated")
    assert {key: tensor.spec for key, tensor in theirs.tensors.items()} == {
        key: tensor.spec for key, tensor in ours.tensors.items()
    }


@pytest.mark.parametrize("roles", [["weights"], ["weights", "activation"]])
def test_an_entry_without_outputs_is_told_where_only_a_concatenation_reads(
    roles: list[str],
) -> None:
    _, findings = to_hierarchical(config(document(layer("conv1", roles=roles))))
    told = [finding for finding in findings if "only a concatenation reads" in finding.message]
    assert len(told) == ("activation" not in roles)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(x + self.fc(x)))
        return y


def test_a_residual_stream_is_what_the_warning_is_about() -> None:
    written, _ = to_hierarchical(config(document()))
    graph = trace(Residual().eval(), (torch.randn(2, 4),))
    ours, theirs = (
        resolve_plan(config(each), graph, graph).tensors for each in (document(), written)
    )
    assert [
        name.rpartition("/")[2] for name, _ in theirs.keys() - ours.keys() if "[" not in name
    ] == ["add"]
    assert not ours.keys() - theirs.keys()


def test_a_residual_stream_in_bfloat16_is_planned_alike() -> None:
    """It is cast as all else is: large values cost small ones nothing there."""
    cast = document(tensor={}, overall={"datatype": "bfloat16"})
    written, findings = to_hierarchical(config(cast))
    graph = trace(Residual().eval(), (torch.randn(2, 4),))
    ours, theirs = (
        resolve_plan(config(each), graph, graph).tensors for each in (cast, written)
    )
    assert (findings, ours.keys() ^ theirs.keys()) == ((), set())
    assert any(name.endswith("/add") for name, _ in ours)


def test_what_is_written_passes_the_checks_of_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The safety net: what a writer gets wrong is refused, at the place of the source that it
    comes from.
    """
    source = document(layer("fc", roles=["weights"]), quantizable_data_type=["weights"])
    place = config(source).rules[-1].selector.place

    def wrong(found: ResolvedConfig) -> ConvertedDocument:
        levels = {
            "layer_quant_config": {
                "fc": {"weight": {"dtype": "int8", "group_size": 0, "qscheme": "per_group"}}
            }
        }
        return ConvertedDocument(
            {"global_quant_config": {}, **levels}, (), {"/layer_quant_config/fc": place}
        )

    monkeypatch.setitem(WRITERS, "hierarchical", wrong)  # type: ignore[misc]
    _, [first, *_] = to_hierarchical(config(source))
    assert (first.code, first.place) == ("QZ124", place)
    assert first.message.startswith("the hierarchical form would refuse it, QZ31")


@pytest.mark.parametrize("name", SAYABLE)
def test_the_layered_file_converts_back(name: str) -> None:
    written, _ = to_layered(config(SAYABLE[name]))
    again, findings = to_hierarchical(config(written))
    assert codes(findings) == []
    plans_alike(SAYABLE[name], again)


def test_optional_entries_that_differ_are_no_global_block() -> None:
    written, _ = to_layered(config(SAYABLE["weights"]))
    written["layer_quantize_config"][0]["overall_quantize_config"]["bit_width"] = 4
    _, findings = to_hierarchical(config(written))
    assert set(codes(findings)) == {"QZ124"}


TO_LAYERED: dict[str, tuple[dict[str, Any], str]] = {
    "groups": (
        {"weight": {"dtype": "int4", "qscheme": "per_group", "ch_axis": 1, "group_size": 32}},
        "per_group",
    ),
    "dynamic": ({"input_tensors": {"dtype": "int8", "is_dynamic": True}}, "is_dynamic"),
    "fp8": ({"weight": {"dtype": "fp8_e4m3"}}, "fp8_e4m3"),
    "axis": (
        {"weight": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1}},
        "ch_axis 1",
    ),
    "channels of an input": (
        {"input_tensors": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1}},
        "qscheme per_channel",
    ),
    "floor": ({"weight": {"dtype": "int8", "round_method": "floor"}}, "floor"),
    "device": ({"weight": INT8, "target_device": "IPU"}, "IPU"),
}


@pytest.mark.parametrize("name", TO_LAYERED)
def test_what_the_layered_form_cannot_say(name: str) -> None:
    """One sentence for each reason, which names the key, wherever it stands."""
    level, message = TO_LAYERED[name]
    types = {"Linear": {key: value for key, value in level.items() if key != "target_device"}}
    _, findings = to_layered(
        config({"global_quant_config": level, "layer_type_quant_config": types})
    )
    errors = [found for found in findings if found.severity == "error"]
    assert [found for found in errors if message in found.message] == [errors[0]]
    assert str(errors[0].place).startswith("Config.global_quant_config.")
    assert set(codes(findings)) == {"QZ124"}


def test_observers_of_all_batches_become_a_statistic_over_batches_with_a_warning() -> None:
    inputs = {"dtype": "int8", "observer_cls": "PerTensorPercentileObserver"}
    there, findings = to_layered(config({"global_quant_config": {"input_tensors": inputs}}))
    assert {found.code for found in findings} == {"QZ125"}
    assert {found.place and found.place.pointer for found in findings} == {
        "/global_quant_config/input_tensors/observer_cls"
    }
    back, findings = to_hierarchical(config(there))
    assert {found.code for found in findings} == {"QZ125"}
    assert (
        back["global_quant_config"]["input_tensors"]["observer_cls"]
        == "PerTensorPercentileObserver"
    )


def test_a_layer_that_inherits_from_its_type_depends_on_the_model() -> None:
    blocks = {
        "global_quant_config": {"weight": INT8},
        "layer_type_quant_config": {
            "Linear": {"weight": {"dtype": "int4", "round_method": "half_up"}}
        },
        "layer_quant_config": {"fc": {"weight": {"dtype": "int8"}}},
    }
    _, findings = to_layered(config(blocks))
    assert codes(findings) == ["QZ124"]
    blocks["layer_quant_config"]["fc"]["weight"]["round_method"] = "half_even"
    assert codes(to_layered(config(blocks))[1]) == []


def test_a_layer_that_inherits_from_a_pattern_depends_on_the_model() -> None:
    names = {
        "l*": {"weight": {"dtype": "int4", "round_method": "half_up"}},
        "layer1.0": {"weight": {"dtype": "int8"}},
    }
    [finding] = to_layered(config({"global_quant_config": {}, "layer_quant_config": names}))[1]
    text = 'layer_quant_config["layer1.0"] may inherit from layer_quant_config["l*"] (weight)'
    assert finding.code == "QZ124" and finding.message.startswith(text)


def test_a_module_that_inherits_inputs_may_have_layers_without_weights() -> None:
    blocks = {"global_quant_config": {"weight": INT8, "input_tensors": INPUT}}
    for name, differs in (("layer1", True), ("Residual::Residual/Linear[fc]/linear", False)):
        levels = blocks | {"layer_quant_config": {name: {"weight": {"dtype": "int4"}}}}
        findings = to_layered(config(levels))[1]
        assert (
            any(
                "is about layers with weights of their own" in found.message
                for found in findings
            )
            == differs
        )


def test_an_excluded_pattern_is_stronger_than_a_name_in_both_forms() -> None:
    blocks = {
        "global_quant_config": {"weight": INT8},
        "layer_quant_config": {"fc": {"bias": BIAS}},
        "exclude": ["f*"],
    }
    layered, findings = to_layered(config(blocks))
    assert not codes(findings)
    assert layered["exclude"] == ["f*"]
    plans_alike(blocks, layered)


TO_HIERARCHICAL: dict[str, tuple[dict[str, Any], str]] = {
    "activations of the network, others of a type": (
        document(layer(type="ReLU", roles=[])),
        "layer_type",
    ),
    "a class of the user": (document(layer(type="models.Linear", roles=[])), "layer_type"),
    "a switch": (
        document(quantizable_data_type=["weights"], keep_add_layer_accuracy=True),
        "keep_add_layer_accuracy",
    ),
    "a statistic": (
        document(quantizable_data_type=["weights"], overall={"calib_statistic_method": "mean"}),
        "mean",
    ),
    "a method": (
        document(quantizable_data_type=["weights"], overall={"method": "entropy"}),
        "method entropy",
    ),
    "bits": (
        document(quantizable_data_type=["weights"], overall={"bit_width": 7}),
        "bit_width 7",
    ),
    "a narrow range": (
        document(quantizable_data_type=["weights"], overall={"narrow_range": True}),
        "narrow_range",
    ),
    "percentile per channel": (
        document(
            quantizable_data_type=["weights"],
            tensor={"weights": {"per_channel": True, "method": "percentile"}},
        ),
        "no observer for it with per_channel",
    ),
    "a layer that may be absent": (
        document(layer("fc", required=False), quantizable_data_type=["weights"]),
        "required false",
    ),
    "what an entry leaves to another": (
        document(
            layer("re:f.*", roles=["weights"], method="percentile", percentage=99),
            layer("fc", roles=["weights"], method="percentile"),
            quantizable_data_type=[],
        ),
        "may inherit from layer_quantize_config[0] (weights)",
    ),
}


@pytest.mark.parametrize("name", TO_HIERARCHICAL)
def test_what_the_hierarchical_form_cannot_say(name: str) -> None:
    content, message = TO_HIERARCHICAL[name]
    _, findings = to_hierarchical(config(content))
    errors = [found for found in findings if found.severity == "error"]
    assert any(message in found.message for found in errors)
    assert all(found.code == "QZ124" and found.place for found in errors)


def test_the_documented_example_has_one_method_that_the_other_form_lacks() -> None:
    path = ROOT / "tests" / "cases" / "configs" / "valid" / "documented_example.json"
    _, findings = to_hierarchical(load_config(path).require())
    assert all(found.place and found.place.line for found in findings)
    [error] = [found for found in findings if found.severity == "error"]
    assert str(error.place) == f"{path}:56:21"
    assert error.message.startswith("method entropy: the hierarchical form has no observer")
    assert error.help.startswith("keep the layered form, or write maxmin, percentile")
    value = json.loads(path.read_text("utf-8"))
    # With maxmin, both forms find the range of several batches alike
    value["tensor_quantize_config"]["activation"]["method"] = "maxmin"
    entry = value["layer_quantize_config"][0]
    entry["tensor_quantize_config"]["activation"] = {"round_mode": "half_up"}
    # The toy has no layer of the second entry
    del value["layer_quantize_config"][1]
    written, findings = to_hierarchical(config(value))
    assert codes(findings) == []
    plans_alike(value, written)


def test_the_dpu_has_the_layered_form_only() -> None:
    _, findings = to_hierarchical(load_config(ROOT / "configs" / "dpu.json").require())
    assert "target_device DPU: the hierarchical form has CPU, GPU and IPU" in {
        found.message for found in findings
    }


def test_the_command_writes_the_other_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "a.json", tmp_path / "b.json"
    source.write_text(json.dumps(SAYABLE["a type"]))
    assert run_command(["convert", str(source), "-o", str(target)]) == 0
    assert load_config(target).require().form == "layered"
    assert run_command(["convert", str(source)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(target.read_text())


def test_the_command_writes_nothing_that_is_not_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "b.json"
    assert (
        run_command(["convert", str(ROOT / "configs" / "static_fp8.json"), "-o", str(target)])
        == 1
    )
    assert not target.exists()
    refusal = (
        "static_fp8.json:6:16: error QZ124: dtype fp8_e4m3: the layered form has no "
        "floating-point formats with a"
    )
    assert refusal in capsys.readouterr().err


def test_the_command_refuses_what_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.json"
    source.write_text(json.dumps({**SETTINGS}))
    assert run_command(["convert", str(source)]) == 2
    assert "QZ105" in capsys.readouterr().err
    source.write_text(json.dumps(SAYABLE["weights"]))
    assert run_command(["convert", str(source), "--to", "hierarchical"]) == 2
    assert "already" in capsys.readouterr().err


@pytest.mark.parametrize("name", presets())
def test_a_preset_that_converts_is_valid_in_the_other_form(name: str) -> None:
    found = load_config(ROOT / "configs" / f"{name}.json").require()
    other = convert_config(found, "hierarchical" if found.form == "layered" else "layered")
    if all(finding.severity != "error" for finding in other.findings):
        result = check_document(Document.of(other.document, name))
        assert codes(result.diagnostics) == []
