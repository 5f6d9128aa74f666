"""The table of the steps of `quantizer tune`, of the core and of plug-ins, from cheap to dear.
Each step proposes changes of a config. `Search` measures them, and keeps the best one if it
gains something.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

from quantizer.calibration.events import NO_FOLLOWER
from quantizer.commands.searching.float_layers import FloatSearch, float_parts
from quantizer.commands.searching.search import NO_CHANGE, OutOfTimeError, Search, SearchStep
from quantizer.commands.searching.trials import Change, Trial
from quantizer.config.algorithms import ALGORITHMS, ConfigChange, ConfigStep
from quantizer.config.forms.level_edits import (
    group_sizes,
    with_algorithm,
    with_channels,
    with_group_size,
    with_layer_entries,
    with_method,
    with_setting,
)
from quantizer.config.json_types import JsonObject
from quantizer.config.model import Role
from quantizer.config.roles import base_role
from quantizer.config.wording import counted, first_names
from quantizer.errors import GateError, UsageError
from quantizer.evaluation.ablation import ablate_calibrated
from quantizer.evaluation.analyze import NOISE_BATCHES, WatchedData, analyze_weights
from quantizer.evaluation.width_choice import Budget, best_choice, chosen_specs
from quantizer.graph.names import path_names
from quantizer.numerics.codes import bits_of
from quantizer.plugins import loaded, plugins

_logger = logging.getLogger(__name__)
_ACTIVATIONS: tuple[Role, ...] = ("input", "activation")
_METHODS = ("auto", "percentile", "mse", "maxmin")
_WEIGHTS: tuple[Role, ...] = ("weights",)
_SMALLEST_GROUP = 32
"""The smallest groups that all engines for integers have."""
_WIDE_BITS = 8
"""The widest integers that engines multiply fast."""
_SHARES = (0.25, 0.5)
"""The share of the way from the config's bits to 8 that the mean width goes."""
_MAX_ON_ALL = 100
"""With more quantized tensors, each is measured on one batch instead of `NOISE_BATCHES`."""


def _change(text: str, edit: Callable[..., JsonObject], **arguments: Any) -> Change:
    """Return the change that calls `edit(document, **arguments)`."""

    def apply(trial: Trial) -> Trial:
        """Return the trial with an edited document."""
        return replace(trial, document=edit(trial.document, **arguments))

    return Change(text, apply)


def _always(*changes: Change) -> Callable[[Search], Iterator[Change]]:
    """Return the function of a step that tries these changes on any model."""
    return lambda search: iter(changes)


def _activation_ranges(search: Search) -> Iterator[Change]:
    """Yield each range method for inputs and activations.

    Raises:
        UsageError: there are none.
    """
    if not _has_activations(search):
        raise UsageError("no activations are quantized")
    for method in _METHODS:
        text = f"inputs and activations: method {method}"
        yield _change(text, with_method, roles=_ACTIVATIONS, method=method)


def _has_activations(search: Search) -> bool:
    """Return whether an activation is quantized."""
    return any(base_role(role) in _ACTIVATIONS for _, role in search.plan.tensors)


def declared_steps() -> Iterator[SearchStep]:
    """Yield the steps of plug-ins, from cheap to dear."""
    declared: list[ConfigStep] = []
    for plugin in plugins():
        try:
            declared += [loaded(plugin.search)] if plugin.search else []
        except UsageError as error:
            # It is of another package
            _logger.warning("%s; its step is left out", error)
    by_name: dict[str, list[ConfigStep]] = {}
    for step in sorted(declared, key=attrgetter("place")):
        by_name.setdefault(step.name, []).append(step)
    finetuning = next(filter(_finetunes, declared), None)
    undone = finetuning.name if finetuning is not None else ""
    for name, steps in by_name.items():
        yield SearchStep(name, steps[0].cost, partial(_declared_changes, steps, undone))


def _finetunes(step: ConfigStep) -> bool:
    """Return whether a step finetunes weights."""
    return any(change.fast_finetune for change in step.changes)


def _declared_changes(
    steps: Sequence[ConfigStep], finetuning: str, search: Search
) -> Iterator[Change]:
    """Yield the changes of a step of plug-ins that are for the best config so far.

    Args:
        steps: as plug-ins declare it.
        finetuning: the name of the step that finetunes, which rounding undoes.
        search: with the best config.

    Raises:
        UsageError: there are none.
    """
    has_activations = _has_activations(search)
    least_bits = _least_bits(search)
    is_any = False
    for step in steps:
        for change in step.changes:
            is_for_inputs = change.needs_activations in (None, has_activations)
            if is_for_inputs and least_bits <= change.most_bits:
                is_any = True
                apply = partial(_changed, change, step.name)
                undone = finetuning if _rounds(change) else ""
                yield Change(change.text, apply, undoes=undone)
    if not is_any:
        raise UsageError(NO_CHANGE)


def _changed(change: ConfigChange, named: str, trial: Trial) -> Trial:
    """Return the trial with a change of a plug-in, whose step has a name."""
    document = trial.document
    if change.setting:
        document = with_setting(document, change.setting, named)
    if change.algorithm:
        document = with_algorithm(document, change.algorithm)
    # Finetuning rounds weights too, so a trial with an algorithm that does has none
    mode = None if _rounds(change) else change.fast_finetune or trial.fast_finetune
    return Trial(document, mode)


def _rounds(change: ConfigChange) -> bool:
    """Return whether a change adds an algorithm that rounds weights."""
    name: str = change.algorithm.get("name", "")
    return name in ALGORITHMS and ALGORITHMS[name].stage == "round"


def _least_bits(search: Search, *, integers_only: bool = False) -> int:
    """Return the bits of the narrowest weights; 32 if none are quantized."""
    widths = []
    for (_, role), tensor in search.plan.tensors.items():
        is_counted = tensor.spec.dtype == "int" or not integers_only
        if base_role(role) == "weights" and is_counted:
            widths.append(bits_of(tensor.spec))
    return min(widths, default=32)


def _smaller_groups(search: Search) -> Iterator[Change]:
    """Yield groups of weights of half their size, a quarter and so on.

    Raises:
        UsageError: there are no groups.
    """
    document = search.best.document
    sizes = group_sizes(document)
    if not sizes:
        raise UsageError("no weights are quantized in groups")
    size = sizes[0] // 2
    while size >= _SMALLEST_GROUP:
        yield _change(f"weights: groups of {size}", with_group_size, largest=size)
        size //= 2


def _wider_weights(search: Search) -> Iterator[Change]:
    """Yield configs in which the weights that gain most are in 8 bits.

    Raises:
        UsageError: the weights have 8 bits already.
        GateError: no weight can have another width.
    """
    narrow = _least_bits(search, integers_only=True)
    if narrow >= _WIDE_BITS:
        raise UsageError("no weights are integers of fewer than 8 bits")
    data = WatchedData(search.context.batches, None, NO_FOLLOWER)
    analysis = analyze_weights(search.plan, (narrow, _WIDE_BITS), data)
    for share in _SHARES:
        bits = narrow + share * (_WIDE_BITS - narrow)
        choice = best_choice(analysis, Budget(bits=bits))
        widths = chosen_specs(search.plan, analysis, choice)
        text = f"weights: {bits:g} bits in the mean, {counted(len(widths), 'layer')} wider"
        yield _change(text, with_layer_entries, layers=widths)


def _layers_in_float(search: Search) -> Iterator[Change]:
    """Search for layers in float with which all gates hold, of the fewest bytes, and yield the
    change to them.

    If the time is up before the end, yield the best change so far.

    Raises:
        GateError: the gates do not hold even with all layers in float, or only without a
            quantized weight.
    """
    original = search.context.original
    calibrated, plan = search.context.calibrate(search.best)
    count = NOISE_BATCHES if len(plan.tensors) <= _MAX_ON_ALL else 1
    ablation = ablate_calibrated(calibrated, islice(search.context.batches(), count))
    floats = FloatSearch(original, search.best, search.figures, search.measure)
    is_out_of_time = False
    try:
        floats.run(float_parts(plan, ablation))
    except OutOfTimeError:
        is_out_of_time = True
    is_useful = floats.best is not None and floats.quantizes_weights
    if is_useful:
        trial = floats.trial
        search.record(trial, floats.figures)
        paths = path_names(original)
        names = [paths.get(layer, layer) for layer in floats.layers]
        yield Change(f"in float: {first_names(names, 3)}", lambda before: trial)
    if is_out_of_time:
        raise OutOfTimeError
    if floats.best is None:
        raise GateError("the gates do not hold even with all layers in float")
    if not is_useful:
        raise GateError("the gates hold only with all weights in float")


STEPS: tuple[SearchStep, ...] = (
    SearchStep(
        "ranges", "a calibration for each method; nothing at run time", _activation_ranges
    ),
    SearchStep(
        "weight ranges",
        "a calibration; nothing at run time",
        _always(
            _change("weights: method mse", with_method, roles=_WEIGHTS, method="mse"),
            _change(
                "weights: method group_mse", with_method, roles=_WEIGHTS, method="group_mse"
            ),
        ),
    ),
    SearchStep(
        "per channel",
        "a calibration, and a scale per channel in the file",
        _always(_change("weights: a scale per output channel", with_channels)),
    ),
    *declared_steps(),
    SearchStep("smaller groups", "more scales in the file", _smaller_groups),
    SearchStep(
        "wider weights", "a measurement of each weight, and a larger file", _wider_weights
    ),
    SearchStep("float layers", "many tests, and slower layers at run time", _layers_in_float),
)
"""Adding a step is one row, here or in `search` of a plug-in."""
