"""Decide whether less or more of a metric is better, by its name or as a file declares it.

Values are not considered. If a name shows no direction, none is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from quantizer.config.wording import a_kind, quoted
from quantizer.declarations import LOWER
from quantizer.errors import ModelError, QuantizerError, UsageError
from quantizer.sources.user_code import UserModule
from quantizer.tables import METRICS

_LOWER_WORDS = """
perplexity ppl loss nll bpc bpb error errors err mae mse rmse rmsle mape smape wer cer der eer
false far frr misses epe fid lpips brier ece
"""
_HIGHER_WORDS = """
accuracy acc topn precision recall f1 map iou miou dice auc auroc ndcg mrr bleu rouge psnr ssim
"""
_REVERSING_WORDS = frozenset(["neg", "negative", "negated", "inverse", "inv", "minus"])
"""Words that reverse the meaning of a name: `neg_mse` is better when it is higher."""
_DECLARATIONS = ("LOWER_IS_BETTER", "HIGHER_IS_BETTER")
_SIZE = "weight_bytes"


@dataclass(frozen=True)
class Directions:
    """Declared directions of metrics, by whole names. They override the words in a name.

    Args:
        lower: names of metrics of which less is better.
        higher: names of metrics of which more is better.
    """

    lower: frozenset[str] = frozenset()
    higher: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        lower: object,
        higher: object,
        places: tuple[str, str] = ("lower_is_better", "higher_is_better"),
        error: type[QuantizerError] = UsageError,
    ) -> Directions:
        """Return the directions that a user declares.

        Args:
            lower: a set, list or tuple of names, or None.
            higher: the same.
            places: what the user calls the two.
            error: the error to raise.

        Raises:
            error: a declaration is not a set of names, or both have a name in common.
        """
        lower_names = _checked_names(lower, places[0], error)
        higher_names = _checked_names(higher, places[1], error)
        in_both = sorted(lower_names & higher_names)
        if in_both:
            raise error(
                f"{' and '.join(places)} both name {quoted(in_both[0])}",
                help="remove it from one of them",
            )
        return cls(lower_names, higher_names)

    @classmethod
    def declared_by(cls, user: UserModule) -> Directions:
        """Return what a file declares as LOWER_IS_BETTER and HIGHER_IS_BETTER.

        Raises:
            ModelError: a declaration is not a set of names, or both have a name in common.
        """
        lower, higher = _DECLARATIONS
        places = (f"{lower} of {user.label}", f"{higher} of {user.label}")
        return cls.of(user.find(lower), user.find(higher), places, ModelError)

    @property
    def declared(self) -> frozenset[str]:
        """Return all names that are declared."""
        return self.lower | self.higher

    def to_json(self, metrics: Iterable[str]) -> dict[str, bool]:
        """Return whether less is better, by name, for those of the metrics that are
        declared.
        """
        return {metric: metric in self.lower for metric in metrics if metric in self.declared}

    @classmethod
    def from_json(cls, lower_is_better: Mapping[str, bool]) -> Directions:
        """Return the directions from which `to_json` has made this mapping."""
        lower = frozenset(metric for metric, is_lower in lower_is_better.items() if is_lower)
        return cls(lower, frozenset(lower_is_better) - lower)

    def with_fallback(self, fallback: Directions) -> Directions:
        """Return these directions, and those of `fallback` for names that are not declared
        here.
        """
        lower = self.lower | (fallback.lower - self.higher)
        higher = self.higher | (fallback.higher - self.lower)
        return Directions(lower, higher)

    def lower_is_better(self, metric: str) -> bool | None:
        """Return whether less of a metric is better, or None if that is unknown.

        >>> directions = Directions(lower=frozenset({"ripple"}))
        >>> [directions.lower_is_better(name) for name in ("ripple", "iou_loss", "mAP@0.5")]
        [True, True, False]
        >>> [directions.lower_is_better(name) for name in ("mean", "neg_mse", "map_mse")]
        [None, None, None]
        """
        if metric in self.declared:
            return metric in self.lower
        words = _words(metric)
        if not _REVERSING_WORDS.isdisjoint(words):
            return None
        # Less of any loss is better
        if words[-1:] == ["loss"]:
            return True
        is_lower = not set(_LOWER_WORDS.split()).isdisjoint(words)
        is_higher = not set(_HIGHER_WORDS.split()).isdisjoint(words)
        return None if is_lower == is_higher else is_lower

    def of_figure(self, figure: str, metrics: Collection[str]) -> bool | None:
        """Return whether less of a figure is better, or None if that is unknown.

        Args:
            figure: a metric of `evaluate` or a figure that the package measures, of all outputs
                or of one, such as `sqnr_db[0.scores]`.
            metrics: the names of the metrics of `evaluate`. They override those of the package.

        >>> [
        ...     BY_NAME.of_figure(name, ["cosine"])
        ...     for name in ("sqnr_db[0.scores]", "weight_bytes", "cosine")
        ... ]
        [False, True, None]
        """
        name = figure.partition("[")[0]
        if figure not in metrics:
            # X and its kin stand for metrics of evaluate()
            if name in METRICS and not name.startswith(("X", "`X`")):
                return METRICS[name].better == LOWER
            if name == _SIZE:
                return True
        return self.lower_is_better(figure)

    def loss(self, metric: str, before: float, after: float) -> float | None:
        """Return how much worse a metric has become, or None if its direction is unknown.

        >>> BY_NAME.loss("top1", 0.75, 0.5), BY_NAME.loss("mae_m", 0.25, 0.75)
        (0.25, 0.5)
        """
        is_lower = self.lower_is_better(metric)
        if is_lower is None:
            return None
        return after - before if is_lower else before - after


BY_NAME = Directions()
"""The directions of metrics of which none is declared."""


def how_to_declare(metric: str) -> str:
    """Return the help of errors about a metric whose direction is unknown."""
    lower, higher = _DECLARATIONS
    names = f"{{{quoted(metric)}}}"
    return f"write {lower} = {names} or {higher} = {names} into the file of evaluate()"


def _words(metric: str) -> list[str]:
    """Return the words of a name in lower case, each also without digits at its end, and `topn`
    for any n.

    >>> _words("mAP50/top-5")
    ['map50', 'map', 'topn']
    """
    text = re.sub(r"(?<![a-z])top[\W_]?\d+", "topn", metric.lower())
    words = []
    for word in re.findall(r"[a-z0-9]+", text):
        words.append(word)
        name = word.rstrip("0123456789")
        if name != word:
            words.append(name)
    return words


def _checked_names(value: object, place: str, error: type[QuantizerError]) -> frozenset[str]:
    if value is None:
        return frozenset()
    remedy = f'give a set of names: {place.partition(" ")[0]} = {{"mae"}}'
    if not isinstance(value, (set, frozenset, list, tuple)):
        raise error(f"{place} is {a_kind(value)}, not a set of names", help=remedy)
    for name in value:
        if not isinstance(name, str):
            raise error(f"{place} holds {a_kind(name)}, not only names", help=remedy)
    return frozenset(value)
