"""Writes the .onnx target: the network with QuantizeLinear and DequantizeLinear.

torch.onnx translates the network with a mark where each tensor is quantized. Passes then
replace marks by nodes and weights by codes.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto, TensorProto

from quantizer.calibration.solution import Solution
from quantizer.export.agreement import Verification
from quantizer.export.arithmetic import with_runtime_biases
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.layer_choice import DEPLOY_FILE, LayerChoice, network_digest, read_choice
from quantizer.export.onnx.build import BuiltOnnx, build_onnx, operator_set, stored_model
from quantizer.export.onnx.lowering import CONVENTIONS, Conventions
from quantizer.export.onnx.openvino import openvino_started
from quantizer.export.onnx.refusals import float8_key_refusals, graph_refusals, tensor_refusals
from quantizer.export.onnx.tuned.tuner import Tuner, activation_keys, without_activations
from quantizer.export.onnx.verify import OnnxFile, verify_sessions
from quantizer.graph.ir import Graph
from quantizer.plan.model import TensorSpecs
from quantizer.storage.files import write_json

_BYTES = {TensorProto.INT8: "int8", TensorProto.UINT8: "uint8"}
_SLOWER_IN_INTEGERS = f"left there for speed, see {DEPLOY_FILE}"


_Written = tuple[OnnxFile, BuiltOnnx]
"""A model that was written, and what it is compared with."""


class OnnxExporter(Exporter[_Written]):
    """Writes a model with the inputs and outputs of the user's model, by their names.

    They are in the order of the call's tensors. The bytes depend only on network and
    calibration. A network of half precision computes in float32 there.
    """

    @property
    def conventions(self) -> Conventions:
        """Return the conventions of the profile."""
        return CONVENTIONS[self.choice("onnx_profile")]

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> Iterator[Refusal]:
        """Yield what ONNX cannot express, and what ONNX Runtime cannot run."""
        yield from self.format_refusals(graph, specs, opset)
        if self.conventions.activations is None:
            yield from float8_key_refusals(graph, specs)

    def format_refusals(
        self, graph: Graph, specs: TensorSpecs, opset: int
    ) -> Iterator[Refusal]:
        """Yield what ONNX cannot express, for any engine."""
        conventions = self.conventions
        opset = operator_set(specs, conventions) if opset == -1 else opset
        yield from graph_refusals(graph, opset)
        yield from tensor_refusals(conventions, graph, specs, opset)

    def as_run(self, graph: Graph, solution: Solution) -> Solution:
        """Return the solution with biases rounded as the file's engine does."""
        return with_runtime_biases(graph, solution, self.conventions.biases)

    def layer_choice(self, deployment: Deployment, path: Path) -> LayerChoice | None:
        """Return what stays in float in a tuned file: as a deploy.json says, or as measured.

        Raises:
            ResultError: the deploy.json does not fit the network.
            UsageError: the machine is too busy to measure.
        """
        if not self.conventions.is_tuned:
            return None
        solution = deployment.solution
        weights = self.choice("onnx_weights")
        named = self.choice("deploy_file")
        source = Path(named) if named else path.with_name(DEPLOY_FILE)
        if not named and not source.exists():
            return Tuner(deployment.in_memory(), weights, self.conventions).choice()
        digest = network_digest(deployment.graph, solution)
        content = read_choice(source, digest, weights, activation_keys(solution))
        left_out = [(layer, role) for layer, role in content["float_activations"]]
        reduced = without_activations(deployment.graph, solution, left_out)
        return LayerChoice(reduced, content)

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[_Written]:
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
            yield file, built
        if deployment.layer_choice is not None:
            write_json(path.with_name(DEPLOY_FILE), deployment.layer_choice.content)

    def verify(self, deployment: Deployment, written: _Written) -> Verification:
        """Run the model in ONNX Runtime, without optimizations and as users do.

        OpenVINO runs a file for kernels, too, if it is installed. It refuses nothing, but a
        warning is logged if it reads the file in another way.
        """
        file, built = written
        codes = _activation_codes(file.model)
        remarks = built.remarks
        if not file.is_for_kernels:
            verification = verify_sessions(file, built.tested)
            return replace(verification, remarks=remarks, activation_codes=codes)
        with openvino_started(file, built.tested) as openvino:
            verification = verify_sessions(file, built.tested)
            engines = () if openvino is None else (openvino(),)
        asides = built.storage.asides
        choice = deployment.layer_choice
        if choice is not None:
            remarks = (choice.line, *remarks)
            asides = (choice.line, *asides)
            verification = _with_reasons(verification, choice)
        return replace(
            verification,
            remarks=remarks,
            asides=asides,
            engines=engines,
            uint8_weights=tuple(built.storage.unsigned),
            processors=built.storage.processors,
            activation_codes=codes,
        )


def _activation_codes(model: ModelProto) -> str:
    """Return the most frequent type of the codes of 8 bits that a file computes."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    codes = [types.get(node.input[2], 0) for node in nodes if len(node.input) > 2]
    counts = Counter(_BYTES[code] for code in codes if code in _BYTES)
    return next((name for name, _ in counts.most_common(1)), "")


def _with_reasons(verification: Verification, choice: LayerChoice) -> Verification:
    """Return the verification with the reason for layers that a choice leaves in float."""
    session = verification.default_session
    if session is None or session.kernels is None:
        return verification
    floating = session.kernels.floating
    left = [layer for layer in choice.float_layers if layer in floating]
    slower = dict.fromkeys(left, _SLOWER_IN_INTEGERS)
    kernels = replace(session.kernels, floating=floating | slower)
    return replace(
        verification,
        default_session=replace(session, kernels=kernels),
        float_activations=choice.float_activations,
    )
