"""Check the graph in a result folder before any of its operators runs: anybody may have written
the file. A graph that tracing cannot produce is refused.
"""

import math
import operator
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from quantizer.calibration import fingerprint
from quantizer.graph.ir import Graph, Node, Ref, references
from quantizer.graph.ops import OPS, find_op
from quantizer.graph.stored import StoredGraph
from quantizer.graph.targets import packet, refine, resolve_target
from quantizer.graph.tracing.program_nodes import MARK, STUB_OPERATORS
from quantizer.storage.files import damaged

MAX_VALUES = 1 << 31
"""The most values that a tensor of a stored graph may have."""
_TOO_MANY = f"it asks for more than {MAX_VALUES} values"
_MOST_BITS = 1024
"""The most bits that a number computed of sizes may have. Those of Python have no limit."""
_BITS_OF_NUMBER = 64
_ANY_BATCH = 1 << 16
"""The batch size for which values are counted if the batch is dynamic. Numbers up to this one
need no check.
"""
_OF_EACH_VALUE = """
__and__ __lshift__ __or__ __rshift__ __xor__ absolute acos acosh addcdiv angle
arccos arcsin arctan arctan2 asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor clamp_max clip copysign cosh deg2rad
digamma divide eq erfc erfinv exp2 float_power fmax fmin ge greater greater_equal gt
hardshrink heaviside hypot i0 isclose isfinite isinf isnan isneginf isposinf ldexp le less
less_equal lgamma log10 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
logit lt multiply nan_to_num ne negative nextafter not_equal positive rad2deg sgn sign
signbit sinh softshrink special_entr special_erf special_erfc special_erfinv special_exp2
special_expit special_expm1 special_i0 special_i0e special_i1 special_i1e special_log1p
special_log_softmax special_logit special_ndtr special_round special_softmax special_xlogy
subtract true_divide xlogy
"""
_REDUCTIONS = """
all aminmax any argmax argmin count_nonzero cummax cummin cumprod frobenius_norm kthvalue
linalg_matrix_norm linalg_norm logcumsumexp logsumexp mode nanmean nanmedian nanquantile
nansum quantile special_logsumexp std_mean trace
"""
_PRODUCTS = """
addbmm addmv addr cdist cosine_similarity cross dist dot ger inner linalg_cross
linalg_matmul linalg_vecdot mv outer pairwise_distance tensordot vdot
"""
_OF_MATRICES = """
det inverse linalg_cholesky linalg_det linalg_eigh linalg_inv linalg_pinv linalg_qr
linalg_slogdet linalg_solve linalg_solve_triangular linalg_svd logdet
"""
_OF_COMPLEX_NUMBERS = """
complex conj conj_physical fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft
fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn fft_rfft
fft_rfft2 fft_rfftfreq fft_rfftn imag istft real resolve_conj resolve_neg stft
view_as_complex view_as_real
"""
_MOVES = """
_weight_norm affine_grid_generator alias constant_pad_nd diag diff hamming_window
hann_window isin lift_fresh_copy msort reflection_pad1d reflection_pad2d reflection_pad3d
replication_pad1d replication_pad2d replication_pad3d row_stack unsafe_chunk unsafe_split
unsafe_split_with_sizes
"""
_RANDOM_NUMBERS = "bernoulli rand rand_like randint randint_like randn randn_like"
FUNCTIONAL = frozenset(
    " ".join(
        (
            *(_OF_EACH_VALUE, _REDUCTIONS, _PRODUCTS, _OF_MATRICES),
            *(_OF_COMPLEX_NUMBERS, _MOVES, _RANDOM_NUMBERS),
        )
    ).split()
)
"""Operators without a row in the table that a stored graph may have, by their packets.

Each only computes: it changes no argument, opens no file, and its results are as large as its
arguments together, or as a size among its arguments says. None loops as often as a number says.
Models may use any other operator; they are traced again each time.
"""
SIZED_BY_VALUES = frozenset(
    {
        "aten.repeat_interleave.Tensor",
        "aten.repeat_interleave.self_Tensor",
        "aten.tensor_split.tensor_indices_or_sections",
    }
)
"""Operators whose results are as large as the values of an argument say. No stored graph may
have them.
"""
_WITHOUT_OPERATOR = ("input", "parameter", "constant")
_ARITHMETIC = """
add sub mul floordiv truediv mod pow neg pos abs and_ or_ xor not_ invert lshift rshift eq ne lt
le gt ge getitem
"""
"""The functions of Python's `operator` that traced graphs use to compute sizes. Others, such as
`operator.methodcaller`, could run any code.
"""
_SHAPES = frozenset(
    {"size", "output_size", "scale_factors", "repeats", "shape", "dims", "s", "n"}
)
"""Names of arguments whose product the size of an operator's result may follow."""
_WIDTHS = frozenset(
    {
        "pad",
        "padding",
        "output_padding",
        "stride",
        "dilation",
        "kernel_size",
        "offset",
        "bins",
        "chunks",
        "sections",
        "n_fft",
        "window_length",
    }
)
"""Names of arguments whose largest number it may follow."""
_BOUNDS = frozenset({"start", "end", "steps", "n", "m", "row", "col"})
"""Names of further such arguments of operators without inputs, such as `arange`."""
_POWERS = (operator.pow.__name__, operator.lshift.__name__)

Fault = tuple[str, str]
"""A place in graph.json, and what is wrong there."""


def check_graph(stored: StoredGraph, header: Mapping[str, Any], path: Path) -> None:
    """Check that tracing can have written a graph, and that it is the graph of this
    calibration.

    Args:
        stored: the graph.
        header: of quant_info.json.
        path: the file of the graph, for errors.

    Raises:
        ResultError: it is not. The file, the place in it and the reason are named.
    """
    for place, why in chain(_faults_of_header(stored, header), faults_of_graph(stored)):
        raise damaged(path, place, why)


def faults_of_graph(stored: StoredGraph) -> Iterator[Fault]:
    """Yield what tracing cannot have written, and operators and numbers that no stored graph
    may have.
    """
    yield from _faults_of_nodes(stored)
    yield from _faults_of_inputs(stored.graph)
    yield from _faults_of_sizes(stored)
    yield from _faults_of_numbers(stored.graph)


def operator_fault(node: Node) -> str | None:
    """Return why tracing cannot have written the operator of a node, or None if it can."""
    expected = node.op
    if node.op in STUB_OPERATORS.values():
        expected = MARK
    elif node.op not in _WITHOUT_OPERATOR:
        if not _is_allowed(node.target):
            return f"{node.target!r} is not an operator that a stored graph may have"
        row = find_op(packet(node.target))
        name = refine(row.name, {**node.inputs, **node.attrs})
        return None if node.op == name else f"{node.op!r} is not the operator {name!r}"
    if node.target == expected:
        return None
    return f"{node.target!r} is not {expected!r}"


def _is_allowed(target: str) -> bool:
    """Return whether a target is arithmetic with sizes, an operator of the table, or one of the
    reviewed operators, in a form that changes none of its arguments.
    """
    namespace, _, name = target.partition(".")
    if namespace == "operator":
        return name in _ARITHMETIC.split()
    try:
        function = resolve_target(target)
    except (AttributeError, ValueError):
        return False
    schema: Any = getattr(function, "_schema", None)
    if schema is None:
        return "." not in name
    if schema.is_mutable or target in SIZED_BY_VALUES:
        return False
    known = packet(target)
    return find_op(known).name in OPS or known in FUNCTIONAL


def _faults_of_header(stored: StoredGraph, header: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the differences between a graph and quant_info.json. The shapes of its inputs are
    compared when the calibration is used.
    """
    graph = stored.graph
    if graph.model != header["model"]:
        yield "model", f"it is {graph.model!r}, not {header['model']!r}"
    layer = fingerprint.first_difference(header["layers"], fingerprint.layer_digests(graph))
    if layer is not None:
        yield "nodes", f"{layer} is not the layer that was calibrated"
    if stored.tensors.keys() != header["weights"].keys():
        yield "tensors", "it has other tensors than quant_info.json"
    if not set(graph.constants) <= stored.tensors.keys():
        yield "constants", "there are no such tensors"


def _faults_of_nodes(stored: StoredGraph) -> Iterator[Fault]:
    """Yield the faults of nodes, such as reading a node that comes later."""
    known: set[str] = set()
    for index, node in enumerate(stored.graph.nodes):
        place = f"nodes/{index}"
        why = operator_fault(node)
        if why is not None:
            yield f"{place}/target", why
        if node.name in known:
            yield f"{place}/name", f"there are two nodes {node.name!r}"
        if not known.issuperset(node.refs()):
            yield f"{place}/inputs", "it reads a node that is not before it"
        if any(references(node.attrs)):
            yield f"{place}/attrs", "it holds a reference"
        if not stored.tensors.keys() >= set(node.params.values()):
            yield f"{place}/params", "there is no such tensor"
        if (node.shape is None) != (node.dtype is None):
            yield place, "it has a shape or a dtype alone"
        known.add(node.name)
    if not known.issuperset(references(stored.graph.output)):
        yield "output", "it names a node that is not there"


def _faults_of_inputs(graph: Graph) -> Iterator[Fault]:
    """Yield the faults of the inputs of a graph, and of their lengths that may vary."""
    inputs = [node for node in graph.nodes if node.op == "input"]
    numbers = [node.attrs.get("index") for node in inputs]
    if numbers != list(range(len(inputs))):
        yield "nodes", "its inputs are not counted from 0"
    if len(inputs) != len(graph.input_paths):
        yield "inputs", f"it names {len(graph.input_paths)} of {len(inputs)} inputs"
    for path in graph.input_paths:
        if len(path) < 2 or path[0] not in (0, 1):
            yield "inputs", f"{list(path)} is not a place in a call"
    for node in inputs:
        if node.shape is None and "value" not in node.attrs:
            yield "nodes", f"{node.name} has neither a shape nor a value"
    for number, length in enumerate(graph.lengths):
        place = f"lengths/{number}"
        if length.least < 1 or length.traced not in length:
            yield place, "its bounds do not hold what was traced"
        for index, axis in length.axes:
            is_open = index < len(inputs) and axis in inputs[index].open_axes
            if not is_open:
                yield place, f"axis {axis} of input {index} is not open"


def _faults_of_sizes(stored: StoredGraph) -> Iterator[Fault]:
    """Yield shapes and arguments that would take more memory than any network needs."""
    for path, kind in stored.tensors.items():
        if math.prod(kind.shape) > MAX_VALUES:
            yield f"tensors/{path}", _TOO_MANY
    for index, node in enumerate(stored.graph.nodes):
        place = f"nodes/{index}"
        shape = node.shape or ()
        if _product(shape) > MAX_VALUES:
            yield f"{place}/shape", _TOO_MANY
        for axis in node.open_axes:
            if axis >= len(shape) or shape[axis] is None:
                yield f"{place}/open_axes", f"there is no such size {axis}"
        limit = max(_product(shape, _ANY_BATCH), _ANY_BATCH)
        for name, value in node.attrs.items():
            if _most_values(node, name, value) > limit:
                yield f"{place}/attrs/{name}", f"it is far more than the shape {list(shape)}"
        if _steps(node) > limit:
            yield f"{place}/attrs/step", f"it is far too small for the shape {list(shape)}"


def _most_values(node: Node, name: str, value: Any) -> float:
    """Return how many values an argument of a node may ask for, for each value of its inputs;
    1 if it is not about sizes.
    """
    is_bound = name in _BOUNDS and not node.inputs
    if is_bound or name in _SHAPES:
        return _product(value)
    if name not in _WIDTHS:
        return 1
    if isinstance(value, (list, tuple)):
        return max(map(_product, value), default=1)
    return _product(value)


def _steps(node: Node) -> float:
    """Return how many values a range with a step below 1 may have."""
    step = node.attrs.get("step")
    if not isinstance(step, float) or not 0 < abs(step) < 1:
        return 1
    start = _product(node.attrs.get("start"))
    end = _product(node.attrs.get("end"))
    return max(start, end) / abs(step)


def _product(sizes: Any, size_of_none: int = 1) -> float:
    """Return the product of the sizes in an argument or a shape. Sizes below 1 count as 1, and
    negative ones, which are relative, by their magnitude.
    """
    if not isinstance(sizes, (list, tuple)):
        sizes = [sizes]
    product: float = 1
    for size in sizes:
        if size is None:
            size = size_of_none
        if isinstance(size, (int, float)) and product <= MAX_VALUES:
            product *= max(1, abs(size))
    return product


def _faults_of_numbers(graph: Graph) -> Iterator[Fault]:
    """Yield numbers that do not fit, and arithmetic whose results may have too many bits."""
    bits: dict[str, float] = {}
    for index, node in enumerate(graph.nodes):
        place = f"nodes/{index}"
        for name, value in node.attrs.items():
            if _most_bits(value, {}) > _BITS_OF_NUMBER:
                yield f"{place}/attrs/{name}", f"it has more than {_BITS_OF_NUMBER} bits"
        namespace, _, function = node.target.partition(".")
        if namespace != "operator" or function == "getitem":
            continue
        arguments = {**node.inputs, **node.attrs}
        total = 1 + sum(_most_bits(value, bits) for value in arguments.values())
        if function in _POWERS:
            total = _bits_of_power(node, bits)
        bits[node.name] = total
        if total > _MOST_BITS:
            yield f"{place}/target", f"its results may have more than {_MOST_BITS} bits"


def _bits_of_power(node: Node, bits: Mapping[str, float]) -> float:
    """Return the most bits of a power or a shift to the left; infinity if the exponent is not
    a constant.
    """
    exponent = node.attrs.get("b")
    if not isinstance(exponent, (int, float)):
        return math.inf
    base = {**node.inputs, **node.attrs}.get("a")
    return _most_bits(base, bits) * (1 + abs(exponent))


def _most_bits(value: Any, bits: Mapping[str, float]) -> float:
    """Return the most bits of the numbers in an argument; `bits` has those of nodes."""
    if isinstance(value, Ref):
        return bits.get(value.name, _BITS_OF_NUMBER)
    if isinstance(value, (list, tuple)):
        return max((_most_bits(item, bits) for item in value), default=0)
    return value.bit_length() if isinstance(value, int) else _BITS_OF_NUMBER
