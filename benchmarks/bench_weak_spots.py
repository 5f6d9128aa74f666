"""Networks that lose most in 8 bits: what each keeps, and how much of a last bit float itself
makes at its output.

    python benchmarks/bench_weak_spots.py  # benchmarks/networks.py says what to install
    python benchmarks/bench_weak_spots.py crepe_tiny mobilevit

A line is a row of the table in docs/weak_spots.md.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import warnings
from pathlib import Path

import bench_retrieval
import networks
import packaged_networks
import torch
from torch import Tensor, nn

import quantizer
from quantizer.numerics.metrics import decibel

PRESETS = Path(__file__).parents[1] / "configs"
DPU = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2", "crepe_tiny", "minilm")
"""Trained networks that lose on the DPU."""
CROPS = 24
"""Random crops of each of twenty photos. Five, as elsewhere, tell 95 % from 97 % hardly."""
TIMM = ("timm", "timm.data", "torchvision", "torchvision.ops", "torchvision.ops.misc")
"""Packages that timm's networks name and do not need."""
Shaped = tuple[nn.Module, tuple[int, ...]]


def mobilevit() -> Shaped:
    """Attention between depthwise convolutions (arXiv 2110.02178)."""
    code = packaged_networks.packaged("timm", "models.mobilevit", TIMM)
    return code.mobilevit_xxs(num_classes=100), (3, 64, 64)


def mobilenet_v4() -> Shaped:
    """Universal inverted bottlenecks (arXiv 2404.10518)."""
    code = packaged_networks.packaged("timm", "models.mobilenetv3", TIMM)
    return code.mobilenetv4_conv_small(num_classes=100), (3, 64, 64)


class Tokens(nn.Module):
    """A language model whose tokens are drawn from its input's numbers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x * 1000).long().abs() % 256
        return self.network(input_ids=tokens).logits  # type: ignore[no-any-return]


def gemma() -> Shaped:
    """A decoder whose embeddings are multiplied by the root of its width."""
    transformers = importlib.import_module("transformers")
    config = transformers.GemmaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
    )
    return Tokens(transformers.GemmaForCausalLM(config)), (32,)


class Codec(nn.Module):
    """An audio codec, from a waveform to the decoded one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).audio_values  # type: ignore[no-any-return]


def dac() -> Shaped:
    """Convolutions with sines between them, and residual vector quantization (arXiv
    2306.06546).
    """
    transformers = importlib.import_module("transformers")
    config = transformers.DacConfig(
        encoder_hidden_size=16,
        downsampling_ratios=[2, 4, 4],
        decoder_hidden_size=128,
        upsampling_ratios=[4, 4, 2],
        n_codebooks=4,
        codebook_size=64,
        codebook_dim=8,
    )
    return Codec(transformers.DacModel(config)), (1, 1024)


RANDOM = {
    make.__name__: make
    for make in (
        packaged_networks.efficientvit_b0,
        packaged_networks.diffusion_autoencoder,
        mobilevit,
        mobilenet_v4,
        gemma,
        dac,
    )
}


@torch.no_grad()
def float_noise(case: networks.Case) -> tuple[float, float]:
    """Return two SQNR in dB after the float network's weights were rounded to 8 bits of
    mantissa, as bfloat16 has: that of the weights, and that of the first output.
    """
    rounded = copy.deepcopy(case.model)
    weights, weights_noise = 0.0, 0.0
    for weight in rounded.parameters():
        coarse = weight.bfloat16().float()
        weights += float(weight.double().square().sum())
        weights_noise += float((coarse.double() - weight).square().sum())
        weight.copy_(coarse)
    signal, noise = 0.0, 0.0
    for batch in case.held_out:
        expected = case.model(batch)
        signal += float(expected.double().square().sum())
        noise += float((rounded(batch) - expected).double().square().sum())
    return decibel(weights, weights_noise), decibel(signal, noise)


def figures(case: networks.Case, preset: str, level: str | None = None) -> str:
    """Return what a preset keeps: the SQNR in dB, the share of samples with the float network's
    class, and for sentences the mean reciprocal rank.
    """
    config = PRESETS / f"{preset}.json"
    torch.manual_seed(0)
    result = quantizer.calibrate(case.model, config, case.calibration, dpu_accuracy=level)
    metrics = result.test(case.held_out).to_json()["metrics"]
    words = f"{metrics['sqnr_db']:.1f} dB"
    if isinstance(case.model, networks.Sentences):
        rank = bench_retrieval.mean_reciprocal_rank(result.network, case.held_out)
        return f"{words}, MRR {rank:.2f}"
    if "top1_agreement" in metrics and not isinstance(case.model, Codec):
        words += f", {metrics['top1_agreement']:.1%}"
    return words


def main() -> None:
    """Print a row for each network."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = sys.argv[1:] or [*DPU, *RANDOM]
    print("| network | `configs/dpu.json` | with the remedy |")
    print("|---|---|---|")
    for name in names:
        if name in DPU:
            case = networks.REAL[name]()
            if name.startswith("efficientnet_lite"):
                case = networks.efficientnet_lite(int(name[-1]), CROPS)
            if name == "minilm":
                remedy = figures(case, "cpu_int8")
            else:
                remedy = figures(case, "dpu", "high")
            print(f"| {name} | {figures(case, 'dpu')} | {remedy} |", flush=True)
    print(
        "\n| network, random weights | `cpu_int8` | `dpu` | bfloat16 weights | their output |"
    )
    print("|---|---|---|---|---|")
    for name in names:
        if name in RANDOM:
            case = networks.Case(*packaged_networks.made(RANDOM[name]))
            row = [figures(case, "cpu_int8"), figures(case, "dpu")]
            row += [f"{sqnr_db:.1f} dB" for sqnr_db in float_noise(case)]
            print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
