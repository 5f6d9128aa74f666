"""Writes the .pte target: a program for ExecuTorch, whose layers XNNPACK computes."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.backends import mkldnn, nnpack
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from quantizer.errors import UsageError, VerificationError
from quantizer.export.acceptance import Outputs
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.mobile.exporter import (
    WHOLE,
    MobileExporter,
    MobileFile,
    MobileProgram,
    batch_size,
    taken_kernels,
)
from quantizer.export.mobile.kernels import MobileEngine
from quantizer.export.mobile.rewrites import (
    add_axes,
    average_images,
    fold_padding,
    infer_batches,
    rewrite,
    round_before_moves,
    slice_parts,
    with_gates,
    write_softplus,
)
from quantizer.export.programs.coded import ProgramForm
from quantizer.graph.ir import Call
from quantizer.option_words import Sentence

ORIGIN_METHOD = "quantizer"
"""The method of a .pte that returns how it was made, as text."""
_MODULE = re.compile(r"_(module_\d+)_")
"""In the name of a parameter of a program."""
_WEIGHT_INDEX = {"convolution": 1, "linear": 1, "addmm": 2, "mm": 1}
"""The argument with the weight, by the operators that multiply."""
_BATCH = "executorch_batch"
"""The option with the largest batch."""
_REWRITES = (
    infer_batches,
    fold_padding,
    average_images,
    slice_parts,
    write_softplus,
    round_before_moves,
    add_axes,
)
"""What XNNPACK needs of programs, in this order."""
_NOT_COUNTED = ("getitem", "executorch_call_delegate", "sym_size")


class ExecutorchExporter(MobileExporter):
    """Writes a program that ExecuTorch runs, with XNNPACK for all operators that it takes.

    The batch dimension is open up to a largest batch. Two runs write the same bytes.
    """

    engine = MobileEngine(
        "XNNPACK",
        compiler="ExecuTorch",
        has_least_code=True,
        has_computed_filters=True,
        float_axes=(0, 2),
    )
    form = ProgramForm(
        "int8",
        weight_codes=(-128, 127),
        has_transposed=True,
        has_ranges=True,
        has_stable_sort=False,
    )

    def load(self, program: ExportedProgram) -> None:
        """Convert a program of one operator for XNNPACK, and run it on its example."""
        method = _method(_lowered(program).to_executorch().buffer)
        inputs, _ = program.example_inputs
        method.execute([*inputs])

    def most_samples(self, deployment: Deployment) -> int | None:
        """Return the largest batch: that of the option, else that of the first call."""
        first = batch_size(deployment.graph, deployment.call)
        text = deployment.choice(_BATCH)
        if first is None or not text:
            return first
        if not text.isdecimal() or int(text) == 0:
            raise UsageError(
                f"<--{_BATCH}> is {text!r}",
                help="give the largest number of samples in a batch, such as 8",
            )
        return int(text)

    def compile(self, source: MobileProgram, name: str) -> MobileFile:
        """Convert the program for XNNPACK, and count what XNNPACK computes."""
        open_program = with_gates(source.program)
        rewrite(open_program, _REWRITES)
        # torch would choose kernels for small batches, and 15 would become the largest one.
        with mkldnn.flags(enabled=False), nnpack.flags(enabled=False):
            origin = {ORIGIN_METHOD: source.tested.origin.text()}
            lowered = _lowered(open_program, constant_methods=origin)
            program = lowered.exported_program()
            _require_open(source, program, name)
            layers = {source.layers[module] for module in _integer_modules(program)}
            kernels = taken_kernels(source, layers, "XNNPACK does not take it")
            remarks = (*_size_remarks(source), *_outside_remarks(program))
            content = lowered.to_executorch().buffer
        return MobileFile(name, content, source.tested, kernels, remarks, source.most_samples)

    def runner(self, written: MobileFile) -> Outputs:
        """Return a call of the program in ExecuTorch's runtime."""
        method = _method(written.content)

        def run(call: Call) -> list[Tensor]:
            """Return the outputs of a call, as copies."""
            _require_small(written, call)
            inputs = [
                leaf.contiguous() if isinstance(leaf, Tensor) else leaf
                for leaf in pytree.tree_leaves(call)
            ]
            # The outputs lie in memory that the next call overwrites.
            return [output.clone() for output in tensor_leaves(method.execute(inputs))]

        return run


def _lowered(program: ExportedProgram, **settings: Any) -> Any:
    """Return a program that is converted for XNNPACK."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    return to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], **settings)


def _method(content: bytes) -> Any:
    """Return what runs the network of a file."""
    from executorch.runtime import Runtime

    return Runtime.get().load_program(content).load_method("forward")


def _require_small(written: MobileFile, call: Call) -> None:
    """Raise `VerificationError` if a batch is larger than the file takes."""
    size = batch_size(written.tested.graph, call)
    if size is None or written.most_samples is None or size <= written.most_samples:
        return
    raise VerificationError(
        f"{written.name} is not written: it takes at most {written.most_samples} samples, "
        f"and a batch to verify it with has {size}",
        help=f"<--{_BATCH} {size}>, or smaller batches",
    )


def _require_open(source: MobileProgram, program: ExportedProgram, name: str) -> None:
    """Raise `VerificationError` if a conversion has fixed a batch that should be open."""
    if source.most_samples in (None, 1):
        return
    inputs = program.graph_signature.user_inputs
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in inputs and not all(isinstance(size, int) for size in _shape(node)):
            return
    raise VerificationError(
        f"{name} is not written: ExecuTorch fixes the number of samples in this network, and "
        f"a batch should have 1 to {source.most_samples}",
        help=f"give batches of one sample and <--{_BATCH} 1>, or use <--deploy onnx or pt2>",
    )


def _shape(node: Node) -> Sequence[Any]:
    """Return the sizes of a node's value; none if that is not a tensor."""
    value = node.meta["val"]
    return value.shape if isinstance(value, Tensor) else ()


def _delegated(program: ExportedProgram) -> Iterator[ExportedProgram]:
    """Yield the parts of a program that XNNPACK computes."""
    for node in program.graph.find_nodes(op="get_attr"):
        part = getattr(program.graph_module, str(node.target))
        yield part.original_module


def _integer_modules(program: ExportedProgram) -> set[str]:
    """Return the modules whose weights XNNPACK multiplies as codes."""
    modules: set[str] = set()
    for part in _delegated(program):
        for node in part.graph.nodes:
            index = _WEIGHT_INDEX.get(_operator(node))
            if index is not None and "dequantize" in node.args[index].name:
                source = node.args[index].args[0]
                modules.update(_MODULE.findall(source.name))
    return modules


def _size_remarks(source: MobileProgram) -> list[str]:
    """Return a sentence on the sizes that the file takes."""
    if source.most_samples is None:
        return []
    samples = f"1 to {source.most_samples} samples"
    if source.most_samples == 1:
        samples = "one sample"
    remark = Sentence(f"a batch has {samples}; <--executorch_batch N> sets the largest")
    return [remark, *(f"{length.name} is {length}" for length in source.tested.graph.lengths)]


def _outside_remarks(program: ExportedProgram) -> list[str]:
    """Return a sentence on the operators that XNNPACK does not compute."""
    inside = sum(
        node.op == "call_function" for part in _delegated(program) for node in part.graph.nodes
    )
    inputs = program.graph_signature.user_inputs
    outside: Counter[str] = Counter()
    for node in program.graph.nodes:
        operator = _operator(node)
        reads_values = any(
            source.op != "placeholder" or source.name in inputs
            for source in node.all_input_nodes
        )
        if operator and operator not in _NOT_COUNTED and reads_values:
            outside[operator] += 1
    if not outside:
        return [WHOLE]
    count = inside + outside.total()
    names = ", ".join(sorted(outside))
    return [f"XNNPACK computes {inside} of {count} operators, not {names}"]


def _operator(node: Node) -> str:
    """Return the name of a node's operator, as `convolution`; empty for a placeholder."""
    if node.op != "call_function":
        return ""
    target = node.target
    schema = getattr(target, "_schema", None)
    name = getattr(target, "__name__", str(target)) if schema is None else schema.name
    return str(name).rpartition("::")[2].partition(".")[0]
