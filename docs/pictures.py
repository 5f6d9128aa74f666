"""Draw docs/pictures, which show what each algorithm does, and the pictures of a report.

`python docs/pictures.py [NAME…]` takes some minutes. NAME is a file of docs/pictures, or
`report`. The networks of examples/ and their data come from PyPI. Draw the pictures again when
an algorithm or the look of the report changes. Two processors may differ in the last digits, so
no test compares them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from report_picture import draw_report
from safetensors.torch import load_file
from svg_file import in_both_schemes
from torch import Tensor

from quantizer.cli.main import run_command
from quantizer.config.load import load_config
from quantizer.graph.edits import by_channel
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.rare_layers import factors, rotate_rows
from quantizer.printable import Markup
from quantizer.report.page import charts, figures
from quantizer.report.page.charts import Point, Series

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES, CONFIGS, TARGET = ROOT / "examples", ROOT / "configs", DOCS / "pictures"
BLOCK = "model.layers.14"
ALPHA_STEPS = 20


def ranges() -> Markup:
    """Draw the activation of EfficientNet-Lite0 whose range methods disagree most."""
    config = (CONFIGS / "cpu_int8.json").read_text()
    with results(EXAMPLES / "efficientnet_lite.py", config) as folder:
        content = json.loads((folder / "report.json").read_text())

    def spread(row: Mapping[str, Any]) -> float:
        ends = [high for _, high in row["methods"].values()]
        return float(max(ends) / min(ends)) if min(ends) > 0 else 0.0

    rows = [row for row in content["layers"] if "histogram" in row]
    drawing = figures.histogram(content, max(rows, key=spread))
    assert drawing is not None
    return drawing


def smoothquant() -> Markup:
    """Draw the inputs of attention by channel, before and after, for alpha 0.5."""
    inputs, weight = language_model(f"{BLOCK}.self_attn.q_proj")
    before = inputs.abs().amax(0)
    after = before / (before / weight.abs().amax(0)).sqrt()
    return by_size(
        {"before": before, "divided by its factor": after},
        "channels, sorted by their value before →",
        "↑ greatest |input| of a channel",
    )


def rotation() -> Markup:
    """Draw the residual stream by channel, before and after."""
    inputs, _ = language_model(f"{BLOCK}.input_layernorm")
    channels = inputs.shape[1]
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (channels,), generator=generator) * 2.0 - 1
    matrices = [matrix.float() for matrix in factors(channels)]
    rotated = rotate_rows(inputs, signs, *matrices)
    before = inputs.abs().amax(0).log2()
    after = rotated.abs().amax(0).log2()
    return by_size(
        {"before": before, "rotated": after},
        "channels, sorted by their value before →",
        "↑ greatest |value| of a channel, as a power of two",
    )


def awq() -> Markup:
    """Draw the output error of a projection in int4 by the exponent of its factors."""
    inputs, weight = language_model(f"{BLOCK}.mlp.gate_proj")
    size = inputs.abs().mean(0)
    expected = inputs @ weight.T
    points = []
    for step in range(ALPHA_STEPS + 1):
        alpha = step / ALPHA_STEPS
        scales = size.pow(alpha)
        scales /= (scales.max() * scales.min()).sqrt()
        rounded = in_groups(weight * scales) / scales
        noise = (inputs @ rounded.T - expected).square().mean()
        percent = float(100 * noise / expected.square().mean())
        points.append(Point(alpha, percent, f"alpha {alpha}: {percent:.3g} %"))
    return charts.draw_curve(
        points,
        points[:1],
        ("with AWQ's factors", "round-to-nearest"),
        title="Output error by AWQ's exponent",
        axis_names=("alpha, the exponent of the factors →", "↑ output error in %"),
    )


def gptq() -> Markup:
    """Draw outputs of the 210 layers of a language model, on the data that they were rounded
    on.
    """
    config = json.loads((CONFIGS / "gptq_int4_group.json").read_text())
    config["global_quant_config"]["weight"]["group_size"] = 64
    with results(EXAMPLES / "smollm2.py", json.dumps(config)) as folder:
        rows = json.loads((folder / "algorithms.json").read_text())["rounded"].values()
    lines = {}
    for label, key in {"round-to-nearest": "error_rtn", "GPTQ": "error"}.items():
        errors = torch.tensor([row[key] for row in rows])
        lines[label] = -10 * errors.log10()
    return by_size(
        lines,
        "layers, sorted by their SQNR with round-to-nearest →",
        "↑ SQNR of a layer's outputs in dB; higher is better",
    )


def equalization() -> Markup:
    """Draw the ranges of the channels of a depthwise convolution, before and after."""
    graph = skewed()
    config = load_config(str(CONFIGS / "dpu.json")).require()
    lines = {}
    for label, include_cle in {"before": False, "equalized": True}.items():
        settings = dataclasses.replace(config.settings, include_cle=include_cle)
        changed = run_passes(graph, settings)
        node = next(node for node in changed.nodes if node.attrs.get("groups", 1) > 1)
        weight = by_channel(node, changed.weight(node))
        lines[label] = weight.flatten(2).abs().amax(2).flatten().log2()
    return by_size(
        lines,
        "channels, sorted by their range before →",
        "↑ range of a channel's weights, as a power of two",
    )


def fast_finetune() -> Markup:
    """Draw the SQNR by depth with weights of 3 bits."""
    model = EXAMPLES / "digits_mobile.py"
    options: dict[str, list[str]] = {
        "round-to-nearest": [],
        "fast finetuning": ["--fast_finetune"],
    }
    lines = {}
    for label, more in options.items():
        with results(model, three_bits(), *more) as folder:
            run("--quant_mode", "test", "--model", str(model), "--output_dir", str(folder))
            content = json.loads((folder / "report.json").read_text())
        rows = figures.measured_rows(content)
        lines[label] = torch.tensor([row["accumulated_sqnr_db"] for row in rows])
    return compared(
        lines,
        "layers in the order of execution →",
        "↑ SQNR of a layer's output in dB; higher is better",
    )


def bias_correction() -> Markup:
    """Draw the mean outputs of a layer by channel, with weights of 3 bits."""
    name = "MobileNet::MobileNet/Sequential[blocks]/Separable[3]/Conv2d[3]/conv2d"
    with results(EXAMPLES / "digits_mobile.py", three_bits(corrected=True)) as folder:
        statistics = load_file(folder / "statistics.safetensors")
        correction = load_file(folder / "bias_corr.safetensors")[name]
    mean = statistics[f"{name}|output|sum"] / statistics[f"{name}|output|count"]
    order = mean.argsort(descending=True)
    return compared(
        {
            "weights in 3 bits": (mean - correction)[order],
            "float, and 3 bits after correction": mean[order],
        },
        "channels, sorted by their mean in float →",
        "↑ mean output of a channel",
    )


def by_size(lines: Mapping[str, Tensor], x_name: str, y_name: str) -> Markup:
    """Draw two lines over channels or layers, from the largest value of the first line down."""
    first = next(iter(lines.values()))
    order = first.argsort(descending=True)
    in_order = {label: values[order] for label, values in lines.items()}
    return compared(in_order, x_name, y_name)


def compared(lines: Mapping[str, Tensor], x_name: str, y_name: str) -> Markup:
    """Draw two lines over channels or layers: before, and after."""
    series = []
    for kind, (label, values) in zip(("second", "first"), lines.items(), strict=True):
        series.append(Series(label, values.tolist(), kind))
    names = [str(number) for number in range(1, len(series[0].values) + 1)]
    title = f"{y_name.removeprefix('↑ ')}: {', '.join(lines)}"
    return charts.draw_lines(
        series, names, "", title=title, has_points=False, axis_names=(x_name, y_name)
    )


def in_groups(weight: Tensor, size: int = 64, bits: int = 4) -> Tensor:
    """Round to symmetric integers with a scale for each group."""
    groups = weight.reshape(len(weight), -1, size)
    scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((groups / scale).round() * scale).reshape(weight.shape)


@cache
def skewed() -> Graph:
    """Return digits_mobile.py with channels of very different ranges."""
    sys.path.insert(0, str(EXAMPLES))
    import digits_mobile

    batch = next(iter(digits_mobile.calibration_data()))
    return trace(digits_mobile.skewed().eval(), (batch[0],))


@cache
def language_model(module: str) -> tuple[Tensor, Tensor]:
    """Return the inputs [tokens, channels] of a module of SmolLM2 on two windows of text, and
    its weight.
    """
    sys.path.insert(0, str(EXAMPLES))
    import smollm2

    network = smollm2.model()
    inputs: list[Tensor] = []
    part = network.get_submodule(module)
    part.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for window in smollm2.evaluation_data(2):
            network(**window)
    return torch.cat(inputs), part.weight


def three_bits(*, corrected: bool = False) -> str:
    """Return configs/cpu_int8.json with weights of three bits."""
    config = json.loads((CONFIGS / "cpu_int8.json").read_text())
    config["tensor_quantize_config"]["weights"]["bit_width"] = 3
    return json.dumps(config | {"include_bias_corr": corrected})


@contextmanager
def results(model: Path, config: str, *more: str) -> Iterator[Path]:
    """Yield the result folder of a calibration, which exists inside the `with` block."""
    with tempfile.TemporaryDirectory() as name:
        config_file = Path(name, "config.json")
        config_file.write_text(config.replace("../schemas", str(ROOT / "schemas")))
        folder = Path(name, "results")
        options = {"model": model, "config_file": config_file, "output_dir": folder}
        words = []
        for option, value in options.items():
            words += [f"--{option}", str(value)]
        run("--quant_mode", "calib", *words, *more)
        yield folder


def run(*arguments: str) -> None:
    """Run the command line once."""
    code = run_command([*arguments, "-q"])
    if code:
        sys.exit(code)


PICTURES: Mapping[str, Callable[[], Markup]] = {
    "ranges": ranges,
    "smoothquant": smoothquant,
    "rotation": rotation,
    "awq": awq,
    "gptq": gptq,
    "equalization": equalization,
    "fast_finetune": fast_finetune,
    "bias_correction": bias_correction,
}
REPORT = "report"

if __name__ == "__main__":
    for name in sys.argv[1:] or (*PICTURES, REPORT):
        if name == REPORT:
            draw_report(DOCS)
        else:
            (TARGET / f"{name}.svg").write_text(in_both_schemes(PICTURES[name]()), "utf-8")
