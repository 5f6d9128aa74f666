"""The experts of a mixture as checkpoints hold them: each layer by itself, by engines' names.

transformers knows these names, and which rows belong to each. It takes rows of numbers apart in
the same way as weights.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.export.compressed_tensors.schemes import CompressedLayer
from quantizer.export.model_tensors import cannot_store, family_of
from quantizer.graph.ir import Node
from quantizer.graph.modules import is_of_experts
from quantizer.nn.quantized_tensor import QuantizedTensor
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
