"""Draws docs/pictures: what each algorithm does, on networks of examples/, which come from PyPI
with their data.

`python docs/pictures.py [NAME…]` takes some minutes. Pictures are drawn again when an algorithm
changes; two processors may differ in the last digits, so no test compares them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quantizer.cli.main import run_command
from quantizer.config.load import load_config
from quantizer.graph.edits import by_channel
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.trace import trace
from quantizer.numerics.hadamard import factors, rotate_rows
from quantizer.report.page import charts, figures
from quantizer.report.page.charts import Point, Series
from quantizer.report.page.html import Markup, page_file

ROOT = Path(__file__).parents[1]
EXAMPLES, CONFIGS, TARGET = ROOT / "examples", ROOT / "configs", ROOT / "docs" / "pictures"
BLOCK = "model.layers.14"


def ranges() -> Markup:
    """An activation of EfficientNet-Lite0 whose range methods disagree most."""
    with results(
        EXAMPLES / "efficientnet_lite.py", (CONFIGS / "cpu_int8.json").read_text()
    ) as folder:
        content = json.loads((folder / "report.json").read_text())

    def spread(row: Mapping[str, Any]) -> float:
        ends = [high for _, high in row["methods"].values()]
        return float(max(ends) / min(ends)) if min(ends) > 0 else 0.0

    row = max((row for row in content["layers"] if "histogram" in row), key=spread)
    drawn = figures.histogram(content, row)
    assert drawn is not None
    return drawn


def smoothquant() -> Markup:
    """Inputs of attention by channel, before and after, for alpha 0.5."""
    inputs, weight = language_model(f"{BLOCK}.self_attn.q_proj")
    before = inputs.abs().amax(0)
    after = before / (before / weight.abs().amax(0)).sqrt()
    return by_size("greatest |input| of a channel", before, "divided by its factor", after)


def rotation() -> Markup:
    """The residual stream by channel, before and after."""
    inputs, _ = language_model(f"{BLOCK}.input_layernorm")
    signs = (
        torch.randint(2, (inputs.shape[1],), generator=torch.Generator().manual_seed(0)) * 2.0
        - 1
    )
    turned = rotate_rows(inputs, signs, *(each.float() for each in factors(inputs.shape[1])))
    names = "greatest |value| of a channel of the residual stream, as a power of two", "rotated"
    return by_size(names[0], inputs.abs().amax(0).log2(), names[1], turned.abs().amax(0).log2())


def awq() -> Markup:
    """The output error of a projection in int4 by the exponent of its factors."""
    inputs, weight = language_model(f"{BLOCK}.mlp.gate_proj")
    size, expected = inputs.abs().mean(0), inputs @ weight.T
    errors = {}
    for step in range(21):
        scales = size.pow(step / 20)
        scales /= (scales.max() * scales.min()).sqrt()
        found = in_groups(weight * scales) / scales
        errors[step / 20] = float(
            (inputs @ found.T - expected).square().mean() / expected.square().mean()
        )
    points = [
        Point(at, 100 * error, f"alpha {at}: {100 * error:.3g} %")
        for at, error in errors.items()
    ]
    names = "output error in percent, by alpha from 0 to 1", "round-to-nearest"
    return charts.draw_curve(points, points[:1], names, title="Output error by AWQ's exponent")


def gptq() -> Markup:
    """Outputs of the 210 layers of a language model, on the data that they were rounded on."""
    config = json.loads((CONFIGS / "gptq_int4_group.json").read_text())
    config["global_quant_config"]["weight"]["group_size"] = 64
    with results(EXAMPLES / "smollm2.py", json.dumps(config)) as folder:
        rows = json.loads((folder / "algorithms.json").read_text())["rounded"].values()
    nearest, found = (
        -10 * torch.tensor([row[key] for row in rows]).log10() for key in ("error_rtn", "error")
    )
    return by_size(
        "SQNR of a layer's outputs in dB, round-to-nearest", nearest, "GPTQ", found, "dB"
    )


def equalization() -> Markup:
    """Ranges of the channels of a depthwise convolution before and after."""
    graph = skewed()
    config = load_config(str(CONFIGS / "dpu.json")).require()
    widths = []
    for include_cle in (False, True):
        changed = run_passes(
            graph, dataclasses.replace(config.settings, include_cle=include_cle)
        )
        node = next(node for node in changed.nodes if node.attrs.get("groups", 1) > 1)
        widths.append(
            by_channel(node, changed.weight(node)).flatten(2).abs().amax(2).flatten().log2()
        )
    order = widths[0].argsort(descending=True)
    return compared(
        "range of a channel's weights, as a power of two",
        widths[0][order],
        "equalized",
        widths[1][order],
        "bits",
    )


def fast_finetune() -> Markup:
    """SQNR by depth with weights of 3 bits."""
    found = []
    for more in ([], ["--fast_finetune"]):
        with results(EXAMPLES / "digits_mobile.py", three_bits(), *more) as folder:
            run(
                "--quant_mode",
                "test",
                "--model",
                str(EXAMPLES / "digits_mobile.py"),
                "--output_dir",
                str(folder),
            )
            content = json.loads((folder / "report.json").read_text())
        found.append(
            torch.tensor([row["accumulated_sqnr_db"] for row in figures.measured_rows(content)])
        )
    return compared(
        "SQNR of each layer's output in dB, round-to-nearest",
        found[0],
        "fast finetuning",
        found[1],
        "dB",
    )


def bias_correction() -> Markup:
    """Mean outputs of a layer by channel, with weights of 3 bits."""
    name = "MobileNet::MobileNet/Sequential[blocks]/Separable[3]/Conv2d[3]/conv2d"
    with results(EXAMPLES / "digits_mobile.py", three_bits(corrected=True)) as folder:
        kept = load_file(folder / "statistics.safetensors")
        missing = load_file(folder / "bias_corr.safetensors")[name]
    mean = kept[f"{name}|output|sum"] / kept[f"{name}|output|count"]
    order = mean.argsort(descending=True)
    first, second = (
        "mean output of a channel, weights in 3 bits",
        "the same in float, and after correction",
    )
    return compared(first, (mean - missing)[order], second, mean[order], "")


def by_size(first: str, before: Tensor, second: str, after: Tensor, unit: str = "") -> Markup:
    """Two lines over channels or layers, from the largest down."""
    order = before.argsort(descending=True)
    return compared(first, before[order], second, after[order], unit)


def compared(first: str, before: Tensor, second: str, after: Tensor, unit: str) -> Markup:
    """Two lines over channels or layers."""
    series = Series(first, before.tolist(), "second"), Series(second, after.tolist(), "first")
    names = [str(at) for at in range(len(before))]
    return charts.draw_lines(series, names, unit, title=f"{first}; {second}", has_points=False)


def in_groups(weight: Tensor, size: int = 64, bits: int = 4) -> Tensor:
    """Rounded to symmetric integers with a scale for each group."""
    groups = weight.reshape(len(weight), -1, size)
    scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((groups / scale).round() * scale).reshape(weight.shape)


@cache
def skewed() -> Graph:
    """digits_mobile.py with channels of very different ranges."""
    sys.path.insert(0, str(EXAMPLES))
    import digits_mobile

    return trace(
        digits_mobile.skewed().eval(), (next(iter(digits_mobile.calibration_data()))[0],)
    )


@cache
def language_model(module: str) -> tuple[Tensor, Tensor]:
    """Inputs [tokens, channels] of a module of SmolLM2 on two windows of text, and its
    weight.
    """
    sys.path.insert(0, str(EXAMPLES))
    import smollm2

    network, seen = smollm2.model(), list[Tensor]()
    part = network.get_submodule(module)
    part.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for window in smollm2.evaluation_data(2):
            network(**window)
    return torch.cat(seen), part.weight


def three_bits(*, corrected: bool = False) -> str:
    """configs/cpu_int8.json with weights of three bits."""
    config = json.loads((CONFIGS / "cpu_int8.json").read_text())
    config["tensor_quantize_config"]["weights"]["bit_width"] = 3
    return json.dumps(config | {"include_bias_corr": corrected})


@contextmanager
def results(model: Path, config: str, *more: str) -> Iterator[Path]:
    """The result folder of a calibration, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "config.json")
        place.write_text(config.replace("../schemas", str(ROOT / "schemas")))
        given = (
            "--model",
            str(model),
            "--config_file",
            str(place),
            "--output_dir",
            str(place.with_name("results")),
        )
        run("--quant_mode", "calib", *given, *more)
        yield place.with_name("results")


def run(*arguments: str) -> None:
    """One run of the command line."""
    if code := run_command([*arguments, "-q"]):
        sys.exit(code)


def in_both_themes(drawing: Markup) -> str:
    """Return the content of an SVG file that is dark where the reader's theme is dark."""
    picture = figures.standalone(drawing)
    light, _, others = page_file("drawing.css").partition("@media")
    dark, _, _ = others.partition("\n}\n")
    light_colours = dict(re.findall(r"--(\w+): (#\w+);", light))
    dark_colours = dict(re.findall(r"--(\w+): (#\w+);", dark))
    rules = picture.partition("<style>")[2].partition("</style>")[0]
    for name, colour in light_colours.items():
        rules = rules.replace(colour, dark_colours[name])
    paper = f"style + rect {{ fill: {dark_colours['back']}; }}\n"
    block = f"@media (prefers-color-scheme: dark) {{\n{rules}{paper}}}\n"
    return picture.replace("</style>", f"{block}</style>", 1)


PICTURES: Mapping[str, Callable[[], Markup]] = {
    each.__name__: each
    for each in (
        ranges,
        smoothquant,
        rotation,
        awq,
        gptq,
        equalization,
        fast_finetune,
        bias_correction,
    )
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        (TARGET / f"{name}.svg").write_text(in_both_themes(PICTURES[name]()), "utf-8")
