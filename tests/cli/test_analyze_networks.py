"""`quantizer analyze` on a trained network and on a language model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import DIGITS, ROOT
from test_analyze import plan_of

from quantizer.cli.main import run_command


def test_the_digits_do_better_with_mixed_widths(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
    )
    config = str(ROOT / "configs" / "weight_int8.json")
    command = [
        "analyze",
        "--config_file",
        config,
        "--model",
        DIGITS,
        "--subset_len",
        "64",
        "--budget",
        "3",
        "--json",
    ]
    assert run_command(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mixed"]["mean_bits"] <= 3 == told["uniform"]["mean_bits"]
    assert told["mixed"]["predicted_db"] > told["uniform"]["predicted_db"]
    assert told["mixed"]["measured_db"] > told["uniform"]["measured_db"]


@pytest.mark.parametrize("passes", ["network", "every", "fast"])
def test_a_batch_of_another_shape_is_named(
    passes: str, toy: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "int8.json"
    config.write_text(json.dumps({"global_quant_config": {"weight": {"dtype": "int8"}}}))
    model = toy("return [torch.ones(4, 3), torch.ones(4, 5)]")
    assert (
        run_command(
            ["analyze", "--config_file", str(config), "--model", model, "--passes", passes]
        )
        == 4
    )
    said = capsys.readouterr().err.splitlines()[-2]
    assert said.startswith("error: batch 1: ") and said.endswith(
        "expected [b, 3] torch.float32, got [4, 5] torch.float32"
    )


LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    config = LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=1, use_cache=False)
    return LlamaForCausalLM(config).eval()

def calibration_data():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 64, (2, 12), generator=generator)} for _ in range(3)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("passes", ["network", "fast"])
def test_a_language_model_in_groups(
    passes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    model, config, written = (
        tmp_path / "llama.py",
        tmp_path / "int4.json",
        tmp_path / "mixed.json",
    )
    model.write_text(LLAMA)
    groups = {
        "dtype": "int4",
        "observer_cls": "PerGroupMinMaxObserver",
        "qscheme": "per_group",
        "ch_axis": 1,
    }
    config.write_text(
        json.dumps({"global_quant_config": {"weight": {**groups, "group_size": 16}}})
    )
    command = [
        "analyze",
        "--config_file",
        str(config),
        "--model",
        str(model),
        "--passes",
        passes,
        "--json",
    ]
    assert run_command([*command, "--budget", "4", "-o", str(written)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["layers"]) == 7
    # The head, with the embedding
    assert any("it shares the weight of" in why for why in told["kept"].values())
    assert told["mixed"]["weight_bytes"] <= told["uniform"]["weight_bytes"]
    assert told["mixed"]["predicted_db"] > told["uniform"]["predicted_db"]
    assert told["mixed"]["measured_db"] > told["uniform"]["measured_db"]
    bits = {row["layers"][0]: row["bits"] for row in told["layers"]}
    for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        widths = {bits[name] for name in bits if any(part in name for part in fused)}
        assert len(widths) == 1, "engines fuse these layers"
    assert len(set(bits.values())) > 1
    after = plan_of(written, str(model), capsys)
    assert {name: after[name, "weights"]["bit_width"] for name in bits} == bits
