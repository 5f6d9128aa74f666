"""Which layers the DPU can run, and why not, by the table of UG1414; and what `inspect --target
DPU` prints.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.dpu_networks import Applied, Joined, example, planned
from support.runs import DIGITS
from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub, QuantStub
from torch.nn import functional as F

from quantizer.cli.main import run_command
from quantizer.plan.dpu_limits import OPERATOR_LIMITS
from quantizer.plan.dpu_support import subgraphs, verdicts


def verdict(module: nn.Module, end: str, x: Tensor | None = None) -> tuple[str, str]:
    """Device, and the engine or the reason, of the last layer whose name ends so."""
    found = verdicts(planned(module, x))
    name = [name for name in found if name.endswith(end)][-1]
    return found[name].device, found[name].why or found[name].engine


def wide(channels: int, size: int = 2) -> Tensor:
    return torch.zeros(2, channels, size, size)


ON_DPU: list[tuple[str, Callable[[], nn.Module], str, Tensor | None, str]] = [
    ("conv", lambda: nn.Conv2d(4, 8, 3), "conv2d", None, "conv2d"),
    ("depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4), "conv2d", None, "depthwise-conv2d"),
    (
        "transposed",
        lambda: nn.ConvTranspose2d(4, 8, 3, 2, 1),
        "conv_transpose2d",
        None,
        "transposed-conv2d",
    ),
    (
        "depthwise transposed",
        lambda: nn.ConvTranspose2d(4, 4, 4, 2, groups=4),
        "2d",
        None,
        "depthwise-transposed-conv2d",
    ),
    ("fused", lambda: Applied(lambda y, x: F.hardswish(y)), "conv2d", None, "conv2d"),
    (
        "flattened map",
        lambda: nn.Sequential(nn.Conv2d(4, 512, 3), nn.Flatten(), nn.Linear(8192, 8)),
        "linear",
        None,
        "conv2d",
    ),
    ("average", lambda: nn.AvgPool2d(3), "avg_pool2d", None, "average-pooling"),
    ("concat", Joined, "cat", None, "concat"),
    (
        "resize",
        lambda: Applied(lambda y, x: F.interpolate(y, scale_factor=2.0)),
        "upsample_nearest",
        None,
        "resize",
    ),
]
ON_CPU: list[tuple[str, Callable[[], nn.Module], str, Tensor | None, str]] = [
    (
        "kernel",
        lambda: nn.Conv2d(4, 8, 17, padding=8),
        "conv2d",
        None,
        "its kernel is (17, 17), and sides are 1 to 16",
    ),
    (
        "stride",
        lambda: nn.Conv2d(4, 8, 3, 9),
        "conv2d",
        wide(4, 20),
        "its stride is (9, 9), and sides are 1 to 8",
    ),
    (
        "padding",
        lambda: nn.Conv2d(4, 8, 1, padding=1),
        "conv2d",
        None,
        "its padding (1, 1) is wider",
    ),
    (
        "dilation",
        lambda: nn.Conv2d(2100, 8, 3, dilation=2),
        "conv2d",
        wide(2100, 5),
        "dilation times input channels",
    ),
    (
        "bank",
        lambda: nn.Conv2d(640, 8, 8),
        "conv2d",
        wide(640, 8),
        "take 2560 entries of a bank, which has 2048",
    ),
    (
        "channels",
        lambda: nn.Conv2d(1, 4097, 1),
        "conv2d",
        wide(1),
        "4097 output channels, and 4096 are the most",
    ),
    (
        "made channels",
        lambda: nn.ConvTranspose2d(1, 4097, 1),
        "conv_transpose2d",
        wide(1),
        "4097 output channels",
    ),
    ("groups", lambda: nn.Conv2d(4, 8, 3, groups=2), "conv2d", None, "it has 2 groups"),
    (
        "output padding",
        lambda: nn.ConvTranspose2d(4, 8, 3, 2, output_padding=1),
        "2d",
        None,
        "its output_padding",
    ),
    (
        "one dimension",
        lambda: nn.Conv1d(4, 8, 3),
        "conv1d",
        torch.zeros(2, 4, 9),
        "the DPU has no conv1d",
    ),
    ("window", lambda: nn.AdaptiveAvgPool2d(1), "2d", wide(1, 257), "its window is (257, 257)"),
    (
        "two sizes",
        lambda: nn.AdaptiveAvgPool2d(4),
        "2d",
        None,
        "it is not an average over windows of one fixed size",
    ),
    (
        "activation",
        lambda: Applied(lambda y, x: torch.sigmoid(y) + y),
        "sigmoid",
        None,
        "the DPU has no sigmoid",
    ),
    (
        "two activations",
        lambda: Applied(lambda y, x: F.relu6(F.leaky_relu(y))),
        "relu6",
        None,
        "an activation already",
    ),
    (
        "no producer",
        lambda: nn.Sequential(nn.ReLU()),
        "relu",
        None,
        "relu runs as part of another layer",
    ),
    (
        "shapes",
        lambda: Applied(lambda y, x: y * y.mean((2, 3), keepdim=True)),
        "mul",
        None,
        "operands differ in shape",
    ),
    ("constant", lambda: Applied(lambda y, x: y + 1), "add", None, "it adds a constant"),
    (
        "batch",
        lambda: Applied(lambda y, x: torch.cat([y, y]) * 1),
        "cat",
        None,
        "it does not join channels",
    ),
    (
        "features",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(4100, 2)),
        "linear",
        torch.zeros(2, 4100),
        "4100 input",
    ),
]


@pytest.mark.parametrize(
    ("module", "end", "x", "engine"),
    [row[1:] for row in ON_DPU],
    ids=[row[0] for row in ON_DPU],
)
def test_the_dpu_runs(
    module: Callable[[], nn.Module], end: str, x: Tensor | None, engine: str
) -> None:
    assert verdict(module(), end, x) == ("DPU", engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "end", "x", "why"), [row[1:] for row in ON_CPU], ids=[row[0] for row in ON_CPU]
)
def test_the_cpu_runs(
    module: Callable[[], nn.Module], end: str, x: Tensor | None, why: str
) -> None:
    device, told = verdict(module(), end, x)
    assert device == "CPU"
    assert why in told


SPECS: list[tuple[dict[str, object], str, str]] = [
    ({"bit_width": 4}, "weights", "its weights have 4 bits"),
    ({"dtype": "bfloat16"}, "bias", "its bias has the datatype bfloat16"),
    ({"scale_type": "float"}, "activation", "its activation has no single power-of-two scale"),
    (
        {"qscheme": "per_channel", "ch_axis": 0},
        "weights",
        "its weights have no single power-of-two scale",
    ),
    (
        {"symmetric": False},
        "activation",
        "its activation has codes that are not signed and symmetric",
    ),
]


@pytest.mark.parametrize(("fields", "role", "why"), SPECS, ids=[row[2] for row in SPECS])
def test_a_spec_that_the_dpu_lacks_sends_the_layer_to_the_cpu(
    fields: dict[str, Any], role: str, why: str
) -> None:
    plan = planned(nn.Conv2d(4, 8, 3))
    name = plan.graph.nodes[1].name
    tensor = plan.tensors[name, role]
    other = dataclasses.replace(tensor, spec=dataclasses.replace(tensor.spec, **fields))
    changed = dataclasses.replace(plan, tensors={**plan.tensors, (name, role): other})
    found = verdicts(changed)[name]
    assert (found.device, found.why) == ("CPU", why)


def test_a_layer_left_in_float_runs_on_the_cpu() -> None:
    plan = planned(nn.Conv2d(4, 8, 3))
    name = plan.graph.nodes[1].name
    rest = {key: tensor for key, tensor in plan.tensors.items() if key != (name, "activation")}
    assert (
        verdicts(dataclasses.replace(plan, tensors=rest))[name].why
        == "its output is not quantized"
    )


def test_stubs_and_casts_to_the_same_type_are_no_operators_of_the_cpu() -> None:
    stubbed = nn.Sequential(
        QuantStub(), Applied(lambda y, x: F.relu(y.to(torch.float32))), DeQuantStub()
    )
    plan = planned(stubbed)
    found = {
        plan.graph.by_name[name].op: verdict.device for name, verdict in verdicts(plan).items()
    }
    assert {op: device for op, device in found.items() if "stub" in op} == {
        "quant_stub": "",
        "dequant_stub": "",
    }
    assert "CPU" not in found.values()


def test_the_limits_name_their_document() -> None:
    assert "UG1414" in OPERATOR_LIMITS


def test_subgraphs_are_counted_between_what_the_cpu_runs() -> None:
    class Cut(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.a, self.b, self.function = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), function

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(self.function(y)) + y

    for function, pieces in ((nn.AvgPool2d(3, 1, 1), 1), (torch.sigmoid, 2)):
        plan = planned(Cut(function), example())
        assert subgraphs(plan.graph, verdicts(plan)) == pieces


def test_inspect_says_what_the_dpu_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
    )
    assert (
        run_command(
            ["inspect", "--target", "DPU", "--model", DIGITS, "--gate", "cpu_operators<=0"]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "22 of 22 operators run on the DPU (DPUCZDX8G_ISA1_B4096), in 1 subgraph\n" in shown
    assert "avgpool: the average of 2x2 is its sum * 1 / 2^2, which is exact" in shown


def test_inspect_gates_decide_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
    )
    assert (
        run_command(
            ["inspect", "--target", "DPU", "--model", DIGITS, "--gate", "dpu_operators>=23"]
        )
        == 1
    )
    assert "not met: dpu_operators>=23" in capsys.readouterr().err
    assert run_command(["inspect", "--model", DIGITS, "--gate", "dpu_operators>=1"]) == 2
    assert "add --to DPU" in capsys.readouterr().err


def test_inspect_as_json_has_a_verdict_for_each_layer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(
        "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
    )
    assert run_command(["inspect", "--target", "DPU", "--json", "--model", DIGITS]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["dpu_operators"] == 22
    assert content["support"]["ResNet::ResNet/Linear[fc]/linear"] == {
        "device": "DPU",
        "engine": "conv2d",
    }
