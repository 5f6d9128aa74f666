"""The generated `<Model>.py` reads like a list of layers, holds only literals, and computes
what test mode computes.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import config, document, layer
from support.extended import extended, extended_except
from support.generated import imported
from support.hierarchies import Fields, hierarchy
from support.toys import TOYS, built, leaves_equal, traced

from quantizer.calibration import fingerprint, observing
from quantizer.calibration.solution import quantized_network
from quantizer.config.model import ResolvedConfig
from quantizer.errors import ResultError
from quantizer.graph.emit import emit
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.plan.resolve import resolve_plan
from quantizer.results.folder import read_info
from quantizer.results.write import write_results
from quantizer.sources.batches import Batch

CONFIGS: dict[str, dict[str, Any]] = {
    "int8": document(tensor={"weights": {"per_channel": True}}),
    "asymmetric": document(overall={"symmetry": False, "signed": False, "bit_width": 4}),
    "bfloat16": document(overall={"datatype": "bfloat16"}),
}
INT4: dict[str, Any] = {"bit_width": 4, "qscheme": "per_group", "group_size": -1}
DYNAMIC: dict[str, Any] = {"is_dynamic": True}
MX: dict[str, Any] = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_type": "e8m0",
}
NV: dict[str, Any] = {"group_size": -1, "scale_type": "e4m3"}
MX9: dict[str, Any] = {"dtype": "mx9", "group_size": 16, "scale_type": "microexponent"}
HIERARCHIES: dict[str, Fields] = {
    "groups": {"weights": INT4, "bias": {"bit_width": 16}, "input": DYNAMIC},
    "asymmetric groups": {"weights": INT4 | {"symmetric": False, "signed": False}},
    "tokens": {
        "weights": {"qscheme": "per_channel"},
        "input": DYNAMIC | {"qscheme": "per_token"},
    },
    "fp8": {role: {"dtype": "fp8_e4m3"} for role in ("weights", "bias", "input", "activation")},
    "fp8 blocks": {
        "weights": {"dtype": "fp8_e4m3", "qscheme": "per_block", "group_size": 3},
        "input": {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 3} | DYNAMIC,
    },
    "mx": {"weights": MX, "input": MX | DYNAMIC},
    "nvfp4": {"weights": MX | NV, "input": MX | NV | DYNAMIC},
    "nvfp4, calibrated factors": {
        "weights": MX | NV,
        "input": MX | NV | {"is_dynamic": "local", "statistic": "mean"},
    },
    "mx9": {"weights": MX | MX9, "input": MX | MX9 | DYNAMIC},
    "bfp16": {
        "weights": MX | {"dtype": "bfp16", "group_size": 8},
        "activation": {"dtype": "float16"},
    },
}
WITHOUT_WEIGHTS = (
    "view_read_later",
    "nested_inputs",
    "constants",
    "two_batches",
    "static_batch",
    "variadic",
)


def calibrated(folder: Path, name: str, content: dict[str, Any]) -> Graph:
    """The toy's planned graph, its results written to `folder` / "results"."""
    return written(folder / "results", name, config(folder, content))


def written(folder: Path, name: str, settings: ResolvedConfig) -> Graph:
    """The toy's planned graph, its results for a config written to `folder`."""
    graph = run_passes(traced(name), settings.settings)
    network = Network(graph)
    calibration = observing.create_observers(resolve_plan(settings, graph, traced(name)))
    batches = [Batch(*built(name).call(2), None, None) for _ in range(2)]
    observing.observe_batches(calibration, network, batches)
    write_results(
        folder,
        traced(name),
        calibration,
        observing.observed_solution(calibration),
        config=settings,
        run=fingerprint.model_digests(traced(name)),
    )
    return graph


def plain(value: Any) -> Any:
    """Named tuples and the like as the tuples that generated code returns."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    extended_except(
        product(TOYS, CONFIGS),
        *((name, "asymmetric") for name in TOYS),
        ("branches", "bfloat16"),
        ("residual", "int8"),
    ),
)
def test_generated_code_equals_test_mode_bit_for_bit(
    name: str, settings: str, tmp_path: Path
) -> None:
    graph = calibrated(tmp_path, name, CONFIGS[settings])
    network = quantized_network(graph, read_info(tmp_path / "results").solution)
    generated = imported(tmp_path / "results" / f"{graph.model}.py")
    for batch in (1, 3) if built(name).batched else (2,):
        args, kwargs = built(name).call(batch)
        with torch.no_grad():
            assert leaves_equal(generated(*args, **kwargs), plain(network(*args, **kwargs)))


IN_EVERY_FORMAT = ("residual", "transposed", "tied", "gated", "attention", "products")
"""Toys whose kinds of weights are those of all others."""


def formats_of_toys() -> Iterator[tuple[str, str]]:
    """Every format with some toys, and one of them with each of the others, by turns."""
    kinds = [*HIERARCHIES]
    others = [name for name in TOYS if name not in (*WITHOUT_WEIGHTS, *IN_EVERY_FORMAT)]
    yield from product(IN_EVERY_FORMAT, kinds)
    for number, name in enumerate(others):
        yield name, kinds[number % len(kinds)]


def further_formats_of_toys() -> Iterator[tuple[str, str]]:
    """Two more formats with each of the others, by turns."""
    usual = [*formats_of_toys()]
    kinds = [*HIERARCHIES]
    for number, name in enumerate(toy for toy in TOYS if toy not in WITHOUT_WEIGHTS):
        for step in (2 * number, 2 * number + 1):
            pair = name, kinds[step % len(kinds)]
            if pair not in usual:
                yield pair


@pytest.mark.parametrize("name", [name for name in TOYS if name not in WITHOUT_WEIGHTS])
def test_layers_of_all_kinds_are_written_in_every_format(name: str) -> None:
    rich = {
        node.op for each in IN_EVERY_FORMAT for node in traced(each).nodes if node.row.weight
    }
    assert {node.op for node in traced(name).nodes if node.row.weight} <= rich


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [*formats_of_toys(), *extended(*further_formats_of_toys())]
)
def test_generated_code_equals_test_mode_in_every_format(
    name: str, kind: str, tmp_path: Path
) -> None:
    graph = written(tmp_path, name, hierarchy(HIERARCHIES[kind]))
    network = quantized_network(graph, read_info(tmp_path).solution)
    generated = imported(tmp_path / f"{graph.model}.py")
    args, kwargs = built(name).call(2)
    with torch.no_grad():
        expected = plain(network(*args, **kwargs))
        assert leaves_equal(generated(*args, **kwargs), expected)
        assert not network.layers or not leaves_equal(
            plain(Network(graph)(*args, **kwargs)), expected
        )


@pytest.mark.parametrize("name", TOYS)
def test_toys_without_weights_are_known(name: str) -> None:
    assert (name in WITHOUT_WEIGHTS) is not any(node.row.weight for node in traced(name).nodes)


def test_quantizing_changes_the_output(tmp_path: Path) -> None:
    graph = calibrated(tmp_path, "residual", CONFIGS["int8"])
    args, _ = built("residual").call(2)
    with torch.no_grad():
        output = quantized_network(graph, read_info(tmp_path / "results").solution)(*args)
        difference = (output - Network(graph)(*args)).abs().max()
    assert 0 < difference < 0.2


def test_infinities_and_dtypes_are_written_as_python(tmp_path: Path) -> None:
    source = emit(traced("constants"))
    assert "float('-inf')" in source
    assert "dtype=torch.float64" in source
    ast.parse(source)


@pytest.mark.parametrize("name", TOYS)
def test_one_line_per_layer_ends_in_its_name(name: str) -> None:
    graph = traced(name)
    lines = [
        line for line in emit(graph).splitlines() if line.startswith("        self.module_")
    ]
    assert [line.rpartition(" #")[2] for line in lines] == [node.name for node in graph.nodes]
    assert all(
        f"self.module_{index} = quantizer.nn." in line for index, line in enumerate(lines)
    )


ALLOWED = (
    *(
        ast.Module,
        ast.Expr,
        ast.Import,
        ast.alias,
        ast.ClassDef,
        ast.FunctionDef,
        ast.arguments,
        ast.arg,
        ast.Assign,
    ),
    *(
        ast.Return,
        ast.Call,
        ast.keyword,
        ast.Attribute,
        ast.Name,
        ast.Constant,
        ast.List,
        ast.Tuple,
        ast.Dict,
    ),
    *(ast.Subscript, ast.UnaryOp, ast.USub, ast.Starred, ast.Load, ast.Store),
)


@pytest.mark.parametrize("name", TOYS)
def test_generated_code_holds_only_literals_and_calls_of_layers(name: str) -> None:
    tree = ast.parse(emit(traced(name)))
    assert {type(node) for node in ast.walk(tree)} <= set(ALLOWED)
    imports = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert imports == ["quantizer", "torch"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            callee = ast.unparse(node.func)
            assert callee.startswith(("self.module_", "quantizer.nn.")) or callee in (
                "super",
                "super().__init__",
                "float",
                "torch.device",
            )


def test_the_documented_shape() -> None:
    source = emit(traced("residual"))
    assert "class Residual(torch.nn.Module):\n    def __init__(self):\n" in source
    assert (
        "        self.module_1 = quantizer.nn.Conv2d(in_channels=3, out_channels=4, "
        "kernel_size=[3, 3], stride=[1, 1], "
        "padding=[0, 0], dilation=[1, 1], groups=1, bias=False) "
        "#Residual::Residual/Conv2d[conv1]/conv2d\n" in source
    )
    assert "        output_module_0 = self.module_0(input=args[0])\n" in source
    assert "        output_module_1 = self.module_1(output_module_0)\n" in source
    assert source.endswith("        return output_module_18\n")


def test_generated_code_without_results_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "Residual.py"
    path.write_text(emit(traced("residual")), encoding="utf-8")
    with pytest.raises(ResultError, match="does not exist") as caught:
        imported(path)
    assert caught.value.help == "calibrate first"


def test_every_scale_of_the_file_is_attached(tmp_path: Path) -> None:
    graph = calibrated(tmp_path, "branches", CONFIGS["int8"])
    info = json.loads((tmp_path / "results" / "quant_info.json").read_text("utf-8"))
    stored = {(layer, role) for layer, roles in info["tensors"].items() for role in roles}
    network = quantized_network(graph, read_info(tmp_path / "results").solution)
    assert {(layer, role) for layer, role, _ in network.quantizers()} == stored
    generated = imported(tmp_path / "results" / f"{graph.model}.py")
    assert sum(len(layer.quantizers) for layer in generated.children()) == len(stored)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_overwriting_memory_changes_no_value(name: str, tmp_path: Path) -> None:
    graph = calibrated(
        tmp_path, name, document(layer(type="einsum", bit_width=3, required=False))
    )
    info = read_info(tmp_path / "results").solution
    network, careful = quantized_network(graph, info), quantized_network(graph, info)
    for _, _, quantizer in careful.quantizers():
        assert isinstance(quantizer, TensorQuantizer)
        quantizer.inplace = False
    args, kwargs = built(name).call(2)
    with torch.no_grad():
        assert leaves_equal(network(*args, **kwargs), careful(*args, **kwargs))
