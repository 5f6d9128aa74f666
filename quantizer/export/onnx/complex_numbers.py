"""Decompose operators on complex numbers for torch.onnx, which writes complex numbers as pairs
of reals.

torch.onnx itself translates some operators on complex numbers. Others are decomposed here into
these. Networks with any other are refused before calibration.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantizer.export.exporter import Refusal
from quantizer.graph.ir import Graph, Node
from quantizer.graph.targets import packet

_ATEN = torch.ops.aten
# The operators that torch.onnx can translate if they read or return complex numbers
_TRANSLATED = frozenset(
    """
    _conj abs angle clone complex conj imag polar real view_as_complex view_as_real
    add div matmul mean mul neg reciprocal rsub sub sum
    cat flatten flip permute reshape roll slice squeeze stack t transpose
    mT numpy_T unflatten view concat concatenate resolve_conj contiguous detach
    fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn
    fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2 fft_irfftn stft
    """.split()  # noqa: SIM905
)
# torch.export decomposes these into the operators above.
_SPELLINGS = frozenset(
    """
    fft_hfft fft_hfft2 fft_ihfft fft_fftshift fft_ifftshift
    absolute adjoint mH movedim moveaxis narrow negative ravel reshape_as rot90
    swapaxes swapdims to true_divide view_as
    """.split()  # noqa: SIM905
)
# The operators that are decomposed here. `getitem` takes a tensor out of the list that `split`
# returns, and `chunk` becomes `split`.
_DECOMPOSED = frozenset(
    ["chunk", "einsum", "expand", "getitem", "linear", "select", "split", "unsqueeze"]
)


def complex_refusals(graph: Graph) -> Iterator[Refusal]:
    """Yield why ONNX cannot express complex numbers, for the first layer of each operator."""
    refused: set[str] = set()
    for node in graph.nodes:
        name = node.op
        if "." in node.target:
            name = packet(node.target)
        if name in refused or not _is_complex(graph, node):
            continue
        if node.op == "input":
            why = "is complex, which ONNX inputs cannot be"
            remedy = "give it as reals, and call torch.view_as_complex"
        elif node.dtype == torch.complex128:
            why = "is complex128"
            remedy = "convert the model's complex tensors to complex64"
        elif name in _TRANSLATED | _SPELLINGS | _DECOMPOSED:
            continue
        else:
            why = f"computes {name} of complex numbers, for which torch.onnx has no form"
            remedy = "write that part with real numbers, or use <--deploy pt2>"
        refused.add(name)
        yield Refusal(why, remedy, node.name)


def _is_complex(graph: Graph, node: Node) -> bool:
    """Return whether an operator reads or returns complex numbers."""
    dtypes = [node.dtype]
    for name in node.refs():
        source = graph.by_name[name]
        dtypes.append(source.dtype)
    return any(dtype is not None and dtype.is_complex for dtype in dtypes)


def complex_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return decompositions of torch's operators for complex tensors.

    For real tensors they return NotImplemented, so that torch.export keeps the operator.
    """
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
    tensors = [x]
    return torch.stack(tensors, dim)


def _select(x: Tensor, dim: int, index: int) -> Any:
    if not x.is_complex():
        return NotImplemented
    # Counted from the front, as pairs of reals have one more axis at the end
    axis = dim % x.dim()
    selected = _reals(x).select(axis, index)
    return torch.view_as_complex(selected)


def _split(x: Tensor, split_size: int, dim: int = 0) -> Any:
    if not x.is_complex():
        return NotImplemented
    axis = dim % x.dim()
    reals = _reals(x)
    parts = torch.split(reals, split_size, axis)
    return [torch.view_as_complex(part) for part in parts]


def _expand(x: Tensor, size: Sequence[int], implicit: bool = False) -> Any:
    if not x.is_complex():
        return NotImplemented
    expanded = _reals(x).expand(*size, 2)
    return torch.view_as_complex(expanded)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not x.is_complex():
        return NotImplemented
    product = torch.matmul(x, weight.mT)
    if bias is None:
        return product
    return product + bias


def _einsum(
    equation: str, tensors: Sequence[Tensor], *, path: Sequence[int] | None = None
) -> Any:
    """Compute a product of two complex tensors as four products of real ones."""
    is_complex = any(tensor.is_complex() for tensor in tensors)
    if len(tensors) != 2 or not is_complex:
        return NotImplemented
    first, second = tensors
    a, b = _parts(first)
    c, d = _parts(second)
    # (a + bi)(c + di) = ac - bd + (ad + bc)i
    ac = torch.einsum(equation, a, c)
    bd = torch.einsum(equation, b, d)
    ad = torch.einsum(equation, a, d)
    bc = torch.einsum(equation, b, c)
    return torch.complex(ac - bd, ad + bc)


def _reals(x: Tensor) -> Tensor:
    """Return the real and the imaginary part of each value along one more axis, at the end."""
    # A lazy conjugate has no such view
    resolved = x.resolve_conj()
    return torch.view_as_real(resolved)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the real part and the imaginary part of a tensor."""
    if not x.is_complex():
        return x, torch.zeros_like(x)
    return x.real, x.imag
