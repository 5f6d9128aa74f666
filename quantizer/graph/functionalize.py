"""Rewrite exported programs that write through shared memory or contain subprograms (`vmap`,
`torch.no_grad`), with torch's own decomposition.

Other in-place operators stay: the conversion to a graph expresses them by renaming values.
"""

from collections.abc import Iterator

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from quantizer.errors import ModelError

_IDENTITIES = ("dropout", "feature_dropout", "alpha_dropout")
"""Operators that return their input itself in inference, which their schemas do not say."""


def functionalize(
    program: ExportedProgram,
    model: str,
) -> ExportedProgram:
    """Return the program without writes to memory that a view shares, and without subprograms
    that only switch a mode.

    Raises:
        ModelError: the model changes one of its own parameters or buffers.
    """
    if _writes_shared(program.graph) or _has_subprograms(program.graph):
        program = program.run_decompositions({})
    for changed in _changed_state(program):
        raise ModelError(
            f"{model} cannot be quantized: it changes its own {changed!r} when it is called",
            help="compute a new tensor instead of changing the buffer, or do so in training "
            "mode only",
        )
    return program


def is_inplace(node: fx.Node) -> bool:
    """Return whether the node writes into its first argument, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    return bool(schema.name.endswith("_") and not schema.name.endswith("__"))


def _changed_state(program: ExportedProgram) -> Iterator[str]:
    """Yield the parameters and buffers that a call changes; a graph cannot express that."""
    signature = program.graph_signature
    for output in signature.output_specs:
        if output.kind == OutputKind.BUFFER_MUTATION:
            yield str(output.target)
    owned: dict[str, str] = {}
    for spec in signature.input_specs:
        if spec.kind != InputKind.USER_INPUT:
            owned[spec.arg.name] = str(spec.target)
    for node in program.graph.nodes:
        written = node.args[0] if is_inplace(node) else None
        if isinstance(written, fx.Node) and written.name in owned:
            yield owned[written.name]


def _writes_shared(graph: fx.Graph) -> bool:
    """Return whether an in-place operator writes to memory of which a view exists.

    Views that are made later see the new values anyway.
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
    """Return whether a node is a program of its own or a function of torch.func."""
    for node in graph.nodes:
        module = str(getattr(node.target, "__module__", ""))
        is_functorch = module.startswith("torch._functorch")
        if node.op == "get_attr" or (node.op == "call_function" and is_functorch):
            return True
    return False


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
    aliases = [value.alias_info for value in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
