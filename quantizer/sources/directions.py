"""Tells whether less or more of a metric is better: by its name, or as a file declares it.

Knows names alone, no values. Some names have no direction, and then nobody guesses one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from quantizer.config.wording import a_kind, quoted
from quantizer.errors import ModelError, QuantizerError, UsageError
from quantizer.sources.user_code import UserModule

LOWER_IS_BETTER = frozenset(
    [
        "perplexity",
        "ppl",
        "loss",
        "nll",
        "mae",
        "mse",
        "rmse",
        "mape",
        "wer",
        "cer",
        "eer",
        "fid",
    ]
)
HIGHER_IS_BETTER = frozenset(
    [
        *("accuracy", "acc", "topn", "precision", "recall", "f1", "map", "iou"),
        *("miou", "dice", "auc", "auroc", "ndcg", "mrr", "bleu", "rouge", "psnr", "ssim"),
    ]
)
REVERSING = frozenset(["neg", "negative", "negated", "inverse", "inv", "minus"])
"""Words that turn the meaning of a name round: `neg_mse` is better when it is higher."""
DECLARATIONS = ("LOWER_IS_BETTER", "HIGHER_IS_BETTER")
FIGURES_LOWER_IS_BETTER = {
    "sqnr_db": False,
    "sqnr_db_pooled": False,
    "cosine": False,
    "equal_outputs": False,
    "rows_kept": False,
    "top1_agreement": False,
    "exact_equal": False,
    "onnx_int8_share": False,
    "weight_bytes": True,
}
"""What the package itself measures: whether less of it is better."""


@dataclass(frozen=True)
class Directions:
    """Declared directions of metrics, by whole names. They go before what words of a name say.

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
        """Return what a user declares.

        Args:
            lower: a set, list or tuple of names, or None.
            higher: the same.
            places: where the user has written either.
            error: raised if one is no such thing.

        Raises:
            error: a declaration is no set of names, or both have one in common.
        """
        lower_names = _checked_names(lower, places[0], error)
        higher_names = _checked_names(higher, places[1], error)
        in_both = sorted(lower_names & higher_names)
        if in_both:
            text = f"{' and '.join(places)} both name {quoted(in_both[0])}"
            raise error(text, help="leave it in one of them")
        return cls(lower_names, higher_names)

    @classmethod
    def declared_by(cls, user: UserModule) -> Directions:
        """Return what a file declares as LOWER_IS_BETTER and HIGHER_IS_BETTER.

        Raises:
            ModelError: it declares no set of names, or one metric as both.
        """
        lower, higher = (user.find(declaration) for declaration in DECLARATIONS)
        places = f"{DECLARATIONS[0]} of {user.label}", f"{DECLARATIONS[1]} of {user.label}"
        return cls.of(lower, higher, places, ModelError)

    @property
    def declared(self) -> frozenset[str]:
        """Return all names that are declared."""
        return self.lower | self.higher

    def declared_of(self, metrics: Iterable[str]) -> dict[str, bool]:
        """Return which of these metrics are declared, and whether less of each is better."""
        return {metric: metric in self.lower for metric in metrics if metric in self.declared}

    @classmethod
    def of_declared(cls, lower_is_better: Mapping[str, bool]) -> Directions:
        """Return the directions that `declared_of` has written down."""
        lower = frozenset(metric for metric, is_lower in lower_is_better.items() if is_lower)
        return cls(lower, frozenset(lower_is_better) - lower)

    def beside(self, other: Directions) -> Directions:
        """Return these and, for names that these do not declare, another file's."""
        lower = self.lower | (other.lower - self.higher)
        higher = self.higher | (other.higher - self.lower)
        return Directions(lower, higher)

    def lower_is_better(self, metric: str) -> bool | None:
        """Return whether less of a metric is better, or None if nothing says so.

        >>> directions = Directions(lower=frozenset({"ripple"}))
        >>> [directions.lower_is_better(name) for name in ("ripple", "iou_loss", "mAP@0.5")]
        [True, True, False]
        >>> [directions.lower_is_better(name) for name in ("mean", "neg_mse", "map_mse")]
        [None, None, None]
        """
        if metric in self.declared:
            return metric in self.lower
        words = _words(metric)
        if not REVERSING.isdisjoint(words):
            return None
        # Whatever is lost, less of it is better.
        if words[-1:] == ["loss"]:
            return True
        is_lower = not LOWER_IS_BETTER.isdisjoint(words)
        is_higher = not HIGHER_IS_BETTER.isdisjoint(words)
        return None if is_lower == is_higher else is_lower

    def of_figure(self, figure: str, metrics: Collection[str]) -> bool | None:
        """Return whether less of a figure is better, or None if nothing says so.

        Args:
            figure: a metric of `evaluate`, or what the package measures: of all outputs, or of
                one as `sqnr_db[0.scores]`.
            metrics: the names of the metrics of `evaluate`, which go before those of the
                package.

        >>> [
        ...     BY_NAME.of_figure(name, ["cosine"])
        ...     for name in ("sqnr_db[0.scores]", "weight_bytes", "cosine")
        ... ]
        [False, True, None]
        """
        if figure not in metrics:
            own = FIGURES_LOWER_IS_BETTER.get(figure.partition("[")[0])
            if own is not None:
                return own
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
"""What names alone say."""


def how_to_declare(metric: str) -> str:
    """Return what to write where a metric has no direction."""
    lower, higher = (f"{declaration} = {{{quoted(metric)}}}" for declaration in DECLARATIONS)
    return f"write {lower} or {higher} into the file of evaluate()"


def _words(metric: str) -> list[str]:
    """The words of a name in lower case, each also without digits at its end; `topn` for any n.

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
    names = () if value is None else value
    remedy = f'give a set of names: {place.partition(" ")[0]} = {{"mae"}}'
    if isinstance(names, str) or not isinstance(names, (set, frozenset, list, tuple)):
        raise error(f"{place} is {a_kind(names)}, not a set of names", help=remedy)
    strange = [name for name in names if not isinstance(name, str)]
    if strange:
        raise error(f"{place} holds {a_kind(strange[0])}, not only names", help=remedy)
    return frozenset(names)
