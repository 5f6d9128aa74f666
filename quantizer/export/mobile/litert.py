"""Writes the .tflite target: a file for LiteRT, which was TensorFlow Lite."""

import contextlib
import io
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from quantizer.config.wording import listed
from quantizer.export.acceptance import Outputs
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.exporter import Refusal
from quantizer.export.mobile.exporter import (
    MobileExporter,
    MobileFile,
    MobileProgram,
    batch_size,
    taken_kernels,
)
from quantizer.export.mobile.kernels import MobileEngine
from quantizer.export.mobile.litert_rewrites import (
    cut_padding,
    keep_constants,
    keep_scales_of_joins,
    keep_scales_of_shares,
    multiply_squares,
    pad_kernels,
)
from quantizer.export.mobile.rewrites import (
    average_images,
    fold_padding,
    infer_batches,
    rewrite,
)
from quantizer.export.mobile.tflite_file import (
    TfliteFile,
    code_weights,
    compute_in_float,
    drop_factors,
    integer_scales,
)
from quantizer.export.performance import Kernels
from quantizer.export.programs.coded import ProgramForm
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.batch_axes import axes_of_graph
from quantizer.plan.model import TensorSpecs

_REWRITES = (
    infer_batches,
    fold_padding,
    average_images,
    pad_kernels,
    cut_padding,
    multiply_squares,
    keep_scales_of_shares,
    keep_scales_of_joins,
)
"""What the converter needs of programs, in this order. `keep_constants` comes last."""
_PAD = torch.ops.aten.constant_pad_nd.default
_IMAGE_SIZES = 8
"""The sizes that a padding of all four axes of an image has."""


class LitertExporter(MobileExporter):
    """Writes a file that LiteRT runs with its int8 kernels.

    Inputs and outputs are float or int8. The file is made with a batch of one, and takes any
    batch if its inputs are resized.
    """

    engine = MobileEngine(
        "LiteRT", compiler="litert-torch", has_least_code=False, float_axes=(0, 1, 2)
    )
    form = ProgramForm(
        "int8", weight_codes=(-127, 127), requantizes=True, has_stable_sort=False
    )

    def load(self, program: ExportedProgram) -> None:
        """Convert a program of one operator, and load it."""
        import litert_torch

        args, _ = program.example_inputs
        with contextlib.redirect_stdout(io.StringIO()):
            model = litert_torch.convert(program.module(), args)
        _signature(model.model_content())

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> Iterator[Refusal]:
        """Yield what the file or the engine's kernels cannot hold."""
        names = [length.name for length in graph.lengths if length.is_asked_for]
        if names:
            yield Refusal(
                f"writes fixed sizes, and <--dynamic> leaves {listed(names)} open",
                "leave <--dynamic> out, or use <--deploy executorch or onnx>",
            )
        yield from super().refusals(graph, specs, opset)

    def engine_for(self, deployment: Deployment) -> MobileEngine:
        """Return what kernels take: devices without floats have no outputs in float."""
        if _is_float(deployment):
            return self.engine
        return replace(self.engine, float_axes=())

    def most_samples(self, deployment: Deployment) -> int | None:
        """Return one sample: the converter loses a batch dimension that is open."""
        size = batch_size(deployment.graph, deployment.call)
        return None if size is None else 1

    def compile(self, source: MobileProgram, name: str) -> MobileFile:
        """Convert the program, and count what is multiplied in int8."""
        with contextlib.redirect_stdout(io.StringIO()):
            converted = _converted(source)
        is_open = source.most_samples is not None
        file = _finished(converted, source, is_open=is_open)
        remarks: list[str] = []
        most_samples: int | None = None
        if is_open and not _takes_batches(file.content(), source.tested):
            # A file with an open batch would take batches and give wrong values
            file = _finished(converted, source, is_open=False)
            most_samples = 1
            remarks.append("the file takes one sample at a time")
        elif is_open:
            remarks.append("the file takes any batch: resize its inputs before a call")
        transposes = [*map(file.name, file.graph.operators)].count("TRANSPOSE")
        if transposes:
            verb = "changes" if transposes == 1 else "change"
            remarks.append(f"{transposes} TRANSPOSE {verb} the layout of images in memory")
        return MobileFile(
            name,
            file.content(),
            source.tested,
            _kernels_of_file(source, file),
            tuple(remarks),
            most_samples,
        )

    def runner(self, written: MobileFile) -> Outputs:
        """Return a call of the file in LiteRT's interpreter, with XNNPACK."""
        run = _signature(written.content)
        # Each sample runs alone, if the file holds one
        outputs_of = _run if written.most_samples is None else _run_apart

        return lambda call: outputs_of(run, written.tested, call)


def _is_float(deployment: Deployment) -> bool:
    """Return whether inputs and outputs are float, and what has no int8 kernel may be."""
    return deployment.choice("litert_io") == "float"


def _converted(source: MobileProgram) -> bytes:
    """Return the file that litert-torch makes of a program."""
    import litert_torch
    from litert_torch.quantize import pt2e_quantizer, quant_config

    coded = [
        f"network.{module}.weight"
        for module, layer in source.layers.items()
        if layer in source.kernels.integer
    ]
    rewrite(source.program, [*_REWRITES, partial(keep_constants, coded=coded)])
    _keep_layout_of_padding()
    config = pt2e_quantizer.get_symmetric_quantization_config(is_per_channel=True)
    # It quantizes nothing here. Without it the converter would leave all kernels in float.
    quantizer = pt2e_quantizer.PT2EQuantizer().set_global(config)
    args, kwargs = source.program.example_inputs
    module = source.program.module()
    module.training = False
    model = litert_torch.convert(
        module,
        args,
        kwargs or None,
        quant_config=quant_config.QuantConfig(pt2e_quantizer=quantizer),
    )
    content: bytes = model.model_content()
    return content


def _keep_layout_of_padding() -> None:
    """Let the converter pad images in the layout of LiteRT.

    It transposes them before and after each padding otherwise, which costs time only.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from litert_torch._convert.fx_passes.optimize_layout_transposes_pass import (
            layout_rewrite,
        )

        layout_rewrite.rewriters.register(_PAD)(_pad_channels_last)


def _pad_channels_last(node: Node) -> None:
    """Rewrite the padding of an image whose channels have become the last axis."""
    value, sizes, *fill = node.args
    assert isinstance(sizes, list | tuple)
    by_axis = [*sizes, *[0] * (_IMAGE_SIZES - len(sizes))]
    width, height, channels = by_axis[:2], by_axis[2:4], by_axis[4:6]
    node.args = (value, [*channels, *width, *height, *by_axis[6:]], *fill)


def _kernels_of_file(source: MobileProgram, file: TfliteFile) -> Kernels:
    """Return the layers that a file multiplies in int8, of those that should be.

    The converter keeps no names of layers, so weights are found by their scales.
    """
    counts = Counter(integer_scales(file))
    taken: set[str] = set()
    for layer in source.kernels.integer:
        scales = tuple(source.scales[layer])
        if counts[scales]:
            counts[scales] -= 1
            taken.add(layer)
    return taken_kernels(source, taken, "the converter made no int8 operator of it")


def _signature(content: bytes) -> Any:
    """Return a function that runs a file, with inputs and outputs by name."""
    from ai_edge_litert.interpreter import Interpreter

    return Interpreter(model_content=content).get_signature_runner()


def _finished(content: bytes, source: MobileProgram, *, is_open: bool) -> TfliteFile:
    """Return the file that the converter wrote, with fast kernels and names.

    Args:
        is_open: whether to let the batch follow the inputs.
    """
    file = TfliteFile.of(content)
    if is_open:
        file.open_batch()
    deployment = source.tested
    is_float = _is_float(deployment)
    if is_float:
        code_weights(file, [*source.scales.values()])
    drop_factors(file)
    if is_float:
        file.give_float_ends()
        compute_in_float(file)
    file.describe(deployment.input_names, deployment.output_names, deployment.origin.text())
    return file


def _takes_batches(content: bytes, deployment: Deployment) -> bool:
    """Return whether a file gives for a batch what it gives for each of its samples."""
    size = batch_size(deployment.graph, deployment.call) or 1
    # The first two samples, or one of them twice
    call = _samples(deployment, deployment.call, [0, min(1, size - 1)])
    run = _signature(content)
    try:
        apart = _run_apart(run, deployment, call)
        outputs = _run(run, deployment, call)
    except (RuntimeError, ValueError):
        return False
    return all(
        ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-3)
        for ours, theirs in zip(apart, outputs, strict=True)
    )


def _run_apart(run: Any, deployment: Deployment, call: Any) -> list[Tensor]:
    """Return the outputs of a file that runs on each sample of a batch."""
    rows = [
        _run(run, deployment, _samples(deployment, call, [index]))
        for index in range(batch_size(deployment.graph, call) or 1)
    ]
    outputs: list[Tensor] = []
    for output, parts in zip(deployment.outputs, zip(*rows, strict=True), strict=True):
        shape = deployment.graph.by_name[output.node].shape or (None,)
        joined = torch.cat(parts, shape.index(None)) if None in shape else parts[0]
        outputs.append(joined)
    return outputs


def _run(run: Any, deployment: Deployment, call: Any) -> list[Tensor]:
    """Return the outputs of a file as floats."""
    details = run.get_input_details()
    tensors = zip(deployment.input_names, tensor_leaves(call), strict=True)
    results = run(**{name: _as_input(tensor, details[name]) for name, tensor in tensors})
    return [_from_output(results[name], run, name) for name in deployment.output_names]


def _as_input(tensor: Tensor, details: Mapping[str, Any]) -> Any:
    """Return a tensor in the type of an input: quantized if that is int8."""
    wanted = details["dtype"]
    if wanted == np.int8 and tensor.is_floating_point():
        scale, zero_point = details["quantization"]
        codes = torch.round(tensor / scale) + zero_point
        tensor = codes.clamp(-128, 127)
    return tensor.numpy().astype(wanted)


def _from_output(values: Any, run: Any, name: str) -> Tensor:
    """Return an output as floats: with the values of its codes if it is int8."""
    tensor = torch.from_numpy(values)
    index = dict(run._outputs)[name]
    scale, zero_point = run._interpreter._get_tensor_details(index, 0)["quantization"]
    if tensor.dtype == torch.int8 and scale:
        tensor = (tensor.float() - zero_point) * scale
    return tensor


def _samples(deployment: Deployment, call: Any, indices: list[int]) -> Any:
    """Return the call of some samples of a batch."""
    leaves, spec = pytree.tree_flatten(call)
    for position, axis in enumerate(axes_of_graph(deployment.graph)):
        if axis is not None:
            leaves[position] = leaves[position].index_select(axis, torch.tensor(indices))
    return pytree.tree_unflatten(leaves, spec)
