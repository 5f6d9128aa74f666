"""The passes from a translated network with marks to the network of the file."""

from collections.abc import Callable

import onnx_ir as ir

from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.passes import (
    constants,
    float_biases,
    gates,
    linear,
    lookup,
    moves,
    padding,
    product_names,
    quantizations,
    sizes,
    sum_biases,
)

Pass = Callable[[ir.Model, Lowering], None]

PASSES: tuple[Pass, ...] = (
    # While weights are still marked: afterwards their transposes would belong to codes.
    linear.apply,
    # Needs the marks, and the products that `linear` makes of Gemm.
    product_names.apply,
    quantizations.apply,
    # From here on there are no marks. Padding comes before `moves`, which would take a Pad of
    # dequantized values for data movement and quantize behind it.
    padding.apply,
    moves.apply,
    lookup.apply,
    # The two biases need the products' names.
    sum_biases.apply,
    float_biases.apply,
    # Needs the final inputs of convolutions: a bias may have been added.
    sizes.apply,
    # Last of the general passes: what the others left constant is computed.
    constants.apply,
    gates.apply,
)


def run_passes(model: ir.Model, lowering: Lowering) -> None:
    """Run all passes, and remove initializers that nothing reads."""
    for run_pass in PASSES:
        run_pass(model, lowering)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
