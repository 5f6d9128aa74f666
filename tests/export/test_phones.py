"""`--to executorch` and `litert`, as far as no engine is needed: what is refused before
calibration, and the program that a compiler gets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deployments import PHONES
from support.runs import ROOT
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

import quantizer
from quantizer.calibration.solution import Solution
from quantizer.cli.main import run_command
from quantizer.config.model import QuantizationSpec
from quantizer.errors import UsageError
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import exporter_of
from quantizer.export.mobile.exporter import MobileExporter, MobileProgram
from quantizer.export.mobile.litert_rewrites import (
    cut_padding,
    keep_scales_of_joins,
    keep_scales_of_shares,
    multiply_squares,
    pad_kernels,
)
from quantizer.export.mobile.rewrites import (
    add_axes,
    average_images,
    fold_padding,
    infer_batches,
    round_before_moves,
    slice_parts,
)
from quantizer.export.refusals import require_expressible
from quantizer.export.targets import CHECKED_TARGETS
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace

PRESET = str(ROOT / "configs" / "mobile_int8.json")
X = torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(0))
DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"


class Padded(nn.Module):
    """Convolutions after paddings, and an average that drops height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, groups=8)
        self.uneven, self.even = nn.ZeroPad2d((0, 1, 0, 1)), nn.ZeroPad2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu6(self.first(self.uneven(x)))
        x = nn.functional.relu6(self.second(self.even(x)))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """A convolution whose output is quantized only after a sigmoid has followed it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        return x * torch.sigmoid(self.gate(x))


def result_of(module: nn.Module, config: Any = PRESET) -> quantizer.Result:
    torch.manual_seed(0)
    return quantizer.calibrate(module.eval(), config, [X])


def deployment_of(result: quantizer.Result, **choices: str) -> Deployment:
    """A deployment with one call, as the exporters get it."""
    calibrated = result._calibrated
    return Deployment(calibrated.graph, calibrated.solution, (X,), {}, choices=choices)


def program_of(target: str, given: Deployment) -> MobileProgram:
    exporter = exporter_of(target)
    assert isinstance(exporter, MobileExporter)
    return exporter.program(given)


def operators(program: ExportedProgram) -> Counter[str]:
    """How often each operator is called."""
    return Counter(
        str(node.target) for node in program.graph.nodes if node.op == "call_function"
    )


@pytest.fixture(scope="module")
def padded() -> quantizer.Result:
    return result_of(Padded())


@pytest.fixture(scope="module")
def graph(padded: quantizer.Result) -> Graph:
    return padded._calibrated.graph


ACTIVATIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "fp8": ({"dtype": "fp8_e4m3"}, "is fp8_e4m3, and", "quantize it to int8"),
    "4 bits": ({"bit_width": 4}, "is int4, and", "quantize it to int8"),
    "16 bits": ({"bit_width": 16}, "is int16, and", "quantize it to int8"),
    "dynamic": ({"is_dynamic": True}, "has a range that is found at run time", "static"),
    "channels": (
        {"qscheme": "per_channel", "ch_axis": 1},
        "has more than one scale",
        "set per_channel to false",
    ),
    "narrow": ({"narrow_range": True}, "uses only some of the 256 codes", "narrow_range"),
    "half up": ({"round_mode": "half_up"}, "is rounded by half_up", "half_even"),
}
WEIGHTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "fp8": ({"dtype": "fp8_e4m3"}, "is fp8_e4m3, and", "quantize it to int8"),
    "16 bits": ({"bit_width": 16}, "is int16, and", "quantize it to int8"),
    "unsigned": ({"signed": False}, "is unsigned", "set signed to true"),
    "zero points": ({"symmetric": False}, "has a zero point", "set symmetry to true"),
    "groups": (
        {"qscheme": "per_group", "ch_axis": 1, "group_size": 4},
        "has scales for groups of inputs",
        "per_channel",
    ),
    "inputs": (
        {"qscheme": "per_channel", "ch_axis": 1},
        "has scales along its inputs",
        "set ch_axis to 0",
    ),
}


def refusal_of(target: str, graph: Graph, specs: dict[Any, Any]) -> UsageError:
    with pytest.raises(UsageError) as refused:
        require_expressible(CHECKED_TARGETS[target], graph, specs, -1)
    return refused.value


@pytest.mark.parametrize("target", PHONES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_without_a_kernel_is_refused(
    kind: str, target: str, padded: quantizer.Result, graph: Graph
) -> None:
    fields, why, remedy = ACTIVATIONS[kind]
    specs = dict(padded._calibrated.solution.specs)
    changed = next(key for key in specs if key[1] == "activation")
    specs[changed] = QuantizationSpec(**fields)
    error = refusal_of(target, graph, specs)
    assert f"--to {target}: activation of {changed[0]} {why}" in str(error)
    assert remedy in str(error.help)


@pytest.mark.parametrize("target", PHONES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_weight_without_a_kernel_is_refused(
    kind: str, target: str, padded: quantizer.Result, graph: Graph
) -> None:
    fields, why, remedy = WEIGHTS[kind]
    specs = dict(padded._calibrated.solution.specs)
    [changed] = [key for key in specs if "[fc]" in key[0] and key[1] == "weights"]
    specs[changed] = QuantizationSpec(**fields)
    error = refusal_of(target, graph, specs)
    assert f"--to {target}: weights of {changed[0]} {why}" in str(error)
    assert remedy in str(error.help)


def test_only_litert_refuses_the_least_code(padded: quantizer.Result, graph: Graph) -> None:
    specs = dict(padded._calibrated.solution.specs)
    [changed] = [key for key in specs if "[fc]" in key[0] and key[1] == "weights"]
    specs[changed] = replace(specs[changed], narrow_range=False)
    require_expressible(CHECKED_TARGETS["executorch"], graph, specs, -1)
    error = refusal_of("litert", graph, specs)
    assert "may have the code -128, which LiteRT does not allow" in str(error)
    assert error.help == "set narrow_range to true there"


class Compared(nn.Module):
    """Compares images with filters that are computed from another input."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.conv, self.groups = nn.Conv2d(3, 4, 3), groups

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        filters = self.conv(y)[:, : 4 // self.groups]
        return nn.functional.conv2d(self.conv(x), filters, groups=self.groups)


@pytest.mark.parametrize("groups", [1, 4])
def test_filters_that_no_compiler_takes_are_refused(groups: int) -> None:
    module = Compared(groups).eval()
    call = (torch.randn(2, 3, 8, 8), torch.randn(4, 3, 5, 5))
    sentence = "conv2d has filters that are computed, which {} cannot convert"
    graph = trace(module, call)
    error = refusal_of("litert", graph, {})
    assert sentence.format("litert-torch") in str(error)
    assert "torch.bmm" in str(error.help)
    if groups == 1:
        require_expressible(CHECKED_TARGETS["executorch"], graph, {}, -1)
    else:
        assert sentence.format("ExecuTorch") in str(refusal_of("executorch", graph, {}))


@pytest.mark.parametrize("target", PHONES)
def test_a_network_without_int8_kernels_is_refused(target: str, graph: Graph) -> None:
    weight = QuantizationSpec(qscheme="per_channel", ch_axis=0, narrow_range=True)
    specs = {(node.name, "weights"): weight for node in graph.nodes if node.is_multiplying}
    error = refusal_of(target, graph, specs)
    assert "would multiply every layer in float: its input is not quantized" in str(error)
    assert "configs/mobile_int8.json" in str(error.help)


def test_a_model_in_half_precision_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).half()
    graph = trace(model, (torch.ones(2, 4, dtype=torch.float16),))
    specs = {(graph.nodes[0].name, "input"): QuantizationSpec()}
    error = refusal_of("executorch", graph, specs)
    assert "is computed in float16" in str(error)
    assert error.help == "convert the model to float32"


MODEL = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

def calibration_data():
    return [torch.ones(2, 8)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


def test_plans_are_checked_without_the_packages(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.export.refusals.find_spec", lambda name: None)
    command = ["plan", "--model", "net.py", "--for", "executorch", "--for", "litert"]
    assert run_command([*command, "--config_file", PRESET]) == 0
    printed = capsys.readouterr().out
    for target in PHONES:
        assert f"--to {target} can express all tensors" in printed
    dynamic = str(ROOT / "configs" / "dynamic_int8.json")
    assert run_command([*command, "--config_file", dynamic]) == 2
    assert "give it a static range" in capsys.readouterr().err


def test_calibration_does_not_start_without_a_kernel(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default = str(ROOT / "configs" / "default.json")
    command = ["--quant_mode", "calib", "--model", "net.py", "-q", "--for", "litert"]
    assert run_command([*command, "--config_file", default]) == 2
    assert "each may have the code -128" in capsys.readouterr().err
    assert not (folder / "quantize_result" / "quant_info.json").exists()


@pytest.mark.parametrize("target", PHONES)
def test_a_compiler_gets_codes_that_its_kernels_take(
    target: str, padded: quantizer.Result
) -> None:
    source = program_of(target, deployment_of(padded))
    assert source.kernels.share == 1.0
    counts = operators(source.program)
    assert counts["quantized_decomposed.dequantize_per_channel.default"] == 3
    for node in source.program.graph.nodes:
        name = str(node.target)
        if name == DEQUANTIZE:
            assert len(node.users) == 1
            assert node.args[-1] == torch.int8
        if name in ("aten.conv2d.default", "aten.linear.default"):
            assert str(node.args[0].target) == DEQUANTIZE
    is_quantizing = counts["quantized_decomposed.quantize_per_channel.default"] == 3
    assert is_quantizing == (target == "litert")


@pytest.mark.parametrize("target", PHONES)
def test_the_program_computes_what_test_mode_does(
    target: str, padded: quantizer.Result
) -> None:
    """Before and after it is rewritten for the compiler."""
    source = program_of(target, deployment_of(padded))
    few = X[: source.most_samples]
    expected = source.tested.network()(few)
    assert torch.equal(source.program.module()(few), expected)
    infer_batches(source.program)
    fold_padding(source.program)
    average_images(source.program)
    assert torch.equal(source.program.module()(few), expected)
    counts = operators(source.program)
    # The padding of only one side stays, and each of the others is the convolution's own.
    assert counts["aten.pad.default"] == 1
    [mean] = source.program.graph.find_nodes(op="call_function", target=torch.ops.aten.mean.dim)
    assert mean.args[2] is True


class Stream(nn.Module):
    """A convolution and a linear layer whose outputs are quantized only after other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.leaky_relu(self.conv(x), 0.2).permute(0, 2, 3, 1)
        return nn.functional.leaky_relu(self.fc(y), 0.2)


@pytest.mark.parametrize("target", PHONES)
def test_outputs_in_float_are_products_of_codes(target: str) -> None:
    """ExecuTorch rounds their inputs again, with a range that changes nothing."""
    source = program_of(target, deployment_of(result_of(Stream())))
    assert (source.kernels.share, source.kernels.count) == (1.0, 2)
    few = X[: source.most_samples]
    computed, expected = source.program.module()(few), source.tested.network()(few)
    assert torch.allclose(computed, expected, rtol=0, atol=1e-5)
    counts = operators(source.program)
    operator = "quantized_decomposed.choose_qparams"
    ranges = counts[f"{operator}.tensor"], counts[f"{operator}_per_token_asymmetric.default"]
    assert ranges == ((1, 1) if target == "executorch" else (0, 0))


class Joined(nn.Module):
    """Parts and joins of values with several scales, and an average with a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.joined, self.last = nn.Conv2d(16, 4, 1), nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.first(x).relu()
        left, _ = first.chunk(2, 1)
        joined = self.joined(torch.cat([first, self.second(left)], 1))
        once = nn.functional.max_pool2d(joined, 3, 1, 1)
        pooled = self.last(
            torch.cat([joined, once, nn.functional.max_pool2d(once, 3, 1, 1)], 1)
        )
        rows = [value.permute(0, 2, 3, 1).flatten(1, 2) for value in (joined, pooled)]
        return torch.cat(rows, 1), nn.functional.avg_pool2d(pooled, 2)


def codes_before(node: Node) -> list[Any]:
    """Return how the codes that a node reads are decoded."""
    codes: list[Any] = []
    for source in node.all_input_nodes:
        codes.append(source.args[1:] if str(source.target) == DEQUANTIZE else None)
    return codes


@pytest.mark.parametrize("activations", ["int8", "uint8"])
def test_a_layer_after_a_join_of_pools_reads_codes(activations: str, tmp_path: Path) -> None:
    """All values of the join have one scale, so it needs none of its own."""
    path = tmp_path / "net.pt2"
    result_of(Joined()).export("pt2", path, pt2_activations=activations)
    layers = torch.export.load(path).graph.find_nodes(
        op="call_function", target=torch.ops.aten.conv2d.default
    )
    assert [codes_before(layer)[0] for layer in layers].count(None) == 0
    assert len(layers) == 4


def test_executorch_gets_one_scale_for_each_join() -> None:
    """XNNPACK loads no other. A chunk would fix the batch."""
    source = program_of("executorch", deployment_of(result_of(Joined())))
    expected = source.program.module()(X)
    slice_parts(source.program)
    round_before_moves(source.program)
    outputs = source.program.module()(X)
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
    [join, *_] = source.program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.cat.default
    )
    [quantize] = join.users
    assert codes_before(join) == [quantize.args[1:]] * 2
    assert "aten.chunk.default" not in operators(source.program)


class Parts(nn.Module):
    """Tokens whose number is open, as the batch is, cut into parts that are quantized again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.out = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        parts = self.fc(self.embed(tokens)).view(batch, 2 * length, 4)
        return self.out(parts)  # type: ignore[no-any-return]


def test_sizes_that_are_open_are_not_rounded() -> None:
    torch.manual_seed(0)
    batches = [torch.randint(0, 20, size) for size in ((2, 7), (3, 9))]
    result = quantizer.calibrate(Parts().eval(), PRESET, batches)
    calibrated = result._calibrated
    given = Deployment(calibrated.graph, calibrated.solution, (batches[0],), {}, choices={})
    source = program_of("executorch", given)
    expected = source.program.module()(batches[0])
    round_before_moves(source.program)
    assert torch.equal(source.program.module()(batches[0]), expected)


def test_litert_joins_and_averages_several_scales_in_float() -> None:
    """Its converter would round all values to one of the scales."""
    source = program_of("litert", deployment_of(result_of(Joined())))
    expected = source.tested.network()(X[:1])
    before = operators(source.program)["aten.mul.Tensor"]
    keep_scales_of_joins(source.program)
    outputs = source.program.module()(X[:1])
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
    # Two values of the last join, one average, and both results.
    assert operators(source.program)["aten.mul.Tensor"] - before == 5


class Correlated(nn.Module):
    """Joined values of one scale, a leaky ReLU of them in float, and a join with codes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(6, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.leaky_relu(self.first(x), 0.1)
        costs = torch.stack([(x * x.roll(1, 2)).mean(1), (x * x.roll(1, 3)).mean(1)], 1)
        costs = nn.functional.leaky_relu(costs, 0.1)
        return self.last(torch.cat([costs, x], 1))  # type: ignore[no-any-return]


def test_litert_computes_in_float_what_joins_floats_and_codes() -> None:
    source = program_of("litert", deployment_of(result_of(Correlated())))
    expected = source.tested.network()(X[:1])
    before = operators(source.program)["aten.mul.Tensor"]
    keep_scales_of_joins(source.program)
    assert torch.equal(source.program.module()(X[:1]), expected)
    # Around the leaky ReLU, and around the join
    assert operators(source.program)["aten.mul.Tensor"] - before >= 4


class Positions(nn.Module):
    """A linear layer that reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.o = nn.Linear(12, 4)
        self.register_buffer("positions", torch.randn(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x) + self.p(self.positions))
        return self.o(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("target", PHONES)
def test_what_follows_from_no_input_is_computed_once(target: str) -> None:
    """Compilers fail at a layer that multiplies a buffer."""
    given = deployment_of(result_of(Positions()))
    source = program_of(target, given)
    assert operators(source.program)["aten.linear.default"] == 2
    few = X[: source.most_samples]
    found = source.program.module()(few)
    assert torch.equal(found, source.tested.network()(few))
    sizes = sorted(source.kernels.multiply_adds.values())
    rows = X[..., 0].numel()
    assert sizes == [rows * 12 * 4, rows * 12 * 12]
    assert source.kernels.multiply_add_share == 1.0


class Vocoder(nn.Module):
    """Convolutions with one axis, of which some have no int8 kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv1d(3, 8, 3, padding=1), nn.ConvTranspose1d(8, 8, 4, 2, 1)
        self.last = nn.Conv1d(8, 4, 3, padding=2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.leaky_relu(self.first(x.flatten(2)), 0.1)
        return self.last(nn.functional.leaky_relu(self.up(x), 0.1)).tanh()


def test_executorch_gets_two_axes_for_convolutions_in_float() -> None:
    source = program_of("executorch", deployment_of(result_of(Vocoder())))
    expected = source.program.module()(X)
    add_axes(source.program)
    # torch adds the products up in another order, so few codes may be one step off.
    assert (source.program.module()(X) == expected).float().mean() > 0.99
    counts = operators(source.program)
    assert counts["aten.conv_transpose2d.input"] == 1
    assert (counts["aten.conv2d.default"], counts["aten.conv1d.default"]) == (1, 1)


class Upsampling(nn.Module):
    """Transposed convolutions whose paddings are not those that LiteRT's converter takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ConvTranspose2d(3, 8, 3, 2, padding=1, output_padding=1)
        self.second = nn.ConvTranspose2d(8, 6, (3, 2), (2, 1), (1, 0), (1, 0), bias=False)
        self.third = nn.ConvTranspose2d(6, 6, 3, 1, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu()).relu())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def upsampling() -> quantizer.Result:
    return result_of(Upsampling())


def test_transposed_convolutions_have_codes_by_outputs(upsampling: quantizer.Result) -> None:
    """XNNPACK takes scales along axis 1, except in groups."""
    source = program_of("executorch", deployment_of(upsampling))
    assert torch.equal(source.program.module()(X), source.tested.network()(X))
    target = torch.ops.quantized_decomposed.dequantize_per_channel.default
    weights = source.program.graph.find_nodes(op="call_function", target=target)
    assert [(node.args[3], *node.meta["val"].shape[:2]) for node in weights] == [
        (1, 3, 8),
        (1, 8, 6),
    ]
    [(grouped, why)] = source.kernels.floating.items()
    assert "[third]" in grouped
    assert why == "XNNPACK has no int8 kernel for transposed convolutions in groups"


def test_litert_gets_transposed_convolutions_with_a_padding_it_takes(
    upsampling: quantizer.Result,
) -> None:
    source = program_of("litert", deployment_of(upsampling))
    expected = source.tested.network()(X[:1])
    pad_kernels(source.program)
    cut_padding(source.program)
    assert torch.equal(source.program.module()(X[:1]), expected)
    kernels: list[list[int]] = []
    for node in source.program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.conv_transpose2d.input
    ):
        assert not any(node.args[5])
        size = node.args[1].meta["val"].shape[2:]
        rest = [edge - step for edge, step in zip(size, node.args[3], strict=True)]
        assert not any(node.args[4]) or rest == [2 * cut for cut in node.args[4]]
        kernels.append([*size])
    assert kernels == [[4, 4], [4, 2], [3, 3]]
    assert operators(source.program)["aten.slice.Tensor"] == 2


class Shares(nn.Module):
    """Values between 0 and 1, whose int8 kernels in LiteRT have one scale, and a square."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.sigmoid(y) * torch.tanh(y) + y.softmax(-1) + y**2


def test_litert_gets_shares_with_a_clamp_that_changes_nothing() -> None:
    source = program_of("litert", deployment_of(result_of(Shares())))
    expected = source.tested.network()(X[:1])
    multiply_squares(source.program)
    keep_scales_of_shares(source.program)
    assert torch.equal(source.program.module()(X[:1]), expected)
    read: Counter[str] = Counter()
    for node in source.program.graph.nodes:
        if str(node.target) == "quantized_decomposed.quantize_per_tensor.default":
            read[str(node.args[0].target)] += 1
    assert (read["aten.relu.default"], read["aten.hardtanh.default"]) == (2, 1)
    assert "aten.pow.Tensor_Scalar" not in operators(source.program)


def test_layers_without_kernels_have_constants_in_float() -> None:
    """XNNPACK computes these in float, which it could not if operators decoded the weights."""
    config = {
        "global_quant_config": {"weight": {"dtype": "int8"}},
        "layer_quant_config": {
            "*gate*": {
                kind: {"dtype": "int8", "qscheme": "per_tensor"}
                for kind in ("input_tensors", "output_tensors", "weight")
            }
        },
    }
    result = result_of(Gated(), config)
    source = program_of("executorch", deployment_of(result))
    [integer] = source.kernels.integer
    [(floating, why)] = source.kernels.floating.items()
    assert ("[gate]" in integer, "[conv]" in floating) == (True, True)
    assert why == "its input is not quantized"
    counts = operators(source.program)
    assert counts["quantized_decomposed.dequantize_per_channel.default"] == 1
    stored = source.program.state_dict
    assert [value.dtype for name, value in stored.items() if name.endswith(".weight")] == [
        torch.float32
    ]


@pytest.mark.parametrize("text", ["0", "many", "-1"])
def test_the_largest_batch_is_a_number(text: str, padded: quantizer.Result) -> None:
    given = deployment_of(padded, executorch_batch=text)
    with pytest.raises(UsageError, match=f"executorch_batch is '{text}'") as refused:
        program_of("executorch", given)
    assert "such as 8" in str(refused.value.help)


@pytest.mark.parametrize(("text", "most"), [("", 5), ("9", 9), ("1", 1)])
def test_a_program_takes_batches_up_to_the_largest(
    text: str, most: int, padded: quantizer.Result
) -> None:
    source = program_of("executorch", deployment_of(padded, executorch_batch=text))
    assert source.most_samples == most
    program = source.program.module()
    for size in {1, most}:
        batch = X[:1].expand(size, -1, -1, -1).contiguous()
        assert len(program(batch)) == size
    with pytest.raises(Exception, match=r"[Gg]uard|equal|<="):
        program(torch.ones(most + 1, 3, 12, 12))


def test_biases_are_steps_of_integer_sums(padded: quantizer.Result) -> None:
    """Those of linear layers, too, which ONNX Runtime adds in float."""
    given = deployment_of(padded)
    rounded = exporter_of("executorch").as_run(given.graph, given.solution)
    network = replace(given, solution=rounded).network()
    weights = {key[0]: tensor for key, tensor in rounded.tensors.items() if key[1] == "weights"}
    [fc] = [layer for layer in weights if "[fc]" in layer]
    [mean] = [key for key in rounded.tensors if key[0].endswith("/mean")]
    step = weights[fc].scale * rounded.tensors[mean].scale
    steps = network.layers[fc].get_parameter("bias").detach() / step
    assert torch.allclose(steps, steps.round(), atol=1e-2)
    assert isinstance(rounded, Solution)


def test_a_bias_that_int32_does_not_hold_gets_a_coarser_scale() -> None:
    """So the layer keeps its int8 kernel, and its bias is not cut off."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4)).eval()
    model[0].weight.data.mul_(1e-8)
    model[1].bias.data.fill_(1.0)
    x = torch.randn(4, 8)
    result = quantizer.calibrate(model, PRESET, [x])
    given = replace(deployment_of(result), args=(x,))
    source = program_of("executorch", given)
    assert source.kernels.share == 1.0
    outputs = source.tested.network()(x)
    assert torch.allclose(outputs, torch.ones(4, 4), atol=0.02)
    [last] = [layer for layer in source.scales if "[1]" in layer]
    bias = source.tested.network().layers[last].get_parameter("bias")
    [first] = [key for key in given.solution.tensors if key[0] != last and "act" in key[1]]
    step = torch.tensor(source.scales[last]) * given.solution.tensors[first].scale
    assert float((bias / step).abs().max()) < 2**31


def test_bounds_of_a_relu6_are_floats(tmp_path: Path, padded: quantizer.Result) -> None:
    """Core ML's converter refuses integers."""
    for activations in ("uint8", "int8"):
        path = tmp_path / f"{activations}.pt2"
        padded.export("pt2", path, pt2_activations=activations)
        program = torch.export.load(path)
        bounds: list[Any] = []
        for node in program.graph.nodes:
            if "hardtanh" in str(node.target):
                bounds.append([type(bound) for bound in node.args[1:]])
            assert "relu6" not in str(node.target)
        assert bounds == [[float, float]] * 2


def test_an_int8_share_is_a_metric_of_its_target(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["--quant_mode", "calib", "--model", "net.py", "-q"]) == 0
    command = ["--quant_mode", "test", "--model", "net.py", "-q"]
    gate = ["--gate", "executorch_int8_share==1"]
    assert run_command([*command, "--deploy", "safetensors", *gate]) == 2
    assert "there is no metric 'executorch_int8_share'" in capsys.readouterr().err
