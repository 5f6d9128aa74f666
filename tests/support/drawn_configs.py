"""Configs of both forms, drawn at random: nearly all are valid. For the toy `residual`, whose
layers they name.
"""

from __future__ import annotations

import random
from typing import Any

from quantizer.config.algorithms import ALGORITHMS, settings_of
from support.configs import SETTINGS

Drawn = dict[str, Any]

NAMES = (
    *("conv1", "fc", "layer1.0.conv1", "layer1.0.conv2", "layer1.0.relu", "layer1.1", "layer1"),
    *(
        "*.conv1",
        "layer1.?.conv2",
        "re:.*(conv1|fc)",
        "kind:head",
        "Residual::Residual/Linear[fc]/linear",
    ),
)
TYPES = (
    "Conv2d",
    "torch.nn.Conv2d",
    "nn.Linear",
    "Linear",
    "Block",
    "add",
    "torch.nn.ReLU",
    "relu",
)
ROLES = ("input", "weights", "bias", "activation")
TENSORS = ("input_tensors", "weight", "bias", "output_tensors")


def layered(draw: random.Random) -> Drawn:
    """A file of the layered form."""
    cast = draw.random() < 0.15
    overall = {"datatype": "bfloat16"} if cast else _parameters(draw, "weights", complete=True)
    roles = draw.choice(
        [[], ["weights"], ["weights", "bias"], draw.sample(ROLES, draw.randint(0, 4)), [*ROLES]]
    )
    entries = [_entry(draw, cast) for _ in range(draw.choice([0, 0, 1, 1, 2, 3]))]
    switches = sorted(key for key, value in SETTINGS.items() if value is False)
    return {
        **SETTINGS,
        **dict.fromkeys(draw.sample(switches, draw.choice([0] * 9 + [1])), True),
        "target_device": draw.choice(["CPU", "GPU"]),
        "quantizable_data_type": roles,
        "overall_quantize_config": overall,
        "tensor_quantize_config": _tensors(draw, roles, cast),
        "layer_quantize_config": entries,
    }


def hierarchical(draw: random.Random) -> Drawn:
    """A file of the hierarchical form."""
    found: Drawn = {"global_quant_config": _level(draw)}
    if draw.random() < 0.4:
        types = draw.sample(TYPES, draw.choice([1, 1, 2]))
        found["layer_type_quant_config"] = {each: _level(draw) for each in types}
    if draw.random() < 0.5:
        names = draw.sample(NAMES, draw.choice([1, 1, 2, 3]))
        found["layer_quant_config"] = {each: _level(draw) for each in names}
    if draw.random() < 0.05:
        found["pre_quant_opt_config"] = draw.choice(
            [{"name": "cle"}, [{"name": "cle"}, {"name": "smoothquant"}]]
        )
    if draw.random() < 0.3:
        found["exclude"] = draw.sample(NAMES, draw.choice([1, 1, 2]))
    return found


def algorithms(draw: random.Random) -> list[Drawn]:
    """Entries for a list of algorithms, with some of their settings, which name layers of the
    toy or of nothing.
    """
    found = []
    for name in draw.sample(
        ["smoothquant", "rotation", "awq", "gptq", "gptaq", "qronos"], draw.choice([1, 1, 2])
    ):
        group: Drawn = {"layers": draw.sample(["conv1", "conv2", "relu"], 1)}
        group |= {
            key: draw.choice(["conv1", "bn1", ""])
            for key in ("prev_op", "inp")
            if draw.random() < 0.3
        }
        options: Drawn = {
            "alpha": draw.choice(
                [0.5, 1, "auto", [0.25, 0.75]] if name == "smoothquant" else [0.25, 0.5]
            ),
            "scaling_layers": draw.choice([None, [], [group]]),
            "model_decoder_layers": draw.choice(["layer1", "", "layers", None]),
            "inside_layer_modules": draw.choice([["conv1"], ["conv1", "conv2"], [], None]),
            "embedding_layers": draw.choice([["fc"], ["embed"], None]),
            "desc_act": draw.random() < 0.5,
            "static_groups": draw.random() < 0.5,
            "group_size": draw.choice([-1, 4, 128]),
            "seed": draw.randint(0, 9),
        }
        known = settings_of(ALGORITHMS[name])
        found.append(
            {
                "name": name,
                **{
                    key: options[key] for key in options if key in known and draw.random() < 0.4
                },
            }
        )
    return found


def _parameters(draw: random.Random, role: str, *, complete: bool) -> Drawn:
    """Words of an integer block that go together; all of them, or a few."""
    symmetry = draw.random() < 0.7
    method = draw.choice(
        ["maxmin"] * 9
        + ["percentile", "percentile", "mse", "mse", "entropy", "diffs"][: 6 if symmetry else 2]
    )
    two = method == "diffs" or draw.random() < 0.2
    words: Drawn = {
        "bit_width": draw.choice([8] * 8 + [4, 4, 5, 16, 16, 7])
        if role != "bias"
        else draw.choice([8, 16, 32]),
        "method": method,
        "round_mode": draw.choice(["half_even", "half_up", "half_down", "std_round"]),
        "symmetry": symmetry or role == "bias",
        "per_channel": role == "weights" and draw.random() < 0.3,
        "signed": role == "bias"
        or (symmetry and (role != "activation" or draw.random() < 0.8)),
        "narrow_range": symmetry and draw.random() < 0.03,
        "scale_type": "poweroftwo" if two else "float",
        "calib_statistic_method": draw.choice(["max"] * 30 + ["mean", "median"]),
    }
    if draw.random() < 0.3:
        words["percentage"] = draw.choice([99, 99.9])
    if draw.random() < 0.2:
        words["symmetric_scale"] = draw.choice(["quant_max", "half_range"])
    if complete:
        return words
    kept = draw.sample(
        ["bit_width", "round_mode", "percentage", "symmetric_scale", "per_channel"], 2
    )
    return {word: value for word, value in words.items() if word in kept and value is not False}


def _tensors(draw: random.Random, roles: list[str], cast: bool) -> Drawn:
    """Blocks of some of the roles, with what they have of their own."""
    chosen = draw.sample(sorted(roles), draw.randint(0, min(2, len(roles))))
    blocks = {
        role: _parameters(draw, role, complete=cast or draw.random() < 0.3) for role in chosen
    }
    if cast:
        return {role: block | {"datatype": "int"} for role, block in blocks.items()}
    floats = {
        role: {"datatype": draw.choice(["float16", "float32"])}
        for role in chosen
        if draw.random() < 0.15
    }
    return {role: block for role, block in (blocks | floats).items() if block}


def _entry(draw: random.Random, cast: bool) -> Drawn:
    """An entry of layer_quantize_config."""
    by_type = draw.random() < 0.5
    roles = draw.sample(ROLES, draw.randint(0, 4))
    floating = draw.random() < 0.2
    overall = (
        {"datatype": "bfloat16"} if floating else _parameters(draw, "weights", complete=True)
    )
    if cast and not floating:
        overall["datatype"] = "int"
    return {
        "layer_type": draw.choice(TYPES) if by_type else None,
        "layer_name": None if by_type else draw.choice(NAMES),
        "quantizable_data_type": roles,
        "overall_quantize_config": overall,
        "tensor_quantize_config": _tensors(draw, roles, floating),
        **({"required": False} if draw.random() < 0.1 else {}),
    }


def _level(draw: random.Random) -> Drawn:
    """A QuantizationConfig."""
    keys = draw.sample(TENSORS, draw.choice([1, 1, 2, 2, 3, 4]))
    return {key: _spec(draw, key) for key in keys}


def _spec(draw: random.Random, key: str) -> Drawn:
    """The specification of one tensor."""
    kind = draw.choice(["int"] * 12 + ["cast", "cast", "float"])
    if kind == "cast":
        return {"dtype": draw.choice(["float16", "bfloat16", "float32"])}
    if kind == "float":
        return {"dtype": draw.choice(["fp8_e4m3", "fp8_e5m2"])}
    spec: Drawn = {
        "dtype": draw.choice(["int8", "int8", "int4", "int3", "uint8", "uint4", "int16"])
    }
    if key == "bias" and draw.random() < 0.5:
        spec["dtype"] = "int32"
    method = draw.choice([None, None, "MinMax", "Percentile", "MSE"])
    if method == "MSE" and spec["dtype"].startswith("u"):
        spec["dtype"] = spec["dtype"].removeprefix("u")
    if draw.random() < 0.3 and method != "MSE" and spec["dtype"] != "int32":
        spec["symmetric"] = spec["dtype"].startswith("int") and draw.random() < 0.5
    scheme = (
        draw.choice([None, "per_tensor", "per_tensor", "per_channel"])
        if key == "weight"
        else None
    )
    if method and scheme != "per_channel":
        spec["observer_cls"] = f"PerTensor{method}Observer"
    if scheme:
        spec["qscheme"] = scheme
    if scheme == "per_channel" and draw.random() < 0.7:
        spec["ch_axis"] = draw.choice([0] * 12 + [1])
    if key == "weight" and draw.random() < 0.04:
        spec |= {"qscheme": "per_group", "ch_axis": 1, "group_size": draw.choice([1, 2])}
        spec.pop("observer_cls", None)
    if key.endswith("_tensors") and method in (None, "MinMax") and draw.random() < 0.06:
        spec |= {"is_dynamic": True, "qscheme": draw.choice(["per_tensor", "per_token"])}
        spec.pop("observer_cls", None)
    words = {
        "round_method": ["half_even", "half_up", "round", "half_down"] * 5 + ["floor"],
        "scale_type": ["float", "pof2"],
        "symmetric_scale": ["quant_max", "half_range"],
        "percentage": [99, 99.9],
    }
    return spec | {
        word: draw.choice(options) for word, options in words.items() if draw.random() < 0.2
    }
