"""Let `torch.export` trace modules of `torch.nn` and distributions that it cannot trace as they
are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributions import Distribution
from torch.nn.modules import transformer

_WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")
_SEARCH_OF_MASKS = "_detect_is_causal_mask"
"""The function with which layers of `nn.Transformer` recognize a causal mask."""


@contextmanager
def recurrent_weights_restored(module: nn.Module) -> Iterator[None]:
    """Restore the recurrent layers' lists of weights at the end.

    torch 2.8 leaves fake tensors in these lists, and then the layers cannot compute.
    """
    lists: list[tuple[dict[str, Any], str, list[Any]]] = []
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            attributes = vars(child)
            for name in attributes.keys() & _WEIGHT_LISTS:
                lists.append((attributes, name, [*attributes[name]]))
    try:
        yield
    finally:
        for attributes, name, weights in lists:
            attributes[name] = weights


@contextmanager
def masks_are_not_searched() -> Iterator[None]:
    """Let the layers of `nn.Transformer` apply a mask without a look at its values.

    They compare it with a causal mask, to use a faster kernel. This branch on values stops
    `torch.export`. The result is the same without the comparison.
    """
    search = getattr(transformer, _SEARCH_OF_MASKS, None)
    if search is None:
        yield
        return
    setattr(transformer, _SEARCH_OF_MASKS, _hint_alone)
    try:
        yield
    finally:
        setattr(transformer, _SEARCH_OF_MASKS, search)


def _hint_alone(_mask: Any, is_causal: bool | None = None, _size: int | None = None) -> bool:
    """Return whether the caller says that the mask is causal."""
    return is_causal is True


@contextmanager
def distributions_are_not_checked() -> Iterator[None]:
    """Let `torch.distributions` take parameters without a look at their values.

    They raise an error for values out of their domain. This branch on values stops
    `torch.export`. The model itself runs the first batch before, with the checks.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
