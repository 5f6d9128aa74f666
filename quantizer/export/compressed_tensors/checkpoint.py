"""Describes a compressed-tensors checkpoint: layers as codes, tensors as values, the config."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.wording import first_names
from quantizer.export.compressed_tensors.engine_layers import (
    Mixture,
    fused_names,
    group_targets,
    partial_block_remarks,
    with_shared_factors,
)
from quantizer.export.compressed_tensors.placement import (
    CodePlacement,
    place_codes,
    value_layers,
)
from quantizer.export.compressed_tensors.schemes import (
    INT8_CACHE_REMARK,
    CompressedCache,
    CompressedLayer,
    compressed_cache,
)
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Written
from quantizer.export.transformers_models import (
    cannot_store,
    model_of,
    parameter_values,
    without_codes,
)
from quantizer.graph.ir import Graph
from quantizer.graph.structure.transformer_parts import layers_behind_blocks
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.plan.model import TensorSpecs
from quantizer.sources.hugging_face.deferred_checkpoint import unused_tensors

TARGET_NAME = "compressed-tensors"
_MIXED_FORMAT = "mixed-precision"
# The format of a file in which only the key-value cache is quantized.
_FLOAT_FORMAT = "dense"
# The class that most layers have, which their group names.
_LINEAR_TARGET = "Linear"
# Samples, tokens and features.
_AXES_OF_TOKENS = 3
_NO_CODES_REMEDY = "quantize it with another scale_type"


class CheckpointExporter(Exporter[Written]):
    """Writes a folder like `save_pretrained`, with the calibration's codes as weights."""

    writes_folder = True

    def value_layers(self, graph: Graph, specs: TensorSpecs) -> tuple[str, ...]:
        """Return the embeddings and other layers that have no place for codes."""
        return value_layers(specs, place_codes(graph, specs))

    def plain_layers(self, graph: Graph) -> tuple[str, ...]:
        """Return the poolers and classifiers behind the blocks."""
        return layers_behind_blocks(graph)


@dataclass(frozen=True)
class CompressedCheckpoint:
    """What the files of a checkpoint hold.

    Attributes:
        layers: those stored as codes, by their paths.
        tensors: the model's, by name.
        linears: the paths of all linear layers, which readers would otherwise quantize.
        remarks: notes for the user.
        head: the path of the layer that makes the logits; empty if there is none.
        fused: the names by which engines know layers that they fuse, each with their paths.
        cache: the quantized key-value cache; None if it is float.
        unused: the tensors of the model's folder that the model does not use, by name.
    """

    layers: Mapping[str, CompressedLayer]
    tensors: Mapping[str, Tensor]
    linears: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    head: str = ""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cache: CompressedCache | None = None
    unused: Mapping[str, Tensor] = field(default_factory=dict)

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors of the files, by name."""
        tensors = dict(self.tensors)
        codes: dict[str, Tensor] = {}
        for path, layer in self.layers.items():
            tensors.pop(f"{path}.weight", None)
            for part, tensor in layer.tensors().items():
                codes[f"{path}.{part}"] = tensor
        scales = {} if self.cache is None else self.cache.scales
        return {**self.unused, **tensors, **codes, **scales}

    @property
    def is_weight_only(self) -> bool:
        """Return whether all inputs and the key-value cache stay float."""
        is_float = all(layer.input is None for layer in self.layers.values())
        return is_float and self.cache is None

    @property
    def schemes(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Return the distinct schemes, each with its layers, the most frequent first."""
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for path, layer in self.layers.items():
            _, paths = groups.setdefault(repr(layer.scheme), (layer.scheme, []))
            paths.append(path)
        return sorted(groups.values(), key=lambda group: -len(group[1]))

    def quantization_config(self) -> dict[str, Any]:
        """Return the field `quantization_config` of config.json.

        No layer is in two groups, as readers disagree on which of them counts. The status must
        be "compressed": with any other, transformers loads random weights without a warning.
        Each group has its format, as readers guess it otherwise.

        The class "Linear" is the target of a single group only: some engines look at classes
        before they look at the names of fused layers. A head is of another class in engines.
        """
        groups: dict[str, dict[str, Any]] = {}
        formats: set[str] = set()
        schemes = self.schemes
        for number, (scheme, paths) in enumerate(schemes):
            targets = [_LINEAR_TARGET]
            if len(schemes) > 1:
                fused = [name for name, parts in self.fused.items() if {*parts} <= {*paths}]
                targets = sorted([*group_targets(paths), *fused])
            elif self.head in paths:
                targets.append(self.head)
            groups[f"group_{number}"] = scheme | {"targets": targets}
            formats.add(scheme["format"])
        file_format = next(iter(formats), _FLOAT_FORMAT)
        if len(formats) > 1:
            file_format = _MIXED_FORMAT
        config: dict[str, Any] = {
            "quant_method": TARGET_NAME,
            "quantization_status": "compressed",
            "format": file_format,
            "config_groups": groups,
            "ignore": sorted(path for path in self.linears if path not in self.layers),
        }
        if self.cache is not None:
            config["kv_cache_scheme"] = self.cache.scheme
        return config


def checkpoint_of_network(
    deployment: Deployment, target: str = TARGET_NAME
) -> CompressedCheckpoint:
    """Return the checkpoint of a traced model. `target` stands for the exporter in messages.

    Raises:
        UsageError: algorithms or passes changed what the model has no place for, or a weight
            has no codes.
    """
    model = model_of(deployment, target)
    solution = deployment.encoded
    placement = place_codes(deployment.graph, solution.specs)
    network = deployment.network()
    layers: dict[str, CompressedLayer] = {}
    for name, node in placement.linears.items():
        weight = solution.tensors[name, "weights"]
        if weight.codes is None:
            raise without_codes(target, name, _NO_CODES_REMEDY)
        key = placement.inputs.get(name)
        layer = CompressedLayer(weight, None if key is None else solution.tensors[key])
        if node.scope in layers and not _is_equal(layers[node.scope], layer):
            why = f"{name} has other codes than another call of its module"
            raise cannot_store(target, why, "leave it out of the algorithms")
        layers[node.scope] = layer
    stacks = {
        node.params["weight"].partition("@")[0]: solution.tensors[name, "weights"]
        for name, node in placement.experts.items()
    }
    coded = {*placement.linears, *placement.experts}
    tensors = parameter_values(deployment, network, coded, target)
    remarks = [
        *float_remarks(solution.specs, placement),
        *_token_remarks(solution.specs, placement),
        *build_remarks(solution.specs, placement),
    ]
    cache = compressed_cache(deployment.graph, solution.tensors, model)
    if cache is not None and cache.spec.dtype == "int":
        remarks.append(INT8_CACHE_REMARK)
    checkpoint = complete_checkpoint(layers, tensors, remarks, model, deployment.graph)
    return with_experts(replace(checkpoint, cache=cache), model, stacks)


def complete_checkpoint(
    layers: Mapping[str, CompressedLayer],
    tensors: Mapping[str, Tensor],
    remarks: Iterable[str],
    model: nn.Module,
    graph: Graph,
) -> CompressedCheckpoint:
    """Return the checkpoint of a model without experts. Layers that are fused get one factor.

    Args:
        layers: those stored as codes, by their paths, each with factors of its own.
        tensors: the model's, by name.
        remarks: notes for the user.
        model: the float model.
        graph: of the model.
    """
    unused = unused_tensors(model)
    modules = model.named_modules(remove_duplicate=False)
    linears = [path for path, module in modules if isinstance(module, nn.Linear)]
    return CompressedCheckpoint(
        with_shared_factors(graph, layers),
        tensors,
        (*linears, *_matrices(unused)),
        (*remarks, *partial_block_remarks(graph, layers), *_plain_layer_remarks(graph, layers)),
        _head_of(model),
        fused_names(graph),
        unused=unused,
    )


def _plain_layer_remarks(graph: Graph, layers: Mapping[str, CompressedLayer]) -> Iterator[str]:
    """Yield a sentence on quantized layers that some engines build in float."""
    paths = [graph.by_name[name].scope for name in layers_behind_blocks(graph)]
    quantized = [path for path in paths if path in layers]
    if quantized:
        yield (
            f"vLLM builds {first_names(quantized)} in float, as poolers and classifiers behind "
            "the blocks of a model, and cannot load them quantized; exclude them for it"
        )


def with_experts(
    checkpoint: CompressedCheckpoint, model: nn.Module, stacks: Mapping[str, QuantizedTensor]
) -> CompressedCheckpoint:
    """Return the checkpoint of a mixture of experts, by the names that files have.

    Without quantized experts, names stay the model's, as readers do not look for codes there.

    Args:
        stacks: the quantized tensors of experts by path.

    Raises:
        UsageError: the format has no layout for the experts of this model.
    """
    if not stacks:
        return checkpoint
    mixture = Mixture(model)
    layers = {mixture.path(path): layer for path, layer in checkpoint.layers.items()}
    experts: dict[str, CompressedLayer] = {}
    for path, stack in stacks.items():
        if stack.codes is None:
            raise without_codes(TARGET_NAME, path, _NO_CODES_REMEDY)
        experts |= mixture.parts(path, stack)
    if len({repr(layer.scheme) for layer in experts.values()}) > 1:
        raise cannot_store(
            TARGET_NAME,
            "its experts have groups in some layers and whole rows in others",
            "choose a group_size that is less than all their inputs",
        )
    others = {name: value for name, value in checkpoint.tensors.items() if name not in stacks}
    linears = {*checkpoint.linears, *map(mixture.path, checkpoint.linears), *mixture.routers()}
    return replace(
        checkpoint,
        layers=layers | experts,
        tensors=mixture.stored_except_experts(others),
        linears=tuple(sorted(linears)),
    )


def float_remarks(specs: TensorSpecs, placement: CodePlacement) -> Iterator[str]:
    """Yield a sentence on layers whose quantized weights are not codes, if there are any."""
    layers = value_layers(specs, placement)
    if layers:
        yield (
            f"rounded, but stored as floats, which saves nothing: {first_names(layers)}; "
            "`exclude` keeps their accuracy"
        )


def build_remarks(specs: TensorSpecs, placement: CodePlacement) -> Iterator[str]:
    """Yield a sentence for each form that vLLM's CPU build has no kernels for.

    Source: vLLM 0.32, which refuses both when it loads a folder.
    """
    forms: dict[str, None] = {}
    for layer in placement.linears:
        weight = specs[layer, "weights"]
        key = placement.inputs.get(layer)
        is_byte = weight.dtype == "int" and weight.bit_width == 8
        if key is None and is_byte:
            forms["int8 weights with float inputs"] = None
        if key is not None and specs[key].dtype.startswith("fp8") and not specs[key].is_dynamic:
            forms["fp8 inputs with static scales"] = None
    for form in forms:
        yield (
            f"for vLLM on GPUs: its CPU build has no kernels for {form}, and refuses the folder"
        )


def _token_remarks(specs: TensorSpecs, placement: CodePlacement) -> Iterator[str]:
    """Yield a sentence on layers for whose tokens transformers does not find separate scales.

    It keeps the first two axes of an input, whatever the number of axes.
    """
    layers = [
        layer
        for layer, key in placement.inputs.items()
        if specs[key].is_dynamic
        and specs[key].qscheme == "per_token"
        and placement.linears[layer].rank != _AXES_OF_TOKENS
    ]
    if layers:
        yield (
            f"the inputs of {first_names(layers)} do not have {_AXES_OF_TOKENS} axes: "
            "transformers finds one scale for several tokens there, and engines one for each"
        )


def _matrices(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the paths of layers that engines may take for linear ones."""
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if part == "weight" and tensor.dim() == 2:
            yield path


def _head_of(model: nn.Module) -> str:
    """Return the path of the layer that makes a language model's logits; empty if none does."""
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    paths: dict[int, str] = {id(module): path for path, module in model.named_modules()}
    return paths.get(id(head), "")


def _is_equal(first: CompressedLayer, second: CompressedLayer) -> bool:
    """Return whether two calls of a module are quantized alike."""
    others = second.tensors()
    return first.scheme == second.scheme and all(
        torch.equal(others[name], value) for name, value in first.tensors().items()
    )
