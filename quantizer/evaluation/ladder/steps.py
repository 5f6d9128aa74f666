"""The table of a ladder's steps, from cheap to dear. Each step proposes changes of a config.
`climb` measures them, and keeps the best one if it gains something.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quantizer.config.dpu_accuracy import FINETUNE_MODES
from quantizer.config.forms.level_edits import (
    group_sizes,
    with_algorithm,
    with_bias_correction,
    with_channels,
    with_equalization,
    with_group_size,
    with_method,
)
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import Role
from quantizer.config.roles import base_role
from quantizer.errors import UsageError
from quantizer.evaluation.ladder.measured_steps import layers_in_float, wider_weights
from quantizer.evaluation.ladder.rungs import Rung, Standing, Trial
from quantizer.numerics.codes import bits_of

_ACTIVATIONS: tuple[Role, ...] = ("input", "activation")
_METHODS = ("auto", "percentile", "mse", "maxmin")
_WEIGHT_METHODS = ("mse", "group_mse")
_FINETUNING = "finetuning"
_FEW_BITS = 4
"""With weights of at most so many bits, scales are searched too."""
_SMALLEST_GROUP = 32
"""The smallest groups that all engines for integers have."""


@dataclass(frozen=True)
class LadderStep:
    """A step of the ladder.

    Attributes:
        name: in tables.
        cost: what it costs to measure and at run time, as words.
        trials: yields the changes to measure, each a change of the best rung so far. Raises
            `UsageError` with the reason if there is nothing to change.
    """

    name: str
    cost: str
    trials: Callable[[Standing], Iterator[Trial]]


def _edited(edit: Callable[[JsonMapping], JsonObject], rung: Rung) -> Rung:
    """Return the rung with an edited document."""
    return replace(rung, document=edit(rung.document))


def _trial(change: str, edit: Callable[..., JsonObject], **arguments: Any) -> Trial:
    """Return the trial that calls `edit(document, **arguments)`."""
    return Trial(change, partial(_edited, partial(edit, **arguments)))


def _activation_ranges(standing: Standing) -> Iterator[Trial]:
    """Yield each range method for inputs and activations.

    Raises:
        UsageError: there are none.
    """
    if not _has_activations(standing):
        raise UsageError("no activations are quantized")
    for method in _METHODS:
        change = f"inputs and activations: method {method}"
        yield _trial(change, with_method, roles=_ACTIVATIONS, method=method)


def _has_activations(standing: Standing) -> bool:
    """Return whether an activation is quantized."""
    return any(base_role(role) in _ACTIVATIONS for _, role in standing.plan.tensors)


def _weight_ranges(standing: Standing) -> Iterator[Trial]:
    for method in _WEIGHT_METHODS:
        change = f"weights: method {method}"
        yield _trial(change, with_method, roles=("weights",), method=method)


def _channels(standing: Standing) -> Iterator[Trial]:
    yield _trial("weights: a scale per output channel", with_channels)


def _bias_correction(standing: Standing) -> Iterator[Trial]:
    yield _trial("biases corrected", with_bias_correction)


def _equalization(standing: Standing) -> Iterator[Trial]:
    yield _trial("neighbouring layers equalized", with_equalization)


def _smoothing(standing: Standing) -> Iterator[Trial]:
    """Yield SmoothQuant where activations are quantized, and AWQ where weights alone are."""
    if not _has_activations(standing):
        awq: JsonObject = {"name": "awq", "online": False}
        yield _trial("AWQ", with_algorithm, entry=awq)
        return
    smoothquant: JsonObject = {"name": "smoothquant", "alpha": 0.5, "online": False}
    yield _trial("SmoothQuant, alpha 0.5", with_algorithm, entry=smoothquant)
    searched = {**smoothquant, "alpha": "auto"}
    yield _trial("SmoothQuant, alpha auto", with_algorithm, entry=searched)


def _finetuning(standing: Standing) -> Iterator[Trial]:
    for mode in FINETUNE_MODES:
        yield Trial(f"--fast_finetune {mode}", partial(replace, fast_finetune=mode))


def _rounding(standing: Standing) -> Iterator[Trial]:
    """Yield the algorithms that round weights one column after another."""
    for name in ("gptq", "qronos"):
        yield Trial(name, partial(_rounded_by, {"name": name}), undoes=_FINETUNING)
    if _least_bits(standing) <= _FEW_BITS:
        entry: JsonObject = {"name": "qronos", "scale_search": True, "sweeps": 4}
        change = "qronos with searched scales"
        yield Trial(change, partial(_rounded_by, entry), undoes=_FINETUNING)


def _rounded_by(entry: JsonMapping, rung: Rung) -> Rung:
    """Return the rung with an algorithm that rounds weights."""
    # Finetuning rounds weights too, so this rung has none
    return Rung(with_algorithm(rung.document, entry))


def _least_bits(standing: Standing) -> int:
    """Return the bits of the narrowest weights; 32 if none are quantized."""
    widths = []
    for (_, role), tensor in standing.plan.tensors.items():
        if base_role(role) == "weights":
            widths.append(bits_of(tensor.spec))
    return min(widths, default=32)


def _smaller_groups(standing: Standing) -> Iterator[Trial]:
    """Yield groups of weights of half their size, a quarter and so on.

    Raises:
        UsageError: there are no groups.
    """
    document = standing.rung.document
    sizes = group_sizes(document)
    if not sizes:
        raise UsageError("no weights are quantized in groups")
    size = sizes[0] // 2
    while size >= _SMALLEST_GROUP:
        yield _trial(f"weights: groups of {size}", with_group_size, largest=size)
        size //= 2


LADDER: tuple[LadderStep, ...] = (
    LadderStep(
        "ranges", "a calibration for each method; nothing at run time", _activation_ranges
    ),
    LadderStep("weight ranges", "a calibration; nothing at run time", _weight_ranges),
    LadderStep("per channel", "a calibration, and a scale per channel in the file", _channels),
    LadderStep("bias correction", "a second pass over the data", _bias_correction),
    LadderStep("equalization", "a calibration; nothing at run time", _equalization),
    LadderStep("smoothing", "a pass over the data, with alpha auto several", _smoothing),
    LadderStep(_FINETUNING, "two networks in step, and a solution per layer", _finetuning),
    LadderStep("rounding", "a Hessian for each layer, column after column", _rounding),
    LadderStep("smaller groups", "more scales in the file", _smaller_groups),
    LadderStep(
        "wider weights", "a measurement of each weight, and a larger file", wider_weights
    ),
    LadderStep("float layers", "many tests, and slower layers at run time", layers_in_float),
)
"""Adding a step is one row."""
