"""A network as a `torch.export` program: batch and lengths left open, no traces of where and
from what it was made.
"""

import io
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from quantizer.errors import ModelError
from quantizer.graph.ir import Graph
from quantizer.graph.lengths import Length
from quantizer.graph.trace import quiet, without_stack_traces

_PLACES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")


def saved(program: ExportedProgram) -> bytes:
    """The bytes of a `.pt2` file.

    Raises:
        ModelError: torch has no form for a part of it, as for some arithmetic with sizes.
    """
    buffer = io.BytesIO()
    try:
        with quiet():
            torch.export.save(program, buffer)
    except Exception as error:
        raise _refused("this network cannot be saved by torch", error) from error
    return buffer.getvalue()


def loaded(content: bytes) -> nn.Module:
    """What a user of these bytes runs."""
    with quiet():
        return torch.export.load(io.BytesIO(content)).module()


def exported(
    module: nn.Module, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ExportedProgram:
    """The program of a module that is called as `graph`'s model; `args` and `kwargs` must hold
    no data of the user.

    Raises:
        ModelError: torch.export refuses it.
    """
    if kwargs:
        module.forward = _by_name(module.forward, args, kwargs)
    for of_length in (_named, _guarded):
        try:
            with quiet(), torch.no_grad(), without_stack_traces():
                opened = _open_sizes(graph, args, kwargs, of_length)
                program = torch.export.export(module, args, kwargs, dynamic_shapes=opened)
            break
        except Exception as error:
            if graph.lengths and of_length is _named:
                continue  # what is wrong with the module itself is wrong again
            raise _refused(f"{graph.model} cannot be exported by torch", error) from error
    for node in program.graph.nodes:
        for key in _PLACES:
            node.meta.pop(key, None)
    return program


def _refused(what: str, error: Exception) -> ModelError:
    first = str(error).strip().partition("\n")[0]
    return ModelError(
        f"{what}: {type(error).__name__}: {first}",
        help="the safetensors target needs no torch.export",
    )


def _by_name(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """`forward` with each keyword in its signature: torch.export cannot match open shapes with
    a bare **kwargs.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    positional = [
        Parameter(f"args_{index}", Parameter.POSITIONAL_ONLY) for index in range(len(args))
    ]
    keywords = [Parameter(name, Parameter.KEYWORD_ONLY) for name in kwargs]
    called.__signature__ = Signature([*positional, *keywords])  # type: ignore[attr-defined]
    return called


def _named(length: Length) -> Any:
    """A dimension of which torch must prove that the program holds between the ends."""
    return Dim(length.name, min=length.least, max=length.most)


def _guarded(length: Length) -> Any:
    """One that only has to stay open: for some lengths (a single token, often) the program may
    refuse to run.
    """
    return Dim.DYNAMIC(min=length.least, max=length.most)


def _open_sizes(
    graph: Graph,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of_length: Callable[[Length], Any],
) -> Any:
    """For each tensor of the call the dimensions that follow the batch or a length, in the
    shape of the call.
    """
    batch, inputs = Dim("batch", min=1), [node for node in graph.nodes if node.op == "input"]
    opened: list[dict[int, Any]] = [
        {0: batch} if node.shape and node.shape[0] is None else {} for node in inputs
    ]
    for length in graph.lengths:
        size = of_length(length)
        for index, axis in length.axes:
            opened[index][axis] = size
    tensors = iter(
        [
            own or None
            for node, own in zip(inputs, opened, strict=True)
            if node.shape is not None
        ]
    )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    shapes = [next(tensors) if isinstance(leaf, Tensor) else None for leaf in leaves]
    args_shapes, kwargs_shapes = pytree.tree_unflatten(shapes, spec)
    return (*args_shapes, *kwargs_shapes.values()) if kwargs else (args_shapes,)
