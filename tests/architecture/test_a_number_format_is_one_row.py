"""A made-up number format, registered at run time and known to no other file, is planned,
calibrated and stored.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.generated import imported
from support.hierarchies import hierarchy
from support.toys import built, leaves_equal, traced

from quantizer.calibration import fingerprint, observing
from quantizer.calibration.changed_modules import attach_solution
from quantizer.calibration.solution import quantized_network
from quantizer.export import saved_modules as storage
from quantizer.export.deployment import Deployment
from quantizer.export.exporting import export
from quantizer.graph.modules import module_graph
from quantizer.graph.passes import run_passes
from quantizer.nn.network import Network
from quantizer.plan.resolve import resolve_plan
from quantizer.plan.size import weight_bytes
from quantizer.results.folder import read_info
from quantizer.results.write import write_results
from quantizer.rows import NumberFormat
from quantizer.sources.batches import Batch
from quantizer.tables import NUMBER_FORMATS

ROWS = {
    "fp5_e2m2": NumberFormat(5, "float8_e4m3fn", 7.0, mantissa=2, least=0),
    "mx_int4": NumberFormat(4, "int8", 7 / 4, mantissa=2, least=0, factor=4.0),
    "fp16_e5m10": NumberFormat(16, "float16", 65504.0, mantissa=10, least=-14),
}
FC = "Residual::Residual/Linear[fc]/linear"


@pytest.fixture(params=ROWS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    monkeypatch.setitem(NUMBER_FORMATS, name, ROWS[name])
    return name


def test_it_goes_from_the_plan_to_every_kind_of_storage(dtype: str, tmp_path: Path) -> None:
    config = hierarchy(
        {"weights": {"dtype": dtype, "qscheme": "per_channel"}, "activation": {"dtype": dtype}}
    )
    graph = run_passes(traced("residual"), config.settings)
    plan = resolve_plan(config, graph, traced("residual"))
    sizes = [
        graph.tensors[node.params["weight"]]
        for node in graph.nodes
        if (node.name, "weights") in plan.tensors
    ]
    before, after = weight_bytes(plan)
    floats = before - sum(4 * tensor.numel() for tensor in sizes)
    codes = sum(math.ceil(tensor.numel() * ROWS[dtype].bits / 8) for tensor in sizes)
    assert after == floats + codes + sum(4 * len(tensor) for tensor in sizes)

    call = built("residual").call(3)
    calibration = observing.create_observers(plan)
    observing.observe_batches(calibration, Network(graph), [Batch(*call, None, None)])
    digests = fingerprint.model_digests(traced("residual"))
    write_results(
        tmp_path,
        traced("residual"),
        calibration,
        observing.observed_solution(calibration),
        config=config,
        run=digests,
    )
    solution, generated = read_info(tmp_path).solution, imported(tmp_path / "Residual.py")
    with torch.no_grad():
        expected = quantized_network(graph, observing.observed_solution(calibration))(*call[0])
        assert leaves_equal(quantized_network(graph, solution)(*call[0]), expected)
        assert leaves_equal(generated(*call[0]), expected)
        assert not leaves_equal(Network(graph)(*call[0]), expected)
    stored = load_file(tmp_path / "weights.safetensors")[
        f"module_{graph.nodes.index(graph.by_name[FC])}.weight"
    ]
    assert stored.nbytes == math.ceil(20 * ROWS[dtype].bits / 8)
    assert (
        export(
            "safetensors", Deployment(graph, solution, *call), tmp_path / "net.safetensors"
        ).equal
        == 1.0
    )


def test_it_is_stored_with_a_model_in_place(dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, fresh = (torch.nn.Sequential(torch.nn.Linear(8, 3)) for _ in range(2))
    graph = module_graph(model)
    plan = resolve_plan(hierarchy({"weights": {"dtype": dtype}}), graph, graph)
    attach_solution(model, graph, observing.observed_solution(observing.create_observers(plan)))
    storage.save_quantized(model, tmp_path)
    storage.load_quantized(fresh, tmp_path)
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert load_file(tmp_path / "model.safetensors")["0.weight"].nbytes == math.ceil(
        24 * ROWS[dtype].bits / 8
    )
