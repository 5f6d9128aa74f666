"""Find the parts of language models that engines treat apart: the head that makes the logits,
and the routers of experts.
"""

import re
from collections.abc import Mapping

from quantizer.graph.ir import Graph, Node

_EXPERT_PATH = re.compile(r"(.*?)\.?experts\.(?:expert_?)?(\d+)\.")
"""The path of a layer of a single expert, as modules without a common tensor have it. Switch
Transformers and NLLB call them `experts.expert_0`.
"""
_BLOCK_PATH = re.compile(r"\.\d+\.")
"""What the path of a layer in one of several blocks contains."""
_WIDE_LAYERS = ("v_proj", "down_proj")
"""The last names of the layers of a block that mixtures of llama.cpp give more bits."""
_ONE_OUTPUT = 1
"""The outputs of the gate of a shared expert."""


def language_head(graph: Graph) -> list[str]:
    """Return the layer that makes the logits, with the embedding if that has the same weight.

    It is the last layer that multiplies, and its weight is as large as the table of an
    embedding.
    """
    embeddings = vocabulary_embeddings(graph)
    last = _last_multiplying(graph)
    if last is None or not embeddings:
        return []
    names: list[str] = []
    for node in embeddings:
        if node.params["weight"] == last.params["weight"]:
            names.append(node.name)
    return [*names, last.name]


def layers_behind_blocks(graph: Graph) -> tuple[str, ...]:
    """Return the layers that multiply after the first numbered block and in no block, if they
    make no logits of tokens: poolers and classifiers.
    """
    if language_head(graph):
        return ()
    names: list[str] = []
    is_behind = False
    for node in graph.nodes:
        if not node.is_multiplying:
            continue
        if _BLOCK_PATH.search(node.scope):
            is_behind = True
        elif is_behind:
            names.append(node.name)
    return tuple(names)


def vocabulary_embeddings(graph: Graph) -> list[Node]:
    """Return the embeddings whose table is as large as the weight of the last layer that
    multiplies. A table may have up to a tenth more rows, for tokens that are read only.
    """
    last = _last_multiplying(graph)
    if last is None:
        return []
    weight = graph.weight(last)
    embeddings: list[Node] = []
    for node in graph.nodes:
        if not node.row.looks_up or not node.params:
            continue
        table = graph.weight(node)
        further_rows = len(table) - len(weight)
        is_as_wide = table.shape[1:] == weight.shape[1:]
        if is_as_wide and 0 <= further_rows <= len(table) // 10:
            embeddings.append(node)
    least_rows = _input_rows(graph)
    return [node for node in embeddings if len(graph.weight(node)) >= least_rows]


def _input_rows(graph: Graph) -> int:
    """Return the rows of the largest table that an input of the network chooses from. Smaller
    ones are of types of tokens, and a classifier may have as few classes.
    """
    rows = 0
    for node in graph.nodes:
        if node.row.looks_up and node.params:
            readings = [graph.by_name[name].op for name in node.refs()]
            if "input" in readings:
                rows = max(rows, len(graph.weight(node)))
    return rows


def _last_multiplying(graph: Graph) -> Node | None:
    last: Node | None = None
    for node in graph.nodes:
        if node.is_multiplying:
            last = node
    return last


def wide_layers(graph: Graph) -> list[str]:
    """Return the layers to which llama.cpp gives more bits in Q4_K_M and Q5_K_M.

    They compute values of attentions, or end MLPs, in the first and last eighth of the blocks
    and in each third block between.

    Source: llama.cpp, `use_more_bits` in llama-quant.cpp.
    """
    names: list[str] = []
    for last_name in _WIDE_LAYERS:
        layers: list[str] = []
        for node in graph.nodes:
            if node.is_multiplying and node.scope.rpartition(".")[2] == last_name:
                layers.append(node.name)
        count = len(layers)
        for index, layer in enumerate(layers):
            after_first = index - count // 8
            is_at_end = after_first < 0 or index >= 7 * count // 8
            if is_at_end or after_first % 3 == 2:
                names.append(layer)
    return names


def router_layers(graph: Graph) -> list[str]:
    """Return the layers that choose experts, and those that weigh shared experts.

    They stand in the module around the experts, and have as many outputs as there are experts,
    or one.
    """
    counts = _experts_by_module(graph)
    names: list[str] = []
    for node in graph.nodes:
        if not node.is_multiplying or node.row.experts:
            continue
        if _EXPERT_PATH.match(node.scope):
            continue
        outputs = len(graph.weight(node))
        for module, count in counts.items():
            prefix = f"{module}." if module else ""
            is_inside = node.scope.startswith(prefix)
            if is_inside and outputs in (count, _ONE_OUTPUT):
                names.append(node.name)
                break
    return names


def _experts_by_module(graph: Graph) -> Mapping[str, int]:
    """Return how many experts a module has, by the path of the module around them."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.row.experts:
            module = node.scope.rpartition(".")[0]
            counts[module] = int(node.attrs["groups"])
            continue
        single_expert = _EXPERT_PATH.match(node.scope)
        if single_expert is not None:
            module, number = single_expert.groups()
            count = int(number) + 1
            counts[module] = max(count, counts.get(module, 0))
    return counts
