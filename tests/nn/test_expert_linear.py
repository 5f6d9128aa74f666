"""Each expert is quantized as a linear layer by itself: scales of its own, whatever they are
of.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended
from support.generated import imported
from support.moe import EXPERTS, calls, experts, matrices, mixture
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")

import quantizer
from quantizer import ModelQuantizer
from quantizer.config.diagnostics import ConfigError
from quantizer.graph.ops import OPS
from quantizer.nn import ExpertLinear

pytestmark = pytest.mark.slow

INT4 = {"dtype": "int4", "qscheme": "per_group", "ch_axis": 1, "group_size": 16}
INT8 = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
WEIGHTS: dict[str, dict[str, Any]] = {
    "groups": INT4,
    "channels": INT8,
    "tensors": {"dtype": "int8", "qscheme": "per_tensor"},
    "tensors, asymmetric": {"dtype": "uint4", "qscheme": "per_tensor", "symmetric": False},
    "tensors, least squares": {
        "dtype": "int4",
        "qscheme": "per_tensor",
        "observer_cls": "PerTensorMSEObserver",
    },
    "fp8": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
    "blocks": {"dtype": "mx", "mx_element_dtype": "fp4", "qscheme": "per_group", "ch_axis": 1},
}


def config(weight: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "global_quant_config": {"weight": weight, **others},
        "exclude": ["kind:head", "kind:embedding"],
    }


def calibrated(family: str, settings: dict[str, Any], **changes: Any) -> Any:
    return quantizer.calibrate(mixture(family, **changes), settings, calls())


def expert_layers(network: Any) -> dict[str, ExpertLinear]:
    """By the path of their tensor."""
    layers = {
        f"{node.scope}.{node.name.rpartition('/')[2]}": node.name
        for node in network.graph.nodes
        if node.row.experts
    }
    return {path: network.layers[name] for path, name in layers.items()}


PAIRS = [
    ("groups", "channels"),
    ("tensors", "tensors, asymmetric"),
    ("fp8", "tensors, least squares"),
    ("blocks", "groups"),
]
"""Kinds of weights for the first layer and the second."""


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("Mixtral", PAIRS[0]),
        ("GptOss", PAIRS[1]),
        *extended(("Mixtral", PAIRS[1]), ("GptOss", PAIRS[0])),
        *extended(*product(("Mixtral", "GptOss"), PAIRS[2:])),
    ],
    ids=str,
)
def test_an_expert_is_quantized_as_a_linear_layer(family: str, kinds: tuple[str, str]) -> None:
    """In a traced network and in place alike, bit for bit."""
    model, (first, second) = mixture(family), (WEIGHTS[kind] for kind in kinds)
    settings = config(first) | {
        "layer_quant_config": {"*layers.1.mlp.experts*": {"weight": second}}
    }
    network = calibrated(family, settings).network
    in_place = ModelQuantizer(settings).quantize_model(mixture(family))
    cases = product(enumerate((first, second)), ("gate_up_proj", "down_proj"))
    for (number, weight), name in cases:
        alone = []
        for matrix in matrices(experts(model, number), name):
            layer = nn.Linear(*matrix.T.shape, bias=False)
            layer.weight = nn.Parameter(matrix.contiguous())
            whole = nn.Sequential(layer)
            ModelQuantizer({"global_quant_config": {"weight": weight}}).quantize_model(whole)
            alone.append(layer.weight.detach())
        found = expert_layers(network)[f"model.layers.{number}.mlp.experts.{name}"].weight
        assert torch.equal(found, torch.cat(alone))
        assert torch.equal(matrices(experts(in_place, number), name), torch.stack(alone))
        assert not torch.equal(found, matrices(experts(model, number), name).flatten(0, 1))


def test_codes_are_those_of_the_formula() -> None:
    """In words of torch alone: the largest magnitude of each matrix is code 127."""
    network = calibrated("Mixtral", config(WEIGHTS["tensors"])).network
    stack = matrices(experts(mixture("Mixtral")), "down_proj")
    scale = (stack.abs().amax((1, 2), keepdim=True).double() / 127).float()
    wanted = (stack / scale).round().clamp(-128, 127) * scale
    layer = expert_layers(network)["model.layers.1.mlp.experts.down_proj"]
    assert torch.equal(layer.weight.view_as(stack), wanted)
    assert torch.equal(layer.quantizers["weights"].scale, scale.flatten())


ONE_LAYER = {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mixtral", {}),
        ("GptOss", {}),
        # The first layer of DeepSeek has no experts
        *extended(("Qwen3Moe", ONE_LAYER), ("DeepseekV3", {})),
    ],
)
def test_test_mode_counts_them_and_the_generated_code_equals_it(
    family: str, changes: dict[str, int], tmp_path: Path
) -> None:
    result = calibrated(family, config(INT4), **changes)
    metrics = result.test().metrics
    assert 10 < metrics["sqnr_db"] < 30
    result.save(tmp_path)
    ids = calls(1)[0]
    with torch.no_grad():
        assert torch.equal(
            imported(tmp_path / f"{family}ForCausalLM.py")(ids)["logits"],
            result.network(ids).logits,
        )
    again = quantizer.load(tmp_path, mixture(family, **changes))
    assert torch.equal(again.network(ids).logits, result.network(ids).logits)


@pytest.mark.parametrize(
    "inputs",
    [{"qscheme": "per_token", "is_dynamic": True}, *extended({"qscheme": "per_tensor"})],
)
def test_what_experts_read_is_quantized(inputs: dict[str, Any]) -> None:
    result = calibrated("Mixtral", config(INT8, input_tensors={"dtype": "int8", **inputs}))
    assert [[*layer.quantizers] for layer in expert_layers(result.network).values()] == [
        ["input", "weights"]
    ] * 4
    assert result.test().metrics["sqnr_db"] > 30


@pytest.mark.parametrize(("scheme", "axis"), [("per_channel", 1), ("per_group", 0)])
def test_experts_share_no_scale(scheme: str, axis: int) -> None:
    weight = {"dtype": "int8", "qscheme": scheme, "ch_axis": axis, "group_size": 16}
    with pytest.raises(
        ConfigError, match=f"{scheme} with ch_axis {axis} would have experts share scales"
    ) as caught:
        calibrated(
            "Mixtral",
            config(weight if scheme == "per_group" else {**weight, "group_size": None}),
        )
    assert f"write {1 - axis}, or exclude these layers" in str(caught.value)


def test_a_layer_entry_reaches_one_tensor() -> None:
    entry = {"*experts.down_proj": {"weight": INT8}}
    network = calibrated("Mixtral", config(INT4) | {"layer_quant_config": entry}).network
    widths = {
        path: layer.quantizers["weights"].spec.bit_width
        for path, layer in expert_layers(network).items()
    }
    assert {path.rpartition(".")[2]: width for path, width in widths.items()} == {
        "gate_up_proj": 4,
        "down_proj": 8,
    }


def rows(*counts: int) -> tuple[Tensor, Tensor]:
    """Where the rows of each expert end, and the expert of each row."""
    return torch.tensor(counts).cumsum(0), torch.arange(len(counts)).repeat_interleave(
        torch.tensor(counts)
    )


@pytest.mark.parametrize("counts", [(3, 0, 2, 1), (0, 0, 0, 6), (0, 0, 0, 0)])
def test_rows_go_to_their_experts(counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = ExpertLinear(3, 5, EXPERTS)
    nn.init.normal_(layer.weight)
    ends, picks = rows(*counts)
    x = torch.randn(len(picks), 3)
    wanted = (
        torch.stack(
            [
                matrix @ row
                for matrix, row in zip(layer.weight.view(EXPERTS, 5, 3)[picks], x, strict=True)
            ]
        )
        if len(picks)
        else torch.zeros(0, 5)
    )
    torch.testing.assert_close(layer(x, ends), wanted)
    torch.testing.assert_close(layer(x, picks=picks), wanted)
    order = torch.randperm(len(picks))
    torch.testing.assert_close(layer(x[order], picks=picks[order]), wanted[order])
    beyond = torch.cat([x, torch.ones(2, 3)])
    torch.testing.assert_close(layer(beyond, ends), torch.cat([wanted, torch.zeros(2, 5)]))


@pytest.mark.parametrize("by", ["ends", "picks"])
def test_a_program_asks_not_how_many_rows_are_whose(by: str) -> None:
    layer = ExpertLinear(3, 5, EXPERTS)
    torch.manual_seed(0)
    nn.init.normal_(layer.weight)
    given = [
        dict(zip(("ends", "picks"), rows(*counts), strict=True))[by]
        for counts in ((2, 0, 1, 3), (0, 4, 0, 5))
    ]
    open_rows = {0: torch.export.Dim("rows")}
    shapes = {"input": open_rows, by: open_rows if by == "picks" else None}
    program = torch.export.export(
        layer, (torch.randn(6, 3),), {by: given[0]}, dynamic_shapes=shapes
    ).module()
    x = torch.randn(9, 3)
    torch.testing.assert_close(program(x, **{by: given[1]}), layer(x, **{by: given[1]}))


def test_it_needs_to_know_whose_rows_are_whose() -> None:
    with pytest.raises(ValueError, match="rows of the input for each expert are not known"):
        ExpertLinear(3, 5, EXPERTS)(torch.zeros(2, 3))
    assert [name for name, row in OPS.items() if row.experts] == ["expert_linear"]
