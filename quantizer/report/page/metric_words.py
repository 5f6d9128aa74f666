"""Lists the metrics with unit, direction and meaning, for the page and for docs/metrics.md."""

from collections.abc import Mapping

from quantizer.evaluation.scores import DROP, RATIO
from quantizer.plugins import HIGHER, LOWER, MetricWords, plugins
from quantizer.sources.directions import Directions

METRICS: dict[str, MetricWords] = {
    "sqnr_db": MetricWords(
        "dB",
        HIGHER,
        "the signal to quantization noise ratio of the worst floating-point output or part: "
        "10 log10(sum x² / sum (x - y)²) of the float values x and the quantized values y",
        "the signal to quantization noise ratio (SQNR) of the worst output. 20 dB: the error "
        "has a tenth of the signal's amplitude; 40 dB: a hundredth",
    ),
    "sqnr_db_worst": MetricWords(
        "dB",
        HIGHER,
        "the same of each sample alone: all but the worst twentieth of samples have more; with "
        "fewer than 20 samples it is that of the worst one",
        "the SQNR that all but the worst twentieth of samples have; with fewer than 20 samples "
        "that of the worst one",
    ),
    "sqnr_db_pooled": MetricWords(
        "dB",
        HIGHER,
        "the same over the values of all outputs together; a large output hides a small one",
        "the SQNR of the values of all outputs together; a large output hides a small one",
    ),
    "sqnr_db[0.scores]": MetricWords(
        "dB", HIGHER, "the same of one output or part, by its name or index"
    ),
    "cosine": MetricWords(
        "-1 to 1",
        HIGHER,
        "the cosine of the angle between float and quantized values, of the worst output or "
        "part",
    ),
    "equal_outputs": MetricWords(
        "0 to 1",
        HIGHER,
        "the share of equal values in outputs of integers and booleans, such as classes and "
        "indices",
    ),
    "rows_kept": MetricWords(
        "0 to 1",
        HIGHER,
        "the share of rows that both networks select, if an operator orders rows by their "
        "values",
    ),
    "top1_agreement": MetricWords(
        "0 to 1", HIGHER, "the share of samples whose largest value stays at the same place"
    ),
    "top1": MetricWords("0 to 1", HIGHER, "accuracy against the labels of the data"),
    "perplexity": MetricWords("1 and more", LOWER, "of a language model on texts"),
    "`X` of your `evaluate()`": MetricWords(
        "yours",
        "as its name or file says",
        "of the quantized network; `X_float` is that of the float network",
    ),
    f"X{DROP}": MetricWords("as X", LOWER, "the loss of quality of X"),
    f"perplexity{RATIO}": MetricWords(
        "1 and more", LOWER, "the quantized perplexity divided by the float one"
    ),
    "exact_equal": MetricWords(
        "0 to 1", HIGHER, "with `--exact`: the share of codes that equal the DPU's integers"
    ),
}
"""By the names of the metrics, in the order of the documentation. X stands for a metric of the
user's evaluate().
"""
for _plugin in plugins():
    METRICS.update(_plugin.metrics)


def metric_sentence(name: str, pairs: Mapping[str, object], directions: Directions) -> str:
    """Return unit and direction of a metric.

    Args:
        name: of the metric.
        pairs: the metrics of the task, by name.
        directions: the declared directions of these metrics.

    >>> metric_sentence("sqnr_db", {}, Directions())
    'dB; higher is better'
    >>> metric_sentence("ripple", {"ripple": 0}, Directions())
    'whether higher or lower is better is not known'
    """
    is_lower = directions.of_figure(name, list(pairs))
    direction = "whether higher or lower is better is not known"
    if is_lower is not None:
        direction = f"{LOWER if is_lower else HIGHER} is better"
    words = METRICS.get(name)
    return direction if words is None else f"{words.unit}; {direction}"


def metric_meaning(name: str) -> str:
    """Return what a metric is, for the page.

    >>> metric_meaning("top1"), metric_meaning("ripple")
    ('accuracy against the labels of the data', 'of your evaluate()')
    """
    words = METRICS.get(name)
    if words is None:
        return "of your evaluate()"
    return words.short or words.meaning
