"""Runs a calibrated network in integers, as the DPU does, and compares each code with the
simulation.

Codes are multiplied and summed in int32 accumulators. Shifts move the sums to the output's
position, rounded by the rule of the output's spec.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.calibration.solution import Solution, quantized_network
from quantizer.config.roles import is_parameter, parameter_name, parameter_role
from quantizer.errors import UsageError
from quantizer.evaluation.compare import over_batches
from quantizer.evaluation.exact_layers import (
    FixedPoint,
    IntegerCall,
    LayerArguments,
    integer_rule,
)
from quantizer.graph.ir import Graph, Node
from quantizer.nn.network import Execution, Network, layer_arguments
from quantizer.numerics.integer import requantize
from quantizer.plan.model import Key
from quantizer.sources.batches import Batch, prefix_batch_errors


@dataclass
class LayerCodes:
    """How the codes of one tensor differ from those of the simulation.

    Attributes:
        layer: the layer's name.
        role: of the tensor in the layer.
        position: fp, if the scale of the codes is 2^-fp.
        codes: how many codes were compared.
        differing: how many codes differ.
        most_steps: the largest difference of two codes.
    """

    layer: str
    role: str
    position: int | None = None
    codes: int = 0
    differing: int = 0
    most_steps: int = 0

    @property
    def equal(self) -> float:
        """Return the share of equal codes; 1 if there are none."""
        return _equal_share(self.codes, self.differing)

    def add(self, codes: Tensor, simulated: Tensor) -> None:
        """Add one batch of codes. Both tensors hold integers."""
        distance = (codes - simulated).abs()
        self.codes += distance.numel()
        self.differing += int(distance.count_nonzero())
        if distance.numel():
            most_steps = int(distance.max())
            self.most_steps = max(self.most_steps, most_steps)


@dataclass
class ExactComparison:
    """The result of a run in integers.

    Attributes:
        layers: the compared tensors.
        floats: the layers that ran in float, with the reason.
        overflows: the layers whose accumulator overflowed, with the first such batch.
    """

    layers: list[LayerCodes] = field(default_factory=list)
    floats: dict[str, str] = field(default_factory=dict)
    overflows: dict[str, int] = field(default_factory=dict)

    @property
    def equal(self) -> float:
        """Return the share of codes that equal those of the simulation."""
        codes = 0
        differing = 0
        for layer in self.layers:
            codes += layer.codes
            differing += layer.differing
        return _equal_share(codes, differing)


def _equal_share(codes: int, differing: int) -> float:
    """Return the share of codes that do not differ; 1 if there are none."""
    return 1 - differing / codes if codes else 1.0


def compare_exact(
    graph: Graph, solution: Solution, batches: Iterable[Batch]
) -> ExactComparison:
    """Run each batch in integers and in simulation, and compare all codes of activations.

    Raises:
        DataError: there is no batch.
        UsageError: a layer to compare computes in half precision.
    """
    require_wide(graph, solution)
    network = _IntegerNetwork(graph, solution)
    rows: dict[str, LayerCodes] = {}
    for node in graph.nodes:
        name, role = _output_key(node)
        if (name, role) in network.positions:
            position = network.positions[name, role]
            rows[name] = LayerCodes(name, role, position)

    def run(number: int, batch: Batch) -> None:
        """Run one batch in step in integers and in simulation, and compare the codes."""
        network.batch = number
        with prefix_batch_errors(number):
            compare_codes(batch)

    def compare_codes(batch: Batch) -> None:
        """Run a batch in both networks, and add the codes of each layer to its row."""
        inputs = network.simulation.inputs(batch.args, batch.kwargs)
        integer_run = Execution(network, inputs)
        simulated_run = Execution(network.simulation, inputs)
        simulated_steps = simulated_run.steps()
        for name, value in integer_run.steps():
            _, simulated = next(simulated_steps)
            if name not in rows:
                continue
            if isinstance(value, FixedPoint):
                expected = FixedPoint.of(simulated, value.position)
                rows[name].add(value.codes, expected.codes)

    over_batches(batches, run)
    network.result.layers = list(rows.values())
    return network.result


def require_wide(graph: Graph, solution: Solution) -> None:
    """Raise `UsageError` if a quantized layer computes in half precision.

    Such a layer rounds its sums to 11 or 8 bits before its quantizer rounds them. A run in
    integers does not.
    """
    for name, _ in solution.tensors:
        dtype = graph.by_name[name].dtype
        if dtype in (torch.float16, torch.bfloat16):
            raise UsageError(
                f"<--exact> cannot compare {name}: it computes in "
                f"{str(dtype).removeprefix('torch.')}, which rounds sums before they are "
                "quantized",
                help="<--exact> needs a float32 model: calibrate and test model.float()",
            )


def _output_key(node: Node) -> Key:
    """Return the key of the tensor that a node outputs."""
    return node.name, "input" if node.op == "input" else "activation"


class _IntegerNetwork:
    """A graph that runs in integers where it can, and otherwise in simulation.

    Attributes:
        plain: layers without quantizers whose weights are codes. They compute in float64, in
            which sums of products of codes are exact.
        simulation: the quantized network, which runs layers that have no integer form.
        positions: of the tensors whose scale is a single power of two.
        biases: the codes of biases, by layer.
        batch: the number of the current batch.
        result: the layers that ran in float or overflowed, so far.
    """

    def __init__(self, graph: Graph, solution: Solution) -> None:
        cpu = torch.device("cpu")
        self.graph = graph.on(cpu).in_memory()
        self.solution = solution.in_memory()
        self.result = ExactComparison()
        self.simulation = quantized_network(self.graph, self.solution)
        self.last_uses = self.simulation.last_uses
        self.overwritten: Collection[str] = self.simulation.overwritten
        self.plain = Network(self.graph).double()
        self.positions = self.solution.positions
        self.biases: dict[str, FixedPoint] = {}
        self.batch = 0
        for (name, role), position in self.positions.items():
            if is_parameter(role):
                self._put_codes(name, parameter_name(role), position)

    def _put_codes(self, name: str, parameter: str, position: int) -> None:
        """Set the codes of a weight as the weight of the plain layer.

        A bias is removed from the layer and stored apart, because its codes have another
        position than the products.
        """
        values = self.simulation.layers[name].get_parameter(parameter)
        fixed = FixedPoint.of(values.detach(), position)
        layer = self.plain.layers[name]
        if parameter == "bias":
            self.biases[name] = fixed
            layer.register_parameter("bias", None)
        else:
            codes = nn.Parameter(fixed.codes, requires_grad=False)
            layer.register_parameter(parameter, codes)

    def run_node(self, node: Node, values: LayerArguments) -> Any:
        """Return the value of a node: `FixedPoint` if it has codes, floats otherwise.

        The node runs in integers if it can and its inputs have codes. Otherwise its inputs are
        converted to floats, and the simulation runs it.
        """
        output = _output_key(node)
        if node.op == "input":
            value = self.simulation.run_node(node, values)
            return self._to_codes(output, value)
        why = self._reason_for_float(node)
        if not why:
            value = self._run_in_integers(node, values)
            if isinstance(value, FixedPoint) and output in self.positions:
                return self._shift(value, output)
            if value is not None:
                return value
        if node.row.kind not in ("structural", "passthrough"):
            why = why or "what it reads has no codes"
            self.result.floats.setdefault(node.name, why)
        floats = {}
        for name in node.refs():
            dtype = self.graph.by_name[name].dtype
            floats[name] = _to_floats(values[name], dtype)
        value = self.simulation.run_node(node, floats)
        return self._to_codes(output, value)

    def _run_in_integers(self, node: Node, values: LayerArguments) -> Any:
        """Return a node's result before it is shifted to the output's position; None if the
        inputs have no codes.
        """
        inputs = layer_arguments(node, values)
        call = IntegerCall(
            node,
            self.plain.layers[node.name],
            self._quantized_inputs(node, inputs),
            self.positions.get((node.name, "weights")),
            self.biases.get(node.name),
        )
        rule = integer_rule(node)
        assert rule is not None
        wide = rule(call)
        if call.overflowed:
            self.result.overflows.setdefault(node.name, self.batch)
        return wide

    def _reason_for_float(self, node: Node) -> str:
        """Return why the layer cannot run in integers with any input; "" if it can."""
        if integer_rule(node) is None:
            return f"{node.op} has no integer form here"
        if node.row.weight:
            # Weights may also be outputs of other nodes
            have_positions = "weight" not in node.inputs and "bias" not in node.inputs
            for parameter in node.params:
                key = (node.name, parameter_role(parameter))
                have_positions = have_positions and key in self.positions
            if not have_positions:
                return "its parameters have no single power-of-two scale"
        output = (node.name, "activation")
        if output in self.solution.tensors and output not in self.positions:
            return "its output has no single power-of-two scale"
        return ""

    def _quantized_inputs(self, node: Node, call: LayerArguments) -> dict[str, Any]:
        """Return the arguments of a layer, with the codes of the inputs that it quantizes
        itself.
        """
        inputs = dict(call)
        for index, (name, value) in enumerate(call.items()):
            role = f"input_{index}" if index else "input"
            key = (node.name, role)
            if isinstance(value, FixedPoint) and key in self.positions:
                inputs[name] = self._shift(value, key)
        return inputs

    def _shift(self, wide: FixedPoint, key: Key) -> FixedPoint:
        """Return a result shifted to the position of a tensor, and clipped to its codes."""
        spec = self.solution.tensors[key].spec
        position = self.positions[key]
        codes = requantize(
            wide.codes,
            wide.position - position,
            spec.quant_min,
            spec.quant_max,
            round_mode=spec.round_mode,
        )
        return FixedPoint(codes, position)

    def _to_codes(self, key: Key, value: Any) -> Any:
        """Return the codes of a value that the simulation has quantized, or the value itself if
        it has no position.
        """
        position = self.positions.get(key)
        if position is None:
            return value
        return FixedPoint.of(value, position)


def _to_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """Return the output of a node, which may be several tensors, with codes as floats."""

    def to_float(leaf: Any) -> Any:
        if isinstance(leaf, FixedPoint):
            return leaf.float(dtype)
        return leaf

    return pytree.tree_map(to_float, value)
