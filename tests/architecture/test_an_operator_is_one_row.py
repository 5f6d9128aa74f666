"""One table means one table: a row added at run time is read everywhere, and no other file
lists operators by name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support.configs import config, document
from support.ledger import MODULES, shown, source
from torch import Tensor, nn

from quantizer.algorithms.equalization.equalization import cross_layer_equalization
from quantizer.algorithms.rotation.residual_stream import residuals
from quantizer.config.model import Settings
from quantizer.graph.channels.axis_rules import MOVED, SAME, Commutes
from quantizer.graph.ir import Graph
from quantizer.graph.op_row import Op
from quantizer.graph.ops import OPS, PACKETS, register_op
from quantizer.graph.passes import run_passes
from quantizer.graph.structure.find import find_structure
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.resolve import NO_RULES, resolve_plan

NAMED = {
    "graph/ops.py": "the table",
    "graph/op_row.py": "which operators return views, or several tensors",
    "graph/targets.py": "how torch traces a ReLU6",
    "graph/tracing/functionalize.py": "which operators share memory in a traced program",
    "graph/structure/transformer_parts.py": "finds attentions that are written out, around their softmax",
    "graph/emit.py": "how layers are written that have arguments of their own",
    "graph/passes/activations.py": "rewrites these operators",
    "graph/passes/compute_constants.py": "removes this operator",
    "graph/passes/fold_batch_norm.py": "rewrites this operator",
    "graph/passes/linear_layers.py": "rewrites these operators",
    "commands/start/findings.py": "writes entries for types, and knows no graph; a test compares it with the table",
    "plan/floating.py": "what each operator makes of divisors and indices, and wants exact",
    "plan/fit/fitted_layers.py": "finds norms that are written out, and outputs that are cut",
    "plan/mask_constants.py": "what each operator makes of the lowest values of a mask",
    "plan/match.py": "a setting that is about additions",
    "plan/dpu_limits.py": "what the DPU has",
    "plan/dpu_support.py": "what the DPU has",
    "commands/inspection/inspect.py": "what the DPU approximates",
    "algorithms/dpu_alignment/dpu_alignment.py": "what the DPU's shifters can take",
    "algorithms/rotation/residual_stream.py": "finds norms that are written out by what they are made "
    "of",
    "evaluation/exact_layers.py": "computes these operators in integers",
    "export/mobile/executorch.py": "where torch has the weight in these operators",
    "export/mobile/kernels.py": "what the kernels of phones compute together, and what they may lack",
    "export/mobile/litert_rewrites.py": "what LiteRT's converter rounds, and has one scale for",
    "export/onnx/tuned/tuner.py": "moves the steps of codes to where the kernels want them",
    "export/refusals.py": "which operators libraries write as another one",
    "export/onnx/refusals.py": "which of these operators torch.onnx knows in part",
    "export/onnx/decompositions.py": "what torch.onnx can do with complex numbers, and what is written out for it",
}
"""Files that may name operators, and why: each implements or rewrites those it names."""
WORDS = {
    "amax",
    "bilinear",
    "ceil",
    "div",
    "fix",
    "floor",
    "index",
    "max",
    "maximum",
    "mean",
    "median",
    "min",
    "minimum",
    "neg",
    "norm",
    "pad",
    "round",
    "std",
    "sum",
    "to",
}
"""Names that are also words for something else, and count only where they are compared with an
operator.
"""
TRACED = {"placeholder", "call_function", "get_attr", "output"}
"""What torch.fx calls the operations of its own nodes."""


def operators() -> set[str]:
    """Operators of torch; not inputs, parameters, results of several and layers of this
    package.
    """
    return {name for name, row in OPS.items() if row.kind != "structural" and row.aten} - {
        "getitem"
    }


def named(path: Path) -> Iterator[str]:
    """Each operator that a file names, and each look at the letters of a name."""
    known = operators()
    unambiguous = known - WORDS
    for node in source(path).nodes:
        if isinstance(node, ast.Constant) and node.value in unambiguous:
            yield str(node.value)
        elif isinstance(node, ast.Compare) and any(
            map(_is_name, (node.left, *node.comparators))
        ):
            words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            yield from (
                ast.unparse(node) for word in words - TRACED if word in known or word not in OPS
            )
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and _is_name(node.value):
            yield ast.unparse(node)


def _is_name(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "op"
        and ast.unparse(node.value) != "self"
    )


def test_only_the_table_and_what_is_about_one_operator_names_operators() -> None:
    found = {shown(path): sorted(set(named(path))) for path in MODULES}
    assert {path: names for path, names in found.items() if names and path not in NAMED} == {}
    assert NAMED.keys() <= {path for path, names in found.items() if names}, (
        "the list is longer than it must be"
    )


@torch.library.custom_op("made_up::bend", mutates_args=())
def bend(x: Tensor) -> Tensor:
    """An activation of which nobody has heard."""
    return torch.where(x > 0, x, x / 4)


@torch.library.custom_op("made_up::swap", mutates_args=())
def swap(x: Tensor) -> Tensor:
    """The last two axes, the other way round."""
    return x.mT.contiguous()


bend.register_fake(torch.empty_like)
swap.register_fake(lambda x: torch.empty_like(x.mT))
BEND = Op(
    "bend",
    "fusable",
    ("made_up.bend",),
    ("made_up_bend",),
    axes=SAME,
    commutes=Commutes.SCALING,
    fresh=True,
)
SWAP = Op("swap", "passthrough", (), ("made_up_swap",), axes=MOVED, commutes=Commutes.ALL)


class Bent(nn.Module):
    """Both operators between layers; a residual stream that is swapped twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = swap(swap(self.embedding(ids)))
        y = self.first(bend(swap(swap(self.norm(x)))))
        return self.second(swap(swap(bend(y))))


IDS = torch.arange(8).view(2, 4)


def prepared(*rows: Op) -> Graph:
    """The graph while the table has these rows, too."""
    for row in rows:
        register_op(row)
    return run_passes(trace(Bent().eval(), (IDS,)), Settings())


@pytest.fixture(autouse=True)
def the_table_as_it_was() -> Iterator[None]:
    with patch.dict(OPS), patch.dict(PACKETS):
        yield


def test_an_operator_without_a_row_stops_everything(tmp_path: Path) -> None:
    graph = prepared()
    assert not cross_layer_equalization(graph).changes
    assert not any(group.fold for group in find_structure(graph).groups)
    assert [found.obstacle is not None for found in residuals(graph)] == [True]
    plan = resolve_plan(config(tmp_path, document()), graph, graph)
    assert {graph.by_name[name].op for name, why in plan.floats.items() if why == NO_RULES} == {
        "made_up_bend",
        "made_up_swap",
    }


def test_channels_are_followed_through_a_row() -> None:
    """By equalization, by folds, by rotation."""
    graph = prepared(BEND, SWAP)
    equalized = cross_layer_equalization(graph)
    assert [
        tuple(graph.by_name[name].scope for name in change.layers)
        for change in equalized.changes
    ] == [("first", "second")]
    with torch.no_grad():
        torch.testing.assert_close(Network(equalized)(IDS), Network(graph)(IDS))
    folds = [
        group.fold and graph.by_name[group.fold.node].scope
        for group in find_structure(graph).groups
    ]
    assert folds == ["norm", "first"]
    [residual] = residuals(graph)
    assert residual.obstacle is not None
    assert residual.obstacle.op == "bend"  # it commutes with factors, not with rotations
    assert len(residual.members) == 6


def test_whether_it_commutes_is_read_off_the_row() -> None:
    graph = prepared(
        replace(BEND, commutes=Commutes.NOTHING), replace(SWAP, commutes=Commutes.SCALING)
    )
    assert not cross_layer_equalization(graph).changes
    assert not any(group.fold for group in find_structure(graph).groups)
    [residual] = residuals(graph)
    assert residual.obstacle is not None
    assert residual.obstacle.op == "swap"


def test_values_are_quantized_where_the_rows_say(tmp_path: Path) -> None:
    """Behind the activation, and not again where they are moved."""
    graph = prepared(BEND, SWAP)
    plan = resolve_plan(config(tmp_path, document()), graph, graph)
    made = [node.op for node in graph.nodes if (node.name, "activation") in plan.tensors]
    assert made == ["bend", "bend", "linear"]


def test_a_row_is_there_once() -> None:
    register_op(BEND)
    with pytest.raises(ValueError, match="has a row for bend"):
        register_op(BEND)
