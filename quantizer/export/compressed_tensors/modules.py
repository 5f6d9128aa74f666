"""The checkpoint in compressed-tensors of a model that was quantized in place, read off its
modules.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from quantizer.calibration.module_attach import role_in_module
from quantizer.calibration.module_target import evaluating
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import parameter_role
from quantizer.errors import ModelError, UsageError
from quantizer.export import Refusal, refuse, require_extras
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import (
    NAME,
    Checkpoint,
    linears_of,
    remarks,
    with_experts,
)
from quantizer.export.compressed_tensors.placement import INSERTED, Placement, place
from quantizer.export.compressed_tensors.schemes import CompressedLayer
from quantizer.export.deployment import tensor_leaves
from quantizer.export.hugging_face_folder import described
from quantizer.export.model_tensors import state_of
from quantizer.graph.ir import Node
from quantizer.graph.modules import as_planned, key_in_module, module_graph, parameters_of
from quantizer.nn.inplace import InPlace
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.plan.model import Key
from quantizer.sources.batches import Batch
from quantizer.sources.hugging_face import without_cache

UNKNOWN_LOSS_DB = 23.0
"""What quantization is taken to cost where there is no float model to compare with."""


def export_modules(model: nn.Module, folder: Path, batches: Iterable[Batch]) -> Verification:
    """Write the checkpoint and verify it with calls of the model; see
    `compressed_tensors.export`.

    Args:
        batches: of calls; at least one.

    Raises:
        ModelError: the model has no quantized layer.
        UsageError: the format cannot say how a layer is quantized, or the model has no config
            of transformers.
        VerificationError: transformers does not give the model's outputs.
        ResultError: the folder cannot be written.
    """
    require_extras([NAME])
    from quantizer.export.compressed_tensors.exporter import write_verified  # needs the extra
    from quantizer.export.transformers_verify import Expected

    checkpoint = of_modules(model)
    described(model)

    def calls() -> Iterator[Expected]:
        device = next(model.parameters()).device
        for batch in batches:
            there, here = batch.to(device), batch.to("cpu")
            outputs = [leaf.cpu() for leaf in tensor_leaves(model(*there.args, **there.kwargs))]
            yield Expected(here.args, here.kwargs, outputs)

    with evaluating(model), without_cache(model):
        return write_verified(checkpoint, model, folder, calls(), UNKNOWN_LOSS_DB)


def of_modules(model: nn.Module) -> Checkpoint:
    """The checkpoint of a model with quantized layers.

    Raises:
        ModelError: it has none.
        UsageError: the format cannot say how one is quantized.
    """
    quantized = {
        path: module for path, module in model.named_modules() if isinstance(module, InPlace)
    }
    if not quantized:
        raise ModelError(
            "the model has no quantized layer",
            help="call ModelQuantizer(config).quantize_model first",
        )
    graph = module_graph(model)
    owned = [(node, parameter_role(key)) for node in graph.nodes for key in node.params]
    named = {
        (node.scope, role_in_module(node, role)): (node.name, role) for node, role in owned
    }
    first = {node.scope: node.name for node, _ in owned}
    specs: dict[Key, QuantizationSpec] = {
        named.get((path, role), (first[path], role)): quantizer.spec
        for path, module in quantized.items()
        for role, quantizer in module.quantizers.items()
        if isinstance(quantizer, TensorQuantizer)
    }
    placement = place(graph, specs)
    refuse(NAME, [*_unheld(quantized), *placement.refusals])
    layers = {
        node.scope: _layer(quantized[node.scope], name, placement)
        for name, node in placement.linears.items()
    }
    own = tuple(f"{path}.quantizers." for path in quantized)
    tensors = {
        name: tensor for name, tensor in state_of(model).items() if not name.startswith(own)
    }
    stacks = dict(_stack(quantized[node.scope], node) for node in placement.experts.values())
    return with_experts(
        Checkpoint(layers, tensors, linears_of(model), remarks(specs, placement)), model, stacks
    )


def _unheld(quantized: dict[str, InPlace]) -> Iterator[Refusal]:
    """What algorithms have put into modules."""
    for path, module in quantized.items():
        if "input_layers" in module._modules:
            yield Refusal(*INSERTED, path)
        if "has_added_bias" in vars(module):
            yield Refusal("has a bias now that the model has no place for", INSERTED[1], path)


def _stack(module: InPlace, node: Node) -> tuple[str, QuantizedTensor]:
    """The path of a tensor of experts, and its codes and scales."""
    key, path = key_in_module(node, "weight"), node.params["weight"].partition("@")[0]
    quantizer = module.quantizers[parameter_role(key)]
    assert isinstance(quantizer, TensorQuantizer)
    return path, quantizer.tensor.encoded(
        as_planned(module, key, module.get_parameter(parameters_of(module)[key]))
    )


def _layer(module: InPlace, name: str, placement: Placement) -> CompressedLayer:
    """Its quantizers' work as codes and scales.

    Raises:
        UsageError: no codes give the weight back.
    """
    tensors = {
        role: q.tensor
        for role, q in module.quantizers.items()
        if isinstance(q, TensorQuantizer)
    }
    weight = tensors["weights"].encoded(module.get_parameter("weight"))
    if weight.codes is None:
        raise UsageError(
            f"no codes give the weight of {name} back exactly: it was changed after it was "
            "quantized",
            help="export the model as quantize_model returned it",
        )
    return CompressedLayer(weight, tensors.get("input") if name in placement.inputs else None)
