"""Let `torch.export` trace modules that it cannot trace as they are: some of `torch.nn`,
distributions, and rotations of transformers.

Rotations of the kind longrope, as in Phi-3 and Phi-4-mini, switch their frequencies at a
length. They write the frequencies of a call into a buffer. What is traced instead chooses
them in each call and keeps nothing, so that a graph has both sides of the switch.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules import transformer

_WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")
_SEARCH_OF_MASKS = "_detect_is_causal_mask"
"""The function with which layers of `nn.Transformer` recognize a causal mask."""
_LONGROPE = "longrope"
_ROTATION_UTILS = "transformers.modeling_rope_utils"
_FREQUENCIES = "inv_freq"


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
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module or a class of torch another attribute meanwhile."""
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def masks_are_not_searched() -> AbstractContextManager[None]:
    """Let the layers of `nn.Transformer` apply a mask without a look at its values.

    They compare it with a causal mask, to use a faster kernel. This branch on values stops
    `torch.export`. The result is the same without the comparison.
    """
    return replaced(transformer, _SEARCH_OF_MASKS, _hint_alone)


def _hint_alone(_mask: Any, is_causal: bool | None = None, _size: int | None = None) -> bool:
    """Return whether the caller says that the mask is causal."""
    return is_causal is True


def distributions_are_not_checked() -> AbstractContextManager[None]:
    """Let `torch.distributions` take parameters without a look at their values.

    They raise an error for values out of their domain. This branch on values stops
    `torch.export`. The model itself runs the first batch before, with the checks.
    """
    return replaced(Distribution, "_validate_args", False)


@contextmanager
def rotations_keep_nothing(module: nn.Module) -> Iterator[None]:
    """Replace `forward` of such rotations meanwhile."""
    replaced: list[nn.Module] = []
    if _ROTATION_UTILS in sys.modules:
        for part in module.modules():
            if _switches(part):
                vars(part)["forward"] = _forward_of(part)
                replaced.append(part)
    try:
        yield
    finally:
        for part in replaced:
            del vars(part)["forward"]


def _switches(part: nn.Module) -> bool:
    kinds: Any = getattr(part, "rope_type", None)
    if isinstance(kinds, dict):
        return _LONGROPE in kinds.values()
    return bool(kinds == _LONGROPE)


def _forward_of(part: nn.Module) -> Callable[..., Any]:
    """Return the `forward` of a rotation without its decorators."""
    undecorated = inspect.unwrap(type(part).forward)

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        kind = part.rope_type
        named: dict[str, str] = {}
        if layer_type is not None:
            kind = part.rope_type[layer_type]  # type: ignore[index]
            named["layer_type"] = layer_type
        if kind != _LONGROPE:
            return undecorated(part, x, position_ids, **named)
        view = _WithFrequencies(part, _frequencies(part, position_ids, named))
        return undecorated(view, x, position_ids, **named)

    return forward


def _frequencies(part: Any, positions: Tensor, named: dict[str, str]) -> dict[str, Tensor]:
    """Return the frequencies for the positions of a call, by the name of their attribute."""
    settings = part.config.rope_parameters
    prefix = ""
    for layer_type in named.values():
        settings = settings[layer_type]
        prefix = f"{layer_type}_"
    switch = settings["original_max_position_embeddings"]
    find = importlib.import_module(_ROTATION_UTILS).ROPE_INIT_FUNCTIONS[_LONGROPE]
    of_long_texts, _ = find(part.config, positions.device, seq_len=switch + 1, **named)
    name = f"{prefix}{_FREQUENCIES}"
    of_short_texts = getattr(part, f"{prefix}original_{_FREQUENCIES}")
    is_long = positions.max() + 1 > switch
    return {name: torch.where(is_long, of_long_texts, of_short_texts)}


class _WithFrequencies:
    """Stands for a rotation with other frequencies."""

    def __init__(self, part: nn.Module, frequencies: dict[str, Tensor]) -> None:
        self._part = part
        self._frequencies = frequencies

    def __getattr__(self, name: str) -> Any:
        if name in self._frequencies:
            return self._frequencies[name]
        return getattr(self._part, name)
