"""Test mode: the quantized network against the float one on the same batches, and the user's
own metrics of both.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quantizer.calibration.events import Events, Stage
from quantizer.comparison.output_figures import named_metrics, worst
from quantizer.config.wording import quoted
from quantizer.distributed import ALONE, Ranks
from quantizer.errors import DataError, ModelError
from quantizer.evaluation import low_sqnr
from quantizer.evaluation.compare import Comparison, compare, target_metrics
from quantizer.evaluation.output_warnings import OutputWarning, output_warnings
from quantizer.evaluation.pass_loss import PassLoss, pass_loss
from quantizer.evaluation.tested_networks import Networks
from quantizer.nn.network import Network
from quantizer.results.calibrated import Calibrated
from quantizer.sources.data import Batches
from quantizer.sources.directions import BY_NAME, Directions
from quantizer.sources.models import Evaluate
from quantizer.sources.user_code import user_errors, was_called

logger = logging.getLogger(__name__)

HELD = 0.01
"""A metric that changes by no more than this share is held."""
DROP, RATIO = "_drop", "_ratio"
"""What the names of a metric's loss of quality end in: its difference, and of perplexity its
factor.
"""


@dataclass(frozen=True)
class Scores:
    """What a test found: the comparison tensor by tensor, and `pairs`, each metric of both
    networks.

    `directions` says which metrics are better when they are lower, as far as the user declares
    it; `passes` what passes cost the outputs, if they change the function of the model.
    `warnings` say what single outputs and parts lose, if they were asked for.
    """

    comparison: Comparison
    pairs: Mapping[str, Mapping[str, float]]
    directions: Directions = BY_NAME
    passes: PassLoss | None = None
    warnings: tuple[OutputWarning, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """All figures by the names that gates have for them."""
        return self.comparison.metrics() | paired(self.pairs, self.directions)

    @property
    def gated(self) -> dict[str, float]:
        """The same with the figures of each output and part."""
        return self.metrics | self.comparison.named_metrics()

    @property
    def quantization(self) -> dict[str, float]:
        """The SQNR of each output and part, and of the worst, against the float network that
        was quantized.
        """
        losses = self.comparison.losses
        figures = named_metrics(losses)
        lowest = worst(losses)
        if lowest is not None and lowest.sqnr_db is not None:
            figures["sqnr_db"] = lowest.sqnr_db
        return figures

    @property
    def lost(self) -> list[str]:
        """Sentences on the outputs and parts that have lost."""
        return [
            warning.text
            for warning in self.warnings
            if warning.kind not in ("rows", "unmatched")
        ]

    @property
    def is_task_held(self) -> bool:
        """Whether there are metrics of the task, and the quantized network has the float
        one's.
        """
        return bool(self.pairs) and all(map(self._is_held, self.pairs))

    def _is_held(self, name: str) -> bool:
        """Whether a metric has lost no more than a hundredth, or changed where its direction is
        unknown.
        """
        before, after = self.pairs[name]["float"], self.pairs[name]["quantized"]
        reserve = HELD * abs(before)
        is_lower_better = self.directions.lower_is_better(name)
        if is_lower_better is None:
            return abs(after - before) <= reserve
        return after <= before + reserve if is_lower_better else after >= before - reserve

    @property
    def fault(self) -> str | None:
        """Why no figure can stand for the quantized network: it gives what is no number, or
        nothing to compare.
        """
        compared = self.comparison
        if compared.spoiled is not None:
            layer = compared.first_spoiled
            where = f"; {layer} is the first layer with such values" if layer else ""
            text = "the quantized network gives NaN or infinity, and the float one does not"
            return f"batch {compared.spoiled}: {text}{where}"
        for name, pair in self.pairs.items():
            if math.isnan(pair["quantized"]) and not math.isnan(pair["float"]):
                return f"the metric {name} of the quantized network is no number"
        return (
            None
            if self.metrics
            else "the model returns no tensors, and there is no evaluate(): nothing is compared"
        )


def paired(
    pairs: Mapping[str, Mapping[str, float]], directions: Directions = BY_NAME
) -> dict[str, float]:
    """Return the metrics of both networks, `{"top1": {"float": …, "quantized": …}}`, by single
    names.

    `X_drop` is what X has lost in quality, whichever way X is good; there is none if that is
    unknown.
    """
    metrics: dict[str, float] = {}
    for name, pair in pairs.items():
        before, after = pair["float"], pair["quantized"]
        metrics[f"{name}_float"] = before
        metrics[name] = after
        loss = directions.loss(name, before, after)
        if loss is not None:
            metrics[f"{name}{DROP}"] = loss
        if name == "perplexity" and before:  # it multiplies where other metrics lose
            metrics[f"{name}{RATIO}"] = after / before
    return metrics


def score(
    calibrated: Calibrated,
    module: nn.Module,
    batches: Batches,
    events: Events,
    function: Evaluate | None = None,
    check: Callable[[Collection[str]], None] = lambda metrics: None,
    ranks: Ranks = ALONE,
    *,
    explained: bool = False,
) -> Scores:
    """Run both networks on all batches.

    Args:
        module: the float model, for `function`.
        function: the user's `evaluate(model, data)`; without it, what targets allow is
            measured: top-1 or perplexity.
        check: called with the names of the user's metrics before the networks are compared; it
            may raise.
        explained: whether a low SQNR is explained in a warning, which costs some runs of one
            batch.
        ranks: who share the batches; `function` is for one process, so rank 0 runs it on all
            data.

    Raises:
        DataError: no batch, or an output that is not finite.
    """
    device, quantized = calibrated.original.device, calibrated.network()
    before: Mapping[str, float] = {}
    function = function if ranks.is_first else None
    if function is not None:
        before = measure(module, batches, device, events, "evaluate float", function)
        check(before.keys())
        _warn_of_unknown(function.directions, before)
    reference = Network(calibrated.float_graph)
    user = None if calibrated.user_graph is None else Network(calibrated.user_graph)
    with Stage(events, "test", batches.total) as stage:
        on_device = stage.counted(batch.to(device) for batch in batches)
        outputs = calibrated.outputs
        compared = compare(reference, quantized, on_device, ranks, user=user, outputs=outputs)
    batches.require_same(ranks)
    passes = (
        pass_loss(calibrated, quantized, batches.first().to(device)) if ranks.is_first else None
    )
    pairs: Mapping[str, Mapping[str, float]] = compared.pairs()
    directions = BY_NAME
    if function is not None:
        directions = function.directions
        after = measure(quantized, batches, device, events, "evaluate quantized", function)
        pairs = {
            name: {"float": value, "quantized": after[name]}
            for name, value in before.items()
            if name in after
        }
    scores = Scores(compared, pairs, directions, passes)
    if not explained or not ranks.is_first:
        return scores
    networks = Networks(reference, quantized, user, batches, device, outputs)
    return replace(scores, warnings=_explained(scores, networks))


def _explained(scores: Scores, networks: Networks) -> tuple[OutputWarning, ...]:
    """Find what outputs lose, and why, and log it."""
    remark_on_passes = low_sqnr.remark_on_passes(scores.passes)
    if remark_on_passes is not None:
        logger.warning("%s", remark_on_passes)
    lost_to_passes = low_sqnr.lost_to_passes(scores.passes)
    warnings = tuple(output_warnings(scores.comparison, networks, lost_to_passes))
    for warning in warnings:
        logger.log(
            logging.INFO if warning.kind == "rows" else logging.WARNING, "%s", warning.text
        )
    is_named = any(warning.kind in ("constant", "below") for warning in warnings)
    if is_named or scores.is_task_held or remark_on_passes is not None:
        return warnings
    remark = low_sqnr.remark(scores.comparison, networks)
    if remark is not None:
        logger.warning("%s", remark)
    return warnings


def _warn_of_unknown(directions: Directions, metrics: Mapping[str, float]) -> None:
    """Warn of names that a file declares and no metric has, as a misspelt one."""
    unknown = sorted(directions.declared - metrics.keys())
    if unknown:
        names = ", ".join(map(quoted, unknown))
        logger.warning("evaluate() gives no metric %s, whose direction is declared", names)


def _evaluated(
    function: Evaluate, model: Callable[..., Any], data: Iterable[Any]
) -> dict[str, float]:
    """Return what the user's `evaluate(model, data)` does.

    Raises:
        DataError: it fails.
        ModelError: the model fails when it is called there.
    """
    try:
        with user_errors("evaluate()", DataError):
            return function(model, data)
    except DataError as error:
        cause = error.__cause__
        if cause is None or not was_called(model, cause):
            raise
        raise ModelError(error.message, help=error.help) from cause


def measure(
    model: Callable[..., Any],
    batches: Batches,
    device: torch.device,
    events: Events,
    label: str,
    function: Evaluate | None,
) -> dict[str, float]:
    """The metrics of one model: the user's, or without `function` what the targets allow."""
    with Stage(events, label, batches.total) as stage, torch.no_grad():
        counted = stage.counted(batch.to(device) for batch in batches)
        if function is not None:
            return _evaluated(function, model, (batch.raw for batch in counted))
        with user_errors(f"running the {label} model", ModelError):
            return target_metrics(model, counted)
