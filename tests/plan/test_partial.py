"""Parts that stay float: outside QuantStub and DeQuantStub, and layers whose list of tensors is
empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import config, document, layer
from support.toys import built, traced
from torch import Tensor, nn

from quantizer.config.model import Settings
from quantizer.graph.emit import emit
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.plan.floating import OUTSIDE
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

P, R = "Partial::Partial/", "Residual::Residual/"
LEFT = "the config leaves it float"


def planned(folder: Path, toy: str, *layers: dict[str, Any], **changes: Any) -> Plan:
    found = config(folder, document(*layers, **changes))
    return resolve_plan(found, run_passes(traced(toy), Settings()), traced(toy))


def test_only_what_lies_between_the_stubs_is_quantized(tmp_path: Path) -> None:
    plan = planned(tmp_path, "partial")
    inside = {
        P + "QuantStub[quant]/quant_stub",
        P + "Conv2d[inside]/conv2d",
        P + "shift",
        P + "relu.1",
    }
    assert {name for name, _ in plan.tensors} == inside
    assert set(plan.of_layer(P + "QuantStub[quant]/quant_stub")) == {"input"}
    outside = {name for name, why in plan.floats.items() if why == OUTSIDE}
    assert {
        P + "Conv2d[before]/conv2d",
        P + "Linear[after]/linear",
        P + "relu.2",
        "Partial::input_0",
    } <= outside
    assert not outside & inside


def test_what_goes_into_a_dequant_stub_is_quantized(tmp_path: Path) -> None:
    module = nn.Sequential(
        torch.ao.quantization.QuantStub(), nn.LayerNorm(4), torch.ao.quantization.DeQuantStub()
    )
    graph = trace(module.eval(), (torch.ones(2, 4),))
    plan = resolve_plan(config(tmp_path, document()), graph, graph)
    assert ("Sequential::Sequential/LayerNorm[1]/layer_norm", "activation") in plan.tensors


def test_an_entry_for_a_layer_outside_says_why_it_changes_nothing(tmp_path: Path) -> None:
    (found,) = planned(tmp_path, "partial", layer("after")).diagnostics
    assert found.code == "QZ405"
    assert OUTSIDE in found.message


def test_the_code_shows_the_stubs() -> None:
    source = emit(traced("partial"))
    assert f"quantizer.nn.QuantStub() #{P}QuantStub[quant]/quant_stub\n" in source
    assert f"quantizer.nn.DeQuantStub() #{P}DeQuantStub[dequant]/dequant_stub\n" in source


def test_tracing_leaves_the_model_without_hooks() -> None:
    traced("partial")
    assert not any(child._forward_hooks for child in built("partial").module.modules())


class Torchs(nn.Module):
    """torch's own stubs, used twice, an in-place activation behind one."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = (
            torch.ao.quantization.QuantStub(),
            torch.ao.quantization.DeQuantStub(),
        )
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.fc(self.quant(x)) + self.quant(y).relu_()
        return self.dequant(z)


def test_torchs_stubs_with_in_place_operators(tmp_path: Path) -> None:
    graph = trace(Torchs().eval(), (torch.ones(2, 4), torch.ones(2, 4)))
    assert [node.op for node in graph.nodes].count("quant_stub") == 2
    plan = resolve_plan(config(tmp_path, document()), graph, graph)
    assert [role for _, role in plan.tensors].count("input") == 2


RELU, CONV = R + "relu", R + "Conv2d[conv1]/conv2d"


@pytest.mark.parametrize(
    "entry",
    [
        layer("conv1", roles=[]),
        layer(CONV, roles=[]),
        layer("con?1", roles=[]),
        layer(type="torch.nn.Conv2d", roles=[]),
    ],
    ids=["path", "name", "glob", "type"],
)
def test_an_empty_list_leaves_a_convolution_and_its_relu_float(
    entry: dict[str, Any], tmp_path: Path
) -> None:
    plan = planned(tmp_path, "residual", entry)
    assert not plan.of_layer(CONV)
    assert not plan.of_layer(RELU)
    assert plan.floats[CONV] == plan.floats[RELU] == LEFT
    assert plan.of_layer(R + "Linear[fc]/linear")


def test_an_empty_list_for_a_type_leaves_the_others_quantized(tmp_path: Path) -> None:
    plan = planned(tmp_path, "residual", layer(type="torch.nn.Conv2d", roles=[]))
    assert not [name for name, _ in plan.tensors if name.endswith("/conv2d")]
    assert {name.rpartition("/")[2] for name, role in plan.tensors if role == "activation"} == {
        "adaptive_avg_pool2d",
        "linear",
        "relu.1",
    }
