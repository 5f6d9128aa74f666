"""ONNX says what test mode does, for every specification, or it says what it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import ROLES, document
from support.deployments import Written, deployment, fitted, outputs_of
from support.extended import extended
from torch import Tensor, nn

onnx = pytest.importorskip("onnx", reason="the ONNX target needs it (extra: onnx)")
ort = pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

from support.toys import built

import quantizer
from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.errors import QuantizerError, UsageError, VerificationError
from quantizer.export.deployment import Deployment
from quantizer.export.exporting import export
from quantizer.export.onnx.build import stored_model
from quantizer.graph.tracing.trace import trace
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.rounding import ROUND_MODES
from quantizer.storage.permission import replacing


class Shifts(nn.Module):
    """As many values as there are specifications, each exact in any runtime."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x * 2 for _ in range(self.count)]


class Tables(nn.Module):
    """As many weights as there are specifications, each read out as it is."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, 3) for _ in range(count))

    def forward(self, rows: Tensor) -> list[Tensor]:
        return [table(rows) for table in self.tables]


class Bessel(nn.Module):
    """An operator that ONNX does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"narrow_range": True},
    {"signed": False},
    {"symmetric": False, "signed": False},
    {"symmetric": False},
    {"scale_type": "poweroftwo"},
)


def integer_specs(
    widths: tuple[int, ...], field: str, values: Sequence[Any]
) -> Iterator[QuantizationSpec]:
    """Yield every kind in every width. The values of `field` take turns, so that each stands
    with each kind and with each width.
    """
    for (row, bit_width), (column, kind) in product(enumerate(widths), enumerate(KINDS)):
        value = values[(row + column) % len(values)]
        yield QuantizationSpec(bit_width=bit_width, **kind, **{field: value})


def on_nodes(
    module: nn.Module, example: Tensor, role: str, specs: list[QuantizationSpec]
) -> Deployment:
    """The module's compute nodes with one spec each, their range half of what comes, so that
    values are cut off.
    """
    graph = trace(module.eval(), (example,))
    nodes = [node for node in graph.nodes if node.op in ("mul", "embedding")]
    tensors = {}
    for node, spec in zip(nodes, specs, strict=True):
        value = example * 2 if role == "activation" else graph.tensors[node.params["weight"]]
        tensors[node.name, role] = fitted(value / 2, spec)
    return Deployment(graph, Solution(tensors), (example,), {})


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(2, 8, 13, 16), *extended(((3, 4, 5),))], ids=str)
def test_every_spec_and_rounding_of_activations(
    widths: tuple[int, ...], tmp_path: Path
) -> None:
    specs = [*integer_specs(widths, "round_mode", [*ROUND_MODES])]
    specs += [QuantizationSpec(dtype=dtype) for dtype in ("float16", "bfloat16", "float32")]
    example = torch.cat([torch.randn(2, 500), torch.arange(-250, 250).expand(2, 500) / 64], 1)
    found = export(
        "onnx",
        on_nodes(Shifts(len(specs)), example, "activation", specs),
        tmp_path / "net.onnx",
    )
    assert found.max_difference == 0.0


def test_ties_at_scales_that_are_no_power_of_two(tmp_path: Path) -> None:
    scale = torch.tensor(0.0236)
    specs = [QuantizationSpec(round_mode=mode) for mode in ROUND_MODES]
    given = on_nodes(
        Shifts(len(specs)),
        ((torch.arange(-130, 130) + 0.5) * scale).expand(2, -1) / 2,
        "activation",
        specs,
    )
    tensors = {
        key: replace(tensor, scale=scale) for key, tensor in given.solution.tensors.items()
    }
    assert (
        export(
            "onnx", replace(given, solution=Solution(tensors)), tmp_path / "net.onnx"
        ).max_difference
        == 0.0
    )


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(3, 4, 8, 16, 20), *extended(((2, 5, 12, 32),))], ids=str)
def test_every_spec_of_weights(widths: tuple[int, ...], tmp_path: Path) -> None:
    specs = [
        replace(spec, qscheme="per_tensor" if spec.ch_axis is None else "per_channel")
        for spec in integer_specs(widths, "ch_axis", (None, 0, 1))
    ]
    specs += [QuantizationSpec(dtype=dtype) for dtype in ("float16", "bfloat16")]
    torch.manual_seed(0)
    given = on_nodes(Tables(len(specs)), torch.arange(5).repeat(2, 1), "weights", specs)
    assert export("onnx", given, tmp_path / "net.onnx").max_difference == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bit_width", "signed", "opset", "type_", "clipped"),
    [
        (4, True, 20, "UINT8", 1),
        (8, True, 20, "UINT8", 0),
        (16, True, 21, "INT16", 0),
        *extended((4, False, 20, "UINT8", 1), (8, False, 20, "UINT8", 0)),
    ],
)
def test_activations_have_a_type_that_the_runtimes_optimizer_takes(
    bit_width: int, signed: bool, opset: int, type_: str, clipped: int, tmp_path: Path
) -> None:
    spec = QuantizationSpec(bit_width=bit_width, signed=signed)
    export(
        "onnx",
        on_nodes(Shifts(1), torch.rand(2, 3), "activation", [spec]),
        tmp_path / "net.onnx",
    )
    model = onnx.load(tmp_path / "net.onnx")
    types = [t.data_type for t in model.graph.initializer if t.name.endswith("zero_point")]
    assert types == [onnx.TensorProto.DataType.Value(type_)]
    assert [node.op_type for node in model.graph.node].count("Clip") == clipped
    assert operator_sets(model) == [opset]


def operator_sets(model: Any) -> list[int]:
    return [entry.version for entry in model.opset_import if not entry.domain]


@pytest.mark.slow
def test_weights_are_stored_as_codes(exported: Callable[[str, str], Written]) -> None:
    graph = onnx.load(exported("onnx", "residual").path).graph
    codes = {
        t.name: t.data_type for t in graph.initializer if t.name.endswith(".weights.codes")
    }
    assert len(codes) == 6
    # The first layer reads floats
    assert set(codes.values()) == {onnx.TensorProto.UINT8, onnx.TensorProto.INT8}
    floats = [
        t
        for t in graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT and len([d for d in t.dims if d > 1]) > 1
    ]
    assert not floats


@pytest.mark.parametrize("batch", [1, 5])
def test_the_batch_is_open(batch: int, exported: Callable[[str, str], Written]) -> None:
    given, path = exported("onnx", "residual").given, exported("onnx", "residual").path
    args, kwargs = built("residual").call(batch)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: args[0].numpy()})
    expected = outputs_of(replace(given, args=args, kwargs=kwargs))[0]
    step = float(given.solution.tensors[given.graph.output.name, "activation"].scale)
    difference = (torch.from_numpy(output) - expected).abs()
    # The runtime's own optimizations may move a code by one
    assert float(difference.max()) <= step * 1.0001
    assert float((difference == 0).float().mean()) >= 0.9


def refusal(given: Deployment, tmp_path: Path) -> QuantizerError:
    with pytest.raises(QuantizerError) as refused:
        export("onnx", given, tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())
    return refused.value


@pytest.mark.parametrize(
    ("spec", "opset", "why", "help_"),
    [
        (
            QuantizationSpec(bit_width=20),
            -1,
            "has 20 bits; ONNX takes 16 or fewer",
            "bit_width",
        ),
        (
            QuantizationSpec(bit_width=16),
            20,
            "has 16 bits, which operator set 20 lacks",
            "onnx_opset_version",
        ),
        (
            QuantizationSpec(qscheme="per_channel", ch_axis=1),
            -1,
            "is per_channel; ONNX takes per_tensor",
            "per_channel",
        ),
        (
            QuantizationSpec(dtype="fp6_e2m3"),
            -1,
            "is fp6_e2m3; ONNX takes integers, fp8_e4m3 or fp8_e5m2",
            "dtype",
        ),
        (
            QuantizationSpec(round_mode="half_odd"),
            -1,
            "is rounded by half_odd; ONNX takes floor, half_down, half_even, half_up or "
            "std_round",
            "half_even",
        ),
    ],
)
def test_what_onnx_cannot_say_is_refused(
    spec: QuantizationSpec, opset: int, why: str, help_: str, tmp_path: Path
) -> None:
    given = on_nodes(Shifts(1), torch.rand(2, 3), "activation", [spec])
    error = refusal(replace(given, opset=opset), tmp_path)
    assert isinstance(error, UsageError)
    assert error.message == f"--to onnx: activation of Shifts::Shifts/mul {why}"
    assert help_ in str(error.help)


def test_all_that_onnx_cannot_say_is_one_sentence(tmp_path: Path) -> None:
    given = on_nodes(
        Shifts(7), torch.rand(2, 3), "activation", [QuantizationSpec(bit_width=20)] * 7
    )
    message = refusal(given, tmp_path).message
    assert message.startswith("--to onnx: activation of Shifts::Shifts/mul, activation of ")
    assert message.endswith(" and 2 more: each has 20 bits; ONNX takes 16 or fewer")


@pytest.mark.parametrize("opset", [0, 17, 24, 10**9])
def test_operator_sets_out_of_reach_are_refused(opset: int, tmp_path: Path) -> None:
    error = refusal(replace(deployment("tied"), opset=opset), tmp_path)
    assert error.message == f"--to onnx writes operator sets 18 to 23, not {opset}"


def test_tensors_that_do_not_fit_one_message_lie_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.export.onnx.build.LARGEST_MESSAGE", 100)
    rows = torch.arange(5)
    given = Deployment(trace(nn.Embedding(5, 512).eval(), (rows,)), Solution({}), (rows,), {})
    assert export("onnx", given, tmp_path / "net.onnx").equal == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx", "net.onnx.data"]
    assert (tmp_path / "net.onnx.data").stat().st_size >= 4 * 5 * 512
    session = ort.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    assert session.run(None, {session.get_inputs()[0].name: torch.tensor([3]).numpy()})[
        0
    ].shape == (1, 512)
    monkeypatch.undo()
    with replacing(overwrite=True):
        export("onnx", given, tmp_path / "net.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *extended(torch.float16)], ids=str)
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = (
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).to(dtype),
        torch.randn(64, 16).to(dtype),
    )
    graph = trace(module, (x,))
    names = [node.name for node in graph.nodes if node.op == "linear"]
    weights = QuantizationSpec(qscheme="per_channel", ch_axis=0)
    tensors = {
        (name, "weights"): fitted(graph.weight(graph.by_name[name]).float(), weights)
        for name in names
    }
    given = Deployment(graph, Solution(tensors), (x,), {}, sqnr_db=30.0)
    found = export("onnx", given, tmp_path / "net.onnx")
    assert found.sqnr_db is not None
    assert found.sqnr_db > (40 if dtype == torch.bfloat16 else 55)
    types = {
        t.data_type
        for t in onnx.load(tmp_path / "net.onnx").graph.initializer
        if len(t.dims) == 2
    }
    assert types == {onnx.TensorProto.INT8}


class Attended(nn.Module):
    """Attention of each value to itself, with a mask and without."""

    def forward(self, *values: Tensor) -> list[Tensor]:
        attended = []
        for x in values:
            for mask in (None, x[..., :1] + torch.zeros(x.shape[-2])):
                attended.append(nn.functional.scaled_dot_product_attention(x, x, x, mask))
        return attended


@pytest.mark.slow
def test_attention_of_any_rank(tmp_path: Path) -> None:
    values = tuple(torch.randn(shape) for shape in ((5, 8), (5, 4, 8), (5, 3, 4, 8)))
    deployed = Deployment(trace(Attended(), values), Solution({}), values, {})
    assert export("onnx", deployed, tmp_path / "net.onnx").max_difference < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, *extended(20, 21, 23)])
def test_the_operator_set_of_the_config_is_written(opset: int, tmp_path: Path) -> None:
    found = export(
        "onnx", replace(deployment("containers"), opset=opset), tmp_path / "net.onnx"
    )
    assert found.equal == 1.0
    assert operator_sets(onnx.load(tmp_path / "net.onnx")) == [opset]


class Constants(nn.Module):
    """Returns tensors that do not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x * 2, self.table, torch.arange(4), torch.full((2,), 3.0)


def test_outputs_that_are_constants(tmp_path: Path) -> None:
    x = torch.rand(2, 3)
    found = export(
        "onnx",
        Deployment(trace(Constants().eval(), (x,)), Solution({}), (x,), {}),
        tmp_path / "net.onnx",
    )
    assert found.equal == 1.0
    session = ort.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    made = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert [each.tolist() for each in made[1:]] == [[0, 1, 2], [0, 1, 2, 3], [3, 3]]


def test_what_onnx_does_not_accept_is_a_sentence(tmp_path: Path) -> None:
    model = onnx.helper.make_model(
        onnx.helper.make_graph([], "Net", [], [onnx.ValueInfoProto(name="output_0")])
    )
    said = "net.onnx is not written: it would be no valid ONNX: "
    with (
        pytest.raises(VerificationError, match=said),
        stored_model(model, tmp_path / "net.onnx"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_float64_and_untranslatable_operators_are_refused(tmp_path: Path) -> None:
    x = torch.rand(2, 3)
    error = refusal(Deployment(trace(Bessel(), (x,)), Solution({}), (x,), {}), tmp_path)
    assert "special_bessel_j0, for which torch.onnx has no form" in error.message
    constants = deployment("constants")
    double = {
        ("Constants::Constants/softmax", "activation"): QuantizedTensor(
            QuantizationSpec(), torch.tensor(0.1)
        )
    }
    assert (
        "is torch.float64"
        in refusal(replace(constants, solution=Solution(double)), tmp_path).message
    )


@pytest.mark.parametrize(
    ("per_channel", "roles"), [(True, ROLES), (True, ["weights"]), *extended((False, ROLES))]
)
def test_a_convolution_with_zero_points_everywhere_is_written(
    per_channel: bool, roles: list[str], tmp_path: Path
) -> None:
    """Its weight stays float in the file beside quantized inputs, and its bias is one of codes.
    Beside float inputs its weight is made of codes ahead.
    """
    config = document(
        overall={"symmetry": False},
        tensor={"weights": {"per_channel": per_channel}},
        quantizable_data_type=roles,
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1)).eval()
    result = quantizer.calibrate(model, config, [torch.randn(2, 3, 6, 6)])
    bound = 0.0 if roles == ROLES else 1e-6  # sums of floats differ in order
    assert result.export("onnx", tmp_path / "net.onnx").max_difference <= bound
