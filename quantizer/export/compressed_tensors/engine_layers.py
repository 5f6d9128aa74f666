"""The layers that engines hold in another way than a model: experts and fused layers.

A checkpoint has each layer of an expert by itself, by engines' names. transformers knows these
names, and which rows belong to each. It takes rows of numbers apart in the same way as weights.

Source of what is fused: vLLM and SGLang, July to November 2026. They build query, key and value
as one layer with one scheme, and take the largest `weight_global_scale` for all of its rows.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.wording import first_names
from quantizer.export.compressed_tensors.schemes import NVFP4_FORMAT, CompressedLayer
from quantizer.export.exporter import Refusal
from quantizer.export.limits import is_symmetric
from quantizer.export.transformers_models import cannot_store, family_of
from quantizer.graph.ir import Graph, Node
from quantizer.graph.modules import is_of_experts
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.two_level import split_global
from quantizer.plan.joining.tied_scales import fused_layers
from quantizer.plan.model import Key, TensorSpecs
from quantizer.storage.deferred_tensor import apply_deferred

_WEIGHT = ".weight"
# The operation of a reader that makes one tensor of the layers of all experts.
_STACKING = "MergeModulelist"
# Readers recognize the layers of experts by this word.
_EXPERT_PATTERN = r"re:.*\.experts\.\d+\..*"


@dataclass(frozen=True)
class Mixture:
    """A model of transformers with experts, and its names in checkpoints."""

    model: nn.Module

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the model's state with the names and shapes that files have."""
        # The module needs the extra.
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.model, dict(tensors)))  # type: ignore[arg-type]

    def stored_except_experts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `stored` returns, but leave the tensors of experts as they are."""
        modules = self.model.named_modules()
        prefixes = tuple(f"{path}." for path, module in modules if is_of_experts(module))
        experts = {name: tensors[name] for name in tensors if name.startswith(prefixes)}
        others = {name: tensors[name] for name in tensors if name not in experts}
        return experts | self.stored(others)

    def path(self, path: str) -> str:
        """Return the name in files of a module with a weight."""
        [name] = self.stored({path + _WEIGHT: torch.zeros(())})
        return name.removesuffix(_WEIGHT)

    def parts(self, path: str, stack: QuantizedTensor) -> dict[str, CompressedLayer]:
        """Return the layers of the experts whose tensor is at `path`, by their paths in files.

        Raises:
            UsageError: files have it as one tensor, too.
        """
        module, _, name = path.rpartition(".")
        count = len(self.model.get_submodule(module).get_parameter(name))
        assert stack.codes is not None
        row_numbers = torch.arange(len(stack.codes)).view(count, -1, 1)
        layers: dict[str, CompressedLayer] = {}
        for part_name, rows in self.stored({path: row_numbers}).items():
            if rows.dim() != 2:
                raise cannot_store(
                    "compressed-tensors",
                    f"there is no layout for {path}",
                    "exclude it, or use <--deploy pt2>",
                )
            part = _part(stack, rows[:, 0], count)
            layers[part_name.removesuffix(_WEIGHT)] = CompressedLayer(part)
        return layers

    def routers(self) -> tuple[str, ...]:
        """Return the paths in files of modules with a matrix that are not linear layers here.

        Engines may implement them as linear layers.
        """
        paths: list[str] = []
        for path, module in self.model.named_modules():
            weight = getattr(module, "weight", torch.empty(0))
            if weight.dim() > 1 and not isinstance(module, (nn.Linear, nn.Embedding)):
                paths.append(self.path(path))
        return tuple(paths)


def are_stored_as_one(node: Node) -> bool:
    """Return whether the files of a model's family have its experts as one tensor.

    Without the package transformers, or for classes of other packages, that is not known.
    """
    family = family_of(node)
    if not family or find_spec("transformers") is None:
        return False
    # The modules need the extra.
    from transformers import CONFIG_MAPPING
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    conversions: Any = get_checkpoint_conversion_mapping(family)  # type: ignore[no-untyped-call]
    if conversions is None:
        return family in CONFIG_MAPPING
    operations = [getattr(conversion, "operations", ()) for conversion in conversions]
    names = {type(operation).__name__ for operation in chain.from_iterable(operations)}
    return _STACKING not in names


def group_targets(paths: Sequence[str]) -> list[str]:
    """Return what names layers in a config; one pattern stands for all experts."""
    pattern = re.compile(_EXPERT_PATTERN.removeprefix("re:"))
    return sorted({_EXPERT_PATTERN if pattern.fullmatch(path) else path for path in paths})


def _part(stack: QuantizedTensor, rows: Tensor, experts: int) -> QuantizedTensor:
    """Return some rows of a stack, all of one expert."""
    codes, spec = stack.codes, stack.spec
    assert codes is not None
    scale_rows = rows
    if spec.qscheme == "per_tensor":
        spec = replace(spec, group_size=None)
        scale_rows = rows[0] // (len(codes) // experts)
    shape = (len(rows), codes.shape[1])
    return replace(
        stack,
        spec=spec,
        scale=stack.scale[scale_rows],
        zero_point=stack.zero_point[scale_rows],
        codes=apply_deferred(codes, shape, lambda whole: whole[rows]),
    )


_ENGINE_NAMES = {
    frozenset({"q_proj", "k_proj", "v_proj"}): "qkv_proj",
    frozenset({"gate_proj", "up_proj"}): "gate_up_proj",
    frozenset({"q_a_proj", "kv_a_proj_with_mqa"}): "fused_qkv_a_proj",
}
_WHOLE_BLOCKS = (
    "vLLM and SGLang fuse these layers with others, and refuse blocks of rows of two layers; "
    "transformers loads them"
)
_HELP = "quantize the layers alike, or exclude all of them"
_OTHER_FACTORS = "calibrate again: this version gives them one factor"


def fused_refusals(
    graph: Graph, specs: TensorSpecs, linears: Mapping[str, Node], inputs: Mapping[str, Key]
) -> Iterator[Refusal]:
    """Yield a refusal for each layer that an engine fuses with one of another scheme.

    Args:
        graph: the network.
        specs: of all quantized tensors.
        linears: the layers whose weights become codes.
        inputs: the key of the tensor that each of them quantizes as its input.
    """
    for group in fused_layers(graph):
        coded = {layer: _words(specs, inputs, layer) for layer in group if layer in linears}
        if not coded:
            continue
        first = next(iter(coded))
        path = graph.by_name[first].scope
        for layer in group:
            why = f"has another scheme than {path}"
            if layer not in coded:
                why = f"stays float, unlike {path}"
            if coded.get(layer) != coded[first]:
                yield Refusal(f"{why}, and engines fuse both", _HELP, layer, "weights")


def with_shared_factors(
    graph: Graph, layers: Mapping[str, CompressedLayer]
) -> dict[str, CompressedLayer]:
    """Return the layers, where those of nvfp4 that engines fuse have one factor.

    Args:
        graph: the network.
        layers: by path.

    Raises:
        UsageError: no factor gives the scales of fused layers.
    """
    shared = dict(layers)
    for group in fused_layers(graph):
        scopes = [graph.by_name[name].scope for name in group]
        coded = [path for path in scopes if path in layers]
        paths = [path for path in coded if layers[path].format == NVFP4_FORMAT]
        if len(paths) < 2:
            continue
        scales = [layers[path].weight.scale.flatten() for path in paths]
        codes_and_factor = split_global(torch.cat(scales))
        if codes_and_factor is None:
            names = ", ".join(path.rpartition(".")[2] for path in paths)
            why = f"{names} of {paths[0].rpartition('.')[0]} have no common global scale"
            raise cannot_store("compressed-tensors", why, _OTHER_FACTORS)
        for path in paths:
            shared[path] = replace(layers[path], global_scale=codes_and_factor[1])
    return shared


def partial_block_remarks(graph: Graph, layers: Mapping[str, CompressedLayer]) -> Iterator[str]:
    """Yield a sentence on fused layers that end within a block, if there are any: the blocks
    of the next layer would begin there.
    """
    cut: list[str] = []
    for name in chain.from_iterable(fused_layers(graph)):
        node = graph.by_name[name]
        if node.scope in layers:
            spec = layers[node.scope].weight.spec
            rows = graph.weight(node).shape[0]
            if spec.qscheme == "per_block" and rows % (spec.group_size or 1):
                cut.append(node.scope)
    if cut:
        yield f"{first_names(cut)} end within a block: {_WHOLE_BLOCKS}"


def fused_names(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the paths that engines give to fused layers, each with the paths of its parts."""
    names: dict[str, tuple[str, ...]] = {}
    for group in fused_layers(graph):
        paths = tuple(graph.by_name[layer].scope for layer in group)
        parent = paths[0].rpartition(".")[0]
        parts = frozenset(path.rpartition(".")[2] for path in paths)
        if parts in _ENGINE_NAMES:
            prefix = f"{parent}." if parent else ""
            names[prefix + _ENGINE_NAMES[parts]] = paths
    return names


def _words(specs: TensorSpecs, inputs: Mapping[str, Key], layer: str) -> list[object]:
    """Return what must be equal in layers that an engine fuses."""
    words: list[object] = []
    for key in ((layer, "weights"), inputs.get(layer)):
        if key is not None:
            spec = specs[key]
            words += [spec.dtype, spec.bit_width, is_symmetric(spec), spec.is_dynamic]
            words += [spec.qscheme, spec.group_size, spec.scale_type]
    return words
