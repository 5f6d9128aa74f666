"""The table of the steps of `quantizer tune`, from cheap to dear. Each step proposes changes of
a config. `Search` measures them, and keeps the best one if it gains something.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from quantizer.calibration.events import NO_FOLLOWER
from quantizer.commands.searching.float_layers import FloatSearch, float_parts
from quantizer.commands.searching.search import OutOfTimeError, Search, SearchStep
from quantizer.commands.searching.trials import Change, Trial
from quantizer.config.forms.level_edits import (
    group_sizes,
    with_algorithm,
    with_bias_correction,
    with_channels,
    with_equalization,
    with_group_size,
    with_layer_entries,
    with_method,
)
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import Role
from quantizer.config.roles import base_role
from quantizer.config.wording import counted, first_names
from quantizer.errors import GateError, UsageError
from quantizer.evaluation.ablation import ablate_calibrated
from quantizer.evaluation.analyze import NOISE_BATCHES, WatchedData, analyze_weights
from quantizer.evaluation.width_choice import Budget, best_choice, chosen_specs
from quantizer.graph.names import path_names
from quantizer.numerics.codes import bits_of

_ACTIVATIONS: tuple[Role, ...] = ("input", "activation")
_METHODS = ("auto", "percentile", "mse", "maxmin")
_WEIGHTS: tuple[Role, ...] = ("weights",)
_FINETUNING = "finetuning"
_FEW_BITS = 4
"""With weights of at most so many bits, scales are searched too."""
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


def _smoothing(search: Search) -> Iterator[Change]:
    """Yield SmoothQuant where activations are quantized, and AWQ where weights alone are."""
    if not _has_activations(search):
        awq: JsonObject = {"name": "awq", "online": False}
        yield _change("AWQ", with_algorithm, entry=awq)
        return
    smoothquant: JsonObject = {"name": "smoothquant", "alpha": 0.5, "online": False}
    yield _change("SmoothQuant, alpha 0.5", with_algorithm, entry=smoothquant)
    searched = {**smoothquant, "alpha": "auto"}
    yield _change("SmoothQuant, alpha auto", with_algorithm, entry=searched)


def _rounding(search: Search) -> Iterator[Change]:
    """Yield the algorithms that round weights one column after another."""
    for name in ("gptq", "qronos"):
        yield Change(name, partial(_rounded_by, {"name": name}), undoes=_FINETUNING)
    if _least_bits(search) <= _FEW_BITS:
        entry: JsonObject = {"name": "qronos", "scale_search": True, "sweeps": 4}
        text = "qronos with searched scales"
        yield Change(text, partial(_rounded_by, entry), undoes=_FINETUNING)


def _rounded_by(entry: JsonMapping, trial: Trial) -> Trial:
    """Return the trial with an algorithm that rounds weights."""
    # Finetuning rounds weights too, so this trial has none
    return Trial(with_algorithm(trial.document, entry))


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
    SearchStep(
        "bias correction",
        "a second pass over the data",
        _always(_change("biases corrected", with_bias_correction)),
    ),
    SearchStep(
        "equalization",
        "a calibration; nothing at run time",
        _always(_change("neighbouring layers equalized", with_equalization)),
    ),
    SearchStep("smoothing", "a pass over the data, with alpha auto several", _smoothing),
    SearchStep(
        _FINETUNING,
        "two networks in step, and a solution per layer",
        _always(
            Change("--fast_finetune adaround", partial(replace, fast_finetune="adaround")),
            Change("--fast_finetune adaquant", partial(replace, fast_finetune="adaquant")),
        ),
    ),
    SearchStep("rounding", "a Hessian for each layer, column after column", _rounding),
    SearchStep("smaller groups", "more scales in the file", _smaller_groups),
    SearchStep(
        "wider weights", "a measurement of each weight, and a larger file", _wider_weights
    ),
    SearchStep("float layers", "many tests, and slower layers at run time", _layers_in_float),
)
"""Adding a step is one row."""
