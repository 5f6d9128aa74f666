"""The tables of range methods, number formats and metrics, with the rows of plug-ins.

`python docs/generate.py` writes their words into the schemas. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quantizer.declarations import (
    DROP,
    FILE_SIZE,
    HIGHER,
    LATENCY,
    LOWER,
    RATIO,
    RISE,
    MetricWords,
)
from quantizer.plugins import plugins
from quantizer.rows import NumberFormat, ObserverClass, RangeMethod

_METHODS = "quantizer.observers.methods"
_LEAST_ERROR = "quantizer.observers.least_error"
_BY_VALUES = "quantizer.observers.value_ranges"
RANGE_METHODS: dict[str, RangeMethod] = {
    "maxmin": RangeMethod(
        f"{_METHODS}:maxmin",
        "the smallest and largest value seen",
        reads="extremes",
        observers={
            "PerTensorMinMaxObserver": ObserverClass(
                ("per_tensor",),
                "smallest and largest value; per_tensor",
                "one range for the tensor, from its smallest to its largest value",
            ),
            "PerChannelMinMaxObserver": ObserverClass(
                ("per_channel", "per_group", "per_token"),
                "smallest and largest value; per_channel, per_group",
                "a range for each channel along `ch_axis`, or for each group of its values, "
                "from the smallest to the largest value",
            ),
            "PerGroupMinMaxObserver": ObserverClass(
                ("per_group",),
                "smallest and largest value; per_group",
                "a range for each group of `group_size` values along `ch_axis`, from the "
                "smallest to the largest value",
            ),
            "PerBlockMXObserver": ObserverClass(
                ("per_group",),
                "largest absolute value of each block; per_group",
                "a shared exponent for each block of a microscaling format, from its largest "
                "magnitude",
            ),
            "PerBlockBFPObserver": ObserverClass(
                ("per_group",),
                "largest absolute value of each block; per_group",
                "a shared exponent for each block of `bfp16`, from its largest magnitude",
            ),
            "PerBlock2DMinMaxObserver": ObserverClass(
                ("per_block",),
                "smallest and largest value; per_block",
                "a range for each block of `block_size` rows and columns, from the smallest to "
                "the largest value",
            ),
        },
    ),
    "percentile": RangeMethod(
        f"{_METHODS}:percentile",
        "the range that contains `percentage` percent of the values",
        device_ready=True,
        observers={
            "PerTensorPercentileObserver": ObserverClass(
                ("per_tensor",),
                "the range that contains `percentage` percent of the values; per_tensor",
                "one range that contains `percentage` percent of the values",
            )
        },
    ),
    "mse": RangeMethod(
        f"{_LEAST_ERROR}:mse",
        "the threshold with the least squared error",
        symmetric_only=True,
        observers={
            "PerTensorMSEObserver": ObserverClass(
                ("per_tensor",),
                "the threshold with the least squared error; per_tensor",
                "the range with the least squared error",
            )
        },
    ),
    "entropy": RangeMethod(
        f"{_METHODS}:entropy",
        "the threshold with the least Kullback-Leibler divergence",
        integers_only=True,
        symmetric_only=True,
        device_ready=True,
    ),
    "group_mse": RangeMethod(
        f"{_BY_VALUES}:group_mse",
        "like mse for weights in groups, symmetric or not: the errors are those of the values "
        "themselves, for several ranges",
        reads="values",
        device_ready=True,
        observers={
            "PerGroupMSEObserver": ObserverClass(
                ("per_group",),
                "the range with the least squared error, asymmetric too; per_group",
                "the range with the least squared error for each group of `group_size` values "
                "along `ch_axis`",
            )
        },
    ),
    "pair_safe": RangeMethod(
        f"{_BY_VALUES}:pair_safe",
        "for weights of 8 bits: the smallest range with which no x86 processor adds up int8 "
        "products wrong. It is maxmin where no products are added in pairs",
        reads="values",
        integers_only=True,
        symmetric_only=True,
        device_ready=True,
        observers={
            "PerChannelPairSafeObserver": ObserverClass(
                ("per_channel",),
                "the smallest range without wrong sums of int8 products; per_channel",
                "the smallest range for each output channel of a weight with which no x86 "
                "processor adds up int8 products wrong",
            )
        },
    ),
    "diffs": RangeMethod(
        f"{_BY_VALUES}:diffs",
        "the power-of-two scale with the least squared error",
        reads="values",
        integers_only=True,
        powers_of_two_only=True,
        device_ready=True,
    ),
    "auto": RangeMethod(
        f"{_LEAST_ERROR}:auto",
        "of all ranges between those that maxmin, percentile and mse find, symmetric or not, "
        "the one with the least error over all batches at once; `calib_statistic_method` is "
        "not read",
    ),
}
"""By the values of `method`."""
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def listed_format(bits: int, levels: Iterable[int], **columns: Any) -> NumberFormat:
    """Return a format of codes in int8 that are the values themselves."""
    values = tuple(float(level) for level in levels)
    return NumberFormat(bits, "int8", values[-1], levels=values, **columns)


NUMBER_FORMATS: dict[str, NumberFormat] = {
    "fp8_e4m3": NumberFormat(
        8, "float8_e4m3fn", 448.0, 3, -6, meaning="8-bit float, largest value 448"
    ),
    "fp8_e5m2": NumberFormat(
        8, "float8_e5m2", 57344.0, 2, -14, meaning="8-bit float, largest value 57344"
    ),
    "fp6_e3m2": NumberFormat(
        6, "float8_e4m3fn", 28.0, 2, -2, meaning="6-bit float, largest value 28"
    ),
    "fp6_e2m3": NumberFormat(
        6, "float8_e4m3fn", 7.5, 3, 0, meaning="6-bit float, largest value 7.5"
    ),
    "fp4": NumberFormat(
        4, "float8_e4m3fn", 6.0, 1, 0, meaning="4-bit float: 0, 0.5, 1, 1.5, 2, 3, 4, 6"
    ),
    "float16": NumberFormat(16, "float16", 65504.0, meaning="IEEE half precision, no scale"),
    "bfloat16": NumberFormat(
        16,
        "bfloat16",
        float.fromhex("0x1.fep+127"),
        meaning="the upper 16 bits of float32, no scale",
    ),
    "float32": NumberFormat(
        32,
        "float32",
        float.fromhex("0x1.fffffep+127"),
        meaning="left in float, also if wider levels quantize it",
    ),
    "mx_int8": NumberFormat(
        8,
        "int8",
        127 / 64,
        6,
        0,
        factor=64.0,
        group_size=32,
        scale_type="e8m0",
        word="mx",
        meaning="blocks of `mx_element_dtype` that share a power of two",
    ),
    "mx6": NumberFormat(
        5,
        "int8",
        15 / 8,
        3,
        0,
        factor=8.0,
        group_size=16,
        scale_type="microexponent",
        meaning="blocks of 16 5-bit codes that share a power of two, less by half for some "
        "pairs: 6 bits a value",
    ),
    "mx9": NumberFormat(
        8,
        "int8",
        127 / 64,
        6,
        0,
        factor=64.0,
        group_size=16,
        scale_type="microexponent",
        meaning="the same with 8-bit codes: 9 bits a value",
    ),
    "bfp16": NumberFormat(
        8,
        "int8",
        127 / 64,
        6,
        0,
        factor=64.0,
        group_size=8,
        scale_type="e8m0",
        scale_mode="even",
        meaning="blocks of 8-bit codes that share a power of two",
    ),
    "q4_k": listed_format(
        4,
        range(16),
        has_minimum=True,
        scale_bits=16,
        group_size=32,
        scale_type="superblock",
        meaning="Q4_K of llama.cpp: 4-bit codes and a minimum for 32 values, 4.5 bits a value "
        "with the scales; for weights",
    ),
    "q5_k": listed_format(
        5,
        range(32),
        has_minimum=True,
        scale_bits=16,
        group_size=32,
        scale_type="superblock",
        meaning="Q5_K of llama.cpp: 5-bit codes and a minimum for 32 values, 5.5 bits a "
        "value; for weights",
    ),
    "q6_k": listed_format(
        6,
        range(-32, 32),
        scale_bits=9,
        group_size=16,
        scale_type="superblock",
        meaning="Q6_K of llama.cpp: 6-bit codes, a scale for 16 values, 6.5625 bits a value; "
        "for weights",
    ),
    "iq4_nl": listed_format(
        4,
        _IQ4_LEVELS,
        scale_bits=16,
        group_size=32,
        meaning="IQ4_NL of llama.cpp: 16 levels that are closer near zero, a scale for 32 "
        "values, 4.5 bits a value; for weights",
    ),
}
"""The formats other than plain integers, by name. The exponent of bfp16 is one up where the
largest value would round beyond it.

Source: OCP Microscaling Formats v1.0, section 5, for groups of 32; arXiv 2302.08007, table 2,
for those of mx6 and mx9; ggml for the last four formats.
"""
METRICS: dict[str, MetricWords] = {
    "sqnr_db": MetricWords(
        "dB",
        HIGHER,
        "the signal to quantization noise ratio of the worst floating-point output or part: "
        "10 log10(sum x² / sum (x - y)²) of the float values x and the quantized values y",
        "the signal to quantization noise ratio (SQNR) of the worst output. 20 dB: the error "
        "has a tenth of the signal's amplitude; 40 dB: a hundredth",
        of="floats",
    ),
    "sqnr_db_worst": MetricWords(
        "dB",
        HIGHER,
        "the same of each sample alone: all but the worst twentieth of samples have more; with "
        "fewer than 20 samples it is that of the worst one",
        "the SQNR that all but the worst twentieth of samples have; with fewer than 20 samples "
        "that of the worst one",
        of="floats",
    ),
    "sqnr_db_pooled": MetricWords(
        "dB",
        HIGHER,
        "the same over the values of all outputs together; a large output hides a small one",
        "the SQNR of the values of all outputs together; a large output hides a small one",
        of="floats",
        is_pooled=True,
    ),
    "sqnr_db[0.scores]": MetricWords(
        "dB", HIGHER, "the same of one output or part, by its name or index"
    ),
    "cosine": MetricWords(
        "-1 to 1",
        HIGHER,
        "the cosine of the angle between float and quantized values, of the worst output or "
        "part",
        of="floats",
    ),
    "equal_outputs": MetricWords(
        "0 to 1",
        HIGHER,
        "the share of equal values in outputs of integers and booleans, such as classes and "
        "indices",
        of="outputs",
    ),
    "rows_kept": MetricWords(
        "0 to 1",
        HIGHER,
        "the share of rows that both networks select, if an operator orders rows by their "
        "values",
    ),
    "top1_agreement": MetricWords(
        "0 to 1",
        HIGHER,
        "the share of samples whose largest value stays at the same place",
        of="outputs",
    ),
    "top1": MetricWords("0 to 1", HIGHER, "accuracy against the labels of the data"),
    "perplexity": MetricWords("1 and more", LOWER, "of a language model on texts"),
    "`X` of your `evaluate()`": MetricWords(
        "yours",
        "as its name or file says",
        "of the quantized network; `X_float` is that of the float network",
    ),
    f"X{DROP}": MetricWords("as X", LOWER, "the loss of quality of X"),
    f"X{RISE}": MetricWords("as X", LOWER, "the same where less of X is better"),
    f"perplexity{RATIO}": MetricWords(
        "1 and more", LOWER, "the quantized perplexity divided by the float one"
    ),
    "exact_equal": MetricWords(
        "0 to 1", HIGHER, "with `--exact`: the share of codes that equal the DPU's integers"
    ),
    LATENCY: MetricWords(
        "ms",
        LOWER,
        "with `--to` for an engine whose speed is measured: the time of one call of the "
        "file with the first batch, the median of rounds that alternate with float",
    ),
    FILE_SIZE: MetricWords(
        "10^6 bytes", LOWER, "with `--to`: the size of the file; of several, the largest"
    ),
}
"""By the names of the metrics, in the order of the documentation. X stands for a metric of the
user's evaluate().
"""
OF_FILES: set[str] = set()
"""The metrics that are measured on written files."""
_BUILT_IN = len(RANGE_METHODS) + len(NUMBER_FORMATS)
for _plugin in plugins():
    # A word of the package keeps its meaning
    RANGE_METHODS.update({**_plugin.range_methods, **RANGE_METHODS})
    NUMBER_FORMATS.update({**_plugin.formats, **NUMBER_FORMATS})
    METRICS.update({**_plugin.metrics, **METRICS})
    for _target in _plugin.targets.values():
        OF_FILES.update(_target.metrics)
POOLED_METRICS = tuple(name for name, words in METRICS.items() if words.is_pooled)
SEARCHED = frozenset(name for name, row in NUMBER_FORMATS.items() if row.scale_bits)
"""The formats whose scales are always searched, as `block_search` does."""
HAS_FOREIGN_ROWS = len(RANGE_METHODS) + len(NUMBER_FORMATS) > _BUILT_IN
"""Whether plug-ins add words that the shipped schemas lack."""
