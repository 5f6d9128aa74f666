"""The compressed-tensors checkpoint of a model that was quantized in place."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import nn

from quantizer.calibration.changed_modules import role_in_module
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import parameter_role
from quantizer.errors import UsageError
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import (
    TARGET_NAME,
    CompressedCheckpoint,
    build_remarks,
    complete_checkpoint,
    float_remarks,
    with_experts,
)
from quantizer.export.compressed_tensors.placement import CodePlacement, place_codes
from quantizer.export.compressed_tensors.schemes import CompressedLayer
from quantizer.export.deployment import tensor_leaves
from quantizer.export.exporter import Refusal, new_files
from quantizer.export.hugging_face_folder import model_config
from quantizer.export.model_tensors import INSERTION_REASON, quantized_layers, state_of
from quantizer.export.refusals import refuse, require_extras
from quantizer.graph.ir import Graph, Node
from quantizer.graph.modules import as_planned, key_in_module, module_graph, parameters_of
from quantizer.nn.inplace import InPlace
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer
from quantizer.plan.model import Key
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import evaluating, without_cache

# What quantization is assumed to cost where there is no float model to compare with.
UNKNOWN_LOSS_DB = 23.0


def export_modules(model: nn.Module, folder: Path, batches: Iterable[Batch]) -> Verification:
    """Write the checkpoint and verify it with calls of the model.

    Args:
        batches: of calls; at least one.

    Raises:
        ModelError: the model has no quantized layer.
        UsageError: the format cannot say how a layer is quantized, or the model has no config
            of transformers.
        VerificationError: transformers does not give the model's outputs.
        ResultError: the folder cannot be written.
    """
    require_extras([TARGET_NAME])
    # These modules need the extra.
    from quantizer.export.compressed_tensors.exporter import (
        CompressedTensorsExporter,
        verified_folder,
        written_folder,
    )
    from quantizer.export.transformers_verify import ExpectedCall

    checkpoint = _checkpoint_of_modules(model)
    model_config(model)

    def calls() -> Iterator[ExpectedCall]:
        """Yield each batch on the CPU, with the outputs of the model for it."""
        device = next(model.parameters()).device
        for batch in batches:
            on_device = batch.to(device)
            on_cpu = batch.to("cpu")
            leaves = tensor_leaves(model(*on_device.args, **on_device.kwargs))
            outputs = [leaf.cpu() for leaf in leaves]
            yield ExpectedCall(on_cpu.args, on_cpu.kwargs, outputs)

    exporter = CompressedTensorsExporter()
    with evaluating(model), without_cache(model), new_files(exporter, folder, model) as new:
        written = written_folder(checkpoint, model, new)
        return verified_folder(written, calls(), UNKNOWN_LOSS_DB)


def _checkpoint_of_modules(model: nn.Module) -> CompressedCheckpoint:
    """Return the checkpoint of a model with quantized layers.

    Raises:
        ModelError: it has none.
        UsageError: the format cannot say how one is quantized.
    """
    quantized = quantized_layers(model)
    graph = module_graph(model)
    specs = _specs(graph, quantized)
    placement = place_codes(graph, specs)
    refuse(f"<--deploy {TARGET_NAME}>", [*_insertion_refusals(quantized), *placement.refusals])
    layers = {
        node.scope: _layer(quantized[node.scope], name, placement)
        for name, node in placement.linears.items()
    }
    prefixes = tuple(f"{path}.quantizers." for path in quantized)
    state = state_of(model).items()
    tensors = {name: tensor for name, tensor in state if not name.startswith(prefixes)}
    stacks = {
        node.params["weight"].partition("@")[0]: _stack(quantized[node.scope], node)
        for node in placement.experts.values()
    }
    remarks = [*float_remarks(specs, placement), *build_remarks(specs, placement)]
    return with_experts(
        complete_checkpoint(layers, tensors, remarks, model, graph), model, stacks
    )


def _specs(graph: Graph, quantized: Mapping[str, InPlace]) -> dict[Key, QuantizationSpec]:
    """Return the specs of the modules' quantizers, by the keys of their nodes in the graph."""
    keys: dict[Key, Key] = {}
    names: dict[str, str] = {}
    for node in graph.nodes:
        for parameter in node.params:
            role = parameter_role(parameter)
            keys[node.scope, role_in_module(node, role)] = (node.name, role)
            names[node.scope] = node.name
    return {
        keys.get((path, role), (names[path], role)): quantizer.spec
        for path, module in quantized.items()
        for role, quantizer in module.quantizers.items()
        if isinstance(quantizer, TensorQuantizer)
    }


def _insertion_refusals(quantized: Mapping[str, InPlace]) -> Iterator[Refusal]:
    """Yield a refusal for what algorithms have put into modules."""
    for path, module in quantized.items():
        if "input_layers" in module._modules:
            yield Refusal(*INSERTION_REASON, path)
        if "has_added_bias" in vars(module):
            yield Refusal(
                "has a bias now that the model has no place for", INSERTION_REASON[1], path
            )


def _stack(module: InPlace, node: Node) -> QuantizedTensor:
    """Return a tensor of experts with codes."""
    key = key_in_module(node, "weight")
    quantizer = module.quantizers[parameter_role(key)]
    assert isinstance(quantizer, TensorQuantizer)
    parameter = module.get_parameter(parameters_of(module)[key])
    return quantizer.tensor.encoded(as_planned(module, key, parameter))


def _layer(module: InPlace, name: str, placement: CodePlacement) -> CompressedLayer:
    """Return a layer with codes and scales.

    Raises:
        UsageError: no codes give the weight back.
    """
    tensors = {
        role: quantizer.tensor
        for role, quantizer in module.quantizers.items()
        if isinstance(quantizer, TensorQuantizer)
    }
    weight = tensors["weights"].encoded(module.get_parameter("weight"))
    if weight.codes is None:
        raise UsageError(
            f"no codes give the weight of {name} back exactly: it was changed after it was "
            "quantized",
            help="export the model as quantize_model returned it",
        )
    return CompressedLayer(weight, tensors.get("input") if name in placement.inputs else None)
