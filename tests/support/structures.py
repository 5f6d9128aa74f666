"""Tiny models of many architectures, and how tests check that a fold changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.config.model import Settings
from quantizer.graph.edits import with_weights
from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import layer_path
from quantizer.graph.passes import run_passes
from quantizer.graph.structure.definitions import InputGroup, Structure
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
_SMALL = {
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "use_cache": False,
}
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "tie_word_embeddings": False}
_ENCODER = {**_DECODER, "image_size": 16, "patch_size": 8, "max_position_embeddings": 64}
_OPT = {**_DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
_MOE = {
    **_GROUPED,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
}
CONFIGS: dict[str, Mapping[str, Any]] = {
    "Llama": _GROUPED,
    "Qwen2": _GROUPED,
    "Mistral": {**_GROUPED, "tie_word_embeddings": True},
    "Gemma": {**_GROUPED, "head_dim": 8},
    "Phi3": _GROUPED,
    "Olmo2": _GROUPED,
    "Cohere": _GROUPED,
    "GPTNeoX": _DECODER,
    "OPT": _OPT,
    "GPT2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "T5": {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4},
    "Bert": _ENCODER,
    "ViT": _ENCODER,
    "Mixtral": {**_GROUPED, "num_local_experts": 4},
    "Qwen2Moe": {**_MOE, "num_experts_per_tok": 2},
}
"""Configs of transformers that take a moment to build."""
_HEADS = {
    "GPT2": "LMHeadModel",
    "T5": "ForConditionalGeneration",
    "Bert": "Model",
    "ViT": "Model",
}


def pretrained(family: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of transformers, its norms unlike the identity, and its inputs; needs
    transformers.
    """
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_SMALL, **CONFIGS[family])
    model: nn.Module = getattr(transformers, family + _HEADS.get(family, "ForCausalLM"))(
        config
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) / 4
            else:
                parameter *= 2
    inputs = {"ViT": (PIXELS,), "T5": (IDS, None, IDS[:, :5])}
    return model, inputs.get(family, (IDS,))


class Experts(nn.Module):
    """A layer of experts that all compute, weighed by a router, as mixtures of experts are
    written for tracing.
    """

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        best, index = self.router(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(*x.shape[:-1], len(self.experts)).scatter(-1, index, best)
        return torch.stack(
            [e(x) * weights[..., i : i + 1] for i, e in enumerate(self.experts)]
        ).sum(0)


class Expert(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.w2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class ExpertBlock(nn.Module):
    """A norm and experts around which the input flows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.moe = nn.RMSNorm(width), Experts(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Mixture(nn.Module):
    """A decoder of experts, without attention."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertBlock(width) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Mobile(nn.Module):
    """Batch norms, a depthwise, a grouped and a transposed convolution, channels that are
    shuffled and averaged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depth, self.point = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 12, 1)
        self.grouped, self.shuffle = nn.Conv2d(12, 8, 1, groups=4), nn.ChannelShuffle(2)
        self.up, self.scale = (
            nn.ConvTranspose2d(8, 6, 2, 2, groups=2),
            nn.Parameter(torch.rand(6, 1, 1) + 0.5),
        )
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.stem(x))), 2)
        x = nn.functional.pad(nn.functional.leaky_relu(self.depth(x)), (1, 1))
        x = self.shuffle(self.grouped(torch.relu(self.point(x))))
        x = self.norm(self.scale * self.up(x))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def prepared(model: nn.Module, *inputs: Any) -> Graph:
    """The graph after the passes."""
    return run_passes(trace(model.eval(), inputs), Settings())


def changed_by_folding(
    graph: Graph, inputs: tuple[Any, ...], structure: Structure, *, divide: bool = True
) -> float:
    """How far the outputs move, as a share, when the channels of all folds are divided by
    random factors.

    Without `divide` the columns are multiplied and nothing is divided, which a test of the test
    wants to see.
    """
    changed = graph
    for number, group in enumerate(structure.groups):
        if group.fold is not None:
            parameters = _rescaled(changed, group, number)
            if not divide:
                del parameters[group.fold.node]
            changed = with_weights(changed, parameters)
    pairs = zip(_outputs(graph, inputs), _outputs(changed, inputs), strict=True)
    return max(float((want - have).norm() / want.norm()) for want, have in pairs)


def _outputs(graph: Graph, inputs: tuple[Any, ...]) -> list[Tensor]:
    with torch.no_grad():
        leaves = pytree.tree_leaves(Network(graph)(*inputs))
    return [
        leaf.double()
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def _rescaled(graph: Graph, group: InputGroup, seed: int) -> dict[str, dict[str, Tensor]]:
    """Parameters with the fold's rows divided and the columns of all layers that read them
    multiplied, in float64.
    """
    fold = group.fold
    assert fold is not None
    by_channel = torch.exp(
        torch.randn(4 * group.channels + 512, generator=torch.Generator().manual_seed(seed)) / 2
    )
    origin = torch.tensor(fold.channels if fold.channels is not None else range(group.channels))
    factors = by_channel[origin]
    divided = torch.ones_like(by_channel)
    divided[origin] = by_channel[origin]
    node = graph.by_name[fold.node]
    changed: dict[str, dict[str, Tensor]] = {fold.node: {}}
    for key in ("weight", "bias"):
        if key in node.params:
            value, offset = (
                graph.tensors[node.params[key]],
                fold.offset if key == "weight" else 0.0,
            )
            changed[fold.node][key] = (
                _by_rows(node, value.double() + offset, 1 / divided).sub(offset).to(value.dtype)
            )
    for name in (*group.layers, *fold.extra):
        weight = graph.tensors[graph.by_name[name].params["weight"]]
        changed.setdefault(name, {})["weight"] = _by_columns(
            graph.by_name[name], weight.double(), factors
        ).float()
    return changed


def _by_rows(node: Node, value: Tensor, factors: Tensor) -> Tensor:
    """A parameter with each output channel times its factor."""
    groups = int(node.attrs.get("groups", 1))
    if value.dim() == 1 or node.op in ("parameter", "constant"):
        return value * factors[: value.numel()].view(value.shape)
    if node.row.experts:  # which share their output channels
        return value * factors[: len(value) // groups].repeat(groups)[:, None]
    if "transpose" not in node.op:
        return value * factors[: len(value)].view(-1, *[1] * (value.dim() - 1))
    parts = value.chunk(groups)
    each = factors[: groups * value.shape[1]].view(groups, 1, -1, *[1] * (value.dim() - 2))
    return torch.cat([part * factor for part, factor in zip(parts, each, strict=True)])


def _by_columns(node: Node, weight: Tensor, factors: Tensor) -> Tensor:
    """A weight with each input channel times its factor."""
    if "transpose" in node.op:
        return weight * factors.view(-1, *[1] * (weight.dim() - 1))
    # Experts share their input channels
    groups = 1 if node.row.experts else int(node.attrs.get("groups", 1))
    each = factors.view(groups, 1, -1, *[1] * (weight.dim() - 2))
    return torch.cat(
        [part * factor for part, factor in zip(weight.chunk(groups), each, strict=True)]
    )


def modules_of(graph: Graph, names: Iterable[str]) -> list[str]:
    """The last names of the modules of some layers, or of the tensors of experts."""
    return [layer_path(graph.by_name[name]).rpartition(".")[2] for name in names]
