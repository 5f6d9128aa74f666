"""Which programs write through shared memory or hold subprograms (`vmap`, `torch.no_grad`), and
torch's own rewriting of those. Plain in-place operators stay: renaming values expresses them.
"""

from collections.abc import Iterator

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from quantizer.errors import ModelError

# In inference these hand on their input itself, which their schemas do not say.
_IDENTITIES = ("dropout", "feature_dropout", "alpha_dropout")


def functionalize(program: ExportedProgram, model: str) -> ExportedProgram:
    """The program itself, or without in-place operators where one writes to memory that a view
    shares, and without subprograms that only switch something while they run.

    Raises:
        ModelError: the model changes one of its own parameters or buffers.
    """
    if _writes_shared(program.graph) or _has_subprograms(program.graph):
        program = program.run_decompositions({})
    changed = next(_changed_state(program), None)
    if changed is None:
        return program
    raise ModelError(
        f"{model} cannot be quantized: it changes its own {changed!r} when it is called",
        help="compute a new tensor instead of changing the buffer, or do so in training mode "
        "only",
    )


def is_inplace(node: fx.Node) -> bool:
    """Whether the node writes into its first argument (its schema says so)."""
    schema = getattr(node.target, "_schema", None)
    return bool(
        schema
        and schema.is_mutable
        and schema.name.endswith("_")
        and not schema.name.endswith("__")
    )


def _changed_state(program: ExportedProgram) -> Iterator[str]:
    """Parameters and buffers that a call changes; a straight line of layers keeps nothing from
    one call to the next.
    """
    signature = program.graph_signature
    yield from (
        str(s.target) for s in signature.output_specs if s.kind == OutputKind.BUFFER_MUTATION
    )
    owned = {
        s.arg.name: str(s.target)
        for s in signature.input_specs
        if s.kind != InputKind.USER_INPUT
    }
    for node in program.graph.nodes:
        written = node.args[0] if is_inplace(node) else None
        if isinstance(written, fx.Node) and written.name in owned:
            yield owned[written.name]


def _writes_shared(graph: fx.Graph) -> bool:
    """Whether an in-place operator writes to memory of which a view exists; later views see the
    new values anyway.
    """
    owner: dict[fx.Node, fx.Node] = {}
    viewed: set[fx.Node] = set()
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if node.op != "call_function" or not isinstance(source, fx.Node):
            continue
        root = owner.get(source, source)
        if is_inplace(node):
            if root in viewed:
                return True
            owner[node] = root
        elif _is_view(node):
            owner[node] = root
            viewed.add(root)
    return False


def _has_subprograms(graph: fx.Graph) -> bool:
    """Whether a node is a program of its own or a function of torch.func, not an operator."""
    modules = (
        str(getattr(node.target, "__module__", ""))
        for node in graph.nodes
        if node.op == "call_function"
    )
    return any(node.op == "get_attr" for node in graph.nodes) or any(
        m.startswith("torch._functorch") for m in modules
    )


def _is_view(node: fx.Node) -> bool:
    """Whether the node's output shares memory with its input: its schema says so, or it is a
    part of such an output.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        source = node.args[0]
        return (
            getattr(node.target, "__name__", "") == "getitem"
            and isinstance(source, fx.Node)
            and _is_view(source)
        )
    identity = schema.name.removeprefix("aten::") in _IDENTITIES
    return identity or any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in schema.returns
    )
