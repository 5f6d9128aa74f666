"""A saved model, loaded into a float one, computes the same to the last bit; weights are stored as codes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from api.specs import per_token, quantized, same, spec, tiny_lm, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from quantizer import (
    Dtype,
    ModelQuantizer,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    QSchemeType,
    QuantizationSpec,
)
from quantizer.api.codes import decode, encode
from quantizer.config.model import QuantizationSpec as Spec
from quantizer.engine.calibrate import Observer
from quantizer.errors import ModelError, ResultError
from quantizer.nn.quantizer import TensorQuantizer

FLOATS = (Dtype.fp8_e4m3, Dtype.fp8_e5m2, Dtype.fp6_e3m2, Dtype.fp6_e2m3, Dtype.fp4)
INTEGERS = tuple(dtype for dtype in Dtype if "int" in dtype.name)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def weight(dtype: Dtype) -> QuantizationSpec:
    if dtype in FLOATS:
        return QuantizationSpec(dtype)
    if dtype in (Dtype.mx, Dtype.bfp16):
        element = Dtype.fp4 if dtype is Dtype.mx else None
        return QuantizationSpec(dtype, mx_element_dtype=element, ch_axis=1)
    return spec(dtype, symmetric=not dtype.name.startswith("uint")) if dtype in INTEGERS else QuantizationSpec(dtype)


@pytest.mark.parametrize("dtype", Dtype, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_format_comes_back(dtype: Dtype, model_dtype: torch.dtype, tmp_path: Path) -> None:
    role = "bias" if dtype is Dtype.int32 else "weight"
    model = quantized(tiny_lm().to(model_dtype), **{role: weight(dtype)})
    ModelQuantizer.save(model, tmp_path)
    loaded = ModelQuantizer.load(tiny_lm().to(model_dtype), tmp_path)
    assert same(loaded(tokens()), model(tokens()))
    assert loaded.lm_head.weight is loaded.embed.weight


def test_weights_are_stored_as_codes(tmp_path: Path) -> None:
    four = spec(Dtype.int4, qscheme=QSchemeType.per_group, observer_cls=PerGroupMinMaxObserver, ch_axis=1, group_size=4)
    eight = spec(qscheme=QSchemeType.per_channel, observer_cls=PerChannelMinMaxObserver, ch_axis=0)
    stored = []
    for weights in (four, eight):
        ModelQuantizer.save(quantized(nn.Sequential(nn.Linear(8, 3)), weight=weights, bias=spec()), tmp_path)
        stored.append(load_file(tmp_path / "model.safetensors"))
    assert [(found["0.weight"].dtype, found["0.weight"].numel()) for found in stored] == [
        (torch.uint8, 12),
        (torch.int8, 24),
    ]
    assert [found["0.quantizers.weights.scale"].shape for found in stored] == [(3, 2), (3,)]
    assert stored[1]["0.bias"].dtype == torch.int8


def test_the_first_of_two_packed_codes_is_in_the_low_half(tmp_path: Path) -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[7.0, -3.0]])
    ModelQuantizer.save(quantized(nn.Sequential(layer), weight=spec(Dtype.int4)), tmp_path)
    assert load_file(tmp_path / "model.safetensors")["0.weight"].tolist() == [(7 + 8) | (-3 + 8) << 4]


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8, 16]),
    symmetric=st.booleans(),
    cut=st.sampled_from([("per_tensor", None, None), ("per_channel", 0, None), ("per_channel", 1, None)])
    | st.sampled_from([("per_group", 1, 3), ("per_group", 0, -1)]),
    seed=st.integers(0, 999),
)
def test_codes_give_back_every_integer_grid(bits: int, symmetric: bool, cut: Any, seed: int) -> None:
    value = torch.randn(5, 9, generator=torch.Generator().manual_seed(seed))
    qscheme, axis, size = cut
    internal = Spec(bit_width=bits, symmetric=symmetric, qscheme=qscheme, ch_axis=axis, group_size=size)
    observer = Observer(internal)
    observer.observe(value)
    found = observer.qparams()
    quantizer = TensorQuantizer(internal, found.scale, found.zero_point)
    on_grid = quantizer(value)
    stored, is_codes = encode(on_grid, quantizer)
    assert is_codes
    assert stored.numel() == (23 if bits <= 4 else 45)
    assert same(decode(stored, quantizer, [5, 9], torch.float32), on_grid)


def test_activations_and_layers_of_all_kinds_come_back(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LSTM(8, 4)
        return nn.Sequential(*layers).eval()

    done = quantized(model(), [X[None]], weight=spec(), bias=spec(), input_tensors=spec(), output_tensors=spec())
    ModelQuantizer.save(done, tmp_path)
    loaded = ModelQuantizer.load(model(), tmp_path)
    assert same(loaded(X[None])[0], done(X[None])[0])
    assert [type(module).__name__ for module in loaded.modules()] == [type(m).__name__ for m in done.modules()]


def test_a_model_with_untied_weights_comes_back_untied(tmp_path: Path) -> None:
    model = quantized(tiny_lm(), exclude=("lm_head",), weight=spec(Dtype.int4), input_tensors=per_token())
    ModelQuantizer.save(model, tmp_path)
    loaded = ModelQuantizer.load(tiny_lm(), tmp_path)
    assert loaded.lm_head.weight is not loaded.embed.weight
    assert same(loaded(tokens()), model(tokens()))


def test_a_model_without_memory_can_be_filled(tmp_path: Path) -> None:
    model = quantized(tiny_lm(), weight=spec())
    ModelQuantizer.save(model, tmp_path)
    with torch.device("meta"):
        empty = type(model)().eval()
    assert same(ModelQuantizer.load(empty, tmp_path)(tokens()), model(tokens()))


def test_two_saves_are_equal(tmp_path: Path) -> None:
    model = quantized(tiny_lm(), weight=spec())
    for folder in ("a", "b"):
        ModelQuantizer.save(model, tmp_path / folder)
    for name in ("model.safetensors", "quantizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_values_that_codes_would_not_give_back_are_stored_as_they_are(tmp_path: Path) -> None:
    model = quantized(nn.Sequential(nn.Linear(8, 3)), weight=spec())
    model[0].weight.data += 1e-3  # trained on, say
    ModelQuantizer.save(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["0.weight"].dtype == torch.float32
    assert same(ModelQuantizer.load(nn.Sequential(nn.Linear(8, 3)), tmp_path)(X), model(X))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(8, 4)), r"0\.bias is \[3\] in the file and \[4\] in the model"),
        (nn.Sequential(nn.Linear(8, 3, bias=False)), r"the model has no 0\.bias"),
        (nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3)), "has a tensor that is not in the file: 1.bias"),
    ],
)
def test_another_model_is_refused_and_stays_as_it_was(model: nn.Module, message: str, tmp_path: Path) -> None:
    ModelQuantizer.save(quantized(nn.Sequential(nn.Linear(8, 3)), weight=spec()), tmp_path)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ResultError, match=message):
        ModelQuantizer.load(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model[0]) is nn.Linear  # type: ignore[index]


def test_a_float_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no quantized layer"):
        ModelQuantizer.save(nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("quantizer.json", "{", "not a readable JSON file"),
        ("quantizer.json", json.dumps({"format": 99}), "not of a model that this version saved"),
        ("model.safetensors", "x", "not a readable safetensors file"),
        ("model.safetensors", None, "does not exist"),
    ],
)
def test_damaged_files_are_told(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    ModelQuantizer.save(quantized(nn.Sequential(nn.Linear(8, 3)), weight=spec()), tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(ResultError, match=message):
        ModelQuantizer.load(nn.Sequential(nn.Linear(8, 3)), tmp_path)
