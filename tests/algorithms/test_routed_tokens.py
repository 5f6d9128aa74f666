"""GPTQ, its kin and AWQ on experts: each by the tokens that were routed to it, and rounded as a
linear layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended
from support.moe import EXPERTS, calls, experts, matrices, mixture
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")

import quantizer
from quantizer import ModelQuantizer

pytestmark = pytest.mark.slow

INT4 = {"dtype": "int4", "qscheme": "per_group", "ch_axis": 1, "group_size": 16}
OTHERS = ["kind:embedding", "kind:head", "*self_attn*", "re:.*Router.*"]
DATA = calls(6)


def config(
    algorithm: dict[str, Any] | None, weight: dict[str, Any] | None = None
) -> dict[str, Any]:
    """For experts alone."""
    settings = {"algo_config": algorithm} if algorithm else {}
    return {"global_quant_config": {"weight": weight or INT4}, "exclude": OTHERS, **settings}


def calibrated(model: nn.Module, settings: dict[str, Any]) -> Any:
    return quantizer.calibrate(model, settings, DATA)


class Plain:
    """What rounding to nearest makes of `spread("Mixtral")`, once for all algorithms."""

    def __init__(self, settings: dict[str, Any]) -> None:
        model = spread("Mixtral")
        result = calibrated(model, settings)
        self.sqnr_db = result.test().metrics["sqnr_db"]
        self.error = error(model, weights(result))


_PLAIN: dict[str, Plain] = {}


def plain_of(settings: dict[str, Any]) -> Plain:
    """By the config, which has no algorithm."""
    key = json.dumps(settings)
    if key not in _PLAIN:
        _PLAIN[key] = Plain(settings)
    return _PLAIN[key]


def weights(result: Any, name: str = "gate_up_proj") -> Tensor:
    """Of the layer of experts, [experts, out, in]."""
    [node] = [
        node
        for node in result.network.graph.nodes
        if node.row.experts and node.name.endswith(f"/{name}")
    ]
    found: Tensor = result.network.layers[node.name].weight.detach()
    return found.view(EXPERTS, -1, found.shape[1])


def routed(model: Any) -> list[list[Tensor]]:
    """The tokens of each expert, batch by batch, as the model's own module of experts is
    called.
    """
    found: list[list[Tensor]] = [[] for _ in range(EXPERTS)]

    def look(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden, picks, _weights = args
        rows = hidden.repeat_interleave(picks.shape[1], 0)
        for expert, own in enumerate(found):
            own.append(rows[picks.flatten() == expert])

    handle = experts(model, 0).register_forward_pre_hook(look)
    with torch.no_grad():
        for ids in DATA:
            model(ids)
    handle.remove()
    return found


def error(model: Any, rounded: Tensor) -> float:
    """Squared error of the outputs of the first layer's experts on their tokens, as a share of
    their energy.
    """
    lost = energy = 0.0
    for tokens, matrix, own in zip(
        routed(model), matrices(experts(model, 0), "gate_up_proj"), rounded, strict=True
    ):
        x = torch.cat(tokens).double()
        lost += float((x @ (own - matrix).double().T).square().sum())
        energy += float((x @ matrix.double().T).square().sum())
    return lost / energy


def spread(family: str) -> Any:
    """A model whose hidden channels are of different sizes, as those of real ones are."""
    model = mixture(family, num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight.copy_(
            torch.linspace(-2, 2, 32).exp()
        )
    return model


@pytest.mark.parametrize("family", ["GptOss", *extended("Mixtral")])
@pytest.mark.parametrize("kind", [{}, {"static_groups": False, "desc_act": False}])
def test_an_expert_is_rounded_as_a_linear_layer_on_its_tokens(
    family: str, kind: dict[str, Any]
) -> None:
    model = spread(family)
    found = weights(calibrated(model, config({"name": "gptq", **kind})))
    stack = matrices(experts(model, 0), "gate_up_proj")
    for expert, tokens in enumerate(routed(model)):
        alone = nn.Sequential(nn.Linear(*stack.shape[:0:-1], bias=False))
        alone[0].weight = nn.Parameter(stack[expert].contiguous())
        one = {"global_quant_config": {"weight": INT4}, "algo_config": {"name": "gptq", **kind}}
        result = quantizer.calibrate(
            alone.eval(), one, [batch for batch in tokens if len(batch)]
        )
        [layer] = [
            each for name, each in result.network.layers.items() if name.endswith("/linear")
        ]
        # Sums are of tokens in another order
        close = torch.isclose(layer.weight, found[expert], rtol=1e-5)
        assert float(close.float().mean()) > 0.99


@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [
        ("gptq", {}, 0.6),
        ("awq", {}, 0.9),
        *extended(
            ("gptaq", {}, 0.6), ("qronos", {}, 0.6), ("awq", {"scale_search": False}, 0.95)
        ),
    ],
)
def test_outputs_of_experts_come_closer(
    name: str, settings: dict[str, Any], most: float
) -> None:
    model, plain = spread("Mixtral"), plain_of(config(None))
    better = calibrated(model, config({"name": name, **settings}))
    if not (name == "awq" and not settings):  # which divides what the experts read as well
        assert error(model, weights(better)) < most * plain.error
    assert better.test().metrics["sqnr_db"] > plain.sqnr_db


@pytest.mark.parametrize(
    "algorithm", [{"name": "gptq"}, {"name": "awq", "scale_search": False}], ids=["gptq", "awq"]
)
def test_an_expert_without_tokens_is_rounded_to_nearest_and_named(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    model = spread("GptOss")
    model.model.layers[0].mlp.router.bias.data[2] = -1e4
    assert [sum(map(len, tokens)) > 0 for tokens in routed(model)] == [True, True, False, True]
    plain, better = calibrated(model, config(None)), calibrated(model, config(algorithm))
    for name in ("gate_up_proj", "down_proj"):
        same = [
            torch.equal(*pair)
            for pair in zip(weights(plain, name), weights(better, name), strict=True)
        ]
        assert same == [False, False, True, False]
    better.save(tmp_path)
    remarks = json.loads((tmp_path / "algorithms.json").read_text())["remarks"]
    missed = [each for each in remarks if "no token of the calibration data" in each["text"]]
    assert len(missed) == 2
    assert all(
        each["layer"].endswith("_proj[2]") or "expert 2 (of 4)" in each["text"]
        for each in missed
    )


def test_each_expert_has_factors_of_its_own_where_its_own_layer_takes_them(
    tmp_path: Path,
) -> None:
    """AWQ, between the layers of an expert: what is large in one is not in another."""
    model = spread("Qwen3Moe")
    module, generator = experts(model, 0), torch.Generator().manual_seed(0)
    width = module.down_proj.shape[2]
    sizes = torch.exp(1.5 * torch.randn(EXPERTS, width, generator=generator))
    module.gate_up_proj.mul_(6)
    module.gate_up_proj[:, width:] *= sizes[..., None]
    module.down_proj /= sizes[:, None].sqrt()
    result = calibrated(model, config({"name": "awq"}))
    result.save(tmp_path)
    told = json.loads((tmp_path / "algorithms.json").read_text())["rounded"]
    [row] = [row for name, row in told.items() if name.endswith("/down_proj")]
    assert row["error"] < 0.05 * row["error_rtn"]


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "awq"},
        {"name": "smooth", "alpha": [0.3, 0.7]},
        *extended({"name": "smooth", "alpha": 0.5}),
    ],
)
def test_the_router_follows_the_experts_into_their_norm(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """One fold for all that read it, so that nothing has to be inserted, which no engine's
    model has.
    """
    model, all_layers = spread("Mixtral"), {"exclude": OTHERS[:2]}
    result = calibrated(model, config(settings) | all_layers)
    result.save(tmp_path)
    told = json.loads((tmp_path / "algorithms.json").read_text())
    assert told["inserted"] == []
    changed = {name.rpartition("/")[0].rpartition("/")[2] for name in told["rescaled"]}
    assert {"MixtralTopKRouter[gate]", "MixtralExperts[experts]"} <= changed
    plain = plain_of(config(None) | all_layers)
    assert result.test().metrics["sqnr_db"] > plain.sqnr_db


@pytest.mark.parametrize("name", ["gptq", "awq"])
@pytest.mark.parametrize("family", ["GptOss", *extended("Qwen3Moe")])
def test_modules_in_place_get_the_same_weights(name: str, family: str) -> None:
    settings = config({"name": name, **({"scale_search": False} if name == "awq" else {})})
    model = ModelQuantizer(settings).quantize_model(spread(family), DATA)
    traced = calibrated(spread(family), settings)
    for tensor in ("gate_up_proj", "down_proj"):
        assert torch.equal(matrices(experts(model, 0), tensor), weights(traced, tensor))


@pytest.mark.parametrize(
    "weight",
    [
        *extended({"dtype": "int4", "qscheme": "per_tensor"}),
        {"dtype": "mx", "mx_element_dtype": "fp4", "qscheme": "per_group", "ch_axis": 1},
        {
            "dtype": "fp4",
            "scale_format": "e4m3",
            "qscheme": "per_group",
            "ch_axis": 1,
            "group_size": 16,
        },
    ],
    ids=["tensors", "mxfp4", "nvfp4"],
)
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_any_scales_will_do(name: str, weight: dict[str, Any]) -> None:
    model = spread("Mixtral")
    found, plain = (
        calibrated(model, config({"name": name}, weight)),
        plain_of(config(None, weight)),
    )
    assert found.test().metrics["sqnr_db"] > plain.sqnr_db - 0.5
    if name == "gptq":
        assert error(model, weights(found)) < plain.error
