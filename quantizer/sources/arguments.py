"""The arguments of `forward`: which of them the tensors of a batch fill, whether the last
tensor is the target, which positions are padding, and inputs of other shapes.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.config.wording import closest_word, counted
from quantizer.errors import BatchError, DataError

DEFAULT_SEQ_LEN = 512
"""Tokens of a sample of text."""
MASK = "attention_mask"
_TEXT_PREFIXES = ("decoder_", "encoder_", "")
"""How the names of the arguments of one text begin. The empty one is for all other names."""
InputShapes = Sequence[Sequence[int | None] | None]
"""The shape of each input, with None for the batch size. An input that is not a tensor is None.
"""
TARGET_NAMES = ("y", "target", "label", "labels")
_UNLIMITED = 1 << 30
_NO_TENSOR = re.compile(r"\b(bool|int|float|str)\b")


@dataclass(frozen=True)
class Arguments:
    """The arguments that `forward` takes.

    Args:
        names: its positional parameters.
        required: how many of them have no default.
        tensors: how many of them, from the first on, may be tensors and are not labels.
        most: how many arguments it takes by position.
        takes_labels: whether it has a parameter for labels.
        known: the names of all its parameters.
        takes_any: whether it takes keyword arguments of any name.
    """

    names: tuple[str, ...] = ()
    required: int = 1
    tensors: int = 1
    most: int = _UNLIMITED
    takes_labels: bool = False
    known: frozenset[str] = frozenset()
    takes_any: bool = True

    def require(self, names: Sequence[str]) -> None:
        """Raise `BatchError` if a dict with these keys does not fill the arguments."""
        if self.takes_any or not names:
            return
        taken = ", ".join(self.names)
        for name in names:
            if name in self.known:
                continue
            remedy = f"forward() of the model takes {taken}"
            near = closest_word(name, self.names)
            if near is not None:
                remedy = f"did you mean {near}? {remedy}"
            raise BatchError(
                f"has the key {name!r}, which the model does not take", help=remedy
            )
        for name in self.names[: self.required]:
            if name not in names:
                raise BatchError(
                    f"lacks the key {name!r}, which the model needs",
                    help=f"forward() of the model takes {taken}",
                )

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the keys that mean a target in dicts and files. A name that `forward` requires
        is an input instead.
        """
        required = self.names[: self.required]
        return tuple(name for name in TARGET_NAMES if name not in required)

    @property
    def needed(self) -> int:
        """Return the least number of inputs."""
        return max(1, self.required)

    def has_target(self, item: Sequence[Any]) -> bool:
        """Return whether the last element of a tuple is the target.

        If `forward` requires arguments, the last element is the target if the tuple has one
        element more than `forward` requires, or than it can take. Models of transformers
        require none of their inputs. For them the last element is the target if it looks like
        one: a value for each sample or, if the model takes labels, a value for each token.

        Raises:
            BatchError: the tuple has too few or too many elements.
        """
        count = len(item)
        if self.required == 0 and 1 < count <= self.tensors:
            return self._is_target(item)
        if count > self.needed and count in (self.needed + 1, self.tensors + 1):
            return True
        if self.needed <= count <= self.most:
            return False
        wanted = f"{self.needed} to {self.most} inputs"
        if self.most == _UNLIMITED:
            wanted = f"at least {counted(self.needed, 'input')}"
        elif self.needed == self.most:
            wanted = counted(self.needed, "input")
        elements = counted(count, "element")
        taken = ", ".join(self.names)
        raise BatchError(
            f"has {elements}, but the model takes {wanted} (and one target may follow)",
            help=f"forward() of the model takes {taken}; a dict leaves no doubt, and samples "
            "are stacked to one tensor",
        )

    def _is_target(self, item: Sequence[Any]) -> bool:
        """Return whether the last element of a tuple looks like a target."""
        first = item[0]
        last = item[-1]
        is_pair = len(item) == 2
        if isinstance(first, Mapping):
            return is_pair
        if not isinstance(last, Tensor) or is_one_per_sample(last):
            return is_pair or self.takes_labels
        if not self.takes_labels or not isinstance(first, Tensor):
            return False
        is_floating = first.is_floating_point() or last.is_floating_point()
        return not is_floating and first.shape == last.shape


UNKNOWN_ARGUMENTS = Arguments()
"""The arguments of an unknown model: one input, and any number of others."""


def arguments_of(module: nn.Module | None) -> Arguments:
    """Return the arguments that `module.forward` takes."""
    if module is None:
        return UNKNOWN_ARGUMENTS
    parameters = inspect.signature(module.forward).parameters.values()
    known = frozenset(p.name for p in parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return Arguments(known=known)
    positional = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    optional = [p.name for p in parameters if p.default is not p.empty]
    return Arguments(
        names=tuple(p.name for p in positional),
        required=sum(p.default is p.empty for p in positional),
        tensors=len(list(takewhile(_may_be_tensor, positional))),
        most=len(positional),
        takes_labels=not set(TARGET_NAMES).isdisjoint(optional),
        known=known,
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _may_be_tensor(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter may get a tensor that is not a label."""
    if parameter.default is parameter.empty:
        return True
    if parameter.default is not None or parameter.name in TARGET_NAMES:
        return False
    annotation = str(parameter.annotation)
    return "Tensor" in annotation or not _NO_TENSOR.search(annotation)


def is_one_per_sample(tensor: Tensor) -> bool:
    """Return whether a tensor has one value per sample, as class labels have."""
    return tensor.dim() < 2 or tensor.shape[1:].numel() == 1


@dataclass(frozen=True)
class FilledArguments:
    """Which arguments of `forward` the tensors of a batch are passed to.

    Args:
        arguments: their names.
        target: whether the batch also has a target.
        passed_over: the name of the argument that the target could have been passed to, or "".
        doubtful: whether the target does not look like one.
        left_out: the names of tensors for which `forward` has no argument.
    """

    arguments: tuple[str, ...]
    target: bool = False
    passed_over: str = ""
    doubtful: bool = False
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return all fields except `doubtful`."""
        fields = asdict(self)
        del fields["doubtful"]
        return fields

    def __str__(self) -> str:
        """Return a sentence for the log, or "" if there is one input and at most a target."""
        unfilled = [name for name in (self.passed_over, *self.left_out) if name]
        is_plain = len(self.arguments) == 1 and not unfilled
        text = f"batches fill {', '.join(self.arguments)} of forward()"
        if unfilled:
            text += f", not {', '.join(unfilled)}"
        if is_plain and not self.doubtful:
            return ""
        if self.target:
            text += ", and have a target"
        if self.doubtful:
            text += "; if the target is an input, give dicts: their keys name the arguments"
        return text


def filled_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Tensor | None, arguments: Arguments
) -> FilledArguments:
    """Return which arguments of `forward` a batch fills."""
    count = len(args)
    names = list(arguments.names[:count])
    for index in range(len(names), count):
        names.append(f"argument {index}")
    names += kwargs
    free = arguments.names[count : arguments.tensors]
    if target is None or kwargs or not free:
        return FilledArguments(tuple(names), target is not None)
    return FilledArguments(tuple(names), True, free[0], doubtful=not is_one_per_sample(target))


def example_input(module: nn.Module, seq_len: int) -> dict[str, Tensor]:
    """Return one sample of the right shape: token ids 0, 1, 2, … or black pixels.

    Args:
        module: the model.
        seq_len: the number of tokens. It is limited to the positions of the model.

    Raises:
        DataError: the model takes neither tokens nor pixels.
    """
    config: Any = getattr(module, "config", None)
    name = getattr(module, "main_input_name", "input_ids")
    if name == "input_ids" and isinstance(getattr(config, "vocab_size", None), int):
        length = min(seq_len, longest_window(module) or seq_len)
        ids = torch.arange(length)[None] % config.vocab_size
        inputs = {name: ids}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        return inputs
    size = getattr(config, "image_size", None)
    if name == "pixel_values" and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        dtype = next(module.parameters()).dtype
        return {name: torch.zeros(1, channels, height, width, dtype=dtype)}
    raise DataError(
        f"{type(module).__name__} does not state the shape of its input", help="give <--data>"
    )


def longest_window(module: nn.Module) -> int | None:
    """Return the number of positions of a Hugging Face model, if its config has it."""
    config = getattr(module, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        return positions
    return None


def text_prefix(name: str) -> str:
    """Return how the names of all arguments of the same text begin.

    >>> text_prefix("decoder_input_ids"), text_prefix("input_ids")
    ('decoder_', '')
    """
    return next(text for text in _TEXT_PREFIXES if name.startswith(text))


def included_positions(mask: Any) -> Tensor | None:
    """Return whether a mask includes each position, bool [batch, positions].

    None means that it excludes none, or is not a mask of zeros and ones.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype.is_floating_point:
        return None
    if bool(mask.all()):
        return None
    is_binary = (mask == 0) | (mask == 1)
    return mask.bool() if bool(is_binary.all()) else None


def call_with_shapes(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: InputShapes
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return a call with zeros of other shapes instead of its tensors.

    Return None if there are not as many shapes as inputs.
    """
    keywords = dict(kwargs)
    leaves, structure = pytree.tree_flatten((args, keywords))
    if len(leaves) != len(shapes):
        return None
    resized: list[Any] = []
    for leaf, shape in zip(leaves, shapes, strict=True):
        if isinstance(leaf, Tensor) and shape is not None:
            samples = leaf.shape[shape.index(None)] if None in shape else 1
            leaf = leaf.new_zeros(with_batch_size(shape, samples))
        resized.append(leaf)
    resized_args, resized_kwargs = pytree.tree_unflatten(resized, structure)
    return resized_args, resized_kwargs


def with_batch_size(shape: Sequence[int | None], batch_size: int) -> list[int]:
    """Return a shape with the batch size instead of None."""
    return [batch_size if size is None else size for size in shape]


def window_length(shapes: InputShapes) -> int | None:
    """Return the number of tokens s if the only input has the shape [b, s], else None."""
    if len(shapes) != 1 or shapes[0] is None or len(shapes[0]) != 2:
        return None
    length = shapes[0][1]
    # An input [b, 1] is one number per sample, not a text
    return None if length == 1 else length


def shapes_text(shapes: InputShapes) -> str:
    """Return the shapes of inputs with the batch size as b.

    >>> shapes_text([[None, 3, 8, 8], [None, 4]])
    '[b, 3, 8, 8] and [b, 4]'
    """
    texts: list[str] = []
    for shape in shapes:
        if shape is not None:
            sizes = ", ".join("b" if size is None else str(size) for size in shape)
            texts.append(f"[{sizes}]")
    return " and ".join(texts)
