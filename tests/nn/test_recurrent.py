"""Recurrent layers: weights, biases, inputs and outputs are quantized, the code names torch's
own arguments.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.configs import config, document, layer
from support.toys import TOYS, Toy, built, traced

from quantizer.calibration import observing
from quantizer.calibration.solution import quantized_network
from quantizer.config.model import Settings
from quantizer.graph.emit import emit
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch

LSTM, GRU = "Recurrent::Recurrent/LSTM[lstm]/", "Gated::Gated/GRU[gru]/"
GATES = ("weights_ih", "weights_hh", "bias_ih", "bias_hh")


def planned(folder: Path, toy: str, *layers: dict[str, object]) -> Plan:
    found = config(folder, document(*layers, tensor={"weights": {"per_channel": True}}))
    return resolve_plan(found, run_passes(traced(toy), Settings()), traced(toy))


def test_every_parameter_has_a_role_and_weights_have_channels(tmp_path: Path) -> None:
    plan = planned(tmp_path, "gated")
    suffixes = ("l0", "l0_reverse", "l1", "l1_reverse")
    assert set(plan.of_layer(GRU + "gru")) == {
        f"{gate}_{suffix}" for gate in GATES for suffix in suffixes
    }
    weight = plan.tensors[GRU + "gru", "weights_hh_l1_reverse"]
    assert (weight.spec.qscheme, weight.spec.ch_axis, weight.scales) == ("per_channel", 0, 12)
    assert plan.tensors[GRU + "gru", "bias_ih_l0"].spec.qscheme == "per_tensor"


def test_what_is_taken_out_of_the_results_is_quantized(tmp_path: Path) -> None:
    plan = planned(tmp_path, "gated")
    assert {role for name, role in plan.tensors if name.startswith(GRU + "getitem")} == {
        "activation"
    }
    assert (
        plan.floats[LSTM.replace("Recurrent", "Gated") + "zeros"]
        == "computed from constants and integers alone"
    )


@pytest.mark.parametrize(
    "entry",
    [{"type": "torch.nn.LSTM"}, {"type": "LSTM"}, {"name": "lstm"}, {"name": LSTM + "lstm"}],
)
def test_an_entry_reaches_weights_and_outputs(entry: dict[str, str], tmp_path: Path) -> None:
    plan = planned(
        tmp_path, "recurrent", layer(entry.get("name"), type=entry.get("type"), bit_width=5)
    )
    changed = {role for (_, role), tensor in plan.tensors.items() if tensor.spec.bit_width == 5}
    assert changed == {f"{gate}_l0" for gate in GATES} | {"activation"}
    assert plan.tensors[LSTM + "getitem", "activation"].spec.bit_width == 5


def test_the_code_reads_as_torch_spells_it() -> None:
    source = emit(traced("gated"))
    assert (
        "quantizer.nn.GRU(input_size=5, hidden_size=4, num_layers=2, bias=True, "
        "batch_first=True, bidirectional=True) #" in source
    )
    assert (
        "num_layers=1, bias=True, batch_first=True, bidirectional=False, nonlinearity='relu')"
        in source
    )


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
def test_a_projection_is_a_weight_too(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.LSTM(3, 6, proj_size=2, batch_first=True)).eval()
    x = torch.randn(2, 5, 3)
    graph = trace(module, (x,))
    assert "proj_size=2" in emit(graph)
    plan = resolve_plan(config(tmp_path, document()), graph, graph)
    assert "weights_hr_l0" in plan.of_layer("Sequential::Sequential/LSTM[0]/lstm")
    assert torch.allclose(Network(graph)(x)[0], module(x)[0], atol=1e-6)


@pytest.mark.parametrize("name", ["recurrent", "gated"])
def test_eight_bits_are_close_to_float(name: str, tmp_path: Path) -> None:
    plan, toy = planned(tmp_path, name), built(name)
    network = Network(plan.graph)
    calibration = observing.create_observers(plan)
    args, kwargs = Toy(toy.module, toy.args).call(8)
    observing.observe_batches(calibration, network, [Batch(args, kwargs, None, None)])
    with torch.no_grad():
        ours = quantized_network(plan.graph, observing.observed_solution(calibration))(*args)
        theirs = network(*args)
    ours, theirs = (value if isinstance(value, tuple) else (value,) for value in (ours, theirs))
    for x, y in zip(theirs, ours, strict=True):
        assert 0 < (x - y).abs().max() < 0.05 * x.abs().max()


def test_the_toys_hold_every_recurrent_operator() -> None:
    found = {node.op for name in TOYS for node in traced(name).nodes}
    assert {"lstm", "gru", "rnn_tanh", "rnn_relu", "gru_cell"} <= found
