"""Complex numbers in an .onnx, which torch.onnx writes as pairs of reals.

torch.onnx knows some operators for these. Others are decomposed here. A network with any other
is refused before calibration.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantizer.export.exporter import Refusal
from quantizer.graph.ir import Graph, Node
from quantizer.graph.targets import packet

_ATEN = torch.ops.aten
# The operators that torch.onnx translates where they read or make complex numbers.
_TRANSLATED = frozenset(
    """
    _conj abs angle clone complex conj imag polar real view_as_complex view_as_real
    add div matmul mean mul neg reciprocal rsub sub sum
    cat flatten flip permute reshape roll slice squeeze stack t transpose
    mT numpy_T unflatten view concat concatenate resolve_conj contiguous detach
    fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn
    fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2 fft_irfftn
    """.split()  # noqa: SIM905
)
# Those that are decomposed here. What `split` gives is taken out of a list by `getitem`.
_DECOMPOSED = frozenset(
    ("chunk", "einsum", "expand", "getitem", "linear", "select", "split", "unsqueeze")
)


def complex_refusals(graph: Graph) -> Iterator[Refusal]:
    """Yield why ONNX cannot express complex numbers, for the first operator of each kind."""
    refused: set[str] = set()
    for node in graph.nodes:
        name = packet(node.target) if "." in node.target else node.op
        if name in refused or not _is_complex(graph, node):
            continue
        if node.op == "input":
            why = "is complex, which ONNX inputs cannot be"
            remedy = "give it as reals, and call torch.view_as_complex"
        elif node.dtype == torch.complex128:
            why = "is complex128"
            remedy = "convert the model's complex tensors to complex64"
        elif name in _TRANSLATED or name in _DECOMPOSED:
            continue
        else:
            why = f"computes {name} of complex numbers, for which torch.onnx has no form"
            remedy = "write that part with real numbers, or use --deploy pt2"
        refused.add(name)
        yield Refusal(why, remedy, node.name)


def _is_complex(graph: Graph, node: Node) -> bool:
    """Return whether an operator reads or makes complex numbers."""
    dtypes = [node.dtype, *(graph.by_name[name].dtype for name in node.refs())]
    return any(dtype is not None and dtype.is_complex for dtype in dtypes)


def complex_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return decompositions of torch's operators for complex tensors; real ones stay."""
    return {
        _ATEN.unsqueeze.default: _unsqueeze,
        _ATEN.select.int: _select,
        _ATEN.split.Tensor: _split,
        _ATEN.expand.default: _expand,
        _ATEN.linear.default: _linear,
        _ATEN.einsum.default: _einsum,
    }


def _unsqueeze(x: Tensor, dim: int) -> Any:
    if not x.is_complex():
        return NotImplemented
    return torch.stack([x], dim)


def _select(x: Tensor, dim: int, index: int) -> Any:
    if not x.is_complex():
        return NotImplemented
    axis = dim % x.dim()
    return torch.view_as_complex(_reals(x).select(axis, index))


def _split(x: Tensor, split_size: int, dim: int = 0) -> Any:
    if not x.is_complex():
        return NotImplemented
    axis = dim % x.dim()
    parts = torch.split(_reals(x), split_size, axis)
    return [torch.view_as_complex(part) for part in parts]


def _expand(
    x: Tensor,
    size: Sequence[int],
    implicit: bool = False,
) -> Any:
    if not x.is_complex():
        return NotImplemented
    return torch.view_as_complex(_reals(x).expand(*size, 2))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not x.is_complex():
        return NotImplemented
    product = torch.matmul(x, weight.mT)
    return product if bias is None else product + bias


def _einsum(
    equation: str, tensors: Sequence[Tensor], *, path: Sequence[int] | None = None
) -> Any:
    """Compute a product of two complex tensors as four products of real ones."""
    if len(tensors) != 2 or not any(tensor.is_complex() for tensor in tensors):
        return NotImplemented
    (a, b), (c, d) = (_parts(tensor) for tensor in tensors)
    real = torch.einsum(equation, a, c) - torch.einsum(equation, b, d)
    imaginary = torch.einsum(equation, a, d) + torch.einsum(equation, b, c)
    return torch.complex(real, imaginary)


def _reals(x: Tensor) -> Tensor:
    """Return pairs of reals along one more axis.

    A conjugate that is not computed yet has no such view.
    """
    return torch.view_as_real(x.resolve_conj())


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    if not x.is_complex():
        return x, torch.zeros_like(x)
    return x.real, x.imag
