"""Programs and tensor files hold exactly what test mode computes with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from support.deployments import Written, fitted, outputs_of
from support.positional import fake_quantize, fake_quantize_plain
from support.toys import built
from torch import nn

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.errors import ResultError, VerificationError
from quantizer.export.agreement import verify
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.exporting import export
from quantizer.export.safetensors import load
from quantizer.graph.tracing.trace import trace
from quantizer.numerics.rounding import ROUND_MODES
from quantizer.storage.files import read_tensors, write_tensors

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("batch", [1, 5])
def test_a_program_takes_any_batch_and_loads_without_quantizer(
    batch: int, exported: Callable[[str, str], Written]
) -> None:
    given, path = exported("pt2_float", "mobile").given, exported("pt2_float", "mobile").path
    program = torch.export.load(path)
    namespaces = {
        str(n.target).partition(".")[0] for n in program.graph.nodes if n.op == "call_function"
    }
    assert namespaces == {"aten"}
    args, kwargs = built("mobile").call(batch)
    found = tensor_leaves(program.module()(*args, **kwargs))
    assert (
        verify(
            "outputs", outputs_of(replace(given, args=args, kwargs=kwargs)), found
        ).max_difference
        == 0.0
    )


@pytest.mark.parametrize("mode", ROUND_MODES)
@pytest.mark.parametrize("axis", [None, 0, 2])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_the_plain_form_equals_the_fast_one_bit_for_bit(
    mode: str, axis: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4).to(dtype)
    count = () if axis is None else (x.shape[axis],)
    scale, zero_point = (
        torch.rand(count) / 8 + 0.01,
        torch.randint(3, 9, count, dtype=torch.int32),
    )
    for low, high in ((-8, 7), (0, 15), (-(1 << 31), (1 << 31) - 1)):
        fast = fake_quantize(x, scale, zero_point, low, high, mode, ch_axis=axis)
        plain = fake_quantize_plain(x, scale, zero_point, low, high, mode, ch_axis=axis)
        assert torch.equal(fast, plain)
        assert torch.equal(fast.signbit(), plain.signbit())


def linear(weights: QuantizationSpec, dtype: torch.dtype = torch.float32) -> Deployment:
    torch.manual_seed(0)
    module = nn.Linear(6, 4).to(dtype)
    graph = trace(module, (torch.randn(2, 6, dtype=dtype),))
    bias = QuantizationSpec(bit_width=32)
    tensors = {
        ("Linear::Linear/linear", "weights"): fitted(module.weight.detach(), weights),
        ("Linear::Linear/linear", "bias"): fitted(module.bias.detach(), bias),
    }
    return Deployment(graph, Solution(tensors), (torch.randn(2, 6, dtype=dtype),), {})


@pytest.mark.parametrize(
    ("bit_width", "axis", "symmetric"),
    [
        *product((2, 4, 5, 8, 16, 32), (None, 0), (True,)),
        *product((4, 8, 16), (None, 1), (False,)),
    ],
)
def test_codes_give_the_weights_back(
    bit_width: int, axis: int | None, symmetric: bool, tmp_path: Path
) -> None:
    scheme = "per_tensor" if axis is None else "per_channel"
    spec = QuantizationSpec(
        bit_width=bit_width, symmetric=symmetric, qscheme=scheme, ch_axis=axis
    )
    given = linear(spec)
    export("safetensors", given, tmp_path / "net.safetensors")
    layer, found = (
        given.network().layers["Linear::Linear/linear"],
        load(tmp_path / "net.safetensors"),
    )
    assert torch.equal(found["Linear::Linear/linear.weight"], layer.get_parameter("weight"))
    assert torch.equal(found["Linear::Linear/linear.bias"], layer.get_parameter("bias"))
    stored = read_tensors(tmp_path / "net.safetensors")["Linear::Linear/linear.weight"]
    if bit_width < 8:
        assert stored.dtype == torch.uint8
        assert stored.shape == (24 * bit_width // 8,)
    else:
        assert stored.shape == (4, 6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_floating_point_formats_give_the_weights_back(dtype: str, tmp_path: Path) -> None:
    given = linear(QuantizationSpec(dtype=dtype))
    assert export("safetensors", given, tmp_path / "net.safetensors").equal == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "spec",
    [QuantizationSpec(bit_width=bits) for bits in (4, 8, 32)]
    + [QuantizationSpec(dtype="bfloat16")],
    ids=["4", "8", "32", "bfloat16"],
)
def test_parameters_have_the_dtype_of_the_model(
    spec: QuantizationSpec, dtype: torch.dtype, tmp_path: Path
) -> None:
    given = linear(spec, dtype)
    assert export("safetensors", given, tmp_path / "net.safetensors").equal == 1.0
    assert {
        tensor.dtype for tensor in load(tmp_path / "net.safetensors").values() if tensor.dim()
    } == {dtype}


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="does not exist"):
        load(tmp_path / "none")
    write_tensors(tmp_path / "other", {"a": torch.ones(2)})
    with pytest.raises(ResultError, match="is not a deployed network"):
        load(tmp_path / "other")


@pytest.mark.parametrize(
    "description",
    [
        "{",
        "[]",
        '{"format": 3}',
        '{"format": 3, "specs": {"a": {"no": 1}}}',
        '{"format": 3, "specs": {}, "shapes": {"a": [2]}, "dtypes": {"a": "no"}}',
    ],
)
def test_a_damaged_description_is_refused(description: str, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    write_tensors(path, {"a": torch.ones(2)}, {"quantizer": description})
    with pytest.raises(ResultError, match="has a damaged description"):
        load(path)


def test_a_verification_counts_what_differs() -> None:
    nan = float("nan")
    found = verify(
        "outputs", [torch.tensor([1.0, 2.0, nan, 4.0])], [torch.tensor([1.0, 2.5, nan, 4.0])]
    )
    assert (found.max_difference, found.mean_difference, found.equal) == (0.5, 0.125, 0.75)
    with pytest.raises(VerificationError, match="shape"):
        verify("outputs", [torch.ones(2)], [torch.ones(3)])
