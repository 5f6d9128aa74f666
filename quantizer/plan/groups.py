"""Decide where activations are quantized: which values share one quantization and which need
none. This depends on operators, not on the config.
"""

from collections.abc import Container, Iterable

from quantizer.errors import or_without
from quantizer.graph.channels.axis_rules import PADDED, pads_zeros
from quantizer.graph.edits import maker
from quantizer.graph.ir import Graph, Node, readers
from quantizer.graph.op_row import ELEMENTWISE
from quantizer.plan.floating import (
    ARGUMENT,
    MASK,
    SCALED,
    computes_in_float,
    floating,
    multiplies_values,
)
from quantizer.plan.layout import (
    EVERY_JOIN,
    PART_SCALE,
    Group,
    Join,
    Layout,
    Multiplication,
    quantization_point,
)
from quantizer.plan.mask_constants import chooses
from quantizer.plan.model import is_entry
from quantizer.plan.readers import Reading, outer_readers, values_readers


def layout(graph: Graph, single: Container[str] = ()) -> Layout:
    """Group the graph's floating-point values.

    A convolution followed only by a ReLU is quantized after the ReLU. Reshapes, pooling maxima
    and other moves keep the quantization of their input, and so do the parts of a join. The
    last activation stays float.

    Args:
        single: the joins whose parts are quantized together, at the join and not before it.

    Source: pytorch_nndct 3.5, except for the joins.
    """
    return _Layouter(graph, single).layout()


class _Layouter:
    """The layout of the nodes so far, in execution order: a join comes after its sources."""

    def __init__(self, graph: Graph, single: Container[str]) -> None:
        self.graph = graph
        self.single = single
        self.where = Layout({}, {}, floats=floating(graph))
        if any(node.is_join for node in graph.nodes):
            self._find_parts()
        # The only reader of a group's point or of a join, if that is a join
        self.feeds: dict[str, str] = {}
        # Groups that are only returned, and need no quantization unless a join has one scale
        self.last: dict[str, Group] = {}
        # Activation functions that belong to a join
        self.after_joins: set[str] = set()

    def _find_parts(self) -> None:
        """Find the parts of joins, and of values that are computed from these."""
        from quantizer.graph.channels.origins import Runs, computed_parts, origins_of

        self.where.origins.update(origins_of(self.graph))
        if self.single is not EVERY_JOIN:
            none: dict[str, Runs] = {}
            runs = or_without(
                "the parts of values that are computed from joined ones",
                lambda: computed_parts(self.graph, self.where.origins),
                none,
            )
            self.where.runs.update(runs)
            self.where.apart.update(_staying_apart(self.graph, self.where))

    def layout(self) -> Layout:
        """Return the layout."""
        for node in self.graph.nodes:
            if self._is_placed(node) or not node.is_float:
                continue
            if node.is_join:
                self._place_join(node)
                continue
            is_joined = node.name in self.where.origins or node.name in self.after_joins
            if is_joined and not self._is_chosen(node):
                continue
            if not self._is_placed_behind(node) and self._has_new_values(node):
                self._place(node)
        return self.where

    def _is_placed(self, node: Node) -> bool:
        """Return whether it is decided where the node's output is quantized."""
        where = self.where
        name = node.name
        return name in where.served or name in where.unneeded or name in where.groups

    def _place(self, node: Node) -> None:
        """Place the group that begins with a node which computes new values."""
        group, join = self._chain(node)
        self._serve(group.members, group.point)
        if join:
            self.feeds[group.point] = join
        reads_parts = self._reads_parts(node)
        if reads_parts and group.point in self.where.apart:
            self._leave(group.members)
            return
        outer = {name for name, _ in outer_readers(self.graph, group.point)}
        # A sigmoid, a softmax, or a value that is computed of parts with different scales
        may_be_float = reads_parts or (
            node.row.kind == "nonlinear" and group.point == node.name
        )
        if may_be_float and outer == {""}:
            self._leave((node.name,))
            self.last[group.point] = group
            return
        self.where.groups[group.point] = group
        products = self._products_of_parts(group)
        if products and node.op != PART_SCALE:
            blend = Join(node.name, group, alone=(), products=products, is_returned=False)
            self.where.blends[group.point] = blend

    def _products_of_parts(self, group: Group) -> tuple[Multiplication, ...]:
        """Return the products of a value that is computed of several parts."""
        if group.point not in self.where.runs:
            return ()
        return tuple(self._products(values_readers(self.graph, group.point, self.where.floats)))

    def _products(self, reads: Iterable[Reading]) -> list[Multiplication]:
        """Return the readers that multiply the value that they read."""
        products = []
        for reader, value in reads:
            if reader and self._multiplies(reader, value):
                products.append(Multiplication(reader, value))
        return products

    def _is_placed_behind(self, node: Node) -> bool:
        """Place a value that is computed of parts behind the operators that bring these to one
        range, and return whether there are any.
        """
        is_moved = node.row.kind == "passthrough"
        if node.name not in self.where.runs or is_moved or node.op == PART_SCALE:
            return False
        group, _ = self._chain(node)
        if group.point not in self.where.runs or self._products_of_parts(group):
            return False
        reads = [*values_readers(self.graph, group.point, self.where.floats)]
        scaling = []
        for name, _ in reads:
            if name and self.graph.by_name[name].op == PART_SCALE:
                scaling.append(name)
                self.where.groups[name] = Group(name, (*group.members, name))
        if scaling and len(reads) == 1:
            self._serve(group.members, scaling[0])
        elif scaling:
            self._leave(group.members)
        return bool(scaling)

    def _reads_parts(self, node: Node) -> bool:
        """Return whether the node computes element by element with a value whose parts have
        different scales.
        """
        if node.row.axes not in ELEMENTWISE and node.name not in self.where.runs:
            return False
        for name in node.refs():
            is_joined = (
                name in self.where.origins
                or name in self.after_joins
                or name in self.where.runs
            )
            if is_joined and quantization_point(self.graph, self.where, name) is None:
                return True
        return False

    def _place_join(self, node: Node) -> None:
        """Place a join with its activation function, with one scale if the config asks for
        it.
        """
        group, outer = self._chain(node)
        self.after_joins.update(group.members)
        if outer:
            self.feeds[node.name] = outer
        outside = []
        products = []
        for name, value in values_readers(self.graph, group.point, self.where.floats):
            if self._is_join(name):
                continue
            outside.append(name)
            if self._needs_one_scale(name, value):
                products.append(Multiplication(name, value))
        is_named = node.name in self.single and self.single is not EVERY_JOIN
        is_scaled = self.graph.by_name[group.point].op == PART_SCALE
        is_single = is_named or is_scaled or (self.single is EVERY_JOIN and bool(outside))
        if node.name in self.where.floats and not products:
            is_single = False
        if not outside and not is_single:
            return
        points = [point for point in self.feeds if self._leads(point, node.name)]
        groups = {**self.last, **self.where.groups}
        alone = [groups[point] for point in points if point in groups]
        self.where.joins[node.name] = Join(
            name=node.name,
            group=group,
            alone=tuple(alone),
            products=tuple(products),
            is_returned="" in outside,
            is_single=is_single,
        )
        if is_single:
            self._serve(group.members, group.point)
            self.where.groups[group.point] = group
            for part in alone:
                self.where.groups.pop(part.point, None)
                self._serve((part.point,), group.point)

    def _serve(self, members: Iterable[str], point: str) -> None:
        """Record that the outputs of layers are quantized at another layer."""
        for member in members:
            if member != point:
                self.where.served[member] = point
                self.where.unneeded.discard(member)

    def _leave(self, members: Iterable[str]) -> None:
        """Record that no layer has to quantize the outputs of layers."""
        for member in members:
            self.where.served.pop(member, None)
            self.where.unneeded.add(member)

    def _leads(self, point: str, join: str) -> bool:
        """Return whether a join is the only reader of a point, directly or through other joins
        with one reader.
        """
        if self.graph.by_name[point].is_join:
            return False
        following: str | None = self.feeds[point]
        while following is not None and following != join and following not in self.where.joins:
            following = self.feeds.get(following)
        return following == join

    def _is_join(self, name: str) -> bool:
        return bool(name) and self.graph.by_name[name].is_join

    def _needs_one_scale(self, reader: str, value: str) -> bool:
        """Return whether a layer multiplies a value whose parts have different scales."""
        if not reader or not self._multiplies(reader, value):
            return False
        origins = self.where.origins.get(value)
        if origins is None:
            # It reads the activation function after the join
            return True
        points: set[str] = set()
        for source in origins.sources:
            points.add(quantization_point(self.graph, self.where, source) or source)
        return len(points) + origins.constants > 1

    def _has_new_values(self, node: Node) -> bool:
        """Return whether the node's output has other values than its inputs, so that it needs a
        quantization of its own.
        """
        kind = _producer(self.graph, node).row.kind
        if self._is_written_over(node):
            return False
        if node.name in self.where.floats or kind in ("unknown", "float"):
            return self._is_quantized_for_products(node)
        if node.op == "input" or self._is_chosen(node):
            return True
        if node.row.axes is PADDED and not pads_zeros(node.attrs):
            return True
        if node.row.rectifies:
            return quantization_point(self.graph, self.where, node.name) is None
        return kind not in ("passthrough", "structural")

    def _is_quantized_for_products(self, node: Node) -> bool:
        """Return whether a float value is quantized because layers multiply it. The layers that
        multiply an argument, or a scaled input as it was, do so at their inputs, if they can.
        """
        floats = self.where.floats
        if floats.get(node.name) not in (ARGUMENT, SCALED):
            return bool(self._products(outer_readers(self.graph, node.name, floats)))
        # A join of an argument with others is quantized for the product of the join
        products = self._products(values_readers(self.graph, node.name, floats))
        if self.single is EVERY_JOIN or not all(map(self._is_own_input, products)):
            return bool(products)
        if products:
            self.where.arguments[node.name] = tuple(products)
        return False

    def _multiplies(self, reader: str, value: str) -> bool:
        """Return whether a layer multiplies a value in integers."""
        node = self.graph.by_name[reader]
        return multiplies_values(node, value) and not computes_in_float(node, self.where.floats)

    def _is_own_input(self, product: Multiplication) -> bool:
        """Return whether a layer can quantize a value as its own input. It cannot if the value
        is one of a list.
        """
        return product.value in self.graph.by_name[product.layer].input_roles().values()

    def _is_chosen(self, node: Node) -> bool:
        """Return whether the node's values were chosen among values with mask constants."""
        producer = _producer(self.graph, node)
        among_constants = any(self.where.floats.get(name) == MASK for name in producer.refs())
        return among_constants and chooses(producer)

    def _is_written_over(self, node: Node) -> bool:
        """Return whether only joins read the node's values, and all of them overwrite these."""
        names = [name for name, _ in readers(self.graph, node.name)]
        source = maker(self.graph, node.name)
        for name in names:
            if not self._is_join(name) or source in self.where.origins[name].sources:
                return False
        return bool(names)

    def _chain(self, node: Node) -> tuple[Group, str]:
        """Return the group that starts at `node`, and its only reader if that is a join, or
        "".
        """
        producer = _producer(self.graph, node)
        members = [*dict.fromkeys((producer.name, node.name))]
        point = node.name
        # Moves, which belong to the group if an activation function follows
        moves: list[str] = []
        names = self.graph.consumers[node.name]
        while len(names) == 1 and names[0]:
            reader = self.graph.by_name[names[0]]
            if reader.row.kind == "fusable" and not is_entry(node) and reader.is_float:
                members += [*moves, reader.name]
                moves = []
                point = reader.name
            elif reader.row.kind == "passthrough" and reader.is_float:
                moves.append(reader.name)
            elif reader.op == PART_SCALE and node.is_join:
                return Group(reader.name, (*members, *moves, reader.name)), ""
            else:
                join = reader.name if reader.is_join else ""
                return Group(point, tuple(members)), join
            names = self.graph.consumers[reader.name]
        return Group(point, tuple(members)), ""


def _staying_apart(graph: Graph, where: Layout) -> set[str]:
    """Return the nodes whose values are computed of parts, and whose readers are the output,
    factors for the parts, or more such nodes.
    """
    apart: set[str] = set()
    for node in reversed(graph.nodes):
        if node.name not in where.runs:
            continue
        needs_one_scale = False
        for name, _ in values_readers(graph, node.name, where.floats):
            if not name or graph.by_name[name].op == PART_SCALE:
                continue
            if graph.by_name[name].row.kind == "mac" or name not in apart:
                needs_one_scale = True
        if not needs_one_scale:
            apart.add(node.name)
    return apart


def _producer(graph: Graph, node: Node) -> Node:
    """Return the operator with several results (as an LSTM) of which the node is one, or the
    node itself.
    """
    return graph.by_name[next(node.refs())] if node.op == "getitem" else node
