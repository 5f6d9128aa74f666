"""The code of the public documentation of the API (AMD Quark for PyTorch: "Configuration
Description" and "Quantization Strategies") runs with `from quantizer import *`, and each of its
import lines with another path.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from api.specs import tiny_lm, tokens
from torch import nn

from quantizer import (
    AWQConfig,
    Config,
    DeviceType,
    Dtype,
    GPTQConfig,
    ModelQuantizer,
    QuantizationConfig,
    QuantizationSpec,
    SmoothQuantConfig,
)

SPECS = """
# Per Tensor Config
QuantizationSpec(dtype=Dtype.int8,
                qscheme=QSchemeType.per_tensor,
                observer_cls=PerTensorMinMaxObserver,
                symmetric=True,
                scale_type=ScaleType.float,
                round_method=RoundType.half_even,
                is_dynamic=False)

# Per Channel Config, should set ch_axis
QuantizationSpec(dtype=Dtype.int4,
                observer_cls=PerChannelMinMaxObserver,
                symmetric=True,
                scale_type=ScaleType.float,
                round_method=RoundType.half_even,
                qscheme=QSchemeType.per_channel,
                ch_axis=0,
                is_dynamic=False)


# Per Group Config, should set ch_axis and group_size
QuantizationSpec(dtype=Dtype.int4,
                observer_cls=PerChannelMinMaxObserver,
                symmetric=True,
                scale_type=ScaleType.float,
                round_method=RoundType.half_even,
                qscheme=QSchemeType.per_group,
                ch_axis=0,
                is_dynamic=False,
                group_size=128)
"""

IMPORTS = [
    "from quark.torch.quantization.config.config import Config",
    "from quark.torch.quantization.config.config import QuantizationConfig",
    "from quark.torch.quantization.config.config import QuantizationSpec",
    "from quark.torch.quantization.config.type import Dtype, ScaleType, RoundType, QSchemeType",
    "from quark.torch.quantization.config.config import Config, QuantizationSpec, "
    "QuantizationConfig",
    "from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver",
    "from quark.torch import ModelQuantizer",
]

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Config(global_quant_config=..., layer_type_quant_config=..., layer_quant_config=...)": (
        {
            "global_quant_config": QuantizationConfig(),
            "layer_type_quant_config": {"Linear": QuantizationConfig()},
            "layer_quant_config": {"fc": QuantizationConfig()},
        },
        {},
    ),
    "QuantizationConfig(input_tensors=..., output_tensors=..., weight=..., ...)": (
        {
            "input_tensors": QuantizationSpec(Dtype.uint8),
            "output_tensors": QuantizationSpec(Dtype.int16),
            "weight": QuantizationSpec(Dtype.int4),
        },
        {"bias": QuantizationSpec(Dtype.int32), "target_device": DeviceType.GPU},
    ),
    """QuantizationSpec(...,
                observer_cls=PerChannelMinMaxObserver,
                ...)""": ({}, {"dtype": Dtype.int8, "ch_axis": 0}),
}
"""Code with dots in it, and what may stand for them: by the keyword before, and of bare
ones.
"""

STRATEGIES = """
# 1. Set model
model = AutoModelForCausalLM.from_pretrained("facebook/opt-125m")
model.eval()
tokenizer = AutoTokenizer.from_pretrained("facebook/opt-125m")

# 2. Set quantization configuration

# 2-1. For weight only quantization, please uncomment the following lines.
DEFAULT_UINT4_PER_GROUP_ASYM_SPEC = QuantizationSpec(dtype=Dtype.uint4,
                                                    observer_cls=PerChannelMinMaxObserver,
                                                    symmetric=False,
                                                    scale_type=ScaleType.float,
                                                    round_method=RoundType.half_even,
                                                    qscheme=QSchemeType.per_group,
                                                    ch_axis=0,
                                                    is_dynamic=False,
                                                    group_size=32)
DEFAULT_W_UINT4_PER_GROUP_CONFIG = QuantizationConfig(weight=DEFAULT_UINT4_PER_GROUP_ASYM_SPEC)
quant_config = Config(global_quant_config=DEFAULT_W_UINT4_PER_GROUP_CONFIG)

# 2-2. For dynamic quantization, please uncomment the following lines.
# INT8_PER_TENSER_DYNAMIC_SPEC = QuantizationSpec(dtype=Dtype.int8,
#                                                 qscheme=QSchemeType.per_tensor,
#                                                 observer_cls=PerTensorMinMaxObserver,
#                                                 symmetric=True,
#                                                 scale_type=ScaleType.float,
#                                                 round_method=RoundType.half_even,
#                                                 is_dynamic=True)
# DEFAULT_W_INT8_A_INT8_PER_TENSOR_DYNAMIC_CONFIG = QuantizationConfig(input_tensors=INT8_PER_TENSER_DYNAMIC_SPEC,
#                                                                      weight=INT8_PER_TENSER_DYNAMIC_SPEC)
# quant_config = Config(global_quant_config=DEFAULT_W_INT8_A_INT8_PER_TENSOR_DYNAMIC_CONFIG)

# 2-3. For static quantization , please uncomment the following lines.
# FP8_PER_TENSOR_SPEC = QuantizationSpec(dtype=Dtype.fp8_e4m3,
#                                        qscheme=QSchemeType.per_tensor,
#                                        observer_cls=PerTensorMinMaxObserver,
#                                        is_dynamic=False)
# DEFAULT_W_FP8_A_FP8_PER_TENSOR_CONFIG = QuantizationConfig(input_tensors=FP8_PER_TENSOR_SPEC,
#                                                            weight=FP8_PER_TENSOR_SPEC)
# quant_config = Config(global_quant_config=DEFAULT_W_FP8_A_FP8_PER_TENSOR_CONFIG)

# 3. Define calibration dataloader (still need this step for weight only and dynamic quantization)
from torch.utils.data import DataLoader
text = "Hello, how are you?"
tokenized_outputs = tokenizer(text, return_tensors="pt")
calib_dataloader = DataLoader(tokenized_outputs['input_ids'])

# 4. In-place replacement with quantized modules in model
quantizer = ModelQuantizer(quant_config)
quant_model = quantizer.quantize_model(model, calib_dataloader)
"""


class Stand:
    """In the place of `AutoModelForCausalLM` and `AutoTokenizer`: a small model, and letters as
    tokens.
    """

    def __init__(self, made: Any) -> None:
        self.made = made

    def from_pretrained(self, _: str) -> Any:
        return self.made


def letters(text: str, return_tensors: str) -> dict[str, torch.Tensor]:
    assert return_tensors == "pt"
    return {"input_ids": torch.tensor([[ord(letter) % 40 for letter in text]])}


def public_names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec("from quantizer import *", names)
    return names


def with_strategy(chosen: int) -> str:
    """The code with one of the sections 2-1, 2-2 and 2-3 in force."""
    lines, section = [], 0
    for line in STRATEGIES.splitlines():
        if line.startswith(("# 2-", "# 3.")):
            section = int(line[4]) if line.startswith("# 2-") else 0
        elif section == chosen:
            line = line.removeprefix("# ")
        elif section:
            line = ""
        lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize("line", IMPORTS)
def test_every_import_finds_its_names(line: str) -> None:
    names: dict[str, Any] = {}
    exec(re.sub(r"from [\w.]+", "from quantizer", line), names)
    assert all(name in names for name in line.partition(" import ")[2].split(", "))


@pytest.mark.parametrize("code", SHAPES, ids=lambda code: code.partition("(")[0])
def test_code_with_dots_runs_when_they_are_filled_in(code: str) -> None:
    values, rest = SHAPES[code]
    filled = re.sub(r"(\w+)=\.\.\.", r"\1=values['\1']", code)
    filled = re.sub(r"\.\.\.,\s*(?=observer)", "", filled).replace("...)", "**rest)")
    found = eval(filled, public_names() | {"values": values, "rest": rest})
    wanted = values | rest
    assert {key: getattr(found, key) for key in wanted} == wanted
    within = QuantizationConfig(weight=found) if isinstance(found, QuantizationSpec) else found
    config = Config(within) if isinstance(within, QuantizationConfig) else within
    assert Config.from_dict(config.to_dict()) == config


def test_the_three_specs_quantize() -> None:
    made: list[QuantizationSpec] = []

    def recorded(**fields: Any) -> QuantizationSpec:
        made.append(QuantizationSpec(**fields))
        return made[-1]

    exec(SPECS, public_names() | {"QuantizationSpec": recorded})
    shapes = []
    for spec in made:
        layer = nn.Linear(256, 4)
        ModelQuantizer(Config(QuantizationConfig(weight=spec))).quantize_model(layer)
        shapes.append(tuple(layer.quantizers["weights"].scale.shape))
    assert shapes == [(), (4,), (4, 2)]


@pytest.mark.parametrize(
    ("strategy", "roles", "dynamic", "sqnr"),
    [
        (1, {"weights"}, False, 12),
        (2, {"weights", "input"}, True, 30),
        (3, {"weights", "input"}, False, 20),
    ],
    ids=["weight-only", "dynamic", "static"],
)
def test_each_strategy_runs(strategy: int, roles: set[str], dynamic: bool, sqnr: float) -> None:
    model, stated = tiny_lm(), Stand(tiny_lm())
    names = public_names() | {"AutoModelForCausalLM": stated, "AutoTokenizer": Stand(letters)}
    exec(with_strategy(strategy), names)
    quantized = names["quant_model"]
    assert quantized is stated.made
    assert type(quantized).generate is type(model).generate
    assert quantized.generate(tokens(), 3).shape == (2, 10)
    assert set(quantized.fc1.quantizers) == roles
    if "input" in roles:
        assert quantized.fc1.quantizers["input"].spec.is_dynamic is dynamic
    expected, found = model(tokens()), quantized(tokens())
    assert 10 * torch.log10(expected.square().sum() / (expected - found).square().sum()) > sqnr


def test_the_defaults_are_the_documented_ones() -> None:
    config = Config(global_quant_config=QuantizationConfig())
    assert (config.layer_type_quant_config, config.layer_quant_config, config.exclude) == (
        {},
        {},
        [],
    )
    assert config.algo_config is None
    assert config.pre_quant_opt_config is None
    assert set(vars(QuantizationConfig()).values()) == {None}
    assert {
        value for name, value in vars(QuantizationSpec(Dtype.int8)).items() if name != "dtype"
    } == {None}


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (
            QuantizationSpec,
            "dtype is_dynamic observer_cls qscheme ch_axis group_size symmetric round_method "
            "scale_type",
        ),
        (QuantizationConfig, "input_tensors output_tensors weight bias target_device"),
        (
            Config,
            "global_quant_config layer_type_quant_config layer_quant_config exclude "
            "algo_config pre_quant_opt_config",
        ),
    ],
)
def test_fields_come_in_the_documented_order(cls: type, fields: str) -> None:
    assert " ".join(field.name for field in dataclasses.fields(cls)).startswith(fields)


@pytest.mark.parametrize(
    ("algorithm", "values"),
    [
        (
            SmoothQuantConfig(),
            {
                "name": "smoothquant",
                "alpha": 1,
                "scale_clamp_min": 1e-3,
                "scaling_layers": None,
                "embedding_layers": None,
                "model_decoder_layers": None,
            },
        ),
        (
            AWQConfig(),
            {
                "name": "awq",
                "bit": 4,
                "sym": False,
                "group_size": 128,
                "algo_processor": None,
                "scaling_layers": None,
                "model_decoder_layers": None,
                "embedding_layers": None,
            },
        ),
        (
            GPTQConfig(),
            {
                "name": "gptq",
                "bit": 4,
                "sym": False,
                "group_size": 128,
                "damp_percent": 0.01,
                "desc_act": True,
                "static_groups": True,
                "true_sequential": True,
                "inside_layer_modules": None,
                "model_decoder_layers": None,
                "embedding_layers": None,
            },
        ),
    ],
    ids=["smoothquant", "awq", "gptq"],
)
def test_algorithms_have_the_documented_fields_and_defaults(
    algorithm: Any, values: dict[str, Any]
) -> None:
    """The documented fields come first; what follows are additions. One default is of later
    versions, static_groups: the documented False cannot go with the documented desc_act.
    """
    assert list(vars(algorithm).items())[: len(values)] == list(values.items())
