"""Turns a network of half precision into one that computes in float32, with the same codes."""

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
    """Return the deployment with float32 for float16 and bfloat16.

    That concerns parameters, the call and casts. Codes and scales stay, and so do the batches
    to verify with. As neither values nor sums are rounded to half precision, outputs are nearer
    to exact arithmetic than test mode's.
    """
    graph = deployment.graph
    if not any(node.dtype in HALF for node in graph.nodes):
        return deployment
    args, kwargs = to_float32((deployment.args, dict(deployment.kwargs)))
    return replace(
        deployment,
        graph=_widened_graph(graph),
        solution=_widened_solution(deployment.encoded),
        args=args,
        kwargs=kwargs,
    )


def to_float32(value: Any) -> Any:
    """Return a nested value with float32 for tensors and dtypes of half precision."""
    return pytree.tree_map(_widened_leaf, value)


def _widened_leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    return torch.float32 if value in HALF else value


def _widened_graph(graph: Graph) -> Graph:
    nodes: list[Node] = []
    for node in graph.nodes:
        attrs = to_float32(dict(node.attrs))
        nodes.append(replace(node, attrs=attrs, dtype=_widened_leaf(node.dtype)))
    return graph.replaced(nodes=tuple(nodes), tensors=to_float32(dict(graph.tensors)))


def _widened_solution(solution: Solution) -> Solution:
    tensors = {}
    for key, tensor in solution.tensors.items():
        tensors[key] = replace(tensor, dtype=_widened_leaf(tensor.dtype))
    return replace(
        solution,
        tensors=tensors,
        weights=to_float32(_as_dicts(solution.weights)),
        rescaled=to_float32(_as_dicts(solution.rescaled)),
        corrections=to_float32(dict(solution.corrections)),
    )


def _as_dicts(by_layer: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return dicts, which pytree maps over."""
    return {layer: dict(tensors) for layer, tensors in by_layer.items()}
