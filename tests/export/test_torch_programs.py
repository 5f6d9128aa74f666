"""`--to pt2`: integer weights and operators that torch's compiler and ExecuTorch know, with
test mode's values.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deployments import ACTIVATION, WEIGHTS, Written, calibrated, fitted, outputs_of
from support.extended import extended, extended_except
from support.runs import ROOT, check
from support.toys import built
from torch import Tensor, nn
from torch.export import ExportedProgram

import quantizer
from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.errors import UsageError, VerificationError
from quantizer.export.agreement import verify
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.exporting import export
from quantizer.export.programs.coded import CODE_TYPES, Activation
from quantizer.export.targets import CHOICES
from quantizer.graph.tracing.trace import trace
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.rounding import ROUND_MODES

INT8_WEIGHTS = QuantizationSpec(
    **{**WEIGHTS.to_json(), "bit_width": 8 if torch.cpu._is_vnni_supported() else 7}
)
"""The widest that torch's compiled kernels add up right: without VNNI two products share 16
bits, which saturate.
"""
BITS = {"4 bits": {"bit_width": 4}, "narrow": {"narrow_range": True}, "8 bits": {}}
SIGNS: dict[str, dict[str, Any]] = {
    "signed": {},
    "unsigned": {"signed": False},
    "asymmetric": {"symmetric": False, "signed": False},
}


class Layers(nn.Module):
    """Convolutions with what stands between them in networks: a shortcut, pooling, padding, a
    reshape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)
        self.up, self.fc = (
            nn.ConvTranspose2d(8, 6, 2, stride=2),
            nn.Linear(6 * 8 * 8, 10, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.first(x).relu(), 2)
        y = self.second(nn.functional.pad(x, (1, 1, 1, 1))).relu() + x
        return self.fc(self.up(y).flatten(1))


class Pair(nn.Module):
    """A convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(4 * 3 * 3, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().flatten(1))  # type: ignore[no-any-return]


def deployment(
    kind: type[nn.Module],
    activation: QuantizationSpec = ACTIVATION,
    weights: QuantizationSpec = WEIGHTS,
    *,
    activations: str = "uint8",
    dtype: torch.dtype = torch.float32,
) -> Deployment:
    """A network calibrated on one batch, with specs for all of its tensors."""
    torch.manual_seed(0)
    module, x = kind().eval().to(dtype), torch.randn(5, 3, 8, 8, dtype=dtype)
    graph = trace(module, (x,))
    found = calibrated(graph, (x,), {}, activation, weights).tensors
    tensors = {
        key: tensor
        for key, tensor in found.items()
        if graph.by_name[key[0]].row.kind != "passthrough"
    }
    tensors[graph.nodes[0].name, "input"] = tensors.pop(
        (graph.nodes[0].name, "activation"), fitted(x, activation)
    )
    return Deployment(
        graph, Solution(tensors), (x,), {}, choices={"pt2_activations": activations}
    )


def calls(program: ExportedProgram) -> Counter[str]:
    """How often each operator is called."""
    return Counter(
        str(node.target) for node in program.graph.nodes if node.op == "call_function"
    )


@pytest.mark.parametrize("batch", [1, 5])
def test_a_program_takes_any_batch_and_loads_without_quantizer(
    batch: int, exported: Callable[[str, str], Written]
) -> None:
    given, path = exported("pt2", "mobile").given, exported("pt2", "mobile").path
    program = torch.export.load(path)
    assert {name.partition(".")[0] for name in calls(program)} == {
        "aten",
        "quantized_decomposed",
    }
    args, kwargs = built("mobile").call(batch)
    expected = tensor_leaves(given.network()(*args, **kwargs))
    assert (
        verify("outputs", expected, tensor_leaves(program.module()(*args, **kwargs))).equal
        == 1.0
    )


def test_weights_take_a_byte_each(tmp_path: Path) -> None:
    torch.manual_seed(0)
    graph = trace(
        nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)),
        (torch.randn(2, 512),),
    )
    given = Deployment(
        graph, calibrated(graph, (torch.randn(2, 512),), {}), (torch.randn(2, 512),), {}
    )
    sizes = {}
    for target in ("pt2", "pt2_float"):
        assert export(target, given, tmp_path / target).equal == 1.0
        sizes[target] = (tmp_path / target).stat().st_size
    assert sizes["pt2"] < 0.28 * sizes["pt2_float"]
    stored = torch.export.load(tmp_path / "pt2").state_dict
    assert {t.dtype for name, t in stored.items() if name.endswith("weights.codes")} == {
        torch.int8
    }
    assert not [name for name in stored if name.endswith(".weight")]


@pytest.mark.parametrize("activations", CHOICES["pt2_activations"].values)
@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize(("bits", "signs"), [*product(BITS, SIGNS)])
def test_codes_of_an_activation_are_test_modes(
    bits: str, signs: str, round_mode: Any, activations: str
) -> None:
    """But for half_even, where the operator multiplies by 1 / scale and a value beside a tie
    may fall a step away.
    """
    spec = QuantizationSpec(round_mode=round_mode, **BITS[bits], **SIGNS[signs])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100_000, generator=generator)
    tensor = fitted(x[:50_000].abs() if signs == "unsigned" else x[:50_000] * 0.5, spec)
    expected, found = (
        TensorQuantizer.of(tensor)(x),
        Activation(tensor, CODE_TYPES[activations])(x),
    )
    if round_mode != "half_even":
        assert torch.equal(expected, found)
    assert (expected == found).float().mean() >= 0.9999
    assert float((expected - found).abs().max()) <= 1.001 * float(tensor.scale)


def test_powers_of_two_have_no_reciprocal_to_round() -> None:
    x = torch.arange(-300, 300) / 16
    tensor = fitted(x[:400], QuantizationSpec(scale_type="poweroftwo"))
    assert torch.equal(
        TensorQuantizer.of(tensor)(x), Activation(tensor, CODE_TYPES["uint8"])(x)
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, *extended(torch.float16)], ids=str
)
def test_models_of_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    sqnr_db = export("pt2", deployment(Pair, dtype=dtype), tmp_path / "net.pt2").sqnr_db
    assert sqnr_db is not None and sqnr_db >= 37


@pytest.mark.slow
def test_the_integers_of_activations_change_no_value(tmp_path: Path) -> None:
    outputs, programs = [], []
    for activations in CHOICES["pt2_activations"].values:
        given = deployment(Layers, activations=activations)
        assert export("pt2", given, tmp_path / activations).equal == 1.0
        programs.append(torch.export.load(tmp_path / activations))
        outputs.append(programs[-1].module()(*given.args))
    assert torch.equal(*outputs)
    for program, dtype in zip(programs, (torch.uint8, torch.int8), strict=True):
        made = [
            node.args[-1]
            for node in program.graph.nodes
            if "quantize_per_tensor" in str(node.target)
        ]
        assert set(made) == {dtype}


def test_layers_read_codes_through_operators_that_keep_them(tmp_path: Path) -> None:
    """After pooling, padding and a reshape; a transposed convolution has no kernel of
    integers.
    """
    export("pt2", deployment(Layers), tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2")
    read = {
        node.name: str(node.args[0].target)
        for node in program.graph.nodes
        if str(node.target) in ("aten.conv2d.default", "aten.linear.default")
    }
    assert len(read) == 3
    assert set(read.values()) == {"quantized_decomposed.dequantize_per_tensor.default"}
    assert calls(program)["quantized_decomposed.dequantize_per_channel.default"] == 3


UNKERNELED = {
    "zero points": {"symmetric": False, "bit_width": 4},
    "unsigned": {"signed": False},
    "16 bits": {"bit_width": 16},
    "another axis": {"ch_axis": 1},
}


@pytest.mark.parametrize("kind", extended_except(UNKERNELED, "zero points", "16 bits"))
def test_weights_that_kernels_would_misread_are_made_by_plain_operators(
    kind: str, tmp_path: Path
) -> None:
    fields = {"qscheme": "per_channel", "ch_axis": 0, **UNKERNELED[kind]}
    given = deployment(Pair, weights=QuantizationSpec(**fields))  # type: ignore[arg-type]
    assert export("pt2", given, tmp_path / "net.pt2").equal == 1.0
    assert "quantized_decomposed.dequantize_per_channel.default" not in calls(
        torch.export.load(tmp_path / "net.pt2")
    )


@pytest.mark.slow
def test_activations_of_16_bits_are_made_by_plain_operators(tmp_path: Path) -> None:
    assert (
        export(
            "pt2", deployment(Pair, QuantizationSpec(bit_width=16)), tmp_path / "net.pt2"
        ).equal
        == 1.0
    )
    assert "quantized_decomposed.quantize_per_tensor.default" not in calls(
        torch.export.load(tmp_path / "net.pt2")
    )


@pytest.mark.slow
def test_a_recurrent_layer_has_codes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 7, 6)
    graph = trace(nn.LSTM(6, 5, batch_first=True).eval(), (x,))
    (lstm,) = (node for node in graph.nodes if node.op == "lstm")
    tensors = {
        (lstm.name, f"weights_{part}_l0"): fitted(
            graph.tensors[lstm.params[f"weight_{part}_l0"]], WEIGHTS
        )
        for part in ("ih", "hh")
    }
    given = Deployment(graph, Solution(tensors), (x,), {})
    assert export("pt2", given, tmp_path / "net.pt2").equal == 1.0
    stored = torch.export.load(tmp_path / "net.pt2").state_dict
    assert sum(tensor.dtype == torch.int8 for tensor in stored.values()) == 2


@pytest.mark.parametrize("target", ["pt2", "pt2_float"])
def test_a_program_that_computes_something_else_is_not_written(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Zeros(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(len(x), 10)

    monkeypatch.setattr(
        "quantizer.export.torch_export.exporter.load_program", lambda content: Zeros()
    )
    with pytest.raises(
        VerificationError,
        match=r"net\.pt2 is not written: it does not compute what test mode does",
    ):
        export(target, deployment(Pair), tmp_path / "net.pt2")
    assert not (tmp_path / "net.pt2").exists()


def test_a_program_whose_guards_fail_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Guarded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("Guard failed: x.size()[0] <= 4\nand more")

    monkeypatch.setattr(
        "quantizer.export.torch_export.exporter.load_program", lambda content: Guarded()
    )
    with pytest.raises(
        VerificationError, match=r"torch cannot run it: Guard failed: x.* <= 4\n"
    ) as refused:
        export("pt2", deployment(Pair), tmp_path / "net.pt2")
    assert refused.value.help
    assert not (tmp_path / "net.pt2").exists()


def test_the_integers_go_with_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path / "none", "--deploy", "onnx", "--pt2_activations", "int8") == 2
    assert "--pt2_activations is only for --to pt2" in capsys.readouterr().err


def test_integers_that_no_consumer_takes_are_refused(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    result = quantizer.calibrate(
        nn.Linear(4, 3).eval(), {"global_quant_config": {"weight": {"dtype": "int8"}}}, [x]
    )
    with pytest.raises(UsageError, match="pt2_activations is 'int16'") as refused:
        result.export("pt2", tmp_path / "net.pt2", pt2_activations="int16")
    assert refused.value.help == "known are uint8, int8"


@pytest.mark.real
@pytest.mark.shows("a convolutional network (random)", "torch.compile (Inductor)")
@pytest.mark.filterwarnings("ignore:.*")  # torch's compiler uses what torch has deprecated
@pytest.mark.parametrize("bits", ["8 bits", *extended("4 bits")])
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs it")
def test_torch_compiles_it_to_kernels_of_integers(bits: str, tmp_path: Path) -> None:
    """And these keep to the bounds of codes; they multiply by 1 / scale and round sums
    otherwise.
    """
    from torch._dynamo.utils import counters

    given = deployment(Layers, QuantizationSpec(**BITS[bits]), INT8_WEIGHTS)
    export("pt2", given, tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2").module()
    torch._dynamo.reset()
    counters.clear()
    with (
        torch._inductor.config.patch(freezing=True, force_disable_caches=True),
        torch.no_grad(),
    ):
        found = torch.compile(program)(*given.args)
    assert counters["inductor"]["qconv_weight_prepack_matcher_count"] == 2
    assert counters["inductor"]["qlinear_weight_prepack_matcher_count"] == 1
    (expected,), (step,) = outputs_of(given), given.steps
    assert step is not None
    assert float((expected - found).abs().max()) <= 1.001 * step
    assert (expected == found).float().mean() >= 0.9


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:.*")
def test_executorch_delegates_it(tmp_path: Path) -> None:
    exir = pytest.importorskip(
        "executorch.exir", reason="a runtime for small devices: pip install executorch torchao"
    )
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.runtime import Runtime

    given = deployment(Layers, activations="int8")
    export("pt2", given, tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2")
    lowered = exir.to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    nodes = (
        node for node in lowered.exported_program().graph.nodes if node.op == "call_function"
    )
    left = [
        node
        for node in nodes
        if any(word in str(node.target) for word in ("convolution", "linear", "mm."))
    ]
    assert [node.args[6] for node in left] == [True], (
        "a transposed convolution is not delegated"
    )
    lowered.to_executorch().save(str(tmp_path / "net.pte"))
    method = Runtime.get().load_program(tmp_path / "net.pte").load_method("forward")
    assert method is not None
    found, (expected,), (step,) = (
        method.execute([given.args[0][:2]])[0],
        outputs_of(given),
        given.steps,
    )
    assert step is not None
    assert float((expected[:2] - found).abs().max()) <= 1.001 * step


@pytest.mark.parametrize(("activations", "kernels"), [("int8", 1), ("uint8", 2)])
def test_xnnpack_gets_no_bias_that_int32_does_not_hold(
    activations: str, kernels: int, tmp_path: Path
) -> None:
    """It rounds biases to multiples of input scale times weight scale; values near 1e-8 leave
    no room for one of 1.
    """
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4)).eval(),
        torch.randn(4, 8),
    )
    model[0].weight.data.mul_(1e-8)
    model[1].bias.data.fill_(1.0)
    result = quantizer.calibrate(model, str(ROOT / "configs" / "cpu_int8.json"), [x])
    found = result.export("pt2", tmp_path / "net.pt2", pt2_activations=activations)
    assert found.equal == 1
    program = torch.export.load(tmp_path / "net.pt2")
    operators = Counter(str(node.target) for node in program.graph.nodes)
    assert operators["quantized_decomposed.dequantize_per_channel.default"] == kernels
