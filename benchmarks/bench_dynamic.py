"""W5: what the simulation of dynamic int8 costs, as a ratio to the float pass of the same
LLaMA; with its accuracy.

`python benchmarks/bench_dynamic.py [rounds]`; 8 sequences of 256 tokens, hidden 512, 4 layers,
two threads.
"""

from __future__ import annotations

import copy
import functools
import sys

import torch
from measure import Part, ratios, report
from torch import Tensor, nn
from workloads import Llama, llama, tokens

from quantizer import (
    Config,
    Dtype,
    ModelQuantizer,
    PerChannelMinMaxObserver,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
)

TARGET = 1.15
WEIGHT = QuantizationSpec(
    Dtype.int8, False, PerChannelMinMaxObserver, QSchemeType.per_channel, ch_axis=0
)
INPUTS = {
    "per token": QuantizationSpec(Dtype.int8, is_dynamic=True, qscheme=QSchemeType.per_token),
    "per tensor": QuantizationSpec(Dtype.int8, is_dynamic=True, qscheme=QSchemeType.per_tensor),
}


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    torch.set_num_threads(2)
    model, data = llama(), tokens(8)
    quantized = {name: with_inputs(model, spec) for name, spec in INPUTS.items()}
    parts: dict[str, Part] = {
        name: functools.partial(run, twin, data) for name, twin in quantized.items()
    }
    report(
        "W5 pass with dynamic int8 inputs and int8 weights, ratio to the float pass",
        ratios(functools.partial(run, model, data), parts, rounds),
        dict.fromkeys(parts, TARGET),
        {
            name: f"logits SQNR {sqnr(model, twin, data[0]):.1f} dB"
            for name, twin in quantized.items()
        },
    )


def with_inputs(model: Llama, spec: QuantizationSpec) -> Llama:
    """A copy with int8 weights per channel and the inputs of all linear layers in `spec`."""
    config = Config(QuantizationConfig(input_tensors=spec, weight=WEIGHT))
    return ModelQuantizer(config).quantize_model(copy.deepcopy(model))


@torch.no_grad()
def run(model: nn.Module, data: list[Tensor]) -> None:
    """One pass over the data."""
    for batch in data:
        model(batch)


@torch.no_grad()
def sqnr(model: nn.Module, twin: nn.Module, batch: Tensor) -> float:
    """Signal to quantization noise of the logits in dB."""
    expected, found = model(batch), twin(batch)
    return float(10 * torch.log10(expected.square().sum() / (expected - found).square().sum()))


if __name__ == "__main__":
    main()
