"""Files of embedding models: llama.cpp pools as the folder of Sentence Transformers says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llamas import SIZES, saved, tokens
from support.runs import ROOT

import quantizer
from quantizer.export.targets import EXPORTERS
from quantizer.sources.models import load_model

for package in EXPORTERS["gguf"].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")
import gguf
import transformers


def embedding_folder(folder: Path, cls: Any, pooling: dict[str, Any]) -> Path:
    """A model of text embeddings without training."""
    torch.manual_seed(0)
    saved(folder, cls(transformers.Qwen3Config(**SIZES, head_dim=32)).eval())
    (folder / "pooling").mkdir()
    (folder / "pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "pooling"},
        {"type": "sentence_transformers.models.Dense", "path": "dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def exported(folder: Path) -> tuple[Any, str]:
    """The float model of a folder, and what was said about the file that was exported."""
    model = load_model(str(folder)).module
    result = quantizer.calibrate(model, ROOT / "configs" / "gguf_q8_0.json", tokens())
    verification = result.export("gguf", folder / "net.gguf")
    return model, " ".join(verification.remarks)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_llama_cpp_pools_as_the_folder_says(
    pooling: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """Of a model without a head."""
    folder = embedding_folder(tmp_path, transformers.Qwen3Model, pooling)
    model, remarks = exported(folder)
    assert "ends before Dense of modules.json" in remarks
    fields = gguf.GGUFReader(folder / "net.gguf").fields
    name = gguf.PoolingType(fields["qwen3.pooling_type"].contents()).name
    assert name.lower() == expected
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs the CPU binding of llama.cpp")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(folder / "net.gguf")
    settings.n_ctx, settings.n_parallel, settings.embedding = 32, 1, True
    settings.warmup = False
    ids = tokens()[0]["input_ids"][:1]
    answer = xllamacpp.Server(settings).handle_embeddings({"input": ids[0].tolist()})
    embedding = torch.tensor(answer["data"][0]["embedding"])
    with torch.no_grad():
        states = model(input_ids=ids).last_hidden_state[0]
    pooled = states[-1] if expected == "last" else states.mean(0)
    assert torch.cosine_similarity(embedding, pooled, dim=0) > 0.999


def test_a_pooling_that_llama_cpp_lacks_is_said(tmp_path: Path) -> None:
    pooling = {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}
    folder = embedding_folder(tmp_path, transformers.Qwen3ForCausalLM, pooling)
    _, remarks = exported(folder)
    assert "how its embeddings are pooled, by max_tokens and mean_tokens" in remarks
    assert "qwen3.pooling_type" not in gguf.GGUFReader(folder / "net.gguf").fields
