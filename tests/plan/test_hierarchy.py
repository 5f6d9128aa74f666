"""The hierarchical form on a graph: global < layer type < layer name (glob < exact) < exclude,
field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.hierarchies import Fields, hierarchy
from support.toys import traced
from torch import Tensor, nn

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.model import QuantizationSpec, ResolvedConfig, Settings
from quantizer.graph.modules import module_graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.plan.model import Plan
from quantizer.plan.remarks import plan_remarks
from quantizer.plan.resolve import resolve_plan
from quantizer.plan.size import weight_bytes
from quantizer.report.tables import plan_table
from quantizer.report.view import TableView

ROOT = "Residual::Residual/"
FC = ROOT + "Linear[fc]/linear"
BLOCK = ROOT + "Sequential[layer1]/Block[0]/"
CONV1, CONV2 = BLOCK + "Conv2d[conv1]/conv2d", BLOCK + "Conv2d[conv2]/conv2d"
OTHER = ROOT + "Sequential[layer1]/Block[1]/Conv2d[conv1]/conv2d"
INT8 = {"dtype": "int", "bit_width": 8}
INT4 = {"dtype": "int", "bit_width": 4}
TOKEN = INT8 | {"qscheme": "per_token", "is_dynamic": True}


def planned(config: ResolvedConfig, toy: str = "residual") -> Plan:
    return resolve_plan(config, run_passes(traced(toy), config.settings), traced(toy))


def spec(plan: Plan, layer: str, role: str = "weights") -> QuantizationSpec:
    return plan.tensors[layer, role].spec


def findings(plan: Plan, code: str) -> list[Diagnostic]:
    return [found for found in plan.diagnostics if found.code == code]


def test_a_global_block_reaches_the_layers_with_weights_and_no_others() -> None:
    plan = planned(hierarchy({"weights": INT8, "input": INT8}))
    assert plan.diagnostics == ()
    assert {role for _, role in plan.tensors} == {"weights", "input"}
    assert {layer for layer, role in plan.tensors} == {
        n.name for n in plan.graph.nodes if n.op in ("conv2d", "linear")
    }
    assert plan.tensors[FC, "input"].source == next(iter(plan.graph.by_name[FC].refs()))


def test_stronger_blocks_win_field_by_field_and_none_inherits() -> None:
    plan = planned(
        hierarchy(
            {"weights": INT8 | {"round_mode": "half_up", "qscheme": "per_channel"}},
            {"Conv2d": {"weights": {"bit_width": 6}}},
            {
                "layer1.0.*": {"weights": {"bit_width": 5}},
                "layer1.0.conv2": {"weights": {"bit_width": 3}},
                CONV1: {"bias": INT8},
            },
            ("layer1.1.conv2",),
        )
    )
    widths = {name: spec(plan, name).bit_width for name in (FC, OTHER, CONV1, CONV2)}
    assert widths == {FC: 8, OTHER: 6, CONV1: 5, CONV2: 3}
    assert {
        tensor.spec.round_mode
        for (_, role), tensor in plan.tensors.items()
        if role == "weights"
    } == {"half_up"}
    assert [key for key in plan.tensors if key[1] == "bias"] == [(CONV1, "bias")]
    left = OTHER.replace("conv1", "conv2")
    assert (
        plan.of_layer(left) == {}
        and plan.floats[left.replace("Conv2d[conv2]/conv2d", "add")] != "excluded"
    )


def test_the_order_of_blocks_does_not_decide() -> None:
    config = hierarchy(
        {"weights": INT8},
        {"Conv2d": {"weights": INT4}},
        {"layer1.0.*": {"weights": {"bit_width": 2}}},
    )
    turned = ResolvedConfig(config.settings, tuple(reversed(config.rules)), form="hierarchical")
    assert planned(config).tensors == planned(turned).tensors


def test_excluded_layers_stay_float_whatever_names_them_and_say_why() -> None:
    config = hierarchy(
        {"weights": INT8, "activation": INT8},
        names={"fc": {"weights": INT4}, CONV1: {"weights": INT4}},
        exclude=("fc", "*.conv1"),
    )
    plan = planned(config)
    assert plan.of_layer(FC) == {} and plan.floats[FC] == "excluded"
    assert plan.of_layer(CONV1) == {} and (CONV2, "weights") in plan.tensors
    counts = {rule.label: (len(rule.layers), rule.took_effect) for rule in plan.rules}
    assert counts["exclude[0]"] == (1, 2)
    assert counts["exclude[1]"] == (2, 4)


def test_the_output_of_a_layer_is_quantized_after_its_relu() -> None:
    plan = planned(hierarchy({"weights": INT8, "activation": INT8}))
    assert (BLOCK + "ReLU[relu]/relu", "activation") in plan.tensors
    assert (CONV1, "activation") not in plan.tensors


def test_outputs_that_a_concatenation_joins_are_quantized_one_by_one() -> None:
    plan = planned(hierarchy({"weights": INT8, "activation": INT8}), "branches")
    joined = [node for node in plan.graph.nodes if node.is_join]
    assert joined and not any((node.name, "activation") in plan.tensors for node in joined)
    for node in plan.graph.nodes:
        if node.row.weight:
            assert (node.name, "activation") in plan.tensors or plan.floats[
                node.name
            ].startswith("quantized at")


def test_an_input_that_has_the_same_codes_is_not_rounded_again() -> None:
    plan = planned(hierarchy({"weights": INT8, "activation": INT8, "input": INT8}))
    first = ROOT + "Conv2d[conv1]/conv2d"
    assert (first, "input") in plan.tensors
    assert (CONV2, "input") not in plan.tensors
    finer = planned(
        hierarchy({"weights": INT8, "activation": INT8, "input": INT8 | {"bit_width": 16}})
    )
    assert (CONV2, "input") in finer.tensors


@pytest.mark.parametrize(
    ("entry", "code", "help_"),
    [
        ({"types": {"Conv2": {"weights": INT8}}}, "QZ402", "Conv2d"),
        ({"names": {"layer1.0.conv3": {"weights": INT8}}}, "QZ402", "conv1"),
        ({"names": {"*.convolution": {"weights": INT8}}}, "QZ402", ""),
        ({"exclude": ("fcc",)}, "QZ402", "fc"),
    ],
)
def test_what_matches_nothing_is_an_error_with_the_closest_names(
    entry: dict[str, Any], code: str, help_: str
) -> None:
    (found,) = findings(planned(hierarchy({"weights": INT8}, **entry)), code)
    assert found.severity == "error"
    assert help_ in (found.help or "")


def test_words_of_other_frameworks_are_taken_with_a_note() -> None:
    plan = planned(
        hierarchy(
            {"weights": INT8},
            {"Conv2D": {"weights": INT4}, "Dense": {"weights": {"bit_width": 3}}},
        )
    )
    assert (spec(plan, CONV1).bit_width, spec(plan, FC).bit_width) == (4, 3)
    assert [found.message for found in findings(plan, "QZ404")] == [
        "'Conv2D' is read as 'Conv2d'",
        "'Dense' is read as 'Linear'",
    ]


def test_a_glob_that_finds_modules_holds_for_the_layers_in_them() -> None:
    plan = planned(hierarchy({"weights": INT8}, names={"*.0": {"weights": INT4}}))
    assert {spec(plan, CONV1).bit_width, spec(plan, CONV2).bit_width} == {4}
    assert spec(plan, OTHER).bit_width == 8


@pytest.mark.parametrize(
    ("axis", "expected", "scales"), [(None, 0, 5), (0, 0, 5), (1, 1, 4), (-1, 1, 4), (-2, 0, 5)]
)
def test_channels_lie_along_the_axis_that_the_file_says(
    axis: int | None, expected: int, scales: int
) -> None:
    fields = INT8 | {"qscheme": "per_channel"} | ({} if axis is None else {"ch_axis": axis})
    tensor = planned(hierarchy({"weights": INT8}, names={"fc": {"weights": fields}})).tensors[
        FC, "weights"
    ]
    assert (tensor.spec.ch_axis, tensor.scales) == (expected, scales)


@pytest.mark.parametrize(
    "cut", [{"qscheme": "per_channel"}, {"qscheme": "per_group", "group_size": 2}]
)
@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_out_of_range_names_the_layer(cut: dict[str, Any], axis: int) -> None:
    fields = INT8 | cut | {"ch_axis": axis}
    (found,) = findings(planned(hierarchy({}, names={"fc": {"weights": fields}})), "QZ406")
    assert "weights of " + FC in found.message and found.help == "write a ch_axis from -2 to 1"


@pytest.mark.parametrize(
    ("toy", "op", "axis", "scales"),
    [("residual", "linear", 1, 10), ("transposed", "conv_transpose2d", 0, 3 * 9 * 1)],
)
def test_groups_run_along_the_inputs(toy: str, op: str, axis: int, scales: int) -> None:
    plan = planned(
        hierarchy({}, {op: {"weights": INT4 | {"qscheme": "per_group", "group_size": 2}}}), toy
    )
    (name,) = [node.name for node in plan.graph.nodes if node.op == op]
    assert findings(plan, "QZ407") == []
    found = plan.tensors[name, "weights"]
    shape = plan.graph.tensors[plan.graph.by_name[name].params["weight"]].shape
    assert found.spec.ch_axis == axis and shape[axis] % 2 == 0
    assert found.scales == shape.numel() // 2


def test_a_group_size_that_does_not_divide_names_layers_and_one_that_does() -> None:
    """A language model has hundreds of layers of one size: five of them say enough."""
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(9))).eval()
    graph = trace(model, (torch.zeros(2, 96),))
    plan = resolve_plan(
        hierarchy({"weights": INT4 | {"qscheme": "per_group", "group_size": 64}}), graph, graph
    )
    (found,) = findings(plan, "QZ407")
    assert (
        "of 9 tensor(s): 96 long in weights of " in found.message
        and "and 4 more" in found.message
    )
    assert found.help is not None and found.help.startswith("32 divides all of them")


class Apart(nn.Module):
    """A depthwise convolution, embeddings of tokens and of positions, those that are counted of
    tokens among them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.relative, self.counted = (
            nn.Embedding(9, 8),
            nn.Embedding(9, width),
            nn.Embedding(9, width),
        )
        self.depthwise, self.fc = nn.Conv1d(8, 8, 3, padding=1, groups=8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]) - torch.arange(ids.shape[1])[:, None]
        counts = (ids != 1).long().cumsum(1)
        x = self.fc(self.depthwise(self.words(ids.to(torch.int64)).mT).mT)
        return x.sum() + self.relative(positions.clamp(0)).sum() + self.counted(counts).sum()


def test_groups_leave_out_depthwise_convolutions_and_embeddings_of_positions() -> None:
    model = Apart(3).eval()
    graph = trace(model, (torch.zeros(2, 4, dtype=torch.int32),))
    plan = resolve_plan(
        hierarchy({"weights": INT4 | {"qscheme": "per_group", "group_size": 4}}), graph, graph
    )
    assert findings(plan, "QZ407") == []
    assert {
        graph.by_name[layer].scope for layer, role in plan.tensors if role == "weights"
    } == {"words", "fc"}
    kept = {graph.by_name[layer].scope: why for (layer, _), why in plan.ungrouped.items()}
    threes = "groups of 4 do not divide 3"
    assert kept == {
        "depthwise": "groups of 4 do not divide 1",
        "relative": threes,
        "counted": threes,
    }
    name = "Apart::Apart/Conv1d[depthwise]/conv1d"
    assert f"left float, as groups of 4 do not divide 1: weights of {name}" in list(
        plan_remarks(plan)
    )
    row = next(each for each in plan.to_json()["layers"] if each["name"] == name)
    assert row["ungrouped"] == {"weights": "groups of 4 do not divide 1"}
    assert (name, "weights", "float: groups of 4 do not divide 1") in plan_table(
        plan, TableView()
    ).rows


def test_groups_that_do_not_fit_other_layers_are_refused_beside_them() -> None:
    graph = trace(
        nn.Sequential(nn.Conv1d(6, 6, 3, groups=6), nn.Conv1d(6, 6, 1)).eval(),
        (torch.zeros(2, 6, 4),),
    )
    plan = resolve_plan(
        hierarchy({"weights": INT4 | {"qscheme": "per_group", "group_size": 4}}), graph, graph
    )
    (found,) = findings(plan, "QZ407")
    assert (
        "of 1 tensor(s): 6 long in weights of Sequential::Sequential/Conv1d[1]/conv1d"
        in found.message
    )


def test_a_group_size_that_does_not_divide_lists_all_layers_at_once() -> None:
    plan = planned(hierarchy({"weights": INT4 | {"qscheme": "per_group", "group_size": 3}}))
    (found,) = findings(plan, "QZ407")
    assert found.severity == "error"
    for node in plan.graph.nodes:
        if node.row.weight and node.params:
            length = 3 if node.name == ROOT + "Conv2d[conv1]/conv2d" else 4
            assert (f"weights of {node.name}" in found.message) == (length == 4)
    assert "4 long in weights of" in found.message
    whole = planned(hierarchy({"weights": INT4 | {"qscheme": "per_group", "group_size": -1}}))
    assert whole.diagnostics == () and whole.tensors[FC, "weights"].scales == 5


def test_blocks_with_a_shared_exponent_may_end_short() -> None:
    mx = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_type": "e8m0"}
    plan = planned(hierarchy({"weights": mx}))
    assert plan.diagnostics == ()
    assert plan.tensors[FC, "weights"].scales == 5
    before, after = weight_bytes(plan)
    parameters = [t.numel() for t in plan.graph.tensors.values() if t.dim() > 1]
    scales = sum(tensor.scales for tensor in plan.tensors.values())
    assert before - after == 4 * sum(parameters) - (sum(parameters) // 2 + scales)


def test_a_format_that_replaces_a_block_format_has_a_scale_of_its_own() -> None:
    mx = {"dtype": "fp4", "qscheme": "per_group", "group_size": 2, "scale_type": "e8m0"}
    plan = planned(
        hierarchy({"weights": mx}, names={"fc": {"weights": INT8 | {"qscheme": "per_tensor"}}})
    )
    assert spec(plan, FC) == QuantizationSpec()


def test_rows_of_values_lie_along_the_features() -> None:
    plan = planned(hierarchy({"weights": INT8, "input": TOKEN}))
    assert (spec(plan, FC, "input").qscheme, spec(plan, FC, "input").ch_axis) == (
        "per_token",
        1,
    )
    plan = planned(hierarchy({"input": TOKEN}), "attention")
    ranks = {
        len(plan.graph.by_name[tensor.source].shape or ()) - 1: tensor.spec.ch_axis
        for tensor in plan.tensors.values()
    }
    assert ranks == {1: 1, 2: 2}


@pytest.mark.parametrize("role", ["input", "activation"])
def test_a_token_of_a_convolution_is_a_sample(role: Any) -> None:
    plan = planned(hierarchy({"weights": INT8, role: TOKEN}))
    shapes = {node.name: node.shape or () for node in plan.graph.nodes}
    maps = [
        t
        for (_, found), t in plan.tensors.items()
        if found == role and len(shapes[t.source]) > 2
    ]
    assert maps and plan.diagnostics == ()
    assert {(tensor.spec.qscheme, tensor.spec.ch_axis) for tensor in maps} == {
        ("per_channel", 0)
    }


def test_float32_switches_a_tensor_off_and_the_plan_says_so() -> None:
    off = {"fc": {"input": {"dtype": "float32"}, "weights": {"dtype": "float32"}}}
    plan = planned(hierarchy({"weights": INT8, "input": INT8, "bias": INT8}, names=off))
    assert set(plan.of_layer(FC)) == {"bias"}
    assert set(plan.off) == {(FC, "input"), (FC, "weights")}
    (row,) = [layer for layer in plan.to_json()["layers"] if layer["name"] == FC]
    assert row["float32"] == {"weights": "default", "input": "default"}
    assert findings(plan, "QZ405") == []


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["exclude", "names", "types"])
def test_a_layer_without_weights_is_found_and_told_to_have_nothing_to_quantize(
    kind: str, in_place: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    graph = module_graph(model) if in_place else trace(model, (torch.randn(2, 4),))
    entry: dict[str, Any] = {
        "exclude": {"exclude": ("1",)},
        "names": {"names": {"1": {"weights": INT4}}},
    }.get(kind, {"types": {"ReLU": {"weights": INT4}}})
    plan = resolve_plan(hierarchy({"weights": INT8}, **entry), graph, graph)
    (found,) = plan.diagnostics
    assert (found.code, found.severity) == ("QZ405", "warning")
    assert (
        "there is nothing to quantize" if kind == "exclude" else "changes no tensor"
    ) in found.message
    assert len(plan.tensors) == 2


def test_groups_of_an_activation_are_dynamic() -> None:
    group = INT8 | {"qscheme": "per_group", "group_size": 2}
    (found,) = findings(
        planned(hierarchy({"weights": INT8, "input": group}, exclude=("conv1",))), "QZ408"
    )
    assert found.severity == "error"
    assert (
        planned(
            hierarchy({"input": group | {"is_dynamic": True}}, exclude=("conv1",))
        ).diagnostics
        == ()
    )


def test_an_activation_has_no_scale_per_sample() -> None:
    fields = INT8 | {"qscheme": "per_channel", "ch_axis": 0}
    assert findings(planned(hierarchy({"input": fields})), "QZ406")[0].message.startswith(
        "axis 0 is the batch"
    )
    plan = planned(hierarchy({"input": fields | {"ch_axis": 1}}))
    assert plan.diagnostics == () and spec(plan, FC, "input").ch_axis == 1


def test_parameters_are_never_dynamic_and_a_bias_has_one_scale_unless_an_axis_is_named() -> (
    None
):
    fields = INT8 | {"is_dynamic": True, "qscheme": "per_channel"}
    plan = planned(hierarchy({"weights": fields, "bias": fields}))
    assert not any(tensor.spec.is_dynamic for tensor in plan.tensors.values())
    assert spec(plan, FC, "bias").qscheme == "per_tensor"
    named = planned(hierarchy({"bias": fields | {"ch_axis": 0}}))
    assert (spec(named, FC, "bias").qscheme, named.tensors[FC, "bias"].scales) == (
        "per_channel",
        5,
    )


@pytest.mark.parametrize(
    ("everywhere", "types", "expected"),
    [
        ({"weights": INT8}, {}, False),
        ({"weights": INT8, "input": TOKEN}, {}, False),
        ({"weights": INT8, "input": {"dtype": "bfloat16"}}, {}, False),
        ({"weights": INT8, "input": INT8}, {}, True),
        (
            {"weights": INT8, "input": TOKEN},
            {"Linear": {"input": {"is_dynamic": False, "qscheme": "per_tensor"}}},
            True,
        ),
        ({"weights": INT8, "activation": INT8}, {}, True),
    ],
)
def test_only_ranges_that_stay_need_data(
    everywhere: Fields, types: Mapping[str, Fields], expected: bool
) -> None:
    plan = planned(hierarchy(everywhere, types))
    assert plan.diagnostics == ()
    assert plan.needs_data is expected


def test_bias_correction_needs_data() -> None:
    config = hierarchy({"weights": INT8})
    corrected = ResolvedConfig(
        Settings(include_bias_corr=True), config.rules, form="hierarchical"
    )
    assert planned(corrected).needs_data


def test_an_embedding_that_only_the_global_block_reaches_is_told_once() -> None:
    note = findings(planned(hierarchy({"weights": INT8}), "tied"), "QZ409")
    assert [(found.severity, "Embedding[embed]" in found.message) for found in note] == [
        ("note", True)
    ]
    assert (
        findings(
            planned(hierarchy({"weights": INT8}, {"Embedding": {"weights": INT4}}), "tied"),
            "QZ409",
        )
        == []
    )
    assert (
        findings(planned(hierarchy({"weights": INT8}, exclude=("embed",)), "tied"), "QZ409")
        == []
    )


def test_a_model_without_weights_is_an_error() -> None:
    (found,) = findings(planned(hierarchy({"weights": INT8}), "two_batches"), "QZ402")
    assert found.message.startswith("global_quant_config applies to no layer")


def test_the_input_of_a_layer_is_not_taken_for_its_output() -> None:
    plan = planned(hierarchy({"input": INT8}), "attention")
    readers = {layer for layer, _ in plan.tensors}
    assert readers == {node.name for node in plan.graph.nodes if node.op == "linear"}
