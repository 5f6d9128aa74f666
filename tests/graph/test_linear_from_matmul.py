"""Products with trained matrices become linear layers: their weights have channels, their biases are biases."""

from __future__ import annotations

from pathlib import Path

from toys import traced

from configs import config, document
from quantizer.config.model import Settings
from quantizer.graph.passes import run_passes
from quantizer.plan.resolve import resolve

P = "Products::Products/"


def test_products_become_linear_layers_and_scaled_ones_stay(tmp_path: Path) -> None:
    graph = run_passes(traced("products"), Settings())
    ops = {node.name.removeprefix(P): node.op for node in graph.nodes}
    assert {name: ops[name] for name in ("addmm", "matmul", "addmm.1", "addmm.2")} == {
        "addmm": "linear",
        "matmul": "linear",
        "addmm.1": "addmm",
        "addmm.2": "linear",
    }
    assert graph.absorbed == {P + "second": P + "matmul"}  # the scaled product still reads the others
    settings = config(tmp_path, document(tensor={"weights": {"per_channel": True}}))
    plan = resolve(settings, graph, traced("products"))
    assert set(plan.of_layer(P + "addmm")) == {"weights", "bias"}
    assert (plan.tensors[P + "addmm", "weights"].spec.ch_axis, plan.tensors[P + "addmm", "weights"].scales) == (0, 6)
    assert plan.tensors[P + "first", "weights"].spec.qscheme == "per_tensor"
