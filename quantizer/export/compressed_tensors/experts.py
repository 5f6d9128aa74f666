"""The experts of a mixture as checkpoints hold them, each of its layers by itself, by the names
that engines know.

transformers says which names these are, and of which rows they are: it takes rows of numbers
apart as it does weights.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quantizer.export.compressed_tensors.schemes import CompressedLayer
from quantizer.export.model_tensors import unheld
from quantizer.graph.modules import is_of_experts
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.storage.deferred_tensor import derived

WEIGHT = ".weight"
PATTERN = r"re:.*\.experts\.\d+\..*"
"""The experts' layers, for readers that look for this word."""


@dataclass(frozen=True)
class Mixture:
    """A model of transformers with experts, and its names in checkpoints."""

    model: nn.Module

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model's state as files have them."""
        from transformers.core_model_loading import revert_weight_conversion  # needs the extra

        return dict(revert_weight_conversion(self.model, dict(tensors)))  # type: ignore[arg-type]

    def beside(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same, but for experts' tensors, which stay as they are."""
        inside = tuple(
            f"{path}." for path, module in self.model.named_modules() if is_of_experts(module)
        )
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(inside)}
        return own | self.stored(
            {name: tensor for name, tensor in tensors.items() if name not in own}
        )

    def path(self, path: str) -> str:
        """What files call a module with a weight."""
        [name] = self.stored({path + WEIGHT: torch.zeros(())})
        return name.removesuffix(WEIGHT)

    def parts(self, path: str, stack: QuantizedTensor) -> dict[str, CompressedLayer]:
        """The layers of the experts whose tensor stands at `path` in the model, by their paths
        in files.

        Raises:
            UsageError: files have it as one tensor, too.
        """
        module, _, name = path.rpartition(".")
        experts = self.model.get_submodule(module)
        count = len(experts.get_parameter(name))
        assert stack.codes is not None
        labels = torch.arange(len(stack.codes)).view(count, -1, 1)
        found = self.stored({path: labels})
        if any(at.dim() != 2 for at in found.values()):
            raise unheld(
                "compressed-tensors",
                f"there is no layout for {path}",
                "exclude it, or use --deploy pt2",
            )
        return {
            own.removesuffix(WEIGHT): CompressedLayer(_part(stack, at[:, 0], count))
            for own, at in found.items()
        }

    def routers(self) -> tuple[str, ...]:
        """The paths in files of modules with a matrix that are no linear layers here, and may
        be some in engines.
        """
        return tuple(
            self.path(path)
            for path, module in self.model.named_modules()
            if not isinstance(module, (nn.Linear, nn.Embedding))
            and getattr(module, "weight", torch.empty(0)).dim() > 1
        )


def targets(paths: Sequence[str]) -> list[str]:
    """What names layers in a config: one pattern stands for all experts, as readers know them
    by it.
    """
    return sorted(
        {PATTERN if re.fullmatch(PATTERN.removeprefix("re:"), path) else path for path in paths}
    )


def _part(stack: QuantizedTensor, rows: Tensor, experts: int) -> QuantizedTensor:
    """Some rows of a matrix, all of one expert."""
    codes, spec, at = stack.codes, stack.spec, rows
    assert codes is not None
    if spec.qscheme == "per_tensor":
        spec, at = replace(spec, group_size=None), rows[0] // (len(codes) // experts)
    own = derived(codes, (len(rows), codes.shape[1]), lambda whole: whole[rows])
    return replace(
        stack, spec=spec, scale=stack.scale[at], zero_point=stack.zero_point[at], codes=own
    )
