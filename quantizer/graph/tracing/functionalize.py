"""Rewrite exported programs that write through shared memory, as in `x[:, 0] = y`, or contain
subprograms (`vmap`, `torch.no_grad`).

Each write through a view becomes a new tensor: `x` with `y` in its place. Views of `x` that are
read later are made again from this tensor. torch's own decomposition does the same, and takes
about twice the time of a trace. Other in-place operators stay: the conversion to a graph
expresses them by renaming values.
"""

import operator
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from quantizer.errors import ModelError
from quantizer.graph import targets

_ATEN = torch.ops.aten
_IDENTITIES = ("dropout", "feature_dropout", "alpha_dropout")
"""Operators that return their input itself in inference, which their schemas do not say."""
_SCATTERS: dict[Any, Any] = {
    _ATEN.select.int: _ATEN.select_scatter.default,
    _ATEN.slice.Tensor: _ATEN.slice_scatter.default,
}
"""What writes into a view, by the operator that makes the view."""
_PARTS = (_ATEN.unbind.int, _ATEN.split.Tensor, _ATEN.split_with_sizes.default)
"""Operators that make several views, which `getitem` picks from."""
_VIEWS = (
    *_SCATTERS,
    _ATEN.view.default,
    _ATEN.transpose.int,
    _ATEN.permute.default,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
    _ATEN.expand.default,
    *_PARTS,
    operator.getitem,
)
"""Operators that never copy. Others, such as `reshape`, do so for some strides."""


def is_inplace(node: fx.Node) -> bool:
    """Return whether the node writes into its first argument, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    name = schema.name
    return bool(name.endswith("_") and not name.endswith("__"))


class ViewWrites:
    """The writes of a program to tensors with views, and to tensors of the module.

    Args:
        graph: of the program.
        owned: the placeholders of the module's tensors.

    Attributes:
        written: the tensors that are written.
        is_known: whether `rewrite` can replace all writes.
    """

    def __init__(self, graph: fx.Graph, owned: Container[fx.Node]) -> None:
        self.graph = graph
        self.written: set[fx.Node] = set()
        self.is_known = True
        # A view or the result of a write, and the value that it was made of
        self._sources: dict[fx.Node, fx.Node] = {}
        self._newest: dict[fx.Node, fx.Node] = {}
        self._views: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
        self._find(owned)

    def _find(self, owned: Container[fx.Node]) -> None:
        """Find the tensors that are written, and whether each write is known."""
        viewed: set[fx.Node] = set()
        copied: set[fx.Node] = set()
        unknown: set[fx.Node] = set()
        for node in self.graph.nodes:
            source = node.args[0] if node.args else None
            if node.op != "call_function" or not isinstance(source, fx.Node):
                continue
            owner = self._owner(source)
            if is_inplace(node):
                self._sources[node] = source
                if owner in viewed or owner in owned:
                    self.written.add(owner)
                if owner in copied or not self._is_known_write(node):
                    unknown.add(owner)
            elif _is_view(node):
                self._sources[node] = source
                viewed.add(owner)
                if node.target not in _VIEWS:
                    copied.add(owner)
        self.is_known = self.written.isdisjoint(unknown)

    def _owner(self, node: fx.Node) -> fx.Node:
        """Return the tensor whose memory a view has."""
        while node in self._sources:
            node = self._sources[node]
        return node

    def _is_known_write(self, node: fx.Node) -> bool:
        """Return whether a write has a twin that computes the same dtype, and goes to a view
        whose values can be written back.
        """
        if not _has_twin(node):
            return False
        view = self._sources[node]
        while view in self._sources:
            if is_inplace(view):
                view = self._sources[view]
            elif _written_back(view, view, None) is None:
                return False
            else:
                view = self._whole(view)
        return True

    def _whole(self, view: fx.Node) -> fx.Node:
        """Return what a view is a part of."""
        source = self._sources[view]
        return self._sources[source] if source.target in _PARTS else source

    def rewrite(self) -> None:
        """Replace the writes to all tensors in `written`."""
        writes: list[fx.Node] = []
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                self._read_current(node)
                owner = self._owner(node)
                if owner is node or owner not in self.written:
                    continue
                if is_inplace(node):
                    self._write(node, owner)
                    writes.append(node)
                else:
                    views = self._views.setdefault(owner, {})
                    views[node] = node
        for node in reversed(writes):
            self.graph.erase_node(node)

    def _read_current(self, node: fx.Node) -> None:
        """Make a node read the values of this moment."""
        for source in node.all_input_nodes:
            current = self._current(source)
            if current is not source:
                node.replace_input_with(source, current)

    def _current(self, node: fx.Node) -> fx.Node:
        """Return the node that has now the value of a tensor or a view."""
        owner = self._owner(node)
        if owner not in self.written:
            return node
        node = self._without_writes(node)
        if node is owner:
            return self._newest.get(owner, owner)
        views = self._views.setdefault(owner, {})
        if node not in views:
            source = self._sources[node]
            views[node] = self._call(
                node.target, (self._current(source), *node.args[1:]), node.kwargs, node.meta
            )
        return views[node]

    def _without_writes(self, node: fx.Node) -> fx.Node:
        """Return the tensor or the view that a write has returned."""
        while is_inplace(node):
            node = self._sources[node]
        return node

    def _write(self, node: fx.Node, owner: fx.Node) -> None:
        """Insert what computes the new value of a tensor."""
        value = self._call(_twin(node), node.args, node.kwargs, node.meta)
        views: dict[fx.Node, fx.Node] = {}
        view = self._without_writes(node)
        while view is not owner:
            views[view] = value
            whole = self._without_writes(self._whole(view))
            call = _written_back(view, self._current(whole), value)
            # `is_known` says so
            assert call is not None
            target, args, kwargs = call
            meta = {**node.meta, "val": whole.meta["val"]}
            value = self._call(target, args, kwargs, meta)
            view = whole
        self._newest[owner] = value
        self._views[owner] = views

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        meta: Mapping[str, Any],
    ) -> fx.Node:
        """Insert a call."""
        node = self.graph.call_function(target, args, dict(kwargs))
        node.meta = dict(meta)
        return node


def _is_view(node: fx.Node) -> bool:
    """Return whether the node's output shares memory with its input, by its schema or as a part
    of such an output.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        source = node.args[0]
        is_part = getattr(node.target, "__name__", "") == "getitem"
        return is_part and isinstance(source, fx.Node) and _is_view(source)
    if schema.name.removeprefix("aten::") in _IDENTITIES:
        return True
    for value in schema.returns:
        alias = value.alias_info
        if alias is not None and not alias.is_write:
            return True
    return False


def _written_back(view: fx.Node, whole: fx.Node, value: Any) -> tuple[Any, ...] | None:
    """Return the operator and the arguments that put new values of a view into a tensor.

    Args:
        view: the node that makes the view.
        whole: the tensor.
        value: the new values; any object, to ask whether there is such an operator.

    Returns:
        (operator, positional arguments, keyword arguments); None if there is no operator.
    """
    source: Any = view.args[0]
    arguments: tuple[Any, ...] = view.args[1:]
    if view.target in _SCATTERS:
        return _SCATTERS[view.target], (whole, value, *arguments), view.kwargs
    if source.target in _PARTS:
        return _part_written_back(source, arguments[0], whole, value)
    if view.target is _ATEN.transpose.int:
        return view.target, (value, *arguments), {}
    if view.target is _ATEN.permute.default:
        dims = [dim % len(arguments[0]) for dim in arguments[0]]
        return view.target, (value, [dims.index(axis) for axis in range(len(dims))]), {}
    if view.target is _ATEN.unsqueeze.default:
        return _ATEN.squeeze.dim, (value, *arguments), {}
    if view.target is _ATEN.view.default:
        sizes = [size if isinstance(size, int) else -1 for size in source.meta["val"].shape]
        if sizes.count(-1) <= 1:
            return _ATEN.reshape.default, (value, sizes), {}
    return None


def _part_written_back(
    parts: fx.Node, index: int, whole: fx.Node, value: Any
) -> tuple[Any, ...] | None:
    """Return the same for one of several views that an operator makes."""
    dim = targets.named_arguments(parts).get("dim", 0)
    if parts.target is _ATEN.unbind.int:
        return _ATEN.select_scatter.default, (whole, value, dim, index), {}
    sizes = [part.shape[dim] for part in parts.meta["val"][: index + 1]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    end = sum(sizes)
    return _ATEN.slice_scatter.default, (whole, value, dim, end - sizes[-1], end), {}


def _twin(node: fx.Node) -> Any:
    """Return the operator that returns what another one writes, None if there is none."""
    name = targets.target_name(node)
    twin = targets.functional(name)
    if twin == name:
        return None
    return targets.resolve_target(twin)


def _has_twin(node: fx.Node) -> bool:
    """Return whether an operator computes what another one writes, in the same dtype."""
    twin = _twin(node)
    name = targets.target_name(node)
    if twin is None or targets.is_copy(name):
        return twin is not None
    args, kwargs = pytree.tree_map_only(
        fx.Node, lambda argument: argument.meta["val"], (node.args, node.kwargs)
    )
    with torch.no_grad():
        result: Any = twin(*args, **kwargs)
    return bool(result.dtype == args[0].dtype)


def functionalize(program: ExportedProgram, model: str) -> ExportedProgram:
    """Return the program without writes to memory that a view shares, and without subprograms
    that only switch a mode.

    Raises:
        ModelError: the model changes one of its own parameters or buffers.
    """
    owned = _tensors_of_module(program)
    writes = ViewWrites(program.graph, owned)
    decomposes = bool(writes.written) and not writes.is_known
    if decomposes or _has_subprograms(program.graph):
        # torch's own decomposition traces the program again
        before = _input_sizes(program)
        program = program.run_decompositions({})
        if _input_sizes(program) != before:
            raise ModelError(
                f"{model} cannot be traced for any batch size: torch fixes it where forward() "
                "writes into a view",
                help="compute a new tensor instead of changing a part of one",
            )
        owned = _tensors_of_module(program)
        writes = ViewWrites(program.graph, owned)
    for changed in _changed_state(program, writes, owned):
        raise ModelError(
            f"{model} cannot be quantized: it changes its own {changed!r} when it is called",
            help="compute a new tensor instead of changing the buffer, or do so in training "
            "mode only",
        )
    writes.rewrite()
    _name_dtypes(program.graph)
    return program


def _input_sizes(program: ExportedProgram) -> list[bool]:
    """Return of each size of the inputs, in order, whether it is open."""
    are_open: list[bool] = []
    for node in program.graph.find_nodes(op="placeholder"):
        for size in getattr(node.meta.get("val"), "shape", ()):
            # A symbol that torch has fixed is still a symbol
            are_open.append(not isinstance(size, int) and not size.node.expr.is_number)
    return are_open


def _name_dtypes(graph: fx.Graph) -> None:
    """Give casts to the dtype of a tensor that dtype instead of the tensor, of which no value
    reaches the result.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.type_as.default):
        tensor, other = node.args
        node.target = torch.ops.aten.to.dtype
        node.args = (tensor, other.meta["val"].dtype)


def _tensors_of_module(program: ExportedProgram) -> dict[fx.Node, str]:
    """Return the paths of the module's tensors by their placeholders."""
    paths: dict[str, str] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind != InputKind.USER_INPUT:
            paths[spec.arg.name] = str(spec.target)
    owned: dict[fx.Node, str] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in paths:
            owned[node] = paths[node.name]
    return owned


def _changed_state(
    program: ExportedProgram, writes: ViewWrites, owned: dict[fx.Node, str]
) -> Iterator[str]:
    """Yield the parameters and buffers that a call changes; a graph cannot express that.

    RWKV, which writes through views, divides its weights in its first call. Like torch's
    decomposition of such programs, a graph does so in each call, from the stored weights.
    """
    signature = program.graph_signature
    for output in signature.output_specs:
        if output.kind == OutputKind.BUFFER_MUTATION:
            yield str(output.target)
    has_views = any(node not in owned for node in writes.written)
    accepted = signature.parameters if has_views else ()
    for node in writes.written:
        if node in owned and owned[node] not in accepted:
            yield owned[node]


def _has_subprograms(graph: fx.Graph) -> bool:
    """Return whether a node is a program of its own or a function of torch.func."""
    for node in graph.nodes:
        module = str(getattr(node.target, "__module__", ""))
        is_functorch = module.startswith("torch._functorch")
        if node.op == "get_attr" or (node.op == "call_function" and is_functorch):
            return True
    return False
