"""W5: what it costs to quantize a weight, range, scale and fake quantization, as a ratio to
copying it.

`python benchmarks/bench_weights.py [rounds]`; a 4096x4096 float32 weight, both into memory that
is there, two threads.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from measure import Part, ratios, report, seconds
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.observers import Observer

CHANNELS = QuantizationSpec(qscheme="per_channel", ch_axis=0)
GROUPS = QuantizationSpec(bit_width=4, qscheme="per_group", ch_axis=1, group_size=128)
BLOCKS = QuantizationSpec(
    "fp4", qscheme="per_group", ch_axis=1, group_size=32, scale_type="e8m0"
)
WEIGHTS = {
    "int8 tensor": QuantizationSpec(),
    "int8 channel": CHANNELS,
    "uint8 channel": replace(CHANNELS, symmetric=False),
    "int4 g128": GROUPS,
    "uint4 g128": replace(GROUPS, symmetric=False),
    "fp8 channel": replace(CHANNELS, dtype="fp8_e4m3"),
    "mxfp4": BLOCKS,
    "mxint8": replace(BLOCKS, dtype="mx_int8"),
}
ROWS = {
    "int8 token": QuantizationSpec(qscheme="per_token", ch_axis=-1, is_dynamic=True),
    "fp8 token": QuantizationSpec("fp8_e4m3", qscheme="per_token", ch_axis=-1, is_dynamic=True),
    "mxfp4": replace(BLOCKS, is_dynamic=True),
}
TARGET = 3.0


def main() -> None:
    """Measure both and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    torch.set_num_threads(2)
    # As after any network's run, the allocator keeps up to some 30 MB from now on (glibc)
    torch.empty(7 << 20)
    copied = torch.empty(4096, 4096)
    weights = {name: functools.partial(static, spec) for name, spec in WEIGHTS.items()}
    show(
        "W5 weights: range, scale and fake quantization, ratio to copy_",
        copied,
        weights,
        rounds,
    )
    rows = {name: TensorQuantizer(spec, inplace=True) for name, spec in ROWS.items()}
    show(
        "W5 dynamic: the same of activations at run time, ratio to copy_", copied, rows, rounds
    )


def show(
    title: str, copied: Tensor, parts: Mapping[str, Callable[[Tensor], object]], rounds: int
) -> None:
    """Measure each part beside copying the same tensor, one part after the other, as they share
    no cache.
    """
    found: dict[str, list[float]] = {}
    speed: dict[str, str] = {}
    for name, part in parts.items():
        tensor = torch.randn(4096, 4096)
        copy: Part = functools.partial(copied.copy_, tensor)
        found |= ratios(copy, {name: functools.partial(part, tensor)}, rounds)
        milliseconds = 1000 * statistics.median(seconds(copy) for _ in range(rounds))
        speed[name] = f"copy_ {milliseconds:.1f} ms"
    report(title, found, dict.fromkeys(parts, TARGET), speed)


def static(spec: QuantizationSpec, weight: Tensor) -> Tensor:
    """What calibration and the network do to one weight, in place."""
    observer = Observer(spec)
    observer.observe(weight)
    found = observer.qparams()
    quantized: Tensor = TensorQuantizer(spec, found.scale, found.zero_point, inplace=True)(
        weight
    )
    return quantized


if __name__ == "__main__":
    main()
