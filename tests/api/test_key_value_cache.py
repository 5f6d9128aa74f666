"""The key-value cache as test mode computes it, and where it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attentions import Attention, Change, batches, blocks, cache_config
from torch import Tensor

import quantizer
from quantizer import Config, ModelQuantizer
from quantizer.errors import UsageError


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-128, 127) * scale


def largest(values: list[Tensor], axes: tuple[int, ...] | None) -> Tensor:
    """The largest magnitude over all batches and these axes."""
    if axes is None:
        return torch.stack([x.abs().max() for x in values]).max()
    return torch.stack([x.abs().amax(axes, keepdim=True) for x in values]).amax(0)


def recorded(model: Any) -> dict[str, list[Tensor]]:
    """The float keys and values of the first attention, batch by batch."""
    values: dict[str, list[Tensor]] = {"key": [], "value": []}
    attention = model.layers[0]["attn"]

    def keep(part: str) -> Change:
        return lambda x: values[part].append(x) or x  # type: ignore[func-returns-value]

    attention.key, attention.value = keep("key"), keep("value")
    with torch.no_grad():
        for batch in batches():
            model(batch)
    return values


def expected(spec: dict[str, Any], batch: Tensor, **kind: Any) -> Tensor:
    """What the float model computes if it quantizes its keys and values itself."""
    model: Any = blocks(Attention(2, **kind))
    values = recorded(model)
    axes = {"per_tensor": None, "per_channel": (0, 2, 3)}

    def changed(part: str) -> Change:
        if spec.get("is_dynamic"):
            return lambda x: rounded(x, x.abs().amax(-1, keepdim=True) / 127)
        top = largest(values[part], axes[spec.get("qscheme", "per_tensor")])
        if spec["dtype"] == "int8":
            return lambda x: rounded(x, top / 127)
        scale = top / 448
        return lambda x: (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

    attention = model.layers[0]["attn"]
    attention.key, attention.value = changed("key"), changed("value")
    with torch.no_grad():
        output: Tensor = model(batch)
    return output


@pytest.mark.parametrize("is_written_out", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        {"dtype": "fp8_e4m3"},
        {"dtype": "int8", "qscheme": "per_channel"},
        {"dtype": "int8", "qscheme": "per_token", "is_dynamic": True},
    ],
    ids=lambda spec: f"{spec['dtype']} {spec.get('qscheme', 'per_tensor')}",
)
def test_keys_are_quantized_after_the_rotation(
    spec: dict[str, Any], is_written_out: bool
) -> None:
    model = blocks(Attention(2, is_written_out=is_written_out))
    config = cache_config(spec, "k_proj", "v_proj")
    result = quantizer.calibrate(model, config, batches())
    [batch, _] = batches()
    with torch.no_grad():
        output = result.network(batch)
        is_changed = not torch.equal(output, model(batch))
    assert is_changed
    wanted = expected(spec, batch, is_written_out=is_written_out)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-5)


def test_dataclasses_have_the_keys() -> None:
    document = cache_config({"dtype": "fp8_e4m3"}, "k_proj", kv_cache_group=["*.k_proj"])
    config = Config.from_dict(document | {"kv_cache_post_rope": False})
    assert config.kv_cache_post_rope is False
    assert config.kv_cache_group == ["*.k_proj"]
    entries = config.kv_cache_quant_config
    assert entries is not None
    assert entries["*.k_proj"].output_tensors == quantizer.QuantizationSpec(
        quantizer.Dtype.fp8_e4m3
    )
    written = config.to_dict()
    assert written["kv_cache_quant_config"] == document["kv_cache_quant_config"]


@pytest.mark.parametrize("is_after_rotation", [True, False])
def test_a_model_in_place_has_no_cache(is_after_rotation: bool) -> None:
    config = cache_config({"dtype": "fp8_e4m3"}, "k_proj", kv_cache_post_rope=is_after_rotation)
    with pytest.raises(UsageError, match="needs a trace of the model") as refused:
        ModelQuantizer(config).quantize_model(blocks(Attention(2)), batches())
    assert refused.value.help == "remove it, or use quantizer.calibrate, which traces the model"
