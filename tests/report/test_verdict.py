"""The verdict of a run says in at most eight lines what came out and what to do next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantizer.export.agreement import Verification
from quantizer.export.performance import Kernels
from quantizer.graph.tracing.trace import trace
from quantizer.plan.model import Plan
from quantizer.report.verdict import MAX_LINES, VerdictFacts, verdict

COMMANDS = [
    "quantizer --quant_mode calib --config_file out/net.json --model net.py",
    "quantizer --quant_mode test --model net.py",
]
TESTED: dict[str, Any] = {
    "commands": COMMANDS,
    "metrics": {"sqnr_db": 40.0, "top1_drop": 0.0},
    "pairs": {"top1": {"float": 0.9, "quantized": 0.9}},
    "outputs": [{"output": "0", "name": "0", "kind": "float", "sqnr_db": 40.0, "equal": 0.1}],
}
OTHER_FACTS: dict[str, Any] = {
    "path": "out/Net.onnx",
    "size": 86_000,
    "tested": TESTED,
    "config": "out/net.json",
    "is_in_shell": True,
}
FACTS = VerdictFacts(
    model="Net",
    formats="int8 weights, uint8 activations",
    float_size=310_000,
    quantized_size=79_000,
    **OTHER_FACTS,
)


def figures(**others: Any) -> dict[str, Any]:
    return {**TESTED, **others}


def row(output: str, name: str, sqnr_db: float | None) -> dict[str, Any]:
    return {"output": output, "name": name, "kind": "float", "sqnr_db": sqnr_db, "equal": 0.0}


def test_weights_take_no_more_than_the_file() -> None:
    facts = replace(FACTS, quantized_size=90_000)
    assert verdict(facts)[1].endswith("86 kB. Weights take 310 kB in float.")


def test_a_good_run() -> None:
    assert verdict(FACTS) == [
        "NOT JUDGED: no --gate says what has to hold.",
        "Wrote out/Net.onnx: int8 weights, uint8 activations; 86 kB. Weights take 310 kB in "
        "float, 79 kB quantized.",
        "top1 is 0.9, in float 0.9.",
        "The output differs from float by 1 % (SQNR 40.0 dB).",
        f"Next: check in out/net.json, and repeat this in CI: `{COMMANDS[0]}` and "
        f"`{COMMANDS[1]} --gate 'top1_drop<=0.009'`",
    ]


@pytest.mark.parametrize(
    ("facts", "first"),
    [
        ({"gates": ["gate a>=1: met (2)"]}, "PASS: gate a>=1: met (2)"),
        (
            {"gates": ["gate b>=1: not met (0)", "gate a>=1: met (2)"], "not_met": ["b>=1"]},
            "FAIL: gate b>=1: not met (0); gate a>=1: met (2)",
        ),
        (
            {"gates": ["gate a>=1: met (2)"], "is_failed": True},
            "FAIL: the error below says why; gate a>=1: met (2)",
        ),
        # In Python the caller judges
        ({"is_in_shell": False}, "Wrote out/Net.onnx: int8 weights"),
    ],
)
def test_the_verdict_begins_with_what_the_gates_say(facts: dict[str, Any], first: str) -> None:
    assert verdict(replace(FACTS, **facts))[0].startswith(first)


def test_a_path_with_a_space_stays_one_word_of_the_proposed_command() -> None:
    options = "--config_file 'my net.json' --model 'my net.py'"
    tested = figures(commands=[f"quantizer --quant_mode calib {options}"])
    lost = replace(FACTS, tested=tested, not_met=["top1>=1"])
    assert f"`quantizer analyze --metric 'top1>=1' {options} --apply`" in verdict(lost)[-1]


def test_the_worst_output_comes_first_and_a_whole_gives_way_to_its_parts() -> None:
    outputs = [
        row("0", "0", 44.0),
        row("0", "0.boxes", 44.0),
        row("0", "0.scores", 6.0),
        row("1", "1", None) | {"kind": "integer", "equal": 0.975},
        row("2", "2", None) | {"kind": "constant", "equal": 1.0},
    ]
    judged_on = {"samples": 8, "skipped": 0, "text": "on the calibration data"}
    lines = verdict(replace(FACTS, tested=figures(outputs=outputs, judged_on=judged_on)))
    assert (
        "Of 4 parts of 3 outputs, 0.scores differs most from float, by 50 % (SQNR 6.0 dB); 0.boxes by "
        "0.6 %; 97.50% of the values of output 1 are equal; output 2 is constant in float."
    ) in lines
    why = "fewer than 16 samples hold nothing back"
    assert f"top1 is 0.9, in float 0.9; measured on the calibration data: {why}." in lines


def test_a_metric_that_loses_more_than_one_percent_asks_for_layers_in_float() -> None:
    pairs = {"top1": {"float": 0.9, "quantized": 0.8}}
    lost = figures(pairs=pairs, metrics={"top1_drop": 0.1})
    assert verdict(replace(FACTS, tested=lost))[-1].startswith(
        "Next: `quantizer analyze --metric 'top1_drop<=0.009' --config_file out/net.json --model "
        "net.py --apply`"
    )
    allowed = {**lost, "gates": {"top1_drop <= 0.2": True}}
    assert verdict(replace(FACTS, tested=allowed))[-1].startswith("Next: check in")
    other = {**lost, "gates": {"top10_drop<=0.2": True}}
    assert verdict(replace(FACTS, tested=other))[-1].startswith("Next: `quantizer analyze")


@pytest.mark.parametrize(("bits", "sqnr_db", "is_low"), [(8, 29.0, True), (4, 15.0, False)])
def test_without_a_task_the_width_of_weights_decides_what_is_low(
    bits: int, sqnr_db: float, is_low: bool
) -> None:
    outputs = [row("0", "0", sqnr_db)]
    layers = [{"layer": "fc", "tensor": "weights", "bits": bits}]
    facts = replace(FACTS, tested=figures(pairs={}, outputs=outputs, layers=layers))
    assert ("analyze --tensors" in verdict(facts)[-1]) == is_low


def test_a_run_of_many_findings_keeps_to_eight_lines_and_its_next_step() -> None:
    crowded = replace(
        FACTS,
        tested=figures(stamp="random data"),
        runtime="9 of 10 multiplications in int8",
        left_float={"conv1": "its output is 16 bits wide", "head": "the config says so"},
        gates=["gate top1>=0.8: met (0.9)", "gate sqnr_db>=50: not met"],
        not_met=["sqnr_db>=50"],
    )
    lines = verdict(crowded)
    assert len(lines) <= MAX_LINES
    assert "These figures are of random data." in lines
    assert "In float: conv1 (its output is 16 bits wide); head (the config says so)." in lines
    assert lines[-1].startswith("Next: `quantizer analyze --metric 'sqnr_db>=50'")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.mixer(x, x, x, need_weights=False)[0]
        return output


def test_products_inside_an_operator_are_called_by_its_path() -> None:
    graph = trace(Attention().eval(), (torch.randn(2, 3, 4),))
    [layer] = [node.name for node in graph.nodes if node.op == "scaled_dot_product_attention"]
    floating = {f"{layer}#inside": "it is inside", f"{layer}#inside#2": "it is inside"}
    verified = Verification("outputs", 0.0, 0.0, 1.0, kernels=Kernels((), floating))
    facts = VerdictFacts.of(Plan(graph, {}, ()), verified, **OTHER_FACTS)
    line = "In float: mixer.scaled_dot_product_attention (it is inside)."
    assert line in verdict(facts)


def test_nothing_written_is_said_first() -> None:
    lines = verdict(replace(FACTS, path=None, not_met=()))
    assert lines[:2] == ["FAIL: the error below says why.", "Nothing was written of Net."]
    assert lines[-1].startswith("Next: the error below says why")


def test_what_is_lost_comes_before_what_stays_float() -> None:
    warnings = [{"kind": "rows", "text": "rows"}, {"kind": "constant", "text": "1 is 0"}]
    crowded = replace(
        FACTS,
        tested=figures(stamp="random data", warnings=[*warnings, *warnings]),
        runtime="9 of 10 multiplications in int8",
        left_float={"conv1": "its output is 16 bits wide"},
        gates=["gate top1>=0.8: met (0.9)"],
    )
    lines = verdict(crowded)
    assert len(lines) == MAX_LINES
    assert "Warning: 1 is 0; 1 more warning in the report." in lines
    assert not any(line.startswith("In float") for line in lines)


def test_the_metric_with_the_largest_loss_comes_first() -> None:
    pairs = {f"kept{index}": {"float": 1.0, "quantized": 1.0} for index in range(3)}
    pairs |= {
        "ripple": {"float": 2.0, "quantized": 3.0},
        "nan": {"float": 1.0, "quantized": None},
    }
    metrics = {f"kept{index}_drop": 0.0 for index in range(3)}
    lines = verdict(replace(FACTS, tested=figures(pairs=pairs, metrics=metrics)))
    assert lines[2] == (
        "nan is not finite, in float 1; ripple is 3, in float 2; kept0 is 1, in float 1; 2 more "
        "with a smaller loss are in the report."
    )
