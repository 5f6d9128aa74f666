"""Calibrations of small models on any device, and the configs that devices are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.api.config import read_config
from quantizer.calibration import steps
from quantizer.calibration.events import Events
from quantizer.calibration.request import CalibrationRequest
from quantizer.calibration.target import Target
from quantizer.evaluation.scores import Scores, score
from quantizer.graph.ir import Graph
from quantizer.nn.network import Network, layer_arguments
from quantizer.results.calibrated import Calibrated
from quantizer.results.graph_file import trace_module
from quantizer.sources.data import Batches, load_batches
from quantizer.sources.module_state import without_cache
from support.configs import document
from support.llamas import llama, tokens
from support.toys import Residual, shake

CPU = torch.device("cpu")


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return shake(Residual()).to(dtype)


def language_model(dtype: torch.dtype) -> nn.Module:
    # the attention of torch is another implementation on each device
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    return llama(attn_implementation="eager", **sizes).to(dtype)


def images(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, 8, 8, generator=generator).to(dtype) for _ in range(2)]


def wide_language_model(dtype: torch.dtype) -> nn.Module:
    """One of two blocks, wide enough for errors to be means of many codes."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return llama(attn_implementation="eager", **sizes).to(dtype)


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[..., list[Any]]]] = {
    "network": (network, images),
    "language_model": (language_model, lambda dtype: tokens()),
    "wide_language_model": (wide_language_model, lambda dtype: tokens(64)),
}


@cache
def graph_of(
    model: str, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, Batches, Graph]:
    """A model on a device, its data, and its trace there."""
    build, data = MODELS[model]
    module = build(dtype).to(device)
    batches = load_batches(lambda: data(dtype), module=module)
    with without_cache(module):
        return module, batches, trace_module(module, next(iter(batches)).to(device))


def batches_of(model: str) -> Batches:
    """The data of a float32 model on the CPU."""
    return graph_of(model, torch.float32, CPU)[1]


@dataclass
class Run:
    """What a calibration and a test found."""

    found: dict[Any, Tensor]
    scores: Scores
    calibrated: Calibrated


def run(
    model: str,
    dtype: torch.dtype,
    device: torch.device,
    config: Any,
    finetune: str | None = None,
    memory: int | None = None,
) -> Run:
    module, batches, graph = graph_of(model, dtype, device)
    config = read_config(config).require()
    request = CalibrationRequest(
        target=Target(graph),
        config=config,
        batches=batches,
        events=Events(),
        fast_finetune=finetune,
        memory=memory,
    )
    solution = steps.run_calibration(request).solution
    calibrated = Calibrated(graph, config.settings, solution)
    scores = score(calibrated, module, batches, Events())
    tensors = {
        (*key, name): value
        for key, own in solution.tensors.items()
        for name in ("scale", "zero_point", "codes")
        if (value := getattr(own, name)) is not None
    }
    tensors |= {
        (name, key): value
        for name, own in solution.weights.items()
        for key, value in own.items()
    }
    tensors |= {(name, "correction"): each for name, each in solution.corrections.items()}
    return Run(tensors, scores, calibrated)


@torch.no_grad()
def layer_errors(calibrated: Calibrated, batches: Batches) -> dict[str, float]:
    """Sum the squared error of each linear layer's outputs on the inputs that it has in the
    float network.
    """
    rounded = calibrated.network()
    network = Network(calibrated.float_graph)
    nodes = [node for node in network.graph.nodes if node.op == "linear"]
    errors = {node.name: 0.0 for node in nodes}
    for batch in batches:
        given = batch.to(calibrated.original.device)
        execution = network.start(given.args, given.kwargs)
        for node in network.graph.nodes:
            if node.name in errors:
                arguments = layer_arguments(node, execution.values)
                wanted = network.layers[node.name](**arguments)
                error = rounded.layers[node.name](**arguments) - wanted
                errors[node.name] += float(error.double().square().sum())
            execution.step()
    return errors


GROUPS = {
    "dtype": "int4",
    "observer_cls": "PerGroupMinMaxObserver",
    "symmetric": True,
    "scale_type": "float",
    "round_method": "half_even",
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 32,
    "is_dynamic": False,
}


def algorithm(**settings: Any) -> dict[str, Any]:
    return {
        "global_quant_config": {"weight": GROUPS},
        "exclude": ["kind:embedding"],
        "algo_config": settings,
    }


CACHE = {
    "*.k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}},
    "*.v_proj": {"output_tensors": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1}},
}
POWERS = {"scale_type": "poweroftwo"}
LAYERED: dict[str, Any] = {
    "maxmin": document(overall={"symmetry": False}),
    "percentile": document(overall={"method": "percentile", "percentage": 99.9}),
    "mse": document(overall={"method": "mse"}),
    "entropy": document(overall={"method": "entropy"}),
    "diffs": document(overall={"method": "diffs"} | POWERS),
    "channels": document(
        tensor={"weights": {"per_channel": True}}, include_bias_corr=True, include_cle=True
    ),
}
HIERARCHICAL: dict[str, Any] = {
    "dynamic": "configs/dynamic_int8.json",
    "smoothquant": "configs/smoothquant_int8.json",
    "gptq": algorithm(name="gptq", desc_act=True, static_groups=True),
    "gptq with open groups": algorithm(name="gptq", desc_act=False, static_groups=False),
    "gptaq": algorithm(name="gptaq"),
    "qronos": algorithm(name="qronos"),
    "awq": algorithm(name="awq"),
    "rotation": algorithm(name="rotation"),
    "key_value_cache": {
        "global_quant_config": {"weight": {"dtype": "int8"}},
        "kv_cache_quant_config": CACHE,
        "kv_cache_group": list(CACHE),
    },
    "fp8_blocks": "configs/fp8_blocks.json",
    "nvfp4": "configs/nvfp4.json",
    "mxfp4": "configs/mxfp4.json",
}
