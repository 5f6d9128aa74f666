"""A network of half precision as one that computes in float32, with the same codes and
scales.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.calibration.solution import Solution
from quantizer.export.deployment import Deployment
from quantizer.graph.ir import Graph, Node

HALF = (torch.float16, torch.bfloat16)


def in_float32(deployment: Deployment) -> Deployment:
    """The deployment with float32 for float16 and bfloat16: parameters, its call and casts;
    itself if it has none.

    The batches to verify with stay as they are.

    Codes stand for values that are not rounded to half precision; the sums are not either, so
    outputs are nearer to those of exact arithmetic than test mode's. Quantization itself is not
    changed.
    """
    graph = deployment.graph
    if not any(node.dtype in HALF for node in graph.nodes):
        return deployment
    args, kwargs = widened((deployment.args, dict(deployment.kwargs)))
    return replace(
        deployment,
        graph=_graph(graph),
        solution=_solution(deployment.encoded),
        args=args,
        kwargs=kwargs,
    )


def widened(value: Any) -> Any:
    """A nested value with float32 for tensors and dtypes of half precision."""
    return pytree.tree_map(_wide, value)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    return torch.float32 if value in HALF else value


def _graph(graph: Graph) -> Graph:
    def changed(node: Node) -> Node:
        return replace(node, attrs=widened(dict(node.attrs)), dtype=_wide(node.dtype))

    tensors = {path: _wide(tensor) for path, tensor in graph.tensors.items()}
    return graph.replaced(nodes=tuple(map(changed, graph.nodes)), tensors=tensors)


def _solution(solution: Solution) -> Solution:
    def layers(found: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        return {
            name: {key: _wide(tensor) for key, tensor in own.items()}
            for name, own in found.items()
        }

    return replace(
        solution,
        tensors={
            key: replace(tensor, dtype=_wide(tensor.dtype))
            for key, tensor in solution.tensors.items()
        },
        weights=layers(solution.weights),
        rescaled=layers(solution.rescaled),
        corrections={name: _wide(tensor) for name, tensor in solution.corrections.items()},
    )
