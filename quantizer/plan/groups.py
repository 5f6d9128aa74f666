"""Where activations are quantized: what shares one quantization and what needs none. Knows
operators, no config.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from quantizer.graph.axis_rules import ALIKE, PADDED, PRODUCT, QUOTIENT, SAME, pads_zeros
from quantizer.graph.computed_parts import Runs, computed_parts
from quantizer.graph.ir import Graph, Node, readers
from quantizer.graph.origins import Origins, maker, origins_of
from quantizer.plan.floating import ARGUMENT, MASK, computes_in_float, floating, multiplied
from quantizer.plan.sentinels import chooses
from quantizer.plan.value_readers import outer_readers, values_readers


@dataclass(frozen=True)
class Group:
    """Layers whose values are quantized once, at `point`; all of `members` may say how."""

    point: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Product:
    """A layer that multiplies `value`, which holds parts on different grids."""

    layer: str
    value: str


@dataclass(frozen=True)
class Join:
    """Values of several layers in one tensor, each quantized where it is made, or all of them
    at `group.point`.

    Attributes:
        name: the layer that joins them.
        group: it, and the activation function or the scaling after it, if nothing else reads
            what is before these.
        alone: the parts that nothing but this join reads, as they are quantized if each is on
            its own.
        products: the layers that multiply several parts at once, and so need one grid for them.
        is_returned: whether some of it is what the network returns.
        is_single: whether all parts are quantized at `group.point`, as somebody has asked for.
    """

    name: str
    group: Group
    alone: tuple[Group, ...]
    products: tuple[Product, ...]
    is_returned: bool
    is_single: bool = False


@dataclass(frozen=True)
class Layout:
    """Where a graph's floating-point values are quantized.

    Attributes:
        groups: what is quantized together, by the layer where it is.
        served: the layer that quantizes another's output; "" where none has to.
        floats: why others need no quantization.
        origins: of what each joined value consists.
        joins: the joins that are read by something else than another join, by name.
        arguments: what stays float as an argument and is multiplied as well; the layers that
            multiply it quantize it.
        runs: where the parts of joins lie in what is computed of them.
        apart: those of `runs` that nothing reads which needs one grid for all parts, however
            indirectly.
        blends: what is computed of parts and then multiplied by layers, like a join whose parts
            cannot be quantized before it, by where it is quantized.
    """

    groups: dict[str, Group]
    served: dict[str, str]
    floats: dict[str, str] = field(default_factory=dict)
    origins: dict[str, Origins] = field(default_factory=dict)
    joins: dict[str, Join] = field(default_factory=dict)
    arguments: dict[str, tuple[Product, ...]] = field(default_factory=dict)
    runs: dict[str, Runs] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    blends: dict[str, Join] = field(default_factory=dict)


class _Everything(Container[str]):
    """Holds any name."""

    def __contains__(self, name: object) -> bool:
        return True


_ELEMENTWISE = (SAME, ALIKE, PRODUCT, QUOTIENT)
PART_SCALE = "input_scale"
"""The operator that brings the parts of a join to one range, so that one scale loses
nothing.
"""
EVERY_JOIN: Container[str] = _Everything()
"""For devices that have one grid for all that lies in one tensor."""


def layout(graph: Graph, single: Container[str] = ()) -> Layout:
    """Group the graph's floating-point values.

    A convolution followed only by a ReLU is quantized after the ReLU. Reshapes, pooling maxima
    and other moves keep the quantization of their input, and so do the parts of a join. The
    last activation stays float.

    Args:
        single: the joins whose parts are quantized together, at the join and not before it.

    Source: pytorch_nndct 3.5, but for the joins.
    """
    return _Layouter(graph, single).layout()


class _Layouter:
    """Places quantizations node by node; a join comes after its sources."""

    def __init__(self, graph: Graph, single: Container[str]) -> None:
        self.graph, self.single = graph, single
        self.where = Layout({}, {}, floating(graph), origins_of(graph))
        if single is not EVERY_JOIN:
            self.where.runs.update(computed_parts(graph, self.where.origins))
            self.where.apart.update(_staying_apart(graph, self.where))
        # The join that alone reads a group's point, or another join.
        self.feeds: dict[str, str] = {}
        # What is only returned, and needs no quantization if it is not joined on one grid.
        self.last: dict[str, Group] = {}
        # Activation functions that belong to a join.
        self.after_joins: set[str] = set()

    def layout(self) -> Layout:
        """Return the layout."""
        for node in self.graph.nodes:
            is_placed = node.name in self.where.served or node.name in self.where.groups
            is_carried = node.name in self.where.origins or node.name in self.after_joins
            is_carried = is_carried and not self._is_chosen(node)
            if is_placed or not node.is_float:
                continue
            if node.is_join:
                self._place_join(node)
            elif (
                not is_carried and not self._is_placed_behind(node) and self._makes_values(node)
            ):
                self._place(node)
        return self.where

    def _place(self, node: Node) -> None:
        """Place the group that begins with a node which makes values."""
        group, join = self._chain(node)
        self._serve(group)
        if join:
            self.feeds[group.point] = join
        ends = {name for name, _ in outer_readers(self.graph, group.point)}
        # A sigmoid, a softmax, or what is computed of parts on different grids, and then only
        # returned.
        is_last = node.row.kind == "nonlinear" and group.point == node.name
        reads_parts = self._reads_parts(node)
        if reads_parts and group.point in self.where.apart:
            self.where.served.update(dict.fromkeys(group.members, ""))
        elif ends == {""} and (is_last or reads_parts):
            self.where.served[node.name] = ""
            self.last[group.point] = group
        else:
            self.where.groups[group.point] = group
            products = self._products_of_parts(group)
            if products and node.op != PART_SCALE:
                self.where.blends[group.point] = Join(
                    node.name, group, (), products, is_returned=False
                )

    def _products_of_parts(self, group: Group) -> tuple[Product, ...]:
        """The layers that multiply what is computed of several parts."""
        if group.point not in self.where.runs:
            return ()
        products: list[Product] = []
        for name, read in values_readers(self.graph, group.point, self.where.floats):
            if name and self._multiplies(name, read):
                products.append(Product(name, read))
        return tuple(products)

    def _is_placed_behind(self, node: Node) -> bool:
        """Place what is computed of parts behind the operators that bring these to one range,
        if any do.
        """
        if (
            node.name not in self.where.runs
            or node.row.kind == "passthrough"
            or node.op == PART_SCALE
        ):
            return False
        group, _ = self._chain(node)
        if group.point not in self.where.runs or self._products_of_parts(group):
            return False
        reading = [
            name for name, _ in values_readers(self.graph, group.point, self.where.floats)
        ]
        scaling = [
            name for name in reading if name and self.graph.by_name[name].op == PART_SCALE
        ]
        for name in scaling:
            self.where.groups[name] = Group(name, (*group.members, name))
        if scaling:
            point = scaling[0] if len(reading) == 1 else ""
            self.where.served.update(dict.fromkeys(group.members, point))
        return bool(scaling)

    def _reads_parts(self, node: Node) -> bool:
        """Whether the node computes element by element with a value whose parts are on
        different grids.
        """
        if node.row.axes not in _ELEMENTWISE and node.name not in self.where.runs:
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
        """Place a join with its activation function, on a grid of its own where that is asked
        for.
        """
        group, outer = self._chain(node)
        self.after_joins.update(group.members)
        if outer:
            self.feeds[node.name] = outer
        reading = values_readers(self.graph, group.point, self.where.floats)
        outside = [(name, read) for name, read in reading if not self._is_join(name)]
        products = [
            Product(name, read) for name, read in outside if self._needs_one_grid(name, read)
        ]
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
            is_returned=any(not name for name, _ in outside),
            is_single=is_single,
        )
        if is_single:
            self._serve(group)
            self.where.groups[group.point] = group
            for part in alone:
                self.where.groups.pop(part.point, None)
                self.where.served[part.point] = group.point

    def _serve(self, group: Group) -> None:
        """Note where the members of a group are quantized."""
        for member in group.members:
            if member != group.point:
                self.where.served[member] = group.point

    def _leads(self, point: str, join: str) -> bool:
        """Whether all that reads a point is a join, through others that nothing else reads."""
        if self.graph.by_name[point].is_join:
            return False
        following: str | None = self.feeds[point]
        while following is not None and following != join and following not in self.where.joins:
            following = self.feeds.get(following)
        return following == join

    def _is_join(self, name: str) -> bool:
        return bool(name) and self.graph.by_name[name].is_join

    def _needs_one_grid(self, reader: str, read: str) -> bool:
        """Whether a layer multiplies a value whose parts are on different grids."""
        if not reader or not self._multiplies(reader, read):
            return False
        origins = self.where.origins.get(read)
        if origins is None:
            return True  # behind an activation function
        grids: set[str] = set()
        for source in origins.sources:
            grids.add(quantization_point(self.graph, self.where, source) or source)
        return len(grids) + origins.constants > 1

    def _makes_values(self, node: Node) -> bool:
        """Whether the node's output has other values than its inputs, so that it needs a
        quantization of its own.
        """
        where, kind = self.where, _producer(self.graph, node).row.kind
        if self._is_written_over(node):
            return False
        if node.name in where.floats or kind in ("unknown", "float"):
            # A join of an argument with others is quantized for what multiplies it, and the
            # argument stays as it is.
            is_argument = where.floats.get(node.name) == ARGUMENT
            readers_of = values_readers if is_argument else outer_readers
            products: list[Product] = []
            for reader, read in readers_of(self.graph, node.name, where.floats):
                if reader and self._multiplies(reader, read):
                    products.append(Product(reader, read))
            if (
                is_argument
                and self.single is not EVERY_JOIN
                and all(map(self._is_own_input, products))
            ):
                if products:
                    where.arguments[node.name] = tuple(products)
                return False
            return bool(products)
        if node.op == "input" or self._is_chosen(node):
            return True
        if node.row.axes is PADDED and not pads_zeros(node.attrs):
            return True
        if node.row.rectifies:
            return quantization_point(self.graph, where, node.name) is None
        return kind not in ("passthrough", "structural")

    def _multiplies(self, reader: str, read: str) -> bool:
        """Whether a layer multiplies a value in integers."""
        node = self.graph.by_name[reader]
        return multiplied(node, read) and not computes_in_float(node, self.where.floats)

    def _is_own_input(self, product: Product) -> bool:
        """Whether a layer can quantize a value as its own input: not one of a list that it
        reads.
        """
        return product.value in self.graph.by_name[product.layer].input_roles().values()

    def _is_chosen(self, node: Node) -> bool:
        """Whether the node's values are those that were chosen among values with sentinels."""
        producer = _producer(self.graph, node)
        among_sentinels = any(self.where.floats.get(name) == MASK for name in producer.refs())
        return among_sentinels and chooses(producer)

    def _is_written_over(self, node: Node) -> bool:
        """Whether nothing is left of the node's values in the joins that alone read them."""
        reads = list(readers(self.graph, node.name))
        if not reads or not all(self._is_join(name) for name, _ in reads):
            return False
        source = maker(self.graph, node.name)
        return all(source not in self.where.origins[name].sources for name, _ in reads)

    def _chain(self, node: Node) -> tuple[Group, str]:
        """The group that starts at `node`, and the join that alone reads it."""
        producer = _producer(self.graph, node)
        members = [*dict.fromkeys((producer.name, node.name))]
        point, current = node.name, node
        pending: list[str] = []
        takes_activation = node.op not in ("input", "quant_stub")
        while True:
            reading = self.graph.consumers[current.name]
            if len(reading) != 1 or reading[0] == "":
                break
            reader = self.graph.by_name[reading[0]]
            if reader.row.kind == "fusable" and takes_activation and reader.is_float:
                members += [*pending, reader.name]
                pending, point, current = [], reader.name, reader
            elif reader.row.kind == "passthrough" and reader.is_float:
                pending.append(reader.name)
                current = reader
            elif reader.op == PART_SCALE and node.is_join:
                return Group(reader.name, (*members, *pending, reader.name)), ""
            else:
                return Group(point, tuple(members)), reader.name if reader.is_join else ""
        return Group(point, tuple(members)), ""


def _staying_apart(graph: Graph, where: Layout) -> set[str]:
    """Return what is computed of parts and read by the output, by factors for the parts, or to
    compute more such.
    """
    apart: set[str] = set()
    for node in reversed(graph.nodes):
        if node.name not in where.runs:
            continue
        needs_one = False
        for name, _ in values_readers(graph, node.name, where.floats):
            reader = graph.by_name.get(name)
            keeps = (
                reader is None
                or reader.op == PART_SCALE
                or (reader.row.kind != "mac" and name in apart)
            )
            needs_one = needs_one or not keeps
        if not needs_one:
            apart.add(node.name)
    return apart


def quantization_point(graph: Graph, where: Layout, name: str) -> str | None:
    """Return the layer at which a node's values are quantized, None where its parts are on
    different grids, or on none.

    That is its group's point, or that of the values it hands on.
    """
    node = graph.by_name[name]
    if name in where.groups:
        return name
    if where.served.get(name):
        return quantization_point(graph, where, where.served[name])
    if node.row.keeps_scale:
        point = quantization_point(graph, where, next(node.refs()))
        if point is not None:
            return point
    origins = where.origins.get(name)
    if origins is None or origins.constants:
        return None
    points = {quantization_point(graph, where, source) for source in origins.sources}
    return points.pop() if len(points) == 1 else None


def _producer(graph: Graph, node: Node) -> Node:
    """The operator that computes what the node picks out of several results (an LSTM's
    outputs), else the node.
    """
    return graph.by_name[next(node.refs())] if node.op == "getitem" else node
