"""Writes the .onnx target: the network with QuantizeLinear and DequantizeLinear.

torch.onnx translates the network with a mark where each tensor is quantized. Passes then
replace marks by nodes and weights by codes.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from onnx import ModelProto, TensorProto

from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.export.agreement import Verification
from quantizer.export.arithmetic.biases import with_runtime_biases
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.layer_choice import DEPLOY_FILE, LayerChoice, network_digest, read_choice
from quantizer.export.onnx.activations import activation_refusal
from quantizer.export.onnx.build import OPSETS, build_onnx, operator_set
from quantizer.export.onnx.complex_numbers import complex_refusals
from quantizer.export.onnx.conventions import CONVENTIONS, Conventions
from quantizer.export.onnx.files import stored_model
from quantizer.export.onnx.int8_weights import WeightStorage
from quantizer.export.onnx.limits import float8_key_refusals, limit_refusals
from quantizer.export.onnx.openvino import openvino_started
from quantizer.export.onnx.sample_filters import lacks_product
from quantizer.export.onnx.tuned.trials import activation_keys, without_activations
from quantizer.export.onnx.tuned.tuner import choose_layers
from quantizer.export.onnx.unknown_operators import untranslatable_operators
from quantizer.export.onnx.verify import OnnxFile, verify_sessions
from quantizer.graph.ir import Graph, Node
from quantizer.plan.model import TensorSpecs
from quantizer.storage.files import write_json

_BYTES = {TensorProto.INT8: "int8", TensorProto.UINT8: "uint8"}
_SLOWER_IN_INTEGERS = f"left there for speed, see {DEPLOY_FILE}"


@dataclass(frozen=True)
class OnnxModel:
    """A model that was written, and what it is compared with."""

    file: OnnxFile
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

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> Iterator[Refusal]:
        """Yield what ONNX cannot express, and what ONNX Runtime cannot run."""
        yield from self.format_refusals(graph, specs, opset)
        if self.conventions.limits is None:
            yield from float8_key_refusals(graph, specs)

    def format_refusals(
        self, graph: Graph, specs: TensorSpecs, opset: int
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
            return choose_layers(deployment.in_memory(), weights, self.conventions)
        digest = network_digest(deployment.graph, solution)
        content = read_choice(source, digest, weights, activation_keys(solution))
        left_out = [(layer, role) for layer, role in content["float_activations"]]
        reduced = without_activations(deployment.graph, solution, left_out)
        return LayerChoice(reduced, content)

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[OnnxModel]:
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
        if deployment.layer_choice is not None:
            write_json(path.with_name(DEPLOY_FILE), deployment.layer_choice.content)

    def verify(self, deployment: Deployment, written: OnnxModel) -> Verification:
        """Run the model in ONNX Runtime, without optimizations and as users do.

        OpenVINO runs a file for kernels, too, if it is installed. It refuses nothing, but a
        warning is logged if it reads the file in another way.
        """
        codes = _activation_codes(written.file.model)
        if not written.file.is_for_kernels:
            verification = verify_sessions(written.file, written.tested)
            return replace(verification, remarks=written.remarks, activation_codes=codes)
        with openvino_started(written.file, written.tested) as openvino:
            verification = verify_sessions(written.file, written.tested)
            engines = () if openvino is None else (openvino.result(),)
        remarks = written.remarks
        asides = written.storage.asides
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
            uint8_weights=tuple(written.storage.unsigned),
            processors=written.storage.processors,
            activation_codes=codes,
        )


def _activation_codes(model: ModelProto) -> str:
    """Return the most frequent type of the codes of 8 bits that a file computes."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    counts: Counter[str] = Counter()
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and len(node.input) > 2:
            counts[_BYTES.get(types.get(node.input[2], 0), "")] += 1
    del counts[""]
    return next((name for name, _ in counts.most_common(1)), "")


def _with_reasons(verification: Verification, choice: LayerChoice) -> Verification:
    """Return the verification with the reason for layers that a choice leaves in float."""
    session = verification.default_session
    if session is None or session.kernels is None:
        return verification
    floating = dict(session.kernels.floating)
    for layer in choice.float_layers:
        if layer in floating:
            floating[layer] = _SLOWER_IN_INTEGERS
    kernels = replace(session.kernels, floating=floating)
    return replace(
        verification,
        default_session=replace(session, kernels=kernels),
        float_activations=choice.float_activations,
    )


def _pools_any_size(graph: Graph, node: Node) -> bool:
    """Return whether a pooling gives several values along an axis whose size is open."""
    if not node.target.startswith("aten.adaptive_") or node.shape is None:
        return False
    source = graph.source(node)
    if source is None:
        return False
    for axis in set(source.open_axes).difference(node.open_axes):
        size = node.shape[axis]
        if size is not None and size > 1:
            return True
    return False


def graph_refusals(graph: Graph, opset: int) -> Iterator[Refusal]:
    """Yield what ONNX cannot express of a network in float."""
    if opset not in OPSETS:
        why = f"writes operator sets {OPSETS.start} to {OPSETS[-1]}, not {opset}"
        yield Refusal(why, "set onnx_opset_version to one of these, or to -1")
    else:
        yield from untranslatable_operators(graph, opset)
    yield from complex_refusals(graph)
    for node in graph.nodes:
        if _pools_any_size(graph, node):
            yield Refusal(
                "pools a map of any size to a constant one, for which ONNX has no operator",
                "pool to a size of 1, leave <--dynamic> out, or use <--deploy pt2>",
                node.name,
            )
        if lacks_product(node):
            yield Refusal(
                "has a number of groups that follows the batch; ONNX has a constant there",
                "write it as a product of matrices (torch.bmm), or use <--deploy pt2>",
                node.name,
            )
        if "weight_hr_l0" in node.params:
            why = "is an LSTM with proj_size, which ONNX's LSTM operator lacks"
            remedy = (
                "leave proj_size out and put a Linear layer behind it, or use <--deploy pt2>"
            )
            yield Refusal(why, remedy, node.name)
