"""Tests a calibrated network: compares it with the float one, and measures the user's metrics
of both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.calibration.events import Events, RunStage
from quantizer.comparison.output_figures import POOLED_FIGURE, WORST_SAMPLES, worst
from quantizer.comparison.perplexity import Score
from quantizer.comparison.samples import BELOW_DB, LOW_DB
from quantizer.config.json_types import JsonMapping
from quantizer.config.wording import quoted
from quantizer.declarations import DROP, RATIO, RISE
from quantizer.distributed import ALONE, Ranks
from quantizer.errors import DataError, ModelError
from quantizer.evaluation.compare import compare, keep_on_device
from quantizer.evaluation.network_comparison import NetworkComparison, Networks, in_pairs
from quantizer.evaluation.output_warnings import NOTES, OutputWarning, output_warnings
from quantizer.nn.recorded_outputs import RecordedOutputs
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.directions import BY_NAME, Directions
from quantizer.sources.models import Evaluate
from quantizer.sources.user_code import user_errors, was_called
from quantizer.sources.user_data import RepeatedPasses

if TYPE_CHECKING:
    from quantizer.evaluation.pass_loss import PassLoss

_logger = logging.getLogger(__name__)

MAX_RELATIVE_CHANGE = 0.01
"""A metric that gets worse by no more than this share counts as unchanged."""


@dataclass(frozen=True)
class Scores:
    """The result of a test.

    Attributes:
        comparison: of the networks, tensor by tensor.
        pairs: each metric of both networks.
        directions: which metrics are better when they are lower, as the user declares it.
        passes: the loss of passes, if they change the function of the model.
        warnings: about single outputs and parts, if they were requested.
        judged_on: which samples were compared, as report.json has it; empty if nothing is known
            of them.
    """

    comparison: NetworkComparison
    pairs: Mapping[str, Mapping[str, float]]
    directions: Directions = BY_NAME
    passes: PassLoss | None = None
    warnings: tuple[OutputWarning, ...] = ()
    judged_on: JsonMapping = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """Return all figures, by the names that gates use."""
        return self.comparison.metrics() | metrics_of_both(self.pairs, self.directions)

    @property
    def gated(self) -> dict[str, float]:
        """Return all figures, also those of each output and part."""
        return self.metrics | self.comparison.named_metrics()

    @property
    def quantization(self) -> dict[str, float]:
        """Return the SQNR of all values of each output and part against the float network that
        was quantized, and the lowest as `sqnr_db`.
        """
        figures = {}
        for output in self.comparison.losses:
            for row in output.rows:
                if row.sqnr_db is not None:
                    figures[f"sqnr_db[{row.name}]"] = row.noise.sqnr_db
        if figures:
            figures["sqnr_db"] = min(figures.values())
        return figures

    @property
    def lost(self) -> list[str]:
        """Return the warnings about outputs and parts that have lost."""
        texts = []
        for warning in self.warnings:
            if warning.kind not in (*NOTES, "unmatched"):
                texts.append(warning.text)
        return texts

    @property
    def is_task_held(self) -> bool:
        """Return whether the quantized network keeps all metrics of the task; False if there
        are none.
        """
        return bool(self.pairs) and all(map(self._is_held, self.pairs))

    def _is_held(self, name: str) -> bool:
        """Return whether a metric gets no worse than by 1 %. A metric without a direction may
        not change by more.
        """
        before = self.pairs[name]["float"]
        after = self.pairs[name]["quantized"]
        reserve = MAX_RELATIVE_CHANGE * abs(before)
        is_lower_better = self.directions.lower_is_better(name)
        if is_lower_better is None:
            return abs(after - before) <= reserve
        if is_lower_better:
            return after <= before + reserve
        return after >= before - reserve

    @property
    def fault(self) -> str | None:
        """Return why the test is not valid: values that are not finite, or nothing to
        compare. Return None if it is valid.
        """
        compared = self.comparison
        if compared.spoiled is not None:
            text = f"batch {compared.spoiled}: only the quantized network gives NaN or infinity"
            layer = compared.first_spoiled
            if layer is not None:
                text += f"; {layer} is the first layer with such values"
            return text
        for name, pair in self.pairs.items():
            if math.isnan(pair["quantized"]) and not math.isnan(pair["float"]):
                return f"the metric {name} of the quantized network is NaN"
        if not self.metrics:
            return (
                "nothing can be compared: the model's outputs hold no values on this data, and "
                "there is no evaluate()"
            )
        return None


def metrics_of_both(
    pairs: Mapping[str, Mapping[str, float]], directions: Directions = BY_NAME
) -> dict[str, float]:
    """Return the metrics of both networks by single names.

    For a metric X, `X` is that of the quantized network, `X_float` that of the float network,
    and `X_drop` the loss of quality, positive if X gets worse; also `X_rise` if less of X is
    better. There is neither if the direction of X is unknown.

    Args:
        pairs: as `{"top1": {"float": …, "quantized": …}}`.
        directions: of the metrics.
    """
    metrics: dict[str, float] = {}
    for name, pair in pairs.items():
        before = pair["float"]
        after = pair["quantized"]
        metrics[f"{name}_float"] = before
        metrics[name] = after
        loss = directions.loss(name, before, after)
        if loss is not None:
            metrics[f"{name}{DROP}"] = loss
            if directions.lower_is_better(name):
                metrics[f"{name}{RISE}"] = loss
        # Losses of perplexity multiply.
        if name == "perplexity" and before:
            metrics[f"{name}{RATIO}"] = after / before
    return metrics


def score(
    calibrated: Calibrated,
    module: nn.Module,
    batches: Batches,
    events: Events,
    *,
    function: Evaluate | None = None,
    check: Callable[[Collection[str]], None] = lambda metrics: None,
    ranks: Ranks = ALONE,
    explained: bool = False,
    before: Mapping[str, float] | None = None,
) -> Scores:
    """Run both networks on all batches.

    Args:
        calibrated: the model and its calibration.
        module: the float model, for `function`.
        batches: of evaluation data.
        events: progress is reported there.
        function: the user's `evaluate(model, data)`, which rank 0 runs on all data; without it,
            top-1 or perplexity is measured if the data has targets.
        check: called with the names of the user's metrics before the networks are compared; it
            may raise.
        ranks: who share the batches.
        explained: whether warnings explain a low SQNR, which takes some runs of one batch.
        before: the user's metrics of the float model; None to measure them.

    Raises:
        DataError: no batch, other batches in another pass, or an output that is not finite.
    """
    same_in_each_pass(batches).calibrated = calibrated.data
    networks = Networks.of(calibrated, batches)
    quantized = networks.quantized
    if not ranks.is_first:
        function = None
    measured = partial(
        measure, batches=batches, device=networks.device, events=events, function=function
    )
    passes: PassLoss | None = None
    with keep_on_device(networks.all):
        if function is not None:
            if before is None:
                before = measured(module, label="evaluate float")
            check(before.keys())
            _warn_of_unknown(function.directions, before)
        recorded = None if function is None else RecordedOutputs(quantized)
        compared = _compared(networks, events, ranks, recorded)
        batches.require_same(ranks)
        if ranks.is_first and calibrated.float_as_run.deviations:
            # Only passes that change the function need it
            from quantizer.evaluation.pass_loss import pass_loss

            first = batches.first().to(networks.device)
            passes = pass_loss(calibrated, quantized, first)
        pairs = compared.pairs()
        directions = BY_NAME
        if function is not None:
            directions = function.directions
            # The comparison has run the network on the same data
            quantized.recorded = recorded
            after = measured(quantized, label="evaluate quantized")
            quantized.recorded = None
            pairs = in_pairs(before or {}, after)
        scores = Scores(compared, pairs, directions, passes, judged_on=judged_on(batches))
        if not explained or not ranks.is_first:
            return scores
        return replace(scores, warnings=_explained(scores, networks))


def _compared(
    networks: Networks, events: Events, ranks: Ranks, recorded: RecordedOutputs | None
) -> NetworkComparison:
    """Compare networks on all batches, and record the outputs of the quantized one."""
    with RunStage(events, "test", networks.batches.total) as stage:
        names = networks.batches.arguments.names
        marked = (batch.with_included(names) for batch in networks.batches)
        moved = (batch.to(networks.device) for batch in marked)
        return compare(
            networks.reference,
            networks.quantized,
            stage.counted(moved),
            ranks,
            user=networks.user,
            outputs=networks.outputs,
            recorded=recorded,
            follow=stage.describe,
        )


def remark_on_samples(metric: str, metrics: Mapping[str, float]) -> str:
    """Return what a bound of a metric does not show: samples with a much lower SQNR than all
    values have. Return an empty text if there are none.

    >>> remark_on_samples("sqnr_db", {"sqnr_db": 38.6, "sqnr_db_worst": 0.0})
    'the worst samples have 0.0 dB: sqnr_db_worst bounds them'
    """
    figure, bracket, output = metric.partition("[")
    samples = f"{WORST_SAMPLES}{bracket}{output}"
    if figure not in ("sqnr_db", POOLED_FIGURE) or samples not in metrics:
        return ""
    if not metrics[metric] - metrics[samples] >= BELOW_DB:
        return ""
    return f"the worst samples have {metrics[samples]:.1f} dB: {samples} bounds them"


def _explained(scores: Scores, networks: Networks) -> tuple[OutputWarning, ...]:
    """Return the warnings about outputs, and log them."""
    of_passes = ""
    explained: Collection[str] = ()
    if scores.passes is not None:
        of_passes = scores.passes.remark
        explained = scores.passes.lost
    if of_passes:
        _logger.warning("%s", of_passes)
    warnings = tuple(output_warnings(scores.comparison, networks, explained))
    log_warnings(warnings)
    is_named = any(
        warning.kind in ("random", "constant", "hidden", "below") for warning in warnings
    )
    if is_named or scores.is_task_held or of_passes:
        return warnings
    lowest = worst(scores.comparison.outputs)
    is_spoiled = scores.comparison.spoiled is not None
    if lowest is None or is_spoiled or lowest.noise.sqnr_db >= LOW_DB:
        return warnings
    # Few networks lose so much
    from quantizer.evaluation.ablation import remark_on_low_sqnr

    _logger.warning("%s", remark_on_low_sqnr(lowest, scores.comparison, networks))
    return warnings


def log_warnings(warnings: Iterable[OutputWarning]) -> None:
    """Log what is said about outputs, losses as warnings."""
    for warning in warnings:
        level = logging.INFO if warning.kind in NOTES else logging.WARNING
        _logger.log(level, "%s", warning.text)


def _warn_of_unknown(directions: Directions, metrics: Mapping[str, float]) -> None:
    """Warn if a direction is declared for a metric that `evaluate()` does not return."""
    unknown = sorted(directions.declared - metrics.keys())
    if unknown:
        names = ", ".join(map(quoted, unknown))
        _logger.warning(
            "a direction is declared for %s, which evaluate() does not return", names
        )


def _evaluated(
    function: Evaluate, model: Callable[..., Any], data: Iterable[Any]
) -> dict[str, float]:
    """Return the metrics of the user's `evaluate(model, data)`.

    Raises:
        DataError: it fails.
        ModelError: the model fails when `evaluate` calls it.
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
    *,
    label: str,
    function: Evaluate | None,
) -> dict[str, float]:
    """Return the metrics of one model: the user's, or without `function` those of the
    targets.

    Raises:
        DataError: the batches are not those of an earlier measurement.
    """
    same_in_each_pass(batches)
    with RunStage(events, label, batches.total) as stage, torch.no_grad():
        followed = FollowedBatches(batches, stage, device)
        if function is not None:
            return _evaluated(function, model, _UserItems(followed))
        with user_errors(f"running the {label} model", ModelError):
            return target_metrics(model, followed)


def target_metrics(model: Callable[..., Any], batches: Iterable[Batch]) -> dict[str, float]:
    """Return top-1 accuracy of one model on labelled batches, or perplexity on text; nothing if
    the data has no targets.
    """
    score = Score()
    for batch in batches:
        outputs = pytree.tree_leaves(model(*batch.args, **batch.kwargs))
        if isinstance(outputs[0], Tensor):
            score.add(outputs[0], batch)
    return score.metrics()


@dataclass
class FollowedBatches:
    """Batches on a device, whose first pass a stage counts."""

    batches: Iterable[Batch]
    stage: RunStage
    device: torch.device | str = "cpu"
    passes: int = 0

    def __iter__(self) -> Iterator[Batch]:
        moved = (batch.to(self.device) for batch in self.batches)
        self.passes += 1
        return moved if self.passes > 1 else self.stage.counted(moved)


@dataclass(frozen=True)
class _UserItems:
    """The items of the user's data, as `evaluate(model, data)` gets them."""

    batches: FollowedBatches

    def __iter__(self) -> Iterator[Any]:
        return (batch.raw for batch in self.batches)


def same_in_each_pass(batches: Batches) -> RepeatedPasses:
    """Require that all passes over some data give the same batches, from now on. Return what
    watches them.
    """
    if batches.passes is None:
        batches.passes = RepeatedPasses(batches.label)
    return batches.passes


def judged_on(batches: Batches) -> Mapping[str, Any]:
    """Return which samples were compared, as report.json has it, after a pass; empty if nothing
    is known of them.
    """
    if batches.passes is None or batches.fingerprint is None:
        return {}
    return batches.passes.judged_on(batches.fingerprint["samples"], batches.skip_len or 0)
