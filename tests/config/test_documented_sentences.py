"""Sentences of the documented format, each said as JSON and as dataclasses: both are one
document and one plan.

Source: AMD Quark for PyTorch, "Configuration Description" and "Quantization Strategies". That
the plans are carried out is tested in tests/api; defaults and fields of the dataclasses in
tests/api/test_documented_dataclasses.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from quantizer import (
    Config,
    DeviceType,
    Dtype,
    PerChannelMinMaxObserver,
    PerTensorMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPercentileObserver,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
    RoundType,
    ScaleType,
)
from quantizer.config.document.document import Document, Text
from quantizer.config.document.read import parse_document
from quantizer.config.load import check_document
from quantizer.graph.modules import module_graph
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

INT8, INT4 = QuantizationSpec(Dtype.int8), QuantizationSpec(Dtype.int4)
Expected = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Case:
    """A sentence, and what it makes of a model `{"conv": Conv2d, "fc1": Linear, "fc2":
    Linear}`: path, role, fields.
    """

    sentence: str
    written: Mapping[str, Any]
    built: Config
    expected: Expected = field(default_factory=dict)


def weight(spec: QuantizationSpec, **others: Any) -> Config:
    return Config(QuantizationConfig(weight=spec), **others)


EVERYWHERE = ("conv", "fc1", "fc2")
W8 = {"weight": {"dtype": "int8"}}
TENSOR_SPEC = {
    "dtype": "int8",
    "qscheme": "per_tensor",
    "observer_cls": "PerTensorMinMaxObserver",
    "symmetric": True,
    "scale_type": "float",
    "round_method": "half_even",
}
BUILT_SPEC: dict[str, Any] = {
    "dtype": Dtype.int8,
    "qscheme": QSchemeType.per_tensor,
    "observer_cls": PerTensorMinMaxObserver,
    "symmetric": True,
    "scale_type": ScaleType.float,
    "round_method": RoundType.half_even,
}

CASES = [
    Case(
        "Global quantization configuration applied to the entire model unless overridden at "
        "the layer level.",
        {
            "global_quant_config": W8,
            "layer_quant_config": {"fc1": {"weight": {"dtype": "int4"}}},
        },
        weight(INT8, layer_quant_config={"fc1": QuantizationConfig(weight=INT4)}),
        {
            "conv": {"weights": {"bit_width": 8}},
            "fc1": {"weights": {"bit_width": 4}},
            "fc2": {"weights": {"bit_width": 8}},
        },
    ),
    Case(
        "A dictionary mapping from layer types to their quantization configurations.",
        {
            "global_quant_config": W8,
            "layer_type_quant_config": {"Linear": {"weight": {"dtype": "int4"}}},
        },
        weight(INT8, layer_type_quant_config={"Linear": QuantizationConfig(weight=INT4)}),
        {
            "conv": {"weights": {"bit_width": 8}},
            "fc1": {"weights": {"bit_width": 4}},
            "fc2": {"weights": {"bit_width": 4}},
        },
    ),
    Case(
        "Layer types (e.g., 'Conv2D', 'Dense').",
        {
            "global_quant_config": {},
            "layer_type_quant_config": {"Conv2D": W8, "Dense": {"weight": {"dtype": "int4"}}},
        },
        Config(
            QuantizationConfig(),
            {
                "Conv2D": QuantizationConfig(weight=INT8),
                "Dense": QuantizationConfig(weight=INT4),
            },
        ),
        {
            "conv": {"weights": {"bit_width": 8}},
            "fc1": {"weights": {"bit_width": 4}},
            "fc2": {"weights": {"bit_width": 4}},
        },
    ),
    Case(
        "A list of layer names to be excluded from quantization, enabling selective "
        "quantization of the model.",
        {"global_quant_config": W8, "exclude": ["fc1", "conv"]},
        weight(INT8, exclude=["fc1", "conv"]),
        {"fc2": {"weights": {}}},
    ),
    Case(
        "If the input_tensors in layer_type_quant_config is None, the configuration from "
        "global_quant_config is used.",
        {
            "global_quant_config": {"input_tensors": {"dtype": "int8"}},
            "layer_type_quant_config": {
                "Linear": {"input_tensors": None, "weight": {"dtype": "int4"}}
            },
        },
        Config(
            QuantizationConfig(input_tensors=INT8),
            {"Linear": QuantizationConfig(None, weight=INT4)},
        ),
        {
            "conv": {"input": {"bit_width": 8}},
            "fc1": {"input": {"bit_width": 8}, "weights": {"bit_width": 4}},
            "fc2": {"input": {"bit_width": 8}, "weights": {"bit_width": 4}},
        },
    ),
    Case(
        "If None in global_quant_config, input_tensors are not quantized; output, weight and "
        "bias: the same as above.",
        {
            "global_quant_config": {
                "input_tensors": None,
                "output_tensors": None,
                "weight": None,
                "bias": {"dtype": "int8"},
            }
        },
        Config(QuantizationConfig(bias=INT8)),
        {path: {"bias": {}} for path in EVERYWHERE},
    ),
    Case(
        "Input, output, weight and bias tensors quantization specification.",
        {
            "global_quant_config": {
                key: {"dtype": "int8"}
                for key in ("input_tensors", "output_tensors", "weight", "bias")
            }
        },
        Config(QuantizationConfig(INT8, INT8, INT8, INT8, DeviceType.CPU)),
        {
            path: {role: {} for role in ("input", "activation", "weights", "bias")}
            for path in EVERYWHERE
        },
    ),
    Case(
        "Per tensor config.",
        {"global_quant_config": {"weight": {**TENSOR_SPEC, "is_dynamic": False}}},
        weight(QuantizationSpec(**BUILT_SPEC, is_dynamic=False)),
        {
            path: {"weights": {"qscheme": "per_tensor", "symmetric": True, "ch_axis": None}}
            for path in EVERYWHERE
        },
    ),
    Case(
        "Per channel config, should set ch_axis.",
        {
            "global_quant_config": {
                "weight": {
                    **TENSOR_SPEC,
                    "dtype": "int4",
                    "observer_cls": "PerChannelMinMaxObserver",
                    "qscheme": "per_channel",
                    "ch_axis": 0,
                }
            }
        },
        weight(
            QuantizationSpec(
                **BUILT_SPEC
                | {
                    "dtype": Dtype.int4,
                    "observer_cls": PerChannelMinMaxObserver,
                    "qscheme": QSchemeType.per_channel,
                    "ch_axis": 0,
                }
            )
        ),
        {
            path: {"weights": {"qscheme": "per_channel", "ch_axis": 0, "bit_width": 4}}
            for path in EVERYWHERE
        },
    ),
    Case(
        "Per group config, should set ch_axis and group_size.",
        {
            "global_quant_config": {
                "weight": {
                    **TENSOR_SPEC,
                    "dtype": "int4",
                    "observer_cls": "PerChannelMinMaxObserver",
                    "qscheme": "per_group",
                    "ch_axis": 0,
                    "group_size": 4,
                }
            }
        },
        weight(
            QuantizationSpec(
                **BUILT_SPEC
                | {
                    "dtype": Dtype.int4,
                    "observer_cls": PerChannelMinMaxObserver,
                    "qscheme": QSchemeType.per_group,
                    "ch_axis": 0,
                    "group_size": 4,
                }
            )
        ),
        {
            path: {"weights": {"qscheme": "per_group", "ch_axis": 1, "group_size": 4}}
            for path in EVERYWHERE
        },
    ),
    Case(
        "If None, symmetric, round_method and scale_type defer to a higher-level setting.",
        {
            "global_quant_config": {
                "weight": {
                    "dtype": "int8",
                    "symmetric": False,
                    "round_method": "half_up",
                    "scale_type": "pof2",
                }
            },
            "layer_quant_config": {
                "fc2": {"weight": {"dtype": "int4", "symmetric": None, "scale_type": "float"}}
            },
        },
        weight(
            QuantizationSpec(
                Dtype.int8,
                symmetric=False,
                round_method=RoundType.half_up,
                scale_type=ScaleType.pof2,
            ),
            layer_quant_config={
                "fc2": QuantizationConfig(
                    weight=QuantizationSpec(Dtype.int4, scale_type=ScaleType.float)
                )
            },
        ),
        {
            "conv": {
                "weights": {
                    "symmetric": False,
                    "round_mode": "half_up",
                    "scale_type": "poweroftwo",
                }
            },
            "fc1": {
                "weights": {
                    "symmetric": False,
                    "round_mode": "half_up",
                    "scale_type": "poweroftwo",
                }
            },
            "fc2": {
                "weights": {
                    "symmetric": False,
                    "round_mode": "half_up",
                    "scale_type": "float",
                    "bit_width": 4,
                }
            },
        },
    ),
    Case(
        "Percentile and MSE calibration methods (per tensor), for each tensor by its "
        "observer_cls.",
        {
            "global_quant_config": {
                "input_tensors": {
                    "dtype": "int8",
                    "observer_cls": "PerTensorPercentileObserver",
                },
                "weight": {"dtype": "int8", "observer_cls": "PerTensorMSEObserver"},
            }
        },
        Config(
            QuantizationConfig(
                QuantizationSpec(Dtype.int8, observer_cls=PerTensorPercentileObserver),
                weight=QuantizationSpec(Dtype.int8, observer_cls=PerTensorMSEObserver),
            )
        ),
        {
            path: {"input": {"method": "percentile"}, "weights": {"method": "mse"}}
            for path in EVERYWHERE
        },
    ),
    Case(
        "Weight-only: the weights are quantized ahead of time, but the activations are not "
        "quantized.",
        {"global_quant_config": W8},
        weight(INT8),
        {path: {"weights": {"is_dynamic": False}} for path in EVERYWHERE},
    ),
    Case(
        "Dynamic: quantizes the weights ahead of time, while the activations are quantized "
        "dynamically at runtime.",
        {
            "global_quant_config": {
                "input_tensors": {"dtype": "int8", "is_dynamic": True},
                "weight": {"dtype": "int8", "is_dynamic": True},
            }
        },
        Config(
            QuantizationConfig(
                QuantizationSpec(Dtype.int8, is_dynamic=True),
                weight=QuantizationSpec(Dtype.int8, is_dynamic=True),
            )
        ),
        {
            path: {"input": {"is_dynamic": True}, "weights": {"is_dynamic": False}}
            for path in EVERYWHERE
        },
    ),
    Case(
        "Static: quantizes both the weights and activations; this process necessitates "
        "calibration with a dataset.",
        {
            "global_quant_config": {
                "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False},
                "weight": {"dtype": "fp8_e4m3", "is_dynamic": False},
            }
        },
        Config(
            QuantizationConfig(
                QuantizationSpec(Dtype.fp8_e4m3, is_dynamic=False),
                weight=QuantizationSpec(Dtype.fp8_e4m3, is_dynamic=False),
            )
        ),
        {
            path: {"input": {"is_dynamic": False}, "weights": {"dtype": "fp8_e4m3"}}
            for path in EVERYWHERE
        },
    ),
]
NEED_DATA = ("Static", "If the input_tensors", "Input, output", "Percentile and MSE")


def planned(document: Document) -> Plan:
    model = nn.ModuleDict(
        {"conv": nn.Conv2d(4, 4, 1), "fc1": nn.Linear(4, 8), "fc2": nn.Linear(8, 4)}
    )
    graph = module_graph(model)
    plan = resolve_plan(check_document(document).require(), graph, graph)
    assert [found for found in plan.diagnostics if found.severity == "error"] == []
    return plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.sentence[:40])
def test_both_ways_to_say_a_sentence_make_the_plan_it_asks_for(case: Case) -> None:
    read = planned(parse_document(Text("net.json", json.dumps(case.written))))
    built = planned(Document.of(case.built.to_dict(), "Config"))
    decided = [
        {key: tensor.spec for key, tensor in plan.tensors.items()} for plan in (read, built)
    ]
    assert decided[0] == decided[1]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (layer, role), spec in decided[0].items():
        path = read.graph.by_name[layer].scope
        wanted = case.expected.get(path, {}).get(role, {})
        found.setdefault(path, {})[role] = {name: getattr(spec, name) for name in wanted}
    assert found == case.expected
    assert read.needs_data == built.needs_data == case.sentence.startswith(NEED_DATA)


@pytest.mark.parametrize("device", DeviceType)
def test_the_target_device(device: DeviceType) -> None:
    """Configuration specifying the target device (e.g., CPU, GPU, IPU) for the quantized
    model.
    """
    written = {"global_quant_config": {**W8, "target_device": device.name}}
    built = Config(QuantizationConfig(weight=INT8, target_device=device))
    for document in (
        parse_document(Text("net.json", json.dumps(written))),
        Document.of(built.to_dict(), "Config"),
    ):
        assert planned(document).settings.target_device == device.name
