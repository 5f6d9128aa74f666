"""Decomposes operators on complex numbers, and convolutions whose filters are computed for each
sample, for torch.onnx.

torch.onnx writes complex numbers as pairs of reals. It translates some operators on them
itself. Others are decomposed here into these. Networks with any other are refused before
calibration.

A network with filters for each sample puts the samples of a batch into groups:
`conv2d(x.view(1, b * c, h, w), filters, groups=b)`. In ONNX, the number of groups is a
constant, and here it follows the batch, so they become products of matrices. Trackers compare
images so, and dynamic convolutions and StyleGAN2 compute filters.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from quantizer.export.exporter import Refusal
from quantizer.graph.ir import Graph, Node, Ref
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
        dtypes = [node.dtype, *(graph.by_name[source].dtype for source in node.refs())]
        is_complex = any(dtype is not None and dtype.is_complex for dtype in dtypes)
        if name in refused or not is_complex:
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


_CONV1D = torch.ops.aten.conv1d
_CONV2D = torch.ops.aten.conv2d
_CONV_TRANSPOSE2D = torch.ops.aten.conv_transpose2d
_GROUPS = 6
"""The place of the number of groups in the arguments of a convolution."""
_SETTINGS = ("stride", "padding", "dilation", "groups")
_SETTINGS_OF_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")
"""The names of the arguments behind the bias, in torch's order."""


def follows_batch(node: fx.Node) -> bool:
    """Return whether the number of groups of a convolution in a program follows the batch."""
    return len(node.args) > _GROUPS and isinstance(node.args[_GROUPS], fx.Node)


def lacks_product(node: Node) -> bool:
    """Return whether a layer of a graph is such a convolution and has no form as a product."""
    names = [str(operator) for operator in PRODUCTS]
    return isinstance(node.inputs.get("groups"), Ref) and node.target not in names


@dataclass(frozen=True)
class _Windows:
    """The windows of an input that meet the filters, with a number for each axis.

    Attributes:
        kernel: the size of a filter.
        strides: how far windows are apart.
        dilations: how far the positions of a window are apart.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]

    @classmethod
    def of(cls, weight: Tensor, settings: Mapping[str, Any]) -> "_Windows":
        """Return the windows of a convolution with these arguments."""
        dims = weight.dim() - 2
        return cls(
            tuple(weight.shape[2:]),
            strides=_for_each_axis(settings["stride"], dims),
            dilations=_for_each_axis(settings.get("dilation", (1,)), dims),
        )

    def width(self, axis: int) -> int:
        """Return how many positions a window covers along an axis."""
        gaps = self.kernel[axis] - 1
        return self.dilations[axis] * gaps + 1

    def count(self, axis: int, length: int) -> int:
        """Return how many windows there are along an axis of that length."""
        free = length - self.width(axis)
        return free // self.strides[axis] + 1


# torch calls the functions below with an operator's arguments. NotImplemented leaves the
# operator as it is.


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Any:
    """Multiply the windows of each group by its filters."""
    settings = dict(zip(_SETTINGS, arguments, strict=False))
    groups = settings.get("groups", 1)
    if isinstance(groups, int):
        return NotImplemented
    windows = _Windows.of(weight, settings)
    padded = functional.pad(x, _edges(settings["padding"], windows))
    sizes = [windows.count(axis, length) for axis, length in enumerate(padded.shape[2:])]
    batch = x.shape[0]
    outputs = weight.shape[0]
    inputs = math.prod(weight.shape[1:])
    columns = _columns(padded, windows)
    columns = columns.reshape(batch, groups, inputs, -1)
    filters = weight.reshape(groups, -1, inputs)
    products = torch.matmul(filters, columns)
    sums = products.reshape(batch, outputs, *sizes)
    return _with_bias(sums, bias)


def _columns(x: Tensor, windows: _Windows) -> Tensor:
    """Return the values of each window as a column."""
    kernel = windows.kernel
    strides = windows.strides
    dilations = windows.dilations
    if len(kernel) == 1:
        # torch cuts windows out of images only
        x = x.unsqueeze(2)
        kernel = (1, *kernel)
        strides = (1, *strides)
        dilations = (1, *dilations)
    return functional.unfold(x, kernel, dilations, 0, strides)


def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Any:
    """Multiply each position by the filters of its group, and add up windows that overlap."""
    settings = dict(zip(_SETTINGS_OF_TRANSPOSED, arguments, strict=False))
    groups = settings.get("groups", 1)
    if isinstance(groups, int):
        return NotImplemented
    windows = _Windows.of(weight, settings)
    padding = _for_each_axis(settings["padding"], 2)
    added = _for_each_axis(settings["output_padding"], 2)
    covered: list[int] = []
    edges: list[int] = []
    for axis, length in enumerate(x.shape[2:]):
        last = (length - 1) * windows.strides[axis]
        covered.append(last + windows.width(axis))
        # Padding of a transposed convolution cuts its output
        before = -padding[axis]
        after = added[axis] - padding[axis]
        edges = [before, after, *edges]
    batch = x.shape[0]
    inputs = weight.shape[0] // groups
    positions = x.reshape(batch, groups, inputs, -1)
    filters = weight.reshape(groups, inputs, -1)
    filters = filters.transpose(1, 2)
    products = torch.matmul(filters, positions)
    values = groups * math.prod(weight.shape[1:])
    columns = products.reshape(batch, values, -1)
    sums = functional.fold(
        columns, tuple(covered), windows.kernel, windows.dilations, stride=windows.strides
    )
    sums = functional.pad(sums, edges)
    return _with_bias(sums, bias)


def _for_each_axis(values: Sequence[int], dims: int) -> tuple[int, ...]:
    """Return an argument of a convolution with a number for each axis."""
    repeats = dims // len(values)
    return tuple(values) * repeats


def _edges(padding: Sequence[int] | str, windows: _Windows) -> list[int]:
    """Return how much is padded before and after each axis, the last axis first."""
    dims = len(windows.kernel)
    edges: list[int] = []
    for axis in reversed(range(dims)):
        if isinstance(padding, str):
            both = 0
            if padding == "same":
                both = windows.width(axis) - 1
            before = both // 2
            after = both - before
        else:
            before = _for_each_axis(padding, dims)[axis]
            after = before
        edges += [before, after]
    return edges


def _with_bias(sums: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return sums
    ones = [1] * (sums.dim() - 2)
    by_channel = bias.reshape(-1, *ones)
    return sums + by_channel


PRODUCTS: Mapping[Any, Callable[..., Any]] = {
    _CONV1D.default: _convolution,
    _CONV1D.padding: _convolution,
    _CONV2D.default: _convolution,
    _CONV2D.padding: _convolution,
    _CONV_TRANSPOSE2D.input: _transposed,
}
"""The convolutions that have a form as a product, by operator."""
