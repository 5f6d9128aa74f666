"""A bias that the model computes for each input anew is added by a layer of its own: a
multiplying layer has none.
"""

import dataclasses
from collections.abc import Iterator

from quantizer.graph.ir import Graph, Node, Ref, map_refs


def separate_biases(graph: Graph) -> Graph:
    """The graph with each such layer `x` as a layer without a bias, read by `x_add`; `x_bias`
    is a convolution's bias as its sum needs it, [channels, 1, …].
    """
    found = {node.name for node in graph.nodes if _is_given_bias(node)}
    if not found:
        return graph

    def through(name: str) -> Ref:
        return Ref(f"{name}_add" if name in found else name)

    nodes: list[Node] = []
    for node in graph.nodes:
        node = dataclasses.replace(node, inputs=map_refs(node.inputs, through))
        nodes += _parts(node) if node.name in found else [node]
    return graph.replaced(nodes=tuple(nodes), output=map_refs(graph.output, through))


def _is_given_bias(node: Node) -> bool:
    return node.is_multiplying and isinstance(node.inputs.get("bias"), Ref)


def _parts(node: Node) -> Iterator[Node]:
    """The layer without its bias, what brings the bias into shape, the sum."""
    inputs = {key: value for key, value in node.inputs.items() if key != "bias"}
    yield dataclasses.replace(node, inputs=inputs)
    bias, plain = node.inputs["bias"], dataclasses.replace(node, attrs={}, params={})
    if node.row.spatial:
        sizes = [-1, *[1] * node.row.spatial]
        name, channels = f"{node.name}_bias", (node.shape or ())[-1 - node.row.spatial]
        yield dataclasses.replace(
            plain,
            name=name,
            op="reshape",
            target="aten.reshape.default",
            inputs={"input": bias},
            attrs={"shape": sizes},
            shape=(channels, *sizes[1:]),
            open_axes=(),
        )
        bias = Ref(name)
    summands = {"input": Ref(node.name), "other": bias}
    yield dataclasses.replace(
        plain, name=f"{node.name}_add", op="add", target="aten.add.Tensor", inputs=summands
    )
