"""Runs a calibrated network in the DPU's integers beside the float simulation, and compares them code for code.

Codes, int32 accumulators, shifts with the rounding of each tensor's spec. It executes and compares; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_role
from quantizer.engine.attach import quantized_network
from quantizer.engine.exact_layers import Fixed, Step, compute, is_known
from quantizer.engine.solution import Solution
from quantizer.errors import DataError, UsageError
from quantizer.graph.ir import Graph, Node
from quantizer.nn.execution import Execution, arguments
from quantizer.nn.network import Network
from quantizer.numerics.integer import requantize
from quantizer.plan.model import Key
from quantizer.sources.batches import Batch, naming_batch

HALF = (torch.float16, torch.bfloat16)


@dataclass
class LayerCodes:
    """One tensor's codes against the simulation's: how many, how many differ, and by at most how many steps."""

    layer: str
    role: str
    position: int
    codes: int = 0
    differing: int = 0
    most_steps: int = 0

    def add(self, found: Tensor, simulated: Tensor) -> None:
        """Take in one batch; both hold integers."""
        distance = (found - simulated).abs()
        self.codes += distance.numel()
        self.differing += int((distance > 0).sum())
        self.most_steps = max(self.most_steps, int(distance.max()) if distance.numel() else 0)


@dataclass
class ExactComparison:
    """What a run in integers found: why layers ran in float, and the first batch in which an accumulator overflowed."""

    layers: list[LayerCodes] = field(default_factory=list)
    floats: dict[str, str] = field(default_factory=dict)
    overflows: dict[str, int] = field(default_factory=dict)

    @property
    def equal(self) -> float:
        """The share of codes that are those of the simulation; 1 if all are."""
        codes = sum(layer.codes for layer in self.layers)
        return 1 - sum(layer.differing for layer in self.layers) / codes if codes else 1.0


def compare_exact(
    graph: Graph, solution: Solution, batches: Iterable[Batch], after_batch: Callable[[int], None] | None = None
) -> ExactComparison:
    """Run every batch in integers and in simulation, and compare all codes of activations.

    Raises:
        DataError: there is no batch.
        UsageError: a layer to compare computes in half precision.
    """
    require_wide(graph, solution)
    result = ExactComparison()
    network = _IntegerNetwork(graph, solution, result)
    rows = {key: LayerCodes(*key, network.positions[key]) for key in network.compared()}
    count = 0
    with torch.no_grad():
        for batch in batches:
            network.batch = count
            with naming_batch(count):
                _one_batch(network, batch, rows)
            count += 1
            if after_batch is not None:
                after_batch(count)
    if not count:
        raise DataError("the evaluation data has no batches", help="check --data and --subset_len")
    result.layers = list(rows.values())
    return result


def _one_batch(network: _IntegerNetwork, batch: Batch, rows: Mapping[Key, LayerCodes]) -> None:
    """Run both networks in step, and count the codes that differ."""
    inputs = network.simulation.inputs(batch.args, batch.kwargs)
    integers, simulated = Execution(network, inputs), Execution(network.simulation, inputs)
    for (name, value), (_, other) in zip(integers.steps(), simulated.steps(), strict=True):
        for role in ("activation", "input"):
            if (name, role) in rows and isinstance(value, Fixed):
                rows[name, role].add(value.codes, other.double() * 2.0**value.position)


def require_wide(graph: Graph, solution: Solution) -> None:
    """Refuse half precision: it rounds a sum to 11 or 8 bits before its quantizer does, so integers cannot follow.

    Raises:
        UsageError: naming the first such layer.
    """
    for name, _ in solution.tensors:
        dtype = graph.by_name[name].dtype
        if dtype in HALF:
            raise UsageError(
                f"--exact compares codes, and {name} computes in {str(dtype).removeprefix('torch.')}, "
                "which rounds sums before they are quantized",
                help="--exact needs a float32 model: calibrate and test model.float()",
            )


class _IntegerNetwork:
    """The graph in integers: `plain` computes on codes in float64, `simulation` runs what has no integer form."""

    def __init__(self, graph: Graph, solution: Solution, result: ExactComparison) -> None:
        self.graph, self.solution, self.result = graph, solution, result
        self.simulation = quantized_network(graph, solution).cpu()
        self.last_uses = self.simulation.last_uses
        self.plain = Network(graph).double().cpu()
        known = {key: tensor.position for key, tensor in solution.tensors.items() if tensor.spec.symmetric}
        self.positions: dict[Key, int] = {key: at for key, at in known.items() if at is not None}
        self.biases: dict[str, Fixed] = {}
        self.batch = 0
        for name in {name for name, role in self.positions if is_parameter(role)}:
            self._put_codes(graph.by_name[name])

    def compared(self) -> list[Key]:
        """The tensors whose codes are compared: the network's inputs and what layers make, in execution order."""
        keys = [(node.name, "input" if node.op == "input" else "activation") for node in self.graph.nodes]
        return [key for key in keys if key in self.positions]

    def run_node(self, node: Node, values: Mapping[str, Any]) -> Any:
        """Its value: `Fixed` where it has codes."""
        if node.op == "input":
            return self._codes_of(node, self.simulation.run_node(node, values))
        return self._run(node, values)

    def _put_codes(self, node: Node) -> None:
        """Weight codes in the plain layer; the bias beside it, as it is added at a position of its own."""
        layer, simulated = self.plain.layers[node.name], self.simulation.layers[node.name]
        for key in [key for key in node.params if (node.name, parameter_role(key)) in self.positions]:
            position = self.positions[node.name, parameter_role(key)]
            codes = simulated.get_parameter(key).detach().double() * 2.0**position
            if key == "bias":
                self.biases[node.name] = Fixed(codes, position)
                layer.register_parameter("bias", None)
            else:
                layer.register_parameter(key, nn.Parameter(codes, requires_grad=False))

    def _run(self, node: Node, values: Mapping[str, Any]) -> Any:
        """One layer in integers, or in float where it has no integer form."""
        call = arguments(node, values)
        step = Step(node, self.plain.layers[node.name], self._own_codes(node, call))
        why = self._why_float(node)
        if not why:
            step.weight_position, step.bias = self.positions.get((node.name, "weights")), self.biases.get(node.name)
            wide = compute(step)
            if step.overflowed:
                self.result.overflows.setdefault(node.name, self.batch)
            if wide is not None:
                return self._shifted(node, wide)
        if node.row.kind not in ("structural", "passthrough"):
            self.result.floats.setdefault(node.name, why or "what it reads has no codes")
        floats = {name: _floats(values[name], self.graph.by_name[name].dtype) for name in node.refs()}
        return self._codes_of(node, self.simulation.run_node(node, floats))

    def _why_float(self, node: Node) -> str:
        """Why the layer cannot run in integers, whatever it reads."""
        if not is_known(node):
            return f"{node.op} has no integer form here"
        if node.row.weight:
            missing = [key for key in node.params if (node.name, parameter_role(key)) not in self.positions]
            if missing or set(node.inputs) & {"weight", "bias"}:
                return "its parameters have no single power-of-two scale"
        spec = self._spec(node)
        if spec is not None and (node.name, "activation") not in self.positions:
            return "its output has no single power-of-two scale"
        return ""

    def _spec(self, node: Node) -> QuantizationSpec | None:
        found = self.solution.tensors.get((node.name, "activation"))
        return found.spec if found else None

    def _own_codes(self, node: Node, call: Mapping[str, Any]) -> dict[str, Any]:
        """The layer's own view of what it reads, where the config quantizes "input" on its own."""
        roles = {name: role for role, name in zip(node.input_roles(), call, strict=False)}
        return {
            name: self._shift(value, (node.name, roles[name]))
            if name in roles and isinstance(value, Fixed) and (node.name, roles[name]) in self.positions
            else value
            for name, value in call.items()
        }

    def _shifted(self, node: Node, wide: Any) -> Any:
        """The wide result as the layer's codes, if it has any."""
        key = (node.name, "activation")
        return self._shift(wide, key) if isinstance(wide, Fixed) and key in self.positions else wide

    def _shift(self, wide: Fixed, key: Key) -> Fixed:
        spec, position = self.solution.tensors[key].spec, self.positions[key]
        shift = wide.position - position
        return Fixed(requantize(wide.codes, shift, spec.quant_min, spec.quant_max, spec.round_mode), position)

    def _codes_of(self, node: Node, value: Any) -> Any:
        """The codes of a value that a quantizer of the simulation has made."""
        position = self.positions.get((node.name, "input" if node.op == "input" else "activation"))
        return value if position is None else Fixed(value.double() * 2.0**position, position)


def _floats(value: Any, dtype: torch.dtype | None) -> Any:
    """A node's value as the simulation has it; several outputs stay several."""
    return pytree.tree_map(lambda leaf: leaf.float(dtype) if isinstance(leaf, Fixed) else leaf, value)
