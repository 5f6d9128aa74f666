"""What ONNX Runtime makes of a file by default: integers where it can, and test mode's values,
or a refusal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deployments import fitted, outputs_of
from support.extended import extended
from support.runs import ROOT
from torch import Tensor, nn
from torch.nn import functional as F

onnx = pytest.importorskip("onnx", reason="the ONNX target needs it (extra: onnx)")
ort = pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

import quantizer
from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.errors import VerificationError
from quantizer.export import acceptance
from quantizer.export.deployment import Deployment
from quantizer.export.exporting import export
from quantizer.export.onnx.verify import OnnxFile, verify_sessions
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.numerics.metrics import sqnr_db
from quantizer.sources.batches import Batch

CONVOLUTIONS = (
    "Flattened::Flattened/Conv2d[first]/conv2d",
    "Flattened::Flattened/Conv2d[second]/conv2d",
)
HEAD = "Flattened::Flattened/Linear[head]/linear"
UNSIGNED: dict[str, Any] = {"symmetric": False, "signed": False}
CHANNELS: dict[str, Any] = {"qscheme": "per_channel", "ch_axis": 0}


class Flattened(nn.Module):
    """Two convolutions with a ReLU6 between, and a linear layer behind a reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu6(self.first(x)))).flatten(1))  # type: ignore[no-any-return]


@cache
def flattened() -> tuple[Graph, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 6, 6)
    return trace(Flattened().eval(), (x,)), x


def quantized(
    activation: dict[str, Any], weights: dict[str, Any], *, exclude: str = "", opset: int = -1
) -> Deployment:
    """The flattened network with these specs for inputs, outputs of layers and weights; one
    layer's weights float.
    """
    graph, x = flattened()
    spec, wanted, network = (
        QuantizationSpec(**activation),
        QuantizationSpec(**weights),
        Network(graph),
    )
    found: dict[Any, Any] = {}
    roles = {node.name: "input" if node.op == "input" else "activation" for node in graph.nodes}

    def watcher(name: str) -> Callable[[Tensor], None]:
        return lambda value: found.update({(name, roles[name]): fitted(value, spec)})

    quantized_here = [
        name for name in roles if name not in CONVOLUTIONS and "flatten" not in name
    ]
    with torch.no_grad():
        output = network.observe((x,), {}, {name: watcher(name) for name in quantized_here})
    for name in (*CONVOLUTIONS, HEAD):
        if name != exclude:
            found[name, "weights"] = fitted(
                network.layers[name].get_parameter("weight"), wanted
            )
    given = Deployment(graph, Solution(found), (x,), {}, opset)
    return replace(given, sqnr_db=sqnr_db(output, outputs_of(given)[0]))


def optimized(path: Path, tmp_path: Path) -> list[str]:
    """The operators that a default session runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # it warns that the file is for this machine
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]


@pytest.mark.slow
def test_every_multiplication_of_a_network_with_relu6_is_in_integers(tmp_path: Path) -> None:
    export("onnx", quantized(UNSIGNED, CHANNELS), tmp_path / "net.onnx")
    operators = optimized(tmp_path / "net.onnx", tmp_path)
    assert (operators.count("QLinearConv"), operators.count("MatMulIntegerToFloat")) == (2, 1)
    assert not {"Conv", "FusedConv", "Gemm", "FusedGemm", "Clip"} & set(operators)


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation",
    [
        {"narrow_range": True},
        {"bit_width": 5, **UNSIGNED},
        *extended({}, {"bit_width": 4}, {"symmetric": False}),
    ],
    ids=str,
)
def test_codes_are_clipped_where_integers_stay_integers(
    activation: dict[str, Any], tmp_path: Path
) -> None:
    """ReLU and ReLU6 become bounds of codes, which is exact, as rounding is monotone."""
    plain = export("onnx", quantized(activation, CHANNELS), tmp_path / "net.onnx")
    found = plain.default_session
    assert plain.equal >= 0.999
    assert found is not None
    assert found.within_step is not None
    assert found.within_step >= 0.99
    assert found.kernels is not None
    assert (found.kernels.integer, found.kernels.floating) == ((*CONVOLUTIONS, HEAD), {})
    assert found.kernels.summary_lines == ["3 of 3 multiplications in int8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "exclude", "layer", "why"),
    [
        ({}, CONVOLUTIONS[1], CONVOLUTIONS[1], "its weights are not quantized"),
        (
            {"bit_width": 16},
            "",
            CONVOLUTIONS[0],
            "its input is in 16 bits; 8 bits or fewer of integers have kernels",
        ),
        (
            {"round_mode": "half_up"},
            "",
            CONVOLUTIONS[0],
            "its output is rounded by operators in float: set round_mode",
        ),
    ],
)
def test_why_a_layer_multiplies_in_float_is_told(
    activation: dict[str, Any], exclude: str, layer: str, why: str, tmp_path: Path
) -> None:
    found = export(
        "onnx", quantized(activation, CHANNELS, exclude=exclude), tmp_path / "net.onnx"
    ).default_session
    assert found is not None
    assert found.kernels is not None
    assert found.kernels.floating[layer].startswith(why)
    assert found.kernels.share < 1
    assert any(
        line.startswith("in float: ") and why in line for line in found.kernels.summary_lines
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "weights", "opset", "written"),
    [
        ({}, {}, -1, 20),
        ({}, CHANNELS, 23, 23),
        ({"bit_width": 4} | UNSIGNED, {"bit_width": 4} | CHANNELS, 21, 21),
        ({"bit_width": 16}, CHANNELS, -1, 21),
        *extended(
            ({}, {}, 21, 21),
            ({"bit_width": 4}, CHANNELS, 21, 21),
            ({"bit_width": 4} | UNSIGNED, CHANNELS, -1, 20),
            ({}, {"bit_width": 4} | CHANNELS, -1, 20),
            (UNSIGNED, {"bit_width": 4}, -1, 20),
        ),
    ],
)
def test_a_default_session_agrees_at_every_width(
    activation: dict[str, Any],
    weights: dict[str, Any],
    opset: int,
    written: int,
    tmp_path: Path,
) -> None:
    """Reshapes, ReLUs and Clips before each type of codes."""
    found = export(
        "onnx", quantized(activation, weights, opset=opset), tmp_path / "net.onnx"
    ).default_session
    assert found is not None
    assert found.within_step is None or found.within_step >= 0.99
    assert found.sqnr_db is not None
    assert found.sqnr_db > 30 or activation.get("bit_width") == 4
    assert [
        entry.version
        for entry in onnx.load(tmp_path / "net.onnx").opset_import
        if not entry.domain
    ] == [written]


def test_weights_that_stay_float_are_float_in_a_default_session(tmp_path: Path) -> None:
    """ONNX Runtime would quantize those between quantized values by itself."""
    given = quantized({"bit_width": 16}, CHANNELS, exclude=CONVOLUTIONS[1])
    found = export("onnx", given, tmp_path / "net.onnx").default_session
    assert found is not None
    assert found.sqnr_db is not None
    assert found.sqnr_db > 60


def test_a_file_with_other_outputs_is_refused_with_figures(tmp_path: Path) -> None:
    given = quantized(UNSIGNED, CHANNELS)
    export("onnx", given, tmp_path / "net.onnx")
    other = replace(
        given,
        solution=Solution(
            {**given.solution.tensors}, corrections={HEAD: torch.full([10], 0.5)}
        ),
    )
    with pytest.raises(VerificationError) as refused:
        verify_sessions(
            OnnxFile(
                "net.onnx",
                (tmp_path / "net.onnx").read_bytes(),
                onnx.load(tmp_path / "net.onnx"),
            ),
            other,
        )
    assert refused.value.exit_code == 1
    expected = (
        r"^net.onnx is not written: ONNX Runtime .* does not compute what test mode "
        r"does: "
        r"outputs differ by"
    )
    assert re.match(expected, refused.value.message)
    assert "are within one step, SQNR" in refused.value.message


def test_what_is_as_near_to_the_float_network_as_test_mode_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a deep network, where one code that falls otherwise changes nearly all that
    follow.
    """
    monkeypatch.setattr(acceptance, "MARGIN_DB", 0.5)
    given = replace(
        quantized(UNSIGNED | {"bit_width": 6}, CHANNELS), float_graph=flattened()[0]
    )
    verification = export("onnx", given, tmp_path / "net.onnx")
    assert verification.float_sqnr_db is None  # its codes are those of test mode
    file = OnnxFile(
        "net.onnx", (tmp_path / "net.onnx").read_bytes(), onnx.load(tmp_path / "net.onnx")
    )
    tensors = {
        key: replace(each, scale=each.scale * 1.02)
        for key, each in given.solution.tensors.items()
    }
    other = replace(given, solution=Solution(tensors))
    assert verify_sessions(file, other).float_sqnr_db == pytest.approx(given.sqnr_db, abs=1.0)
    with pytest.raises(VerificationError, match="are within one step, SQNR"):
        verify_sessions(file, replace(other, float_graph=None))
    with pytest.raises(
        VerificationError,
        match=r"dB from the float network; test mode itself is 50\.0 dB from the",
    ):
        verify_sessions(file, replace(other, sqnr_db=50.0))


@pytest.mark.parametrize("layer", [HEAD, *extended(*CONVOLUTIONS)])
def test_a_file_with_one_wrong_scale_is_too_far_from_the_float_network_as_well(
    layer: str, tmp_path: Path
) -> None:
    given = replace(quantized(UNSIGNED, CHANNELS), float_graph=flattened()[0])
    export("onnx", given, tmp_path / "net.onnx")
    model = onnx.load(tmp_path / "net.onnx")
    (scale,) = (
        each for each in model.graph.initializer if each.name == f"{layer}.weights.scale"
    )
    scale.CopyFrom(
        onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * 1.1, scale.name)
    )
    with pytest.raises(
        VerificationError, match="dB from the float network; test mode itself is"
    ):
        verify_sessions(OnnxFile("net.onnx", model.SerializeToString(), model), given)


def test_a_file_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(
        VerificationError, match=r"^net.onnx is not written: ONNX Runtime .* cannot run it: "
    ):
        verify_sessions(OnnxFile("net.onnx", b"no model", onnx.ModelProto()), quantized({}, {}))


def test_a_softmax_above_the_largest_code_does_not_wrap_around(tmp_path: Path) -> None:
    """ONNX Runtime's own kernel of a quantized softmax gives 0 there."""
    torch.manual_seed(0)
    x = torch.randn(8, 16) * 4
    graph = trace(nn.Sequential(nn.Softmax(1)).eval(), (x,))
    made, cut = x.softmax(1), QuantizationSpec(**UNSIGNED)
    (input_, softmax) = (node.name for node in graph.nodes)
    tensors = {
        (input_, "input"): fitted(x, QuantizationSpec()),
        (softmax, "activation"): fitted(made * 0.3, cut),
    }
    found = export(
        "onnx", Deployment(graph, Solution(tensors), (x,), {}), tmp_path / "net.onnx"
    ).default_session
    assert found is not None
    assert (found.equal, found.max_difference) == (1.0, 0.0)


@pytest.mark.parametrize("weights", [CHANNELS, {}], ids=["channels", "tensor"])
def test_a_bias_that_int32_cannot_hold_beside_tiny_weights(
    weights: dict[str, Any], tmp_path: Path
) -> None:
    """ONNX Runtime would add what is left of it; networks with depthwise convolutions have such
    channels.
    """
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        tiny = module[0].weight[1] if weights else module[0].weight
        tiny.mul_(1e-9)
        module[0].bias.fill_(0.7)
    graph = trace(module.eval(), (x,))
    input_, conv, relu = (node.name for node in graph.nodes)
    made = module(x).detach()
    tensors = {
        (input_, "input"): fitted(x, QuantizationSpec(**UNSIGNED)),
        (conv, "weights"): fitted(
            graph.weight(graph.by_name[conv]), QuantizationSpec(**weights)
        ),
        (relu, "activation"): fitted(made, QuantizationSpec(**UNSIGNED)),
    }
    found = export(
        "onnx", Deployment(graph, Solution(tensors), (x,), {}), tmp_path / "net.onnx"
    ).default_session
    assert found is not None
    assert found.kernels is not None
    assert (found.equal >= 0.999, found.kernels.share) == (True, 1.0 if weights else 0.0)


def test_all_batches_are_verified(tmp_path: Path) -> None:
    given, drawn = quantized(UNSIGNED, CHANNELS), []

    def batches() -> Iterator[Batch]:
        for size in (4, 16):
            drawn.append(size)
            yield Batch((given.args[0][:size],), {}, None, None)

    found = export(
        "onnx", replace(given, batches=batches()), tmp_path / "net.onnx"
    ).default_session
    assert drawn == [4, 16]
    assert found is not None
    assert found.top1_agreement is not None
    assert found.top1_agreement * 20 == pytest.approx(round(found.top1_agreement * 20))


def test_an_activation_without_a_kernel_of_integers_is_the_reason(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.1), nn.Conv2d(4, 4, 1), nn.Flatten()
    )
    result = quantizer.calibrate(
        model, str(ROOT / "configs" / "cpu_int8.json"), [torch.randn(4, 3, 6, 6)]
    )
    found = result.export("onnx", tmp_path / "net.onnx").default_session
    assert found is not None
    assert found.kernels is not None
    ((layer, why),) = found.kernels.floating.items()
    assert layer.endswith("Conv2d[0]/conv2d")
    assert why.startswith("LeakyRelu follows it, and its output is quantized after that")


class Attending(nn.Module):
    """Attention of each value to all."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        result: Tensor = self.last(F.scaled_dot_product_attention(query, key, value))
        return result


def test_both_products_of_attention_are_named_by_its_layer(tmp_path: Path) -> None:
    config = ROOT / "configs" / "cpu_int8.json"
    values = torch.randn(3, 5, 8)
    result = quantizer.calibrate(Attending(), config, [values])
    verification = result.export("onnx", tmp_path / "net.onnx", [values])
    assert verification.default_session is not None
    kernels = verification.default_session.kernels
    assert kernels is not None
    layer = "scaled_dot_product_attention"
    reasons = {name.rpartition("/")[2]: why for name, why in kernels.floating.items()}
    assert reasons == {
        f"{layer}#inside": "a step inside the operator, whose result the config does not "
        "quantize",
        layer: "it multiplies by a softmax that the config does not quantize",
    }
