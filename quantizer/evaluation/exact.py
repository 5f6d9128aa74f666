"""Runs a calibrated network in the DPU's integers beside the float simulation, and compares
them code for code.

Codes, int32 accumulators, shifts with the rounding of each tensor's spec. It executes and
compares; it decides nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.calibration.solution import Solution, quantized_network
from quantizer.config.roles import is_parameter, parameter_name, parameter_role
from quantizer.errors import UsageError
from quantizer.evaluation.compare import over_batches
from quantizer.evaluation.exact_layers import Fixed, IntegerCall, rule_of
from quantizer.graph.ir import Graph, Node
from quantizer.nn.execution import Execution, arguments
from quantizer.nn.network import Network
from quantizer.numerics.integer import requantize
from quantizer.plan.model import Key
from quantizer.sources.batches import Batch


@dataclass
class LayerCodes:
    """One tensor's codes against the simulation's: how many, how many differ, and by at most
    how many steps.

    `position` is the fix position of codes of the DPU.
    """

    layer: str
    role: str
    position: int | None = None
    codes: int = 0
    differing: int = 0
    most_steps: int = 0

    @property
    def equal(self) -> float:
        """The share of codes that are equal; 1 if there are none."""
        return 1 - self.differing / self.codes if self.codes else 1.0

    def add(self, found: Tensor, simulated: Tensor) -> None:
        """Take in one batch; both hold integers."""
        distance = (found - simulated).abs()
        self.codes += distance.numel()
        self.differing += int((distance > 0).sum())
        self.most_steps = max(self.most_steps, int(distance.max()) if distance.numel() else 0)


@dataclass
class ExactComparison:
    """What a run in integers found: why layers ran in float, and the first batch in which an
    accumulator overflowed.
    """

    layers: list[LayerCodes] = field(default_factory=list)
    floats: dict[str, str] = field(default_factory=dict)
    overflows: dict[str, int] = field(default_factory=dict)

    @property
    def equal(self) -> float:
        """The share of codes that are those of the simulation; 1 if all are."""
        codes = sum(layer.codes for layer in self.layers)
        return 1 - sum(layer.differing for layer in self.layers) / codes if codes else 1.0


def compare_exact(
    graph: Graph, solution: Solution, batches: Iterable[Batch]
) -> ExactComparison:
    """Run every batch in integers and in simulation, and compare all codes of activations.

    Raises:
        DataError: there is no batch.
        UsageError: a layer to compare computes in half precision.
    """
    require_wide(graph, solution)
    result = ExactComparison()
    network = _IntegerNetwork(graph, solution, result)
    keys = [
        (node.name, "input" if node.op == "input" else "activation") for node in graph.nodes
    ]
    rows = {
        key: LayerCodes(*key, network.positions[key])
        for key in keys
        if key in network.positions
    }

    def one_batch(batch: Batch) -> None:
        inputs = network.simulation.inputs(batch.args, batch.kwargs)
        integers, simulated = Execution(network, inputs), Execution(network.simulation, inputs)
        for (name, value), (_, other) in zip(integers.steps(), simulated.steps(), strict=True):
            for role in ("activation", "input"):
                if (name, role) in rows and isinstance(value, Fixed):
                    rows[name, role].add(value.codes, other.double() * 2.0**value.position)
        network.batch += 1

    over_batches(batches, one_batch)
    result.layers = list(rows.values())
    return result


def require_wide(graph: Graph, solution: Solution) -> None:
    """Refuse half precision: it rounds a sum to 11 or 8 bits before its quantizer does, so
    integers cannot follow.

    Raises:
        UsageError: naming the first such layer.
    """
    for name, _ in solution.tensors:
        dtype = graph.by_name[name].dtype
        if dtype in (torch.float16, torch.bfloat16):
            raise UsageError(
                f"--exact compares codes, and {name} computes in "
                f"{str(dtype).removeprefix('torch.')}, which rounds sums before they are "
                "quantized",
                help="--exact needs a float32 model: calibrate and test model.float()",
            )


class _IntegerNetwork:
    """The graph in integers: `plain` computes on codes in float64, `simulation` runs what has
    no integer form.
    """

    def __init__(self, graph: Graph, solution: Solution, result: ExactComparison) -> None:
        graph, solution = graph.on(torch.device("cpu")).in_memory(), solution.in_memory()
        self.graph, self.solution, self.result = graph, solution, result
        self.simulation = quantized_network(graph, solution)
        self.last_uses = self.simulation.last_uses
        self.overwritten: Collection[str] = self.simulation.overwritten
        self.plain = Network(graph).double()
        self.positions = solution.positions
        self.biases: dict[str, Fixed] = {}
        self.batch = 0
        for key, position in self.positions.items():
            if is_parameter(key[1]):
                self._put_codes(*key, position)

    def _put_codes(self, name: str, role: str, position: int) -> None:
        """Weight codes in the plain layer; the bias beside it, as it is added at a position of
        its own.
        """
        layer, key = self.plain.layers[name], parameter_name(role)
        codes = (
            self.simulation.layers[name].get_parameter(key).detach().double() * 2.0**position
        )
        if key == "bias":
            self.biases[name] = Fixed(codes, position)
            layer.register_parameter("bias", None)
        else:
            layer.register_parameter(key, nn.Parameter(codes, requires_grad=False))

    def run_node(self, node: Node, values: Mapping[str, Any]) -> Any:
        """Its value, in integers or in float where it has no integer form: `Fixed` where it has
        codes.
        """
        if node.op == "input":
            return self._codes_of((node.name, "input"), self.simulation.run_node(node, values))
        output, rule, why = (node.name, "activation"), rule_of(node), self._why_float(node)
        if rule is not None and not why:
            inputs = self._own_codes(node, arguments(node, values))
            weight, bias = (
                self.positions.get((node.name, "weights")),
                self.biases.get(node.name),
            )
            step = IntegerCall(node, self.plain.layers[node.name], inputs, weight, bias)
            wide = rule(step)
            if step.overflowed:
                self.result.overflows.setdefault(node.name, self.batch)
            if wide is not None:
                return (
                    self._shift(wide, output)
                    if isinstance(wide, Fixed) and output in self.positions
                    else wide
                )
        if node.row.kind not in ("structural", "passthrough"):
            self.result.floats.setdefault(node.name, why or "what it reads has no codes")
        floats = {
            name: _floats(values[name], self.graph.by_name[name].dtype) for name in node.refs()
        }
        return self._codes_of(output, self.simulation.run_node(node, floats))

    def _why_float(self, node: Node) -> str:
        """Why the layer cannot run in integers, whatever it reads."""
        if rule_of(node) is None:
            return f"{node.op} has no integer form here"
        if node.row.weight:
            missing = [
                key
                for key in node.params
                if (node.name, parameter_role(key)) not in self.positions
            ]
            if missing or set(node.inputs) & {"weight", "bias"}:
                return "its parameters have no single power-of-two scale"
        output = (node.name, "activation")
        has_position = output in self.positions or output not in self.solution.tensors
        return "" if has_position else "its output has no single power-of-two scale"

    def _own_codes(self, node: Node, call: Mapping[str, Any]) -> dict[str, Any]:
        """The layer's own view of what it reads, where the config quantizes "input" on its
        own.
        """
        found = {}
        for index, (name, value) in enumerate(call.items()):
            key = (node.name, f"input_{index}" if index else "input")
            found[name] = (
                self._shift(value, key)
                if isinstance(value, Fixed) and key in self.positions
                else value
            )
        return found

    def _shift(self, wide: Fixed, key: Key) -> Fixed:
        spec, position = self.solution.tensors[key].spec, self.positions[key]
        shift = wide.position - position
        return Fixed(
            requantize(
                wide.codes, shift, spec.quant_min, spec.quant_max, round_mode=spec.round_mode
            ),
            position,
        )

    def _codes_of(self, key: Key, value: Any) -> Any:
        """The codes of a value that a quantizer of the simulation has made."""
        position = self.positions.get(key)
        return value if position is None else Fixed(value.double() * 2.0**position, position)


def _floats(value: Any, dtype: torch.dtype | None) -> Any:
    """A node's value as the simulation has it; several outputs stay several."""
    return pytree.tree_map(
        lambda leaf: leaf.float(dtype) if isinstance(leaf, Fixed) else leaf, value
    )
