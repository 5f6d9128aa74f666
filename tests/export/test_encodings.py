"""The encodings target: names and values of the JSON, what is refused, and what verification
notices.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from support.deployments import ACTIVATION, WEIGHTS, calibrated
from support.onnx_files import quick_files  # noqa: F401 - a fixture
from torch import Tensor, nn

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.errors import UsageError, VerificationError
from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment
from quantizer.export.encodings import exporter as encodings_exporter
from quantizer.export.encodings.exporter import evaluated_model
from quantizer.export.exporter import exporter_of
from quantizer.export.exporting import export
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace

pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")
pytestmark = pytest.mark.usefixtures("quick_files")

GROUPS = QuantizationSpec(qscheme="per_group", ch_axis=1, group_size=4, bit_width=4)
ASYMMETRIC = QuantizationSpec(signed=False, symmetric=False)


class Joined(nn.Module):
    """A depthwise convolution, a concatenation and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.cut = nn.ReLU6()
        self.side = nn.Conv2d(4, 4, 1)
        self.up = nn.ConvTranspose2d(8, 3, 2, 2)

    def forward(self, image: Tensor) -> Tensor:
        deep = self.cut(self.depthwise(image))
        joined = torch.cat([deep, self.side(image)], 1)
        scaled: Tensor = self.up(joined)
        return scaled


class Gate(nn.Module):
    """A lookup with a scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(tokens))
        return logits


def deployed(
    module: nn.Module,
    *args: Tensor,
    activation: QuantizationSpec = ACTIVATION,
    weights: QuantizationSpec = WEIGHTS,
    version: str = "1.0.0",
) -> Deployment:
    """A network with a spec for all activations and one for all weights."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    graph = trace(module, args)
    is_grouped = weights.qscheme == "per_group"
    solution = calibrated(graph, args, {}, activation, WEIGHTS if is_grouped else weights)
    if is_grouped:
        solution = in_groups(solution, graph, weights)
    return Deployment(graph, solution, args, {}, choices={"encodings_version": version})


def in_groups(solution: Solution, graph: Graph, spec: QuantizationSpec) -> Solution:
    """The same with a scale for each group of inputs of the weights."""
    tensors = dict(solution.tensors)
    for key, tensor in solution.tensors.items():
        if key[1] == "weights":
            weight = graph.weight(graph.by_name[key[0]])
            rows = weight.unflatten(1, (-1, spec.group_size or 1))
            scale = rows.abs().amax(2) / spec.quant_max
            zero_point = torch.zeros(scale.shape, dtype=torch.int32)
            tensor = replace(tensor, spec=spec, scale=scale, zero_point=zero_point)
        tensors[key] = tensor
    return Solution(tensors)


def joined(**more: Any) -> Deployment:
    """`Joined`, with the weight of the transposed convolution per tensor."""
    torch.manual_seed(1)
    whole = deployed(Joined(), torch.randn(2, 4, 6, 6), **more)
    tensors = {}
    for key, tensor in whole.solution.tensors.items():
        if whole.graph.by_name[key[0]].row.transposed and key[1] == "weights":
            one = replace(tensor.spec, qscheme="per_tensor", ch_axis=None)
            tensor = replace(tensor, spec=one, scale=tensor.scale.max())
            tensor = replace(tensor, zero_point=torch.zeros((), dtype=torch.int32))
        tensors[key] = tensor
    return replace(whole, solution=Solution(tensors))


def linear(**more: Any) -> Deployment:
    torch.manual_seed(1)
    return deployed(nn.Sequential(nn.Linear(8, 6)), torch.randn(5, 8), **more)


def written(given: Deployment, folder: Path) -> tuple[Any, onnx.ModelProto, Verification]:
    path = folder / "network.encodings"
    verification = export("encodings", given, path)
    model = onnx.load(folder / "network.encodings.onnx")
    return json.loads(path.read_text("utf-8")), model, verification


def entries(document: Any) -> dict[str, Any]:
    rows = document.get("encodings") or [
        *document["activation_encodings"],
        *document["param_encodings"],
    ]
    return {row["name"]: row for row in rows}


def initializers(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_tensors_have_the_names_of_the_network_next_to_it(tmp_path: Path) -> None:
    document, model, verification = written(joined(), tmp_path)
    assert verification.within_step == 1.0
    named = entries(document)
    made = {name for node in model.graph.node for name in node.output}
    known = made | set(initializers(model)) | {value.name for value in model.graph.input}
    assert set(named) <= known
    assert {row["name"] for row in document["param_encodings"]} == {
        "depthwise.weight",
        "side.weight",
        "up.weight",
    }
    assert named["depthwise.weight"]["enc_type"] == "PER_CHANNEL"
    assert len(named["depthwise.weight"]["scale"]) == 4
    assert named["up.weight"]["enc_type"] == "PER_TENSOR"


def test_weights_are_the_values_of_their_codes(tmp_path: Path) -> None:
    document, model, _ = written(joined(), tmp_path)
    weight = initializers(model)["side.weight"]
    row = entries(document)["side.weight"]
    codes = weight / np.array(row["scale"]).reshape(-1, 1, 1, 1)
    assert row["is_sym"]
    assert row["offset"] == [-128] * 4
    assert np.abs(codes - np.rint(codes)).max() < 1e-4
    assert np.abs(codes).max() > 100


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_both_versions_say_the_same(bits: int, tmp_path: Path) -> None:
    activation = replace(ASYMMETRIC, bit_width=bits)
    weights = replace(WEIGHTS, bit_width=bits, signed=False, symmetric=False)
    read: list[dict[str, Any]] = []
    for version in ("1.0.0", "2.0.0"):
        given = linear(activation=activation, weights=weights, version=version)
        folder = tmp_path / version
        document, _, verification = written(given, folder)
        assert verification.equal == 1.0
        assert document["version"] == version
        read.append(entries(document))
    old, new = read
    assert set(old) == set(new)
    for name, row in new.items():
        assert row["output_dtype"] == f"uint{bits}" == f"uint{old[name]['bw']}"
        assert np.array_equal(np.ravel(row["y_scale"]), old[name]["scale"])
        zero_points = np.ravel(row.get("y_zero_point", np.zeros(len(old[name]["scale"]))))
        assert np.array_equal(zero_points, -np.array(old[name]["offset"]))
    assert new["0.weight"]["axis"] == 0


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
def test_groups_are_blocks(version: str, tmp_path: Path) -> None:
    document, _, verification = written(linear(weights=GROUPS, version=version), tmp_path)
    assert verification.equal == 1.0
    row = entries(document)["0.weight"]
    assert row["block_size"] == 4
    scales = row.get("scale") or row["y_scale"]
    assert np.size(scales) == 6 * 2


def test_narrow_weights_take_the_next_width(tmp_path: Path) -> None:
    weights = replace(WEIGHTS, bit_width=3)
    document, _, verification = written(linear(weights=weights), tmp_path)
    assert verification.equal == 1.0
    assert entries(document)["0.weight"]["bw"] == 4


def test_an_axis_needs_the_newer_version(tmp_path: Path) -> None:
    by_input = replace(WEIGHTS, ch_axis=1)
    with pytest.raises(UsageError, match=r"0\.weight has scales along axis 1") as refused:
        written(linear(weights=by_input), tmp_path)
    assert refused.value.help == "--encodings_version 2.0.0 has one"
    assert not list(tmp_path.iterdir())
    document, _, _ = written(linear(weights=by_input, version="2.0.0"), tmp_path)
    assert entries(document)["0.weight"]["axis"] == 1


def test_a_table_with_a_scale_for_each_row_is_named(tmp_path: Path) -> None:
    given = deployed(Gate(), torch.arange(6).view(2, 3))
    document, model, verification = written(given, tmp_path)
    assert verification.equal == 1.0
    assert "table.weight" in initializers(model)
    assert "table.weight" not in entries(document)
    assert "head.weight.transposed" in entries(document)
    (line,) = verification.remarks
    assert "Embedding[table]" in line
    assert "no encoding" in line


def test_what_readers_quantize_more_changes_no_code(tmp_path: Path) -> None:
    """The toys quantize each value; real plans do not quantize before a ReLU or a join."""
    given = joined()
    tensors = dict(given.solution.tensors)
    for name in given.graph.by_name:
        node = given.graph.by_name[name]
        if node.scope in ("depthwise", "side") or node.scope == "cut":
            tensors.pop((name, "activation"))
    document, model, verification = written(
        replace(given, solution=Solution(tensors)), tmp_path
    )
    assert verification.equal == 1.0
    named = entries(document)
    made = {node.output[0]: node for node in model.graph.node}
    (join,) = [node for node in model.graph.node if node.op_type == "Concat"]
    whole = named[join.output[0]]
    for part in join.input:
        assert (named[part]["scale"], named[part]["offset"]) == (
            whole["scale"],
            whole["offset"],
        )
    (clip,) = [node for node in made.values() if node.op_type == "Clip"]
    assert named[clip.input[0]]["scale"] == whole["scale"]
    values = initializers(model)
    for bound in clip.input[1:]:
        row = named[bound]
        code = values[bound] / row["scale"][0] - row["offset"][0]
        assert code == np.rint(code)
        assert 0 <= code <= 255


def test_a_wrong_scale_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document_of = encodings_exporter.encodings_document

    def wrong(encodings: Any, version: str) -> Any:
        document = document_of(encodings, version)
        document["param_encodings"][0]["scale"][0] /= 4
        return document

    monkeypatch.setattr(encodings_exporter, "encodings_document", wrong)
    with pytest.raises(VerificationError, match="the network with its encodings does not"):
        written(linear(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_ties_are_rounded_up() -> None:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n"])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "graph", [x], [y])
    opset = onnx.helper.make_opsetid("", 20)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9)
    entry = {"name": "x", "output_dtype": "uint8", "y_scale": 2.0, "y_zero_point": 128}
    text = json.dumps({"version": "2.0.0", "encodings": [entry]})
    reference = onnx.reference.ReferenceEvaluator(evaluated_model(model, text))
    points = np.array([-5, -3, -1, 0.9999999, 1, 3, 5, 400, -400], np.float32)
    (values,) = reference.run(None, {"x": points})
    assert values.tolist() == [-4, -2, 0, 0, 2, 4, 6, 254, -256]


STAND_IN = """
import onnxruntime


class QuantizationSimModel:
    def __init__(self, model, config_file):
        open(config_file).close()
        self.session = onnxruntime.InferenceSession(model.SerializeToString())


def load_encodings_to_sim(simulation, path, strict):
    LOADED
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that stands for aimet-onnx, which needs an environment of its own."""
    folder = tmp_path / "site"
    configs = folder / "aimet_onnx" / "common" / "quantsim_config"
    configs.mkdir(parents=True)
    for package in (configs.parents[1], configs.parent, configs):
        (package / "__init__.py").touch()
    (configs / "default_config_per_channel.json").touch()
    (folder / "aimet_onnx-2.42.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: aimet-onnx\nVersion: 2.42.0\n"
    (folder / "aimet_onnx-2.42.0.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder / "aimet_onnx" / "quantsim.py"


@pytest.mark.parametrize(
    ("loaded", "line"),
    [
        ("return []", "in aimet-onnx 2.42.0, outputs differ by at most"),
        ("raise ValueError('no such tensor')", "cannot run it: ValueError: no such tensor"),
    ],
)
def test_aimet_is_asked_if_it_is_installed(
    loaded: str, line: str, stand_in: Path, tmp_path: Path
) -> None:
    stand_in.write_text(STAND_IN.replace("LOADED", loaded))
    _, _, verification = written(linear(), tmp_path)
    (check,) = verification.engines
    assert check.engine == "aimet-onnx 2.42.0"
    assert line in check.line


@pytest.mark.parametrize(
    ("role", "spec", "why"),
    [
        ("activation", replace(ACTIVATION, is_dynamic=True), "has a dynamic range"),
        ("activation", QuantizationSpec(dtype="fp8_e4m3"), "is fp8_e4m3"),
        ("activation", replace(ACTIVATION, bit_width=6), "has 6 bits"),
        ("activation", replace(ACTIVATION, narrow_range=True), "has a narrow range"),
        ("activation", replace(ACTIVATION, round_mode="floor"), "is rounded by floor"),
        ("activation", replace(ACTIVATION, qscheme="per_channel", ch_axis=1), "is per_channel"),
        ("weights", QuantizationSpec(dtype="fp4", qscheme="per_group"), "is fp4"),
        ("weights", replace(WEIGHTS, bit_width=24), "has 24 bits"),
        ("weights", replace(GROUPS, group_size=5), "has groups of 5"),
        ("weights", replace(WEIGHTS, group_size=3), "has scales along two axes"),
        ("weights_hh_l0", WEIGHTS, "belongs to a recurrent layer"),
    ],
)
def test_what_encodings_cannot_hold_is_named(
    role: str, spec: QuantizationSpec, why: str
) -> None:
    given = linear()
    (layer,) = [node.name for node in given.graph.nodes if node.row.weight]
    refusals = list(exporter_of("encodings").refusals(given.graph, {(layer, role): spec}, -1))
    (refusal,) = refusals
    assert refusal.why.startswith(why)
    assert (refusal.layer, refusal.role) == (layer, role)
    assert refusal.help
