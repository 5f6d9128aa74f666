"""A graph in a result folder is data: what tracing cannot have written is refused, and nothing
of it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.edits import sealed
from torch import nn

import quantizer
from quantizer.calibration import fingerprint
from quantizer.errors import ResultError
from quantizer.graph.ir import Node
from quantizer.graph.ops import find_op
from quantizer.graph.stored import graph_from_json, graph_to_json
from quantizer.graph.targets import packet
from quantizer.graph.tracing.trace import trace
from quantizer.results.graph_checks import FUNCTIONAL, check_graph, operator_fault

Json = dict[str, Any]
Edit = Callable[[Json], object]


def stored(edit: Edit = lambda content: None) -> tuple[Json, Json]:
    """The graph of a small network, edited, and the header that is for the edited graph."""
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Flatten())
    graph = trace(module, (torch.ones(2, 3),))
    content = json.loads(json.dumps(graph_to_json(graph)))
    edit(content)
    edited = graph_from_json(content).graph
    header = {
        "model": "Sequential",
        "layers": fingerprint.layer_digests(edited),
        "weights": fingerprint.weight_digests(graph),
        "inputs": fingerprint.input_shapes(edited),
    }
    return content, header


def test_a_traced_graph_passes() -> None:
    content, header = stored()
    check_graph(graph_from_json(content), header, Path("graph.json"))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda c: c.update(model="Other"), "it is 'Other'"),
        (lambda c: c["nodes"].reverse(), "is not before it"),
        (lambda c: c["nodes"].append(c["nodes"][-1]), "there are two nodes"),
        (lambda c: c["nodes"][1]["params"].update(weight="x"), "there is no such tensor"),
        (lambda c: c["nodes"][1].update(dtype=None), "a shape or a dtype alone"),
        (lambda c: c["nodes"][1].update(op="conv2d"), "is not the operator 'linear'"),
        (lambda c: c["nodes"][1].update(open_axes=[7]), "there is no such size 7"),
        (lambda c: c["nodes"][1].update(shape=[1 << 20, 1 << 20]), "more than 2147483648"),
        (lambda c: c["nodes"][2]["attrs"].update(size=[1 << 20] * 2), "more than the shape"),
        (lambda c: c["nodes"][2]["attrs"].update(x={"ref": "y"}), "it holds a reference"),
        (lambda c: c["nodes"][0]["attrs"].update(index=1), "not counted from 0"),
        (lambda c: c.update(output=[{"ref": "x"}]), "a node that is not there"),
        (lambda c: c.update(inputs=[]), "it names 0 of 1 inputs"),
        (lambda c: c.update(inputs=[[2, 0]]), "is not a place in a call"),
        (lambda c: c.update(constants=["x"]), "there are no such tensors"),
        (lambda c: c["tensors"].pop("0.bias"), "other tensors than quant_info.json"),
        (
            lambda c: c.update(
                lengths=[
                    {
                        "name": "sequence",
                        "axes": [[0, 1]],
                        "traced": 3,
                        "least": 1,
                        "most": None,
                    }
                ]
            ),
            "axis 1 of input 0 is not open",
        ),
    ],
)
def test_a_graph_that_no_trace_has_made_is_refused(edit: Edit, reason: str) -> None:
    content, header = stored(edit)
    with pytest.raises(ResultError, match=reason):
        check_graph(graph_from_json(content), header, Path("graph.json"))


@pytest.mark.parametrize(
    "target",
    [
        "aten.from_file.default",
        "aten.save.default",
        "aten.add_.Tensor",
        "operator.methodcaller",
        "operator.attrgetter",
        "operator.call",
        "operator.setitem",
        "os.system",
        "builtins.exec",
        "math.ceil.x",
        "torch.load",
        "load_library.x.y",
        "profiler._record_function_enter.default",
        "inductor.resize_storage_bytes_.default",
        "",
        "aten",
        "aten..",
        "aten.no_such_operator.default",
    ],
)
def test_a_hostile_operator_is_refused(target: str) -> None:
    assert operator_fault(Node("x", "unknown", target)) is not None


@pytest.mark.parametrize(
    ("op", "target"),
    [
        ("conv2d", "aten.conv2d.default"),
        ("getitem", "operator.getitem"),
        ("erfinv", "aten.erfinv.default"),
        ("input", "input"),
        ("quant_stub", "aten.alias.default"),
    ],
)
def test_operators_that_tracing_writes_are_taken(op: str, target: str) -> None:
    assert operator_fault(Node("x", op, target)) is None


def appended(target: str, **attrs: Any) -> Edit:
    """An edit that appends a node whose values nobody reads; `x` is the input of the network."""

    def append(content: Json) -> None:
        op = find_op(packet(target)).name
        inputs = {}
        for name, value in list(attrs.items()):
            if value == "x":
                inputs[name] = {"ref": content["nodes"][0]["name"]}
        rest = {name: value for name, value in attrs.items() if name not in inputs}
        kind = {"shape": [3, 4], "dtype": "float32"}
        if target.startswith("operator."):
            kind = {"shape": None, "dtype": None}
        last = content["nodes"][-1]
        content["nodes"].append(
            {**last, **kind, "op": op, "target": target, "inputs": inputs, "attrs": rest}
            | {"name": f"{last['name']}.1", "params": {}}
        )

    return append


def doubled(content: Json) -> None:
    """Forty products, each of the one before it with itself."""
    appended("operator.mul", a=3, b=3)(content)
    for count in range(40):
        last = content["nodes"][-1]
        before = {"ref": last["name"]}
        name = f"{last['name']}.{count}"
        content["nodes"].append(
            {**last, "name": name, "inputs": {"a": before, "b": before}, "attrs": {}}
        )


ATTACKS: dict[str, tuple[Edit, str]] = {
    "crash": (
        appended("aten._convert_indices_from_coo_to_csr.default", input="x", size=9),
        "is not an operator that a stored graph may have",
    ),
    "vander": (
        appended("aten.linalg_vander.default", x="x", N=1 << 40),
        "is not an operator that a stored graph may have",
    ),
    "sized by values": (
        appended("aten.repeat_interleave.self_Tensor", input="x", repeats="x"),
        "is not an operator that a stored graph may have",
    ),
    "repeat_interleave": (
        appended("aten.repeat_interleave.self_int", input="x", repeats=10**10),
        "far more than the shape",
    ),
    "repeat": (appended("aten.repeat.default", input="x", repeats=[1, 1 << 30]), "far more"),
    "full": (appended("aten.full.default", size=[1 << 20] * 2, fill_value=1), "far more"),
    "arange": (appended("aten.arange.default", end=1e12), "far more"),
    "small steps": (
        appended("aten.arange.start_step", start=0, end=1, step=1e-12),
        "too small",
    ),
    "parts": (appended("aten.tensor_split.sections", input="x", sections=10**9), "far more"),
    "tiles": (appended("aten.tile.default", input="x", dims=[1 << 20] * 3), "far more"),
    "padding": (appended("aten.pad.default", input="x", pad=[1 << 40, 0]), "far more"),
    "number": (appended("aten.add.Scalar", input="x", other=1 << 70), "more than 64 bits"),
    "pow": (appended("operator.pow", a=10, b=10**10), "more than 1024 bits"),
    "shift": (appended("operator.lshift", a=1, b=1 << 40), "more than 1024 bits"),
    "exponent": (appended("operator.pow", a=10, b="x"), "more than 1024 bits"),
    "squares": (doubled, "more than 1024 bits"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_graph_that_would_crash_or_take_all_memory_is_refused(name: str) -> None:
    edit, reason = ATTACKS[name]
    content, header = stored(edit)
    with pytest.raises(ResultError, match=reason):
        check_graph(graph_from_json(content), header, Path("graph.json"))


def test_each_reviewed_operator_is_one_of_torch_that_only_computes() -> None:
    for name in sorted(FUNCTIONAL):
        operator = getattr(torch.ops.aten, name)
        schemas = [getattr(operator, overload)._schema for overload in operator.overloads()]
        assert any(not schema.is_mutable for schema in schemas), name
    forms = ("add_.Tensor", "relu_.default", "add.out", "repeat_interleave.Tensor", "rand.out")
    for form in forms:
        target = f"aten.{form}"
        op = find_op(packet(target)).name
        assert operator_fault(Node("x", op, target)) is not None, form


DAMAGE: dict[str, Edit] = {
    "dtype": lambda c: c["nodes"][1].update(dtype="load"),
    "kind": lambda c: c["nodes"][1]["attrs"].update(x={"import": "os"}),
    "another key": lambda c: c.update(device="nowhere"),
    "extra": lambda c: c["nodes"][1].update(code="1"),
    "missing": lambda c: c.pop("nodes"),
    "text": lambda c: c["nodes"][1].update(shape="[2]"),
    "deep": lambda c: c["nodes"][1]["attrs"].update(x=nested(200)),
}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_graph_is_refused_with_a_sentence(name: str, tmp_path: Path) -> None:
    module, data = nn.Sequential(nn.Linear(3, 2)).eval(), [torch.ones(2, 3)]
    quantizer.calibrate(module, None, data).save(tmp_path)
    path = tmp_path / "graph.json"
    content = json.loads(path.read_text())
    DAMAGE[name](content)
    path.write_text(json.dumps(content))
    sealed(tmp_path)
    with pytest.raises(ResultError, match=r"graph\.json is damaged"):
        quantizer.load(tmp_path, module)
