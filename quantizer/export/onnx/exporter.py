"""Writes the .onnx target: the network with QuantizeLinear and DequantizeLinear.

torch.onnx translates the network with a mark where each tensor is quantized. Passes then
replace marks by nodes and weights by codes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import ModelProto

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.export import refuse
from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.float32 import in_float32
from quantizer.export.onnx.activations import activation_refusal
from quantizer.export.onnx.biases import (
    overflowing,
    sum_biases,
    sum_steps,
    with_runtime_biases,
)
from quantizer.export.onnx.cleaning import clean_proto
from quantizer.export.onnx.complex_numbers import complex_refusals
from quantizer.export.onnx.conventions import CONVENTIONS, EXACT, BiasForm, Conventions
from quantizer.export.onnx.files import stored_model
from quantizer.export.onnx.int8_weights import WeightStorage
from quantizer.export.onnx.limits import (
    float8_key_refusals,
    limit_refusals,
    profile_remarks,
    wide_bias_refusals,
)
from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.openvino import openvino_started
from quantizer.export.onnx.passes import lower_marks
from quantizer.export.onnx.profile import quantized_linearly, rounded_half_even
from quantizer.export.onnx.specs import (
    adapt_weights,
    quantized_apart,
    signed_weights,
    weight_storage,
)
from quantizer.export.onnx.speed import float_model
from quantizer.export.onnx.tensors import MIN_OPSET, activation_type, weight_type
from quantizer.export.onnx.translation import translate_network
from quantizer.export.onnx.verify import OnnxFile, verify_sessions
from quantizer.export.onnx.weights import BLOCK_SIZE_OPSET
from quantizer.export.targets import checked_target
from quantizer.graph.ir import Graph
from quantizer.plan.model import Key

OPSETS = range(MIN_OPSET, 24)
"""The operator sets that torch.onnx writes."""
DEFAULT_OPSET = 20
"""Every optimization of ONNX Runtime knows it."""


@dataclass(frozen=True)
class OnnxModel:
    """A model that was written, and what it is compared with."""

    file: OnnxFile
    tested: Deployment
    storage: WeightStorage
    remarks: tuple[str, ...]


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


class OnnxExporter(Exporter[OnnxModel]):
    """Writes a model with the inputs and outputs of the user's model, by their names.

    They are in the order of the call's tensors. The bytes depend only on network and
    calibration. A network of half precision computes in float32 there.
    """

    @property
    def conventions(self) -> Conventions:
        """Return the conventions of the profile."""
        return CONVENTIONS[self.choice("onnx_profile")]

    def refusals(
        self,
        graph: Graph,
        specs: Mapping[Key, QuantizationSpec],
        opset: int,
    ) -> Iterator[Refusal]:
        """Yield what ONNX cannot express, and what ONNX Runtime cannot run."""
        yield from self.format_refusals(graph, specs, opset)
        if self.conventions.limits is None:
            yield from float8_key_refusals(graph, specs)

    def format_refusals(
        self,
        graph: Graph,
        specs: Mapping[Key, QuantizationSpec],
        opset: int,
    ) -> Iterator[Refusal]:
        """Yield what ONNX cannot express, for any engine."""
        conventions = self.conventions
        opset = operator_set(specs, conventions) if opset == -1 else opset
        yield from graph_refusals(graph, opset)
        for (layer, role), spec in specs.items():
            if is_parameter(role):
                continue
            dtype = graph.by_name[layer].dtype
            reason = activation_refusal(spec, dtype, opset, conventions)
            if reason is not None:
                yield Refusal(*reason, layer, role)
        if conventions.limits is not None:
            yield from limit_refusals(conventions.limits, graph, specs)

    def as_run(
        self,
        graph: Graph,
        solution: Solution,
    ) -> Solution:
        """Return the solution with biases rounded as the file's engine does."""
        return with_runtime_biases(graph, solution, self.conventions.biases)

    @contextmanager
    def write(
        self,
        deployment: Deployment,
        path: Path,
    ) -> Iterator[OnnxModel]:
        """Write the model; it is verified before it is published.

        Raises:
            ModelError: torch.onnx does not know an operator of the network.
            ResultError: the file cannot be written.
        """
        conventions = self.conventions
        built = build_onnx(deployment, self.choice("onnx_weights"), conventions)
        with stored_model(built.proto, path) as source:
            is_for_kernels = conventions.is_for_kernels
            file = OnnxFile(path.name, source, built.proto, built.floating, is_for_kernels)
            yield OnnxModel(file, built.tested, built.storage, built.remarks)

    def verify(
        self,
        deployment: Deployment,
        written: OnnxModel,
    ) -> Verification:
        """Run the model in ONNX Runtime, without optimizations and as users do.

        OpenVINO runs a file for kernels, too, if it is installed. It refuses nothing, but a
        warning is logged if it reads the file in another way.
        """
        if not written.file.is_for_kernels:
            verification = verify_sessions(written.file, written.tested)
            return replace(verification, remarks=written.remarks)
        with openvino_started(written.file, written.tested) as openvino:
            verification = verify_sessions(written.file, written.tested)
            engines = () if openvino is None else (openvino.result(),)
        return replace(
            verification,
            remarks=written.remarks,
            engines=engines,
            uint8_weights=tuple(written.storage.unsigned),
            processors=written.storage.processors,
        )


def build_onnx(
    deployment: Deployment,
    weights: str,
    conventions: Conventions = EXACT,
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
    is_half_even = conventions.rounds_half_even
    solution = with_runtime_biases(
        deployment.graph, deployment.solution, conventions.biases
    ).by_rows()
    # The file is compared with this, whatever is restated for it.
    tested = replace(deployment, solution=solution)
    if is_half_even and not conventions.is_for_kernels:
        # The engine rounds as it does. The file is right if it is what the remarks say.
        tested = replace(deployment, solution=quantized_linearly(solution))
    apart = quantized_apart(deployment.graph, solution, any_rounding=is_half_even)
    wide = in_float32(replace(deployment, solution=apart))
    encoded = rounded_half_even(wide.encoded) if is_half_even else wide.encoded
    if conventions.is_for_kernels:
        is_packed = conventions.is_packed
        stated = adapt_weights(wide.graph, encoded, weights, packed=is_packed)
    else:
        stated = signed_weights(wide.graph, encoded)
    opset = deployment.opset
    if opset == -1:
        opset = operator_set(stated.specs, conventions)
    network = wide.network()
    quantizations = list(stated.tensors.items())
    model = translate_network(wide, network, quantizations, opset)
    floating = float_model(model) if conventions.is_for_kernels else None
    steps = sum_steps(wide.graph, stated, conventions.biases)
    biases = sum_biases(network, steps)
    if conventions.biases is BiasForm.PRODUCTS:
        words = checked_target("onnx", deployment.choices).words
        refuse(words, wide_bias_refusals(step for step in steps if step not in biases))
    float_layers = overflowing(network, stated) - biases.keys()
    lowering = Lowering(network, quantizations, opset, biases, float_layers, conventions)
    lower_marks(model, lowering)
    proto = ir.to_proto(model)
    clean_proto(proto, deployment.graph, deployment.input_names)
    storage = weight_storage(wide.graph, stated)
    texts = dict(deployment.origin.texts())
    remarks = profile_remarks(conventions, solution.specs)
    if conventions.is_for_kernels:
        texts["processors"] = storage.processors
        remarks = storage.remarks
    onnx.helper.set_model_props(proto, texts)
    return BuiltOnnx(proto, floating, tested, storage, remarks)


def graph_refusals(
    graph: Graph,
    opset: int,
) -> Iterator[Refusal]:
    """Yield what ONNX cannot express of a network in float."""
    if opset not in OPSETS:
        why = f"writes operator sets {OPSETS.start} to {OPSETS[-1]}, not {opset}"
        yield Refusal(why, "set onnx_opset_version to one of these, or to -1")
    yield from complex_refusals(graph)
    for node in graph.nodes:
        if "weight_hr_l0" in node.params:
            why = "is an LSTM with proj_size, which ONNX's LSTM operator lacks"
            remedy = "leave proj_size out and put a Linear layer behind it, or use --deploy pt2"
            yield Refusal(why, remedy, node.name)


def operator_set(
    specs: Mapping[Key, QuantizationSpec],
    conventions: Conventions = EXACT,
) -> int:
    """Return 20, or 21 if only that has a type of codes or the blocks of a weight."""
    opsets = [DEFAULT_OPSET]
    for (_, role), spec in specs.items():
        if spec.dtype == "int":
            opsets.append(_first_opset(role, spec, conventions))
    return max(opsets)


def _first_opset(
    role: str,
    spec: QuantizationSpec,
    conventions: Conventions,
) -> int:
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
