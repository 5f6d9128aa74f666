"""Builds the network of an .onnx: what is written, and the model with its nodes and codes.
Stores it as a file, with its tensors in another one if a protobuf message cannot hold them.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import ModelProto

import quantizer
from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.errors import VerificationError, first_line
from quantizer.export.arithmetic import (
    BiasForm,
    overflowing,
    quantized_apart,
    sum_biases,
    sum_steps,
    with_runtime_biases,
)
from quantizer.export.deployment import Deployment, in_float32
from quantizer.export.onnx.lowering import (
    EXACT,
    MARK_DOMAIN,
    OPSETS,
    Conventions,
    Lowering,
    Quantizations,
    activation_type,
    weight_type,
)
from quantizer.export.onnx.passes import lower_marks
from quantizer.export.onnx.refusals import profile_remarks, wide_bias_refusals
from quantizer.export.onnx.restated import (
    WeightStorage,
    adapt_weights,
    signed_weights,
    weight_storage,
    with_activations,
)
from quantizer.export.onnx.speed import float_model
from quantizer.export.onnx.translation import translate_network
from quantizer.export.onnx.weights import BLOCK_SIZE_OPSET, PACKED_DOMAIN
from quantizer.export.refusals import refuse
from quantizer.export.targets import checked_target
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.lengths import Length
from quantizer.nn.network import Network
from quantizer.plan.model import Key, TensorSpecs
from quantizer.storage.files import cannot_write, write_bytes

DEFAULT_OPSET = 20
"""Every optimization of ONNX Runtime knows it."""


@dataclass(frozen=True)
class BuiltOnnx:
    """A model that no file has yet.

    Attributes:
        floating: the same network without quantization, serialized; None if it is large.
        tested: what it is compared with.
        storage: how its weights are stored.
        remarks: notes for the user.
    """

    proto: ModelProto
    floating: bytes | None
    tested: Deployment
    storage: WeightStorage
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class NetworkToWrite:
    """A network in float32 and how a file holds its tensors.

    Attributes:
        tested: what the file is compared with.
        wide: the deployment in float32.
        stated: its tensors in the form of the file.
        network: the deployment's, which translation attaches marks to.
    """

    tested: Deployment
    wide: Deployment
    stated: Solution
    network: Network
    opset: int
    conventions: Conventions

    @classmethod
    def of(
        cls, deployment: Deployment, weights: str, conventions: Conventions
    ) -> "NetworkToWrite":
        """Return what `build_onnx` translates and lowers, for its arguments."""
        is_half_even = conventions.rounds_half_even
        solution = with_runtime_biases(
            deployment.graph, deployment.solution, conventions.biases
        ).by_rows()
        tested = replace(deployment, solution=solution)
        if is_half_even and not conventions.is_for_kernels:
            # The engine rounds as it does. The file is right if it is what the remarks say.
            linearly = with_activations(solution, round_mode="half_even", narrow_range=False)
            tested = replace(deployment, solution=linearly)
        apart = quantized_apart(deployment.graph, solution, any_rounding=is_half_even)
        wide = in_float32(replace(deployment, solution=apart))
        encoded = wide.encoded
        if is_half_even:
            encoded = with_activations(encoded, round_mode="half_even")
        if conventions.is_for_kernels:
            is_packed = conventions.is_packed
            stated = adapt_weights(wide.graph, encoded, weights, packed=is_packed)
        else:
            stated = signed_weights(wide.graph, encoded)
        opset = deployment.opset
        if opset == -1:
            opset = operator_set(stated.specs, conventions)
        return cls(tested, wide, stated, wide.network(), opset, conventions)

    @property
    def quantizations(self) -> Quantizations:
        """Return what is quantized, in the order of the marks' indices."""
        return list(self.stated.tensors.items())

    def translated(self) -> ir.Model:
        """Return the network as ONNX, with marks."""
        return translate_network(self.wide, self.network, self.quantizations, self.opset)

    def lowered(
        self, model: ir.Model, quantizations: Quantizations, left_out: Collection[Key] = ()
    ) -> ModelProto:
        """Return a translated model with nodes and codes in the places of its marks.

        Args:
            model: is changed.
            quantizations: by the indices of its marks.
            left_out: those that stay in float.

        Raises:
            UsageError: the profile cannot hold the biases.
        """
        biases_form = self.conventions.biases
        steps = sum_steps(self.wide.graph, self.stated, biases_form)
        biases = sum_biases(self.network, steps)
        if biases_form is BiasForm.PRODUCTS:
            words = checked_target("onnx", self.tested.choices).words
            wide_biases = [step for step in steps if step not in biases]
            refuse(words, wide_bias_refusals(wide_biases))
        lowering = Lowering(
            self.network,
            quantizations,
            self.opset,
            biases,
            overflowing(self.network, self.stated) - biases.keys(),
            self.conventions,
            left_out,
        )
        lower_marks(model, lowering)
        proto = ir.to_proto(model)
        clean_proto(proto, self.tested.graph, self.tested.input_names)
        return proto


def build_onnx(
    deployment: Deployment, weights: str, conventions: Conventions = EXACT
) -> BuiltOnnx:
    """Return the network with QuantizeLinear and DequantizeLinear.

    Args:
        deployment: what is exported.
        weights: the type of 8-bit weights in files for kernels: "auto", "int8" or "uint8".
        conventions: those of the profile.

    Raises:
        UsageError: the profile cannot hold the biases.
        ModelError: torch.onnx does not know an operator of the network.
    """
    to_write = NetworkToWrite.of(deployment, weights, conventions)
    model = to_write.translated()
    floating = float_model(model) if conventions.is_for_kernels else None
    proto = to_write.lowered(model, to_write.quantizations)
    storage = weight_storage(to_write.wide.graph, to_write.stated)
    texts = dict(deployment.origin.texts())
    remarks = profile_remarks(conventions, deployment.solution.specs)
    if conventions.is_for_kernels:
        texts["processors"] = storage.processors
        remarks = storage.remarks
    onnx.helper.set_model_props(proto, texts)
    return BuiltOnnx(proto, floating, to_write.tested, storage, remarks)


def operator_set(specs: TensorSpecs, conventions: Conventions = EXACT) -> int:
    """Return 20, or 21 if only that has a type of codes or the blocks of a weight."""
    opsets = [
        _first_opset(role, spec, conventions)
        for (_, role), spec in specs.items()
        if spec.dtype == "int"
    ]
    return max([DEFAULT_OPSET, *opsets])


def _first_opset(role: str, spec: QuantizationSpec, conventions: Conventions) -> int:
    """Return the first operator set with the type of a tensor's codes; biases stay floats."""
    if base_role(role) == "bias":
        return 0
    newest = OPSETS[-1]
    if not is_parameter(role):
        stored = activation_type(spec, newest, conventions)
        return 0 if stored is None else stored[0].opset
    kind = weight_type(spec, newest)
    opset = 0 if kind is None else kind.opset
    if spec.qscheme == "per_group":
        opset = max(opset, BLOCK_SIZE_OPSET)
    return opset


# torch's name for an open size, alone or in a formula.
_SYMBOL = re.compile(r"\b[su]\d+\b")
_INVALID_HELP = "the pt2 target writes the same network for torch"
LARGEST_MESSAGE = 2**31 - 2**20
"""Bytes of tensors that fit one message."""


def clean_proto(model: ModelProto, graph: Graph, input_names: Sequence[str]) -> None:
    """Remove metadata and value shapes, and name producer, graph, domains and open sizes."""
    model.producer_name = "quantizer"
    model.producer_version = quantizer.__version__
    _set_domains(model)
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    del model.graph.value_info[:]
    model.graph.name = graph.model
    model.graph.doc_string = ""
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    names = _size_names(model, graph, input_names)
    for value in (*model.graph.input, *model.graph.output):
        del value.metadata_props[:]
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.HasField("dim_param"):
                size = dimension.dim_param
                dimension.dim_param = names.get(size) or _SYMBOL.sub(
                    lambda symbol: names[symbol[0]], size
                )


def _set_domains(model: ModelProto) -> None:
    domains = {
        entry.domain: entry.version
        for entry in model.opset_import
        if entry.domain not in (MARK_DOMAIN, PACKED_DOMAIN)
    }
    if any(node.domain == PACKED_DOMAIN for node in model.graph.node):
        domains[PACKED_DOMAIN] = 1
    del model.opset_import[:]
    for domain, version in domains.items():
        model.opset_import.append(onnx.helper.make_opsetid(domain, version))


def _names_of_size(size: str, length: Length | None) -> dict[str, str]:
    """Return the name of an input's open size, and of torch's symbol in it.

    Args:
        size: what torch calls it, such as "s5" or "4*s5".
        length: which sizes are accepted; None for the batch.
    """
    if length is None:
        return {size: "batch"}
    names = {size: length.name}
    if length.step > 1:
        [symbol] = _SYMBOL.findall(size)
        offset = length.least % length.step
        first = f"({length.name} - {offset})" if offset else length.name
        names[symbol] = f"({first}/{length.step})"
    return names


def _size_names(
    model: ModelProto, graph: Graph, input_names: Sequence[str]
) -> Mapping[str, str]:
    """Return what torch's symbols stand for: the batch, a length, or a size from values.

    The latter are called "size_1" and so on. A length that is accepted in steps is a formula:
    its symbol stands for the number of steps.
    """
    shapes = [node.shape for node in graph.nodes if node.op == "input"]
    tensors = [index for index, shape in enumerate(shapes) if shape is not None]
    lengths = {axes: length for length in graph.lengths for axes in length.axes}
    names: dict[str, str] = {}
    for value in model.graph.input:
        index = tensors[input_names.index(value.name)]
        for axis_number, dimension in enumerate(value.type.tensor_type.shape.dim):
            if dimension.HasField("dim_param"):
                size = dimension.dim_param
                open_length = lengths.get((index, axis_number))
                names |= _names_of_size(size, open_length)
    count = 0
    for value in model.graph.output:
        for dimension in value.type.tensor_type.shape.dim:
            for symbol in _SYMBOL.findall(dimension.dim_param):
                if symbol not in names:
                    count += 1
                    names[symbol] = f"size_{count}"
    return names


@contextmanager
def stored_model(model: ModelProto, path: Path) -> Iterator[bytes | str]:
    """Yield what a session loads, and write it to `path`, in a new folder.

    That is the serialized model, or its file. Tensors of 2 GB and more go to `<path>.data`.

    Raises:
        ResultError: the file cannot be written.
        VerificationError: it is not valid ONNX.
    """
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) <= LARGEST_MESSAGE:
        _check(model, path.name)
        content = model.SerializeToString(deterministic=True)
        yield content
        write_bytes(path, content)
        return
    try:
        onnx.save_model(
            model,
            path,
            save_as_external_data=True,
            location=f"{path.name}.data",
            size_threshold=1024,
        )
    except OSError as error:
        raise cannot_write(path, error) from error
    _check(str(path), path.name)
    yield str(path)


def _check(model: ModelProto | str, name: str) -> None:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        why = first_line(error)
        raise VerificationError(
            f"{name} is not written: it would be no valid ONNX: {why}", help=_INVALID_HELP
        ) from error
