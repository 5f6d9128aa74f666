"""Builds the network of an .onnx: what is written, and the model with its nodes and codes."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir
from onnx import ModelProto

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.export.arithmetic import (
    BiasForm,
    overflowing,
    quantized_apart,
    sum_biases,
    sum_steps,
    with_runtime_biases,
)
from quantizer.export.deployment import Deployment, in_float32
from quantizer.export.onnx.conventions import (
    EXACT,
    OPSETS,
    Conventions,
    activation_type,
    weight_type,
)
from quantizer.export.onnx.files import clean_proto
from quantizer.export.onnx.marks import Lowering, Quantizations
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
from quantizer.export.onnx.weights import BLOCK_SIZE_OPSET
from quantizer.export.refusals import refuse
from quantizer.export.targets import checked_target
from quantizer.nn.network import Network
from quantizer.plan.model import Key, TensorSpecs

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
    return max(DEFAULT_OPSET, *opsets)


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
