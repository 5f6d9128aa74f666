"""`evaluate` gets the outputs that the comparison has computed, and only those that another run
would give.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quantizer.calibration.solution import Solution, quantized_network
from quantizer.config.model import QuantizationSpec
from quantizer.evaluation.compare import compare
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.nn.recorded_outputs import RecordedOutputs
from quantizer.sources.batches import Batch

COARSE = QuantizedTensor(QuantizationSpec(bit_width=4), torch.tensor(0.25))
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.shift)


class Runs:
    """A network that has recorded its output for X, and how many nodes it has run since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graph = trace(Shifted(), (X,))
        solution = Solution({("Shifted::input_0", "input"): COARSE})
        self.network = quantized_network(graph, solution)
        self.same = quantized_network(graph, solution)
        recorded = RecordedOutputs(self.network)
        compare(Network(graph), self.network, [Batch.of(X)], recorded=recorded)
        self.network.recorded = recorded
        self.count = 0
        run_node = self.network.run_node

        def counted(*arguments: object) -> object:
            self.count += 1
            return run_node(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(self.network, "run_node", counted)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def test_the_same_input_is_not_run_again(runs: Runs) -> None:
    expected = runs.same(X)
    output = runs.network(X.clone())
    assert torch.equal(output, expected)
    output.zero_()
    assert torch.equal(runs.network(X), expected)
    assert runs.count == 0


@pytest.mark.parametrize("other", [2 * X, X[:2], X.clone().requires_grad_()])
def test_another_input_is_run(other: Tensor, runs: Runs) -> None:
    assert torch.equal(runs.network(other), runs.same(other))
    assert runs.count


def test_hooks_are_called(runs: Runs) -> None:
    seen: list[object] = []
    layer = runs.network.layers["Shifted::Shifted/relu"]
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    assert torch.equal(runs.network(X), runs.same(X))
    assert len(seen) == 1


def test_changed_parameters_count(runs: Runs) -> None:
    for network in (runs.network, runs.same):
        for parameter in network.parameters():
            parameter.data = parameter + 1
    assert torch.equal(runs.network(X), runs.same(X))
    assert runs.count
    with torch.no_grad():
        for network in (runs.network, runs.same):
            for parameter in network.parameters():
                parameter.add_(1)
    assert torch.equal(runs.network(X), runs.same(X))
