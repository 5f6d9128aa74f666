"""A pass that adds a bias that is computed anew for each input in a layer of its own. A
multiplying layer can only have a constant bias.
"""

from collections.abc import Iterator
from dataclasses import replace

from quantizer.graph.ir import Graph, Node, Ref


def separate_biases(graph: Graph) -> Graph:
    """Return the graph with each layer `x` of a computed bias as `x` without a bias, read by
    `x_add`.

    A convolution's bias is brought into the shape [channels, 1, …] by `x_bias`.
    """
    layers = {node.name for node in graph.nodes if _has_computed_bias(node)}
    if not layers:
        return graph

    def through(name: str) -> Ref:
        return Ref(f"{name}_add") if name in layers else Ref(name)

    changed = graph.reading(through)
    nodes: list[Node] = []
    for node in changed.nodes:
        if node.name in layers:
            nodes += _parts(node)
        else:
            nodes.append(node)
    return changed.replaced(nodes=tuple(nodes))


def _has_computed_bias(node: Node) -> bool:
    return node.is_multiplying and isinstance(node.inputs.get("bias"), Ref)


def _parts(node: Node) -> Iterator[Node]:
    """Yield the layer without its bias, the reshape of a convolution's bias, and the sum."""
    inputs = dict(node.inputs)
    bias = inputs.pop("bias")
    yield replace(node, inputs=inputs)
    computed = replace(node, attrs={}, params={})
    if node.row.spatial:
        shape = [-1, *[1] * node.row.spatial]
        name = f"{node.name}_bias"
        channels = (node.shape or ())[-1 - node.row.spatial]
        yield replace(
            computed,
            name=name,
            op="reshape",
            target="aten.reshape.default",
            inputs={"input": bias},
            attrs={"shape": shape},
            shape=(channels, *shape[1:]),
            open_axes=(),
        )
        bias = Ref(name)
    yield replace(
        computed,
        name=f"{node.name}_add",
        op="add",
        target="aten.add.Tensor",
        inputs={"input": Ref(node.name), "other": bias},
    )
