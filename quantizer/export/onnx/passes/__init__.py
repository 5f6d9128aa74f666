"""The passes from a translated network with marks to the network of the file."""

from collections.abc import Callable

import onnx_ir as ir

from quantizer.export.onnx.builder import make_names_unique
from quantizer.export.onnx.lowering import Lowering
from quantizer.export.onnx.passes.integer_forms import (
    compute_constants,
    look_up_codes,
    pool_globally,
    quantize_gates,
)
from quantizer.export.onnx.passes.moves import (
    pad_channels,
    pad_codes,
    requantize_moves,
    requantize_rectified,
    wrap_operators,
)
from quantizer.export.onnx.passes.products import (
    hide_float_biases,
    name_products,
    straighten_linear,
    write_sizes_as_sums,
    write_sum_biases,
)
from quantizer.export.onnx.passes.quantizations import replace_marks

_Pass = Callable[[ir.Model, Lowering], None]

ONNX_PASSES: tuple[_Pass, ...] = (
    # While weights are still marked: afterwards their transposes would belong to codes.
    straighten_linear,
    # Needs the marks, and the products that were made of Gemm.
    name_products,
    replace_marks,
    # From here on there are no marks. Padding comes before data movement is looked at: a Pad of
    # dequantized values would count as such, and be quantized again behind.
    pad_codes,
    requantize_rectified,
    requantize_moves,
    # In profiles that quantize between operators only.
    wrap_operators,
    look_up_codes,
    # The two biases need the products' names.
    write_sum_biases,
    hide_float_biases,
    # Needs the final inputs of convolutions: a bias may have been added.
    write_sizes_as_sums,
    # Needs the zero points of weights as constants.
    pad_channels,
    # Last of the general passes: what the others left constant is computed.
    compute_constants,
    # Needs the axes as constants.
    pool_globally,
    # In the fast profile only; needs the quantizations beside the gates.
    quantize_gates,
)


_FOR_KERNELS = (
    pad_channels,
    pad_codes,
    look_up_codes,
    hide_float_biases,
    write_sizes_as_sums,
    quantize_gates,
)
"""The passes for what ONNX Runtime or OpenVINO would get wrong or slow, and no other engine."""
_FOR_OTHERS = (requantize_rectified, wrap_operators)
"""The passes for engines that want QuantizeLinear and DequantizeLinear at each operator."""


def lower_marks(model: ir.Model, lowering: Lowering) -> None:
    """Run all passes of the profile, give values names of their own, and remove initializers
    that nothing reads.
    """
    left_out = _FOR_OTHERS if lowering.conventions.is_for_kernels else _FOR_KERNELS
    for run_pass in ONNX_PASSES:
        if run_pass not in left_out:
            run_pass(model, lowering)
    make_names_unique(model.graph)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
