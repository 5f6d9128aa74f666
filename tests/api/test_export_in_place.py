"""ModelQuantizer.export: a model that was quantized in place as a checkpoint that transformers
loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.llamas import llama, tokens
from torch import nn

from quantizer import (
    Config,
    Dtype,
    ModelQuantizer,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    PerTensorMinMaxObserver,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
)
from quantizer.errors import ModelError, UsageError

for package in ("transformers", "compressed_tensors"):
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")

FLOAT = ["lm_head", "model.embed_tokens"]
INT4 = QuantizationSpec(
    Dtype.int4,
    qscheme=QSchemeType.per_group,
    ch_axis=1,
    group_size=32,
    observer_cls=PerGroupMinMaxObserver,
)
INT8 = QuantizationSpec(
    Dtype.int8,
    qscheme=QSchemeType.per_channel,
    ch_axis=0,
    observer_cls=PerChannelMinMaxObserver,
)
STATIC = QuantizationSpec(
    Dtype.int8, qscheme=QSchemeType.per_tensor, observer_cls=PerTensorMinMaxObserver
)
DYNAMIC = QuantizationSpec(
    Dtype.int8, qscheme=QSchemeType.per_token, symmetric=False, is_dynamic=True
)
CONFIGS = {
    "int4": QuantizationConfig(weight=INT4),
    "static int8": QuantizationConfig(weight=INT8, input_tensors=STATIC),
    "dynamic int8": QuantizationConfig(weight=INT8, input_tensors=DYNAMIC),
}


def quantized(config: QuantizationConfig, exclude: list[str], **settings: Any) -> Any:
    return ModelQuantizer(Config(config, exclude=exclude)).quantize_model(
        llama(**settings), tokens()
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("data", [None, tokens(1)])
def test_transformers_computes_what_the_model_does(
    name: str, data: Any, tmp_path: Path
) -> None:
    model = quantized(CONFIGS[name], FLOAT).train()
    found = ModelQuantizer.export(model, tmp_path / "out", data)
    assert found.max_difference <= (1e-6 if name == "dynamic int8" else 0.0)
    assert model.training
    assert model.config.use_cache
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not any("quantizers" in key for key in stored)
    assert sum(key.endswith("weight_scale") for key in stored) == 7


def test_everything_quantized_leaves_embeddings_as_values(tmp_path: Path) -> None:
    found = ModelQuantizer.export(
        quantized(CONFIGS["int4"], [], tie_word_embeddings=True), tmp_path / "out"
    )
    assert found.max_difference == 0.0
    assert "embed_tokens" in found.remarks[0]


def test_what_a_checkpoint_cannot_say_is_refused(tmp_path: Path) -> None:
    outputs = quantized(QuantizationConfig(weight=INT8, output_tensors=STATIC), FLOAT)
    with pytest.raises(UsageError, match=r"activation of .* is quantized between operators"):
        ModelQuantizer.export(outputs, tmp_path / "out")
    with pytest.raises(ModelError, match="no quantized layer"):
        ModelQuantizer.export(llama(), tmp_path / "out")
    plain = ModelQuantizer(Config(CONFIGS["int4"])).quantize_model(
        nn.Sequential(nn.Linear(32, 4))
    )
    with pytest.raises(UsageError, match="not a model of transformers"):
        ModelQuantizer.export(plain, tmp_path / "out")
    changed = quantized(CONFIGS["int4"], FLOAT)
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(UsageError, match=r"no codes give the weight of .*up_proj"):
        ModelQuantizer.export(changed, tmp_path / "out")
    assert not list(tmp_path.iterdir())
