"""The key-value cache in a plan: which keys and values an entry selects, with which spec, and
what is said about entries that select none.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.attentions import Attention, Fused, batches, blocks, cache_config
from torch import nn

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.graph.tracing.trace import trace
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

FP8 = {"dtype": "fp8_e4m3"}
HEADS = {"dtype": "int8", "qscheme": "per_channel"}
TOKENS = {"dtype": "int8", "qscheme": "per_token", "is_dynamic": True}


def planned(config: dict[str, Any], *attentions: nn.Module) -> Plan:
    graph = trace(blocks(*attentions or (Attention(2),)), (batches(1)[0],))
    read = check_document(Document.of(config, "config")).require()
    return resolve_plan(read, graph, graph)


def specs(plan: Plan) -> dict[tuple[str, str], tuple[str, str, int | None]]:
    """dtype, qscheme and ch_axis of each tensor, by the layer's path and operator, and role."""
    table = {}
    for (name, role), tensor in plan.tensors.items():
        node = plan.graph.by_name[name]
        spec = tensor.spec
        table[f"{node.scope} {node.op}", role] = (spec.dtype, spec.qscheme, spec.ch_axis)
    return table


def messages(plan: Plan, code: str) -> list[tuple[str, str]]:
    return [(each.severity, each.message) for each in plan.diagnostics if each.code == code]


ATTENTION = "layers.0.attn scaled_dot_product_attention"


def test_entries_select_keys_and_values_by_the_layers_that_compute_them() -> None:
    config = cache_config(FP8, "k_proj")
    config["kv_cache_quant_config"]["*.v_proj"] = {"output_tensors": HEADS}
    plan = planned(config)
    assert specs(plan) == {
        (ATTENTION, "input_1"): ("fp8_e4m3", "per_tensor", None),
        (ATTENTION, "input_2"): ("int", "per_channel", 1),
    }
    assert not plan.diagnostics
    assert [rule.took_effect for rule in plan.rules[-2:]] == [1, 1]


def test_the_attention_itself_selects_both() -> None:
    plan = planned(cache_config(FP8, "attn"))
    assert {role for _, role in plan.tensors} == {"input_1", "input_2"}


def test_one_layer_for_query_key_and_value_selects_keys_and_values() -> None:
    plan = planned(cache_config(TOKENS, "query_key_value"), Fused())
    assert specs(plan) == {
        ("layers.0.attn baddbmm", "input_2"): ("int", "per_token", 1),
        ("layers.0.attn bmm", "input_1"): ("int", "per_token", 2),
    }


def test_exclude_leaves_weights_in_float_and_not_the_cache() -> None:
    config = cache_config(FP8, "k_proj", "v_proj", exclude=["*"])
    config["global_quant_config"] = {"weight": {"dtype": "int8"}}
    assert {role for _, role in planned(config).tensors} == {"input_1", "input_2"}


def test_before_the_rotation_the_outputs_of_the_layers_are_quantized() -> None:
    config = cache_config(FP8, "k_proj", "v_proj", exclude=["*"], kv_cache_post_rope=False)
    assert specs(planned(config)) == {
        ("layers.0.attn.k_proj linear", "activation"): ("fp8_e4m3", "per_tensor", None),
        ("layers.0.attn.v_proj linear", "activation"): ("fp8_e4m3", "per_tensor", None),
    }


def test_other_specs_of_an_entry_are_those_of_the_layers() -> None:
    config = cache_config(FP8, "k_proj", "v_proj")
    config["global_quant_config"] = {"weight": {"dtype": "int8"}}
    config["kv_cache_quant_config"]["*.k_proj"]["weight"] = {"dtype": "int4"}
    widths = {
        plan_key[0].rpartition("/")[0].rpartition("[")[2]: tensor.spec.bit_width
        for plan_key, tensor in planned(config).tensors.items()
        if plan_key[1] == "weights"
    }
    assert widths == {"q_proj]": 8, "k_proj]": 4, "v_proj]": 8, "o_proj]": 8}


def test_the_more_specific_entry_counts() -> None:
    config = cache_config(FP8, "k_proj")
    exact = {"layers.1.attn.k_proj": {"output_tensors": HEADS}}
    config["kv_cache_quant_config"] = exact | config["kv_cache_quant_config"]
    table = specs(planned(config, Attention(2), Attention(2)))
    assert [spec[0] for spec in table.values()] == ["fp8_e4m3", "int"]


def test_the_later_of_two_patterns_counts_with_a_warning() -> None:
    config = cache_config(FP8, "k_proj")
    config["kv_cache_quant_config"]["*k_pro?"] = {"output_tensors": HEADS}
    plan = planned(config)
    assert [spec[0] for spec in specs(plan).values()] == ["int"]
    [(severity, text)] = messages(plan, "QZ403")
    assert severity == "warning"
    assert text == (
        'kv_cache_quant_config["*k_pro?"] overrides kv_cache_quant_config["*.k_proj"]: both '
        "select by pattern"
    )


def test_a_layer_that_computes_no_keys_or_values_is_an_error() -> None:
    [(severity, text)] = messages(planned(cache_config(FP8, "q_proj")), "QZ410")
    assert severity == "error"
    assert text == (
        'kv_cache_quant_config["*.q_proj"] names layers.0.attn.q_proj, and the trace shows no '
        "attention that reads this as keys or values"
    )


def test_a_name_without_a_layer_is_an_error() -> None:
    [(severity, text)] = messages(planned(cache_config(FP8, "key_proj")), "QZ402")
    assert (severity, text) == ("error", "kv_cache_quant_config '*.key_proj' matches no layer")


class NoAttention(nn.Module):
    """A layer with the name of keys, in a block that mixes tokens by a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        return self.k_proj(x).mean(1, keepdim=True)


def findings(plan: Plan) -> list[Diagnostic]:
    return [each for each in plan.diagnostics if each.code == "QZ410"]


def test_a_block_without_attention_is_named() -> None:
    plan = planned(cache_config(FP8, "k_proj"), Attention(2), NoAttention())
    [finding] = findings(plan)
    assert finding.severity == "warning"
    assert "layers.1.attn.k_proj" in finding.message
    [finding] = findings(planned(cache_config(FP8, "k_proj"), NoAttention()))
    assert finding.severity == "error"
    assert finding.help == "the trace of Blocks shows no attention; leave the key out"


@pytest.mark.parametrize("name", ["query_key_value", "attn"])
def test_heads_without_an_axis_cannot_have_scales(name: str) -> None:
    [(severity, text)] = messages(planned(cache_config(HEADS, name), Fused()), "QZ406")
    assert severity == "error"
    assert text.endswith("in one axis with the batch, and cannot have a scale each")
