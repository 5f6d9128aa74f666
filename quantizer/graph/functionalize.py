"""Which programs write through shared memory, and torch's own rewriting of those. Plain in-place operators stay: renaming
values expresses them.
"""

from __future__ import annotations

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from quantizer.errors import ModelError

# In inference these hand on their input itself, which their schemas do not say.
_IDENTITIES = ("dropout", "feature_dropout", "alpha_dropout")


def functionalize(program: ExportedProgram, model: str) -> ExportedProgram:
    """The program itself, or without in-place operators where one writes to memory that a view shares.

    Raises:
        ModelError: the model changes one of its own parameters or buffers.
    """
    _refuse_state(program, model)
    return program.run_decompositions({}) if _writes_shared(program.graph) else program


def is_inplace(node: fx.Node) -> bool:
    """Whether the node writes into its first argument (its schema says so)."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.is_mutable and schema.name.endswith("_") and not schema.name.endswith("__"))


def _refuse_state(program: ExportedProgram, model: str) -> None:
    """A straight line of layers keeps nothing from one call to the next."""
    owned = {s.arg.name: s.target for s in program.graph_signature.input_specs if s.kind != InputKind.USER_INPUT}
    for node in program.graph.nodes:
        written = node.args[0] if is_inplace(node) else None
        if isinstance(written, fx.Node) and written.name in owned:
            raise ModelError(
                f"{model} cannot be quantized: it changes its own {owned[written.name]!r} when it is called",
                help="compute a new tensor instead of changing the buffer, or do so in training mode only",
            )


def _writes_shared(graph: fx.Graph) -> bool:
    """Whether an in-place operator writes to memory of which a view exists; views made later see the new values anyway."""
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


def _is_view(node: fx.Node) -> bool:
    """Whether the node's output shares memory with its input: its schema says so, or it is a part of such an output."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        source = node.args[0]
        return getattr(node.target, "__name__", "") == "getitem" and isinstance(source, fx.Node) and _is_view(source)
    identity = schema.name.removeprefix("aten::") in _IDENTITIES
    return identity or any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
