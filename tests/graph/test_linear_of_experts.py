"""Products of tokens with the matrices of their experts become layers, called as people call
the tensors.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.extended import extended
from support.moe import EXPERTS, FAMILIES, IDS, experts, matrices, mixture
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")

from quantizer.config.model import Selector, Settings
from quantizer.errors import ModelError
from quantizer.graph.emit import emit
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.match import match

pytestmark = pytest.mark.slow

LAYERS = "MixtralForCausalLM::MixtralForCausalLM/MixtralModel[model]/ModuleList[layers]/MixtralDecoderLayer"
IN_FIRST = f"{LAYERS}[0]/MixtralSparseMoeBlock[mlp]/MixtralExperts[experts]/"


@cache
def traced(
    family: str,
    implementation: str = "grouped_mm",
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
) -> tuple[Graph, Graph]:
    """As traced, and after the passes."""
    model = mixture(family, implementation, num_hidden_layers=layers)
    graph = trace(model.to(dtype), (IDS,))
    return graph, run_passes(graph, Settings())


FURTHER = ("Qwen3Moe",)
"""Its experts are laid out as those of Mixtral."""
USUAL = [family for family in FAMILIES if family not in FURTHER]


@pytest.mark.parametrize(
    ("family", "implementation", "dtype", "count"),
    [
        *((family, "grouped_mm", torch.float32, 2) for family in USUAL),
        ("Mixtral", "grouped_mm", torch.bfloat16, 1),  # which torch has another operator for
        ("Mixtral", "batched_mm", torch.float32, 1),
        *extended(("GptOss", "batched_mm", torch.float32, 1)),
        *extended(*((family, "grouped_mm", torch.float32, 2) for family in FURTHER)),
    ],
)
def test_each_tensor_is_a_layer_of_its_name(
    family: str, implementation: str, dtype: torch.dtype, count: int
) -> None:
    model = mixture(family, implementation, num_hidden_layers=count).to(dtype)
    original, graph = traced(family, implementation, dtype, count)
    layers = [node for node in graph.nodes if node.row.experts]
    first = 1 if family == "DeepseekV3" else 0  # its first layer has no experts
    names = [
        (layer, name) for layer in range(first, count) for name in ("gate_up_proj", "down_proj")
    ]
    assert [node.scope for node in layers] == [
        f"model.layers.{layer}.mlp.experts" for layer, _ in names
    ]
    assert [node.name.rpartition("/")[2] for node in layers] == [name for _, name in names]
    for node, (layer, name) in zip(layers, names, strict=True):
        assert torch.equal(
            graph.weight(node), matrices(experts(model, layer), name).flatten(0, 1)
        )
        assert original.by_name[node.name].op == "parameter"
    ids = IDS.flip(0)[:1, :9]
    with torch.no_grad():
        torch.testing.assert_close(Network(graph)(ids).logits, model(ids).logits)


def test_the_generated_code_needs_no_transformers() -> None:
    source = emit(traced("GptOss")[1])
    assert (
        source.count("quantizer.nn.ExpertLinear(in_features=32, out_features=96, experts=4) #")
        == 2
    )
    assert "transformers." not in source.partition("class ")[2]


@pytest.mark.parametrize(
    ("kind", "text", "layers", "names"),
    [
        ("name", IN_FIRST + "gate_up_proj", [0], ["gate_up_proj"]),
        ("name", "model.layers.0.mlp.experts.down_proj", [0], ["down_proj"]),
        ("name", "model.layers.*.mlp.experts.down_proj", [0, 1], ["down_proj"]),
        ("name", "*gate_up_proj", [0, 1], ["gate_up_proj"]),
        ("name", "model.layers.1.mlp", [1], ["gate_up_proj", "down_proj"]),
        ("exclude", "*experts*", [0, 1], ["gate_up_proj", "down_proj"]),
        ("type", "MixtralExperts", [0, 1], ["gate_up_proj", "down_proj"]),
    ],
)
def test_selectors_find_them(kind: str, text: str, layers: list[int], names: list[str]) -> None:
    original, graph = traced("Mixtral")
    found = match(Selector(kind, text), graph, original)  # type: ignore[arg-type]
    own = [name for name in found.layers if graph.by_name[name].row.experts]
    assert own == [
        f"{LAYERS}[{at}]/MixtralSparseMoeBlock[mlp]/MixtralExperts[experts]/{n}"
        for at in layers
        for n in names
    ]


class Once(nn.Module):
    """Tokens [n, 3] times a matrix each, which is read as a whole as well."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.whole = nn.Parameter(torch.randn(EXPERTS, 5, 3)), whole

    def forward(self, x: Tensor, picks: Tensor) -> Tensor:
        y = torch.bmm(self.weight[picks], x.unsqueeze(-1)).squeeze(-1)
        y = y + torch.bmm(self.weight[picks.flip(0)], x.unsqueeze(2)).squeeze(2)
        return y + self.weight.sum() if self.whole else y


@pytest.mark.parametrize("whole", [False, True])
def test_a_tensor_may_be_multiplied_twice_or_read_as_a_whole(*, whole: bool) -> None:
    model, x, picks = (
        Once(whole=whole).eval(),
        torch.randn(6, 3),
        torch.tensor([3, 1, 1, 0, 3, 0]),
    )
    graph = run_passes(trace(model, (x, picks)), Settings())
    names = ["squeeze", "squeeze.1"] if whole else ["weight", "weight.1"]
    assert [node.name for node in graph.nodes if node.row.experts] == [
        f"Once::Once/{name}" for name in names
    ]
    torch.testing.assert_close(Network(graph)(x, picks), model(x, picks))


def test_a_loop_over_experts_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"for expert_idx in expert_hit") as caught:
        trace(mixture("Mixtral", "eager"), (IDS,))
    assert caught.value.help == 'call its set_experts_implementation("grouped_mm")'
