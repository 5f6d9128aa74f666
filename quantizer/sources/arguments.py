"""Which arguments of `forward` the tensors of a batch fill, and whether the last of them is the
target instead.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from quantizer.errors import DataError

TARGET_NAMES = ("y", "target", "label", "labels")
_ANY = 1 << 30
_NO_TENSOR = re.compile(r"\b(bool|int|float|str)\b")


@dataclass(frozen=True)
class Arguments:
    """What `forward` takes.

    Args:
        names: its positional parameters, and how many of them are `required`.
        tensors: how many of them, from the first on, may be tensors and are no labels.
        most: how many it takes by position.
        takes_labels: whether it names labels, so that targets have a place of their own.
        known: the names of all its parameters.
    """

    names: tuple[str, ...] = ()
    required: int = 1
    tensors: int = 1
    most: int = _ANY
    takes_labels: bool = False
    known: frozenset[str] = frozenset()

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of targets in dicts and files: those that are no inputs which `forward`
        needs.
        """
        return tuple(name for name in TARGET_NAMES if name not in self.names[: self.required])

    @property
    def needed(self) -> int:
        """How many inputs there are at least."""
        return max(1, self.required)

    def has_target(self, item: Sequence[Any]) -> bool:
        """Whether the last element of a tuple is the target.

        It is where the tuple has one element more than `forward` needs, or can take. A model
        that needs none of several, as those of transformers, takes it as an argument, unless it
        looks like a target: a value for each sample, or for each token of a model that has
        labels.

        Raises:
            DataError: the tuple has too few elements, or too many.
        """
        count = len(item)
        if self.required == 0 and self.needed < count <= self.tensors:
            return self._is_target(item)
        if count > self.needed and count in (self.needed + 1, self.tensors + 1):
            return True
        if self.needed <= count <= self.most:
            return False
        wanted = (
            str(self.needed) if self.needed == self.most else f"{self.needed} to {self.most}"
        )
        raise DataError(
            f"has {count} elements, but the model takes {wanted} inputs (and one target may "
            "follow)"
        )

    def _is_target(self, item: Sequence[Any]) -> bool:
        first, last = item[0], item[-1]
        if isinstance(first, Mapping):
            return len(item) == 2
        if not isinstance(last, Tensor) or is_one_per_sample(last):
            return len(item) == 2 or self.takes_labels
        integers = isinstance(first, Tensor) and not (
            first.is_floating_point() or last.is_floating_point()
        )
        return self.takes_labels and integers and first.shape == last.shape


UNKNOWN = Arguments()
"""Of a model that does not say: one input, and any others beside it."""


def arguments_of(module: nn.Module | None) -> Arguments:
    """What `module.forward` takes."""
    if module is None:
        return UNKNOWN
    parameters = inspect.signature(module.forward).parameters.values()
    known = frozenset(p.name for p in parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return Arguments(known=known)
    positional = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    others = (
        at
        for at, p in enumerate(positional)
        if p.default is not p.empty and not _may_be_tensor(p)
    )
    return Arguments(
        names=tuple(p.name for p in positional),
        required=sum(p.default is p.empty for p in positional),
        tensors=next(others, len(positional)),
        most=len(positional),
        takes_labels=any(
            p.name in TARGET_NAMES for p in parameters if p.default is not p.empty
        ),
        known=known,
    )


def _may_be_tensor(parameter: inspect.Parameter) -> bool:
    """Whether a parameter with a default may be given a tensor that is no label."""
    annotated = "" if parameter.annotation is parameter.empty else str(parameter.annotation)
    others = _NO_TENSOR.search(annotated) and "Tensor" not in annotated
    return parameter.default is None and not others and parameter.name not in TARGET_NAMES


def is_one_per_sample(tensor: Tensor) -> bool:
    """Whether there is one value for each sample, as class labels are."""
    return tensor.dim() < 2 or tensor.shape[1:].numel() == 1


@dataclass(frozen=True)
class Filled:
    """The arguments of `forward` that a batch fills.

    Args:
        arguments: their names.
        target: whether there is a target besides.
        passed_over: the argument that the target might have been, "" if there is none.
        doubtful: whether the target does not look like one.
        left_out: names of other tensors, for which `forward` has no argument.
    """

    arguments: tuple[str, ...]
    target: bool = False
    passed_over: str = ""
    doubtful: bool = False
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All but whether it is doubtful."""
        return {name: value for name, value in asdict(self).items() if name != "doubtful"}

    def __str__(self) -> str:
        """In words; "" where there is one input and nothing to choose."""
        unfilled = ", ".join(filter(None, (self.passed_over, *self.left_out)))
        fills = f"batches fill {', '.join(self.arguments)} of forward()" + (
            f", not {unfilled}" if unfilled else ""
        )
        is_plain = len(self.arguments) == 1 and not unfilled
        if not self.target:
            return "" if is_plain else fills
        what = "(input, target) pairs" if is_plain else f"{fills}, and have a target"
        doubt = (
            "; if it is an input, give dicts, which name what they fill"
            if self.doubtful
            else ""
        )
        return f"{what}; calibration ignores the targets{doubt}"


def filled(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Tensor | None, given: Arguments
) -> Filled:
    """What a call fills of the arguments that `forward` takes."""
    named = (
        *given.names[: len(args)],
        *(f"argument {at}" for at in range(len(given.names), len(args))),
        *kwargs,
    )
    free = given.names[len(args) : given.tensors]
    if target is None or kwargs or not free:
        return Filled(named, target is not None)
    return Filled(named, True, free[0], doubtful=not is_one_per_sample(target))
