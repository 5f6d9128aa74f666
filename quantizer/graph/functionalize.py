"""Rewrite exported programs that write through shared memory or contain subprograms (`vmap`,
`torch.no_grad`).

Other in-place operators stay: the conversion to a graph expresses them by renaming values.
"""

from collections.abc import Iterator

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from quantizer.errors import ModelError
from quantizer.graph.view_writes import ViewWrites


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
