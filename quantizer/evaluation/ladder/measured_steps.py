"""The steps of a ladder that measure layers: wider weights where they gain most, and layers in
float as the last resort.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from quantizer.config.forms.layer_entries import with_float, with_layer_entries
from quantizer.config.roles import base_role
from quantizer.config.wording import counted, first_names
from quantizer.errors import GateError, UsageError
from quantizer.evaluation.ablation import ablate_calibrated
from quantizer.evaluation.analyze import NOISE_BATCHES, analyze_weights, width_candidates
from quantizer.evaluation.cheapest import FloatPart, cheapest_parts, float_parts, needed_layers
from quantizer.evaluation.ladder.rungs import OutOfTimeError, Rung, Standing, Trial
from quantizer.evaluation.width_changes import WidthChanges, chosen_specs
from quantizer.evaluation.width_choice import Budget, best_choice
from quantizer.graph.names import path_names
from quantizer.graph.passes import run_passes
from quantizer.numerics.codes import bits_of
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch

_WIDE_BITS = 8
"""The widest integers that engines multiply fast."""
_SHARES = (0.25, 0.5)
"""The share of the way from the config's bits to 8 that the mean width goes."""
_MAX_MEASURED = 200
"""With more weights, their noise is predicted from gradients and not measured."""
_MAX_ON_ALL = 100
"""With more quantized tensors, each is measured on one batch instead of `NOISE_BATCHES`."""


def wider_weights(standing: Standing) -> Iterator[Trial]:
    """Yield configs in which the weights that gain most are in 8 bits.

    Raises:
        UsageError: the weights have 8 bits already.
        GateError: no weight can have another width.
    """
    plan = standing.plan
    narrow = _narrow_bits(plan)
    if narrow is None:
        raise UsageError("no weights are integers of fewer than 8 bits")
    candidates, _ = width_candidates(plan)
    passes = "network" if len(candidates) <= _MAX_MEASURED else "fast"
    analysis = analyze_weights(
        plan, (narrow, _WIDE_BITS), standing.ground.batches, passes, after_layer=lambda: None
    )
    for share in _SHARES:
        bits = narrow + share * (_WIDE_BITS - narrow)
        choice = best_choice(analysis, Budget(bits=bits))
        changes = chosen_specs(plan, analysis, choice)
        change = f"weights: {bits:g} bits in the mean, {counted(len(changes), 'layer')} wider"
        yield Trial(change, partial(_with_widths, changes))


def _narrow_bits(plan: Plan) -> int | None:
    """Return the smallest width of integer weights; None if none is below 8 bits."""
    widths = []
    for (_, role), tensor in plan.tensors.items():
        if base_role(role) == "weights" and tensor.spec.dtype == "int":
            widths.append(bits_of(tensor.spec))
    narrow = min(widths, default=_WIDE_BITS)
    return narrow if narrow < _WIDE_BITS else None


def _with_widths(changes: WidthChanges, rung: Rung) -> Rung:
    """Return the rung with other bits for some layers."""
    return replace(rung, document=with_layer_entries(rung.document, changes))


def layers_in_float(standing: Standing) -> Iterator[Trial]:
    """Search for layers in float with which all gates hold, of the fewest bytes, and yield the
    config with them.

    If the time is up before the end, yield the best config of the search so far.

    Raises:
        GateError: the gates do not hold even with all layers in float, or only without a
            quantized weight.
    """
    calibrated, plan = standing.ground.calibrate(standing.rung)
    ablation = ablate_calibrated(calibrated, _few_batches(standing, len(plan.tensors)))
    parts = float_parts(plan, ablation)
    search = _FloatSearch(standing)
    try:
        cheapest_parts(parts, search.holds)
    except OutOfTimeError:
        if search.best is not None:
            yield search.trial()
        raise
    if search.best is None:
        reason = "the gates do not hold even with all layers in float"
        if search.is_met_in_float:
            reason = "the gates hold only with all weights in float"
        raise GateError(reason)
    yield search.trial()


def _few_batches(standing: Standing, tensors: int) -> Iterable[Batch]:
    """Return the first batches of a pass, as many as there is time for with so many tensors."""
    count = NOISE_BATCHES if tensors <= _MAX_ON_ALL else 1
    return islice(standing.ground.batches(), count)


class _FloatSearch:
    """Tests configs with layers in float.

    Args:
        standing: the rung that they change.

    Attributes:
        best: the last parts with which the gates held and weights were quantized; None if
            there are none.
        is_met_in_float: whether the gates held without a quantized weight.
    """

    def __init__(self, standing: Standing) -> None:
        self.best: Sequence[FloatPart] | None = None
        self.is_met_in_float = False
        self._standing = standing

    def holds(self, parts: Sequence[FloatPart]) -> bool:
        """Return whether the gates hold with these parts in float."""
        if not parts:
            return False
        layers = _layers(parts)
        judged = self._standing.attempt(self._rung(layers))
        if judged.is_met and _has_weights(self._plan(layers)):
            self.best = parts
        elif judged.is_met:
            self.is_met_in_float = True
        return judged.is_met

    def trial(self) -> Trial:
        """Return the trial of the layers in `best`."""
        layers = _layers(self.best or ())
        rung = self._rung(layers)
        paths = path_names(self._standing.ground.original)
        names = [paths.get(layer, layer) for layer in layers]
        return Trial(f"in float: {first_names(names, 3)}", lambda before: rung)

    def _rung(self, layers: Sequence[str]) -> Rung:
        """Return the rung with these layers in float, which names as few of them as it can."""
        rung = self._standing.rung
        needed = needed_layers(layers, self._plan)
        return replace(rung, document=with_float(rung.document, needed))

    def _plan(self, layers: Sequence[str]) -> Plan:
        """Return the plan with these layers in float."""
        rung = self._standing.rung
        config = replace(rung, document=with_float(rung.document, layers)).config
        original = self._standing.ground.original
        return resolve_plan(config, run_passes(original, config.settings), original)


def _has_weights(plan: Plan) -> bool:
    """Return whether a weight is quantized."""
    return any(base_role(role) == "weights" for _, role in plan.tensors)


def _layers(parts: Sequence[FloatPart]) -> tuple[str, ...]:
    """Return the layers of all parts, in order."""
    layers: list[str] = []
    for part in parts:
        layers += part.layers
    return tuple(layers)
