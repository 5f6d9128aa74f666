"""`python tests/fuzz/soak.py SECONDS [SEED]`: random networks, configs and data through
everything that must agree.

Of each seed a model is calibrated, and calibrated again by a run that is killed and resumed:
the same bytes. Test mode, the generated file and a loaded folder give the same bits; a model in
place the same codes; an ONNX file, in a default session, the same up to codes beside ties,
output by output and part by part where values of two ranges are joined. Samples are of
different loudness, and a fresh set of them has what test mode prints. Where inputs have
channels of different units, a channel that loses its effect is named. What differs, or ends
with an internal error, is printed with its seed.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fuzz.graphs import has_units, model_file
from fuzz.results import quietly
from fuzz.search import search
from support.crashes import killed_at
from support.drawn_configs import hierarchical, layered
from support.generated import imported
from support.runs import differing
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import quantizer
from quantizer.errors import LEFT_OUT, QuantizerError
from quantizer.numerics.metrics import sqnr_db
from quantizer.report.next_step import hides_samples
from quantizer.results import checkpoint
from quantizer.sources.models import load_model

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
REFUSED = (1, 2, 3, 4)
"""A config that does not go with the network, or numbers that no format holds."""
CLOSE_DB = 30.0
"""An ONNX file is at least so near to the quantized network, or nearer than that is to the
float one.
"""
FRESH_DB = 10.0
"""How much less a fresh sample may have than what test mode shows."""
NOTICED_DB = 40.0
"""Above it, a value that leaves the range of the calibration by a little costs most of the
figure.
"""
FEWEST_SAMPLES = 16
"""So many samples at least stand for others, as `run` has it."""
MARGIN_DB = 3.0
"""How much nearer. A default session is held to what an export is held to: the loss may
double.
"""


def drawn_config(draw: random.Random) -> dict[str, Any]:
    """One of the presets, or a file without entries, which name layers of another network."""
    kind = draw.choice(["preset", "layered", "hierarchical", "algorithm"])
    if kind == "preset":
        found: dict[str, Any] = json.loads(draw.choice(PRESETS).read_text("utf-8"))
        return {
            key: value
            for key, value in found.items()
            if key not in ("$schema", "//", "layer_quantize_config")
        }
    if kind == "layered":
        found = layered(draw) | {
            "layer_quantize_config": [],
            "include_bias_corr": draw.random() < 0.5,
        }
        activation = found["tensor_quantize_config"].get("activation")
        if activation and draw.random() < 0.5:
            activation["method"] = "auto"
        return found
    found = {"global_quant_config": hierarchical(draw)["global_quant_config"]}
    if kind == "algorithm":
        weight = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0}
        name = draw.choice(["gptq", "awq", "smoothquant", "qronos", "gptaq"])
        found = {"global_quant_config": {"weight": weight, "input_tensors": {"dtype": "int8"}}}
        found |= {
            "pre_quant_opt_config" if name == "smoothquant" else "algo_config": {"name": name}
        }
    return found


class _LeftOut(logging.Handler):
    """Collects the analyses that failed without ending the run."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def watched(seed: int, place: Path) -> tuple[str, list[str]]:
    """The same as `one`, where an analysis that was left out is a finding."""
    left_out = _LeftOut()
    logging.getLogger(LEFT_OUT).addHandler(left_out)
    try:
        end, found = one(seed, place)
    finally:
        logging.getLogger(LEFT_OUT).removeHandler(left_out)
    return end, [*found, *dict.fromkeys(left_out.lines)]


def one(seed: int, place: Path) -> tuple[str, list[str]]:
    """How the seed ended, "ok" or "refused", and what was found."""
    draw = random.Random(seed)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    text, plain = model_file(seed)
    (place / "net.py").write_text(text)
    config = drawn_config(draw)
    (place / "config.json").write_text(json.dumps(config))
    given = [
        "--model",
        str(place / "net.py"),
        "--config_file",
        str(place / "config.json"),
        "-q",
    ]
    folder = place / "out"
    code, said = quietly(["--quant_mode", "calib", *given, "--output_dir", str(folder)])
    said_in_calib = said
    if code in REFUSED:
        return "refused", []
    if code:
        return "ok", [f"calib: exit {code}: {said.strip()[-400:]}"]
    found = [*resumed(draw, given, folder, place)]
    code, said = quietly(["--quant_mode", "test", *given, "--output_dir", str(folder)])
    if code in REFUSED:
        return "refused", found
    if code:
        return "ok", [*found, f"test: exit {code}: {said.strip()[-400:]}"]
    named = (
        "codes per standard deviation" in said_in_calib + said or "input channels lose" in said
    )
    model = load_model(str(place / "net.py")).module
    data = load_model(str(place / "net.py")).calibration_data
    batches = [as_call(batch) for batch in data()] if callable(data) else []
    samples = sum(len(tree_leaves(batch)[0]) for batch in batches)
    # What is fitted to a few samples loses more on others
    if samples >= FEWEST_SAMPLES and "algo_config" not in config:
        fresh = map(as_call, run_path(str(place / "net.py"))["fresh_data"]())
        found += unlike_fresh(folder, model, batches, list(fresh))
    if has_units(seed) and not named:
        found += lost_channels(folder, model, batches)
    batches += [single(batch) for batch in batches[:1]]
    return "ok", [*found, *compared(folder, model, batches, config, given, plain=plain)]


@torch.no_grad()
def unlike_fresh(
    folder: Path, model: nn.Module, batches: list[Call], fresh: list[Call]
) -> list[str]:
    """Outputs for which test mode shows much more than a fresh sample has."""
    report = json.loads((folder / "report.json").read_text("utf-8"))
    rows = [row for row in report["outputs"] if row["name"] == row["output"]]
    network = quantizer.load(folder, model, batches).network
    ratios: dict[str, list[float]] = {row["name"]: [] for row in rows}
    for batch in fresh:
        leaves = zip(tree_leaves(model(*batch)), tree_leaves(network(*batch)), strict=True)
        for row, (expected, got) in zip(rows, leaves, strict=True):
            if row["samples"] is not None:
                ratios[row["name"]] += map(sqnr_db, expected, got)
    found = []
    for row in rows:
        shown_db = row["sqnr_db"]
        if hides_samples(row):
            shown_db = row["sqnr_db_worst"]
        of_fresh = sorted(ratios[row["name"]])
        if not of_fresh or shown_db is None:
            continue
        median_db = of_fresh[len(of_fresh) // 2]
        if min(shown_db, NOTICED_DB) > median_db + FRESH_DB:
            found.append(
                f"output {row['name']}: {shown_db:.1f} dB is shown, and fresh samples have "
                f"{median_db:.1f} dB"
            )
    return found


HEARD = 4.0
"""Channels are compared whose effect is so many times as large as the error of the output."""


@torch.no_grad()
def lost_channels(folder: Path, model: nn.Module, batches: list[Call]) -> list[str]:
    """Channels of the input whose values have half of their effect on the output, or less."""
    network = quantizer.load(folder, model, batches).network
    x, *states = batches[0]
    axis = 1 if x.dim() == 4 else 2
    first = (tree_leaves(model(x, *states))[0], tree_leaves(network(x, *states))[0])
    if not first[0].is_floating_point():
        return []
    error = float((first[0] - first[1]).norm())
    found = []
    for channel in range(x.shape[axis]):
        changed = x.clone()
        changed.select(axis, channel).copy_(x.select(axis, channel).roll(1, -1))
        pairs = zip((model, network), first, strict=True)
        before, after = (
            float((tree_leaves(run(changed, *states))[0] - output).norm())
            for run, output in pairs
        )
        if before > HEARD * error and after < before / 2:
            share = after / before
            found.append(f"channel {channel} of the input has {share:.2f} of its effect")
    return found


def resumed(draw: random.Random, given: list[str], folder: Path, place: Path) -> list[str]:
    """A run that ends at some operation on files, and one that goes on, end in the same
    files.
    """
    other = place / "resumed"
    command = ["--quant_mode", "calib", *given, "--output_dir", str(other)]
    killed_at(command, draw.randrange(60))
    code, said = quietly([*command, "--resume"])
    if code:
        return [f"resume: exit {code}: {said.strip()[-400:]}"]
    return [f"resume: {name} differs" for name in sorted(differing(folder, other))]


Call = tuple[Tensor, ...]
"""The positional arguments of a model: the samples, and perhaps a state [layers, n, width]."""


def as_call(batch: Tensor | Call) -> Call:
    """The arguments of a batch."""
    return batch if isinstance(batch, tuple) else (batch,)


def single(call: Call) -> Call:
    """The first sample alone: models and files take any number."""
    return tuple(value.narrow(min(index, 1), 0, 1) for index, value in enumerate(call))


@torch.no_grad()
def compared(
    folder: Path,
    model: nn.Module,
    batches: list[Call],
    config: dict[str, Any],
    given: list[str],
    *,
    plain: bool,
) -> list[str]:
    """What else the calibrated network is, beside test mode's."""
    found = []
    network = quantizer.load(folder, model, batches).network
    quantized = [tree_leaves(network(*batch)) for batch in batches]
    floating = [tree_leaves(model(*batch)) for batch in batches]
    code = imported(next(folder.glob("*.py")))
    for batch, expected in zip(batches, quantized, strict=True):
        if not all(map(torch.equal, tree_leaves(code(*batch)), expected)):
            found.append("the generated file gives something else")
    is_same = (
        plain
        and "global_quant_config" in config
        and not {"exclude", "pre_quant_opt_config"} & {*config}
    )
    if is_same and not has_levels(folder):
        found += in_place(model, batches, config, quantized)
    if find_spec("onnxruntime"):
        found += onnx(folder, batches, given, quantized, floating)
    return found


def has_levels(folder: Path) -> bool:
    """Whether channels, or the parts of a join, were brought to one range, which modules in
    place cannot see.
    """
    header = json.loads((folder / "quant_info.json").read_text("utf-8"))["header"]
    is_scaled = any(decision["scale"] == "scaled" for decision in header["joins"].values())
    return is_scaled or bool(header.get("levels"))


def parts(outputs: list[list[Tensor]]) -> list[tuple[str, Tensor]]:
    """Masks of the values of all batches that are compared together, for each floating-point
    output: where values of two ranges are joined, those of either.
    """
    masks: list[tuple[str, Tensor]] = []
    for number, leaves in enumerate(zip(*outputs, strict=True)):
        if leaves[0].is_floating_point():
            blocks = torch.cat([_blocks(leaf).flatten() for leaf in leaves])
            masks += [(f"{number}, {int(block)}", blocks == block) for block in blocks.unique()]
    return masks


WIDTH = 3
"""The channels of each value that is joined."""


def _blocks(leaf: Tensor) -> Tensor:
    """For each value the number of the joined one that it is of; 0 for all where none were
    joined.
    """
    axis = 1 if leaf.dim() == 4 else leaf.dim() - 1
    if leaf.dim() < 3 or leaf.shape[axis] not in (2 * WIDTH, 3 * WIDTH):
        return torch.zeros_like(leaf)
    numbers = torch.arange(leaf.shape[axis]) // WIDTH
    return numbers.view([-1 if other == axis else 1 for other in range(leaf.dim())]).expand(
        leaf.shape
    )


def in_place(
    model: nn.Module, batches: list[Call], config: dict[str, Any], expected: list[list[Tensor]]
) -> list[str]:
    """The same config on the modules: the same network up to the order of sums, where it is
    taken at all.
    """
    # Without the single sample, as the network was calibrated
    try:
        made: nn.Module = quantizer.ModelQuantizer(
            quantizer.Config.from_dict(config)
        ).quantize_model(model, batches[:-1])
    except QuantizerError:
        return []
    got = [tree_leaves(made(*batch)) for batch in batches]
    return [
        f"in place: part {name}: {near:.1f} dB from the traced network"
        for name, near, _ in figures(expected, got)
        if near <= CLOSE_DB
    ]


def figures(
    expected: list[list[Tensor]], got: list[list[Tensor]]
) -> Iterator[tuple[str, float, float]]:
    """The name, the SQNR and the share of equal values of each part."""
    for name, mask in parts(expected):
        number = int(name.partition(",")[0])
        ours, theirs = (
            torch.cat([leaves[number].flatten() for leaves in side])[mask]
            for side in (expected, got)
        )
        yield name, sqnr_db(ours, theirs), float((ours == theirs).float().mean())


def onnx(
    folder: Path,
    batches: list[Call],
    given: list[str],
    quantized: list[list[Tensor]],
    floating: list[list[Tensor]],
) -> list[str]:
    """The exported file, run as its users run it."""
    import onnxruntime

    command = ["--quant_mode", "test", *given, "--output_dir", str(folder), "--deploy", "onnx"]
    code, said = quietly(command)
    if code:
        return [] if code in REFUSED else [f"onnx: exit {code}: {said.strip()[-400:]}"]
    (path,) = (folder / "export").glob("*.onnx")
    losses = {name: loss for name, loss, _ in figures(quantized, floating)}
    # Sums of values with power-of-two scales: nearly every other one lies half-way between two codes.
    has_ties = "poweroftwo" in (folder / "quant_info.json").read_text("utf-8")
    found: list[str] = []
    for kind, margin_db in (("default session", -MARGIN_DB), ("float inputs", MARGIN_DB)):
        options = onnxruntime.SessionOptions()
        # Else 8 bits for what products with float inputs read, as docs/onnx.md says
        if kind == "float inputs":
            # Otherwise products with float inputs read 8 bits, as docs/onnx.md says.
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
            if has_ties:
                # As the file is written. ONNX Runtime's own sums add an odd zero point before
                # they round a tie.
                options.graph_optimization_level = (
                    onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
                )
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        names = [value.name for value in session.get_inputs()]
        got: list[list[Tensor]] = []
        for batch in batches:
            got.append(
                [
                    torch.from_numpy(output)
                    for output in session.run(
                        None,
                        {name: value.numpy() for name, value in zip(names, batch, strict=True)},
                    )
                ]
            )
        for part, near, equal in figures(quantized, got):
            # In a network of a few channels one code of 4 bits that falls on the other side of
            # a tie is half of this.
            if near <= min(CLOSE_DB, losses[part] + margin_db) and equal <= 0.9:
                distances = (
                    f"{near:.1f} dB from test mode, which is {losses[part]:.1f} from float"
                )
                found.append(f"onnx, {kind}: part {part}: {distances}")
    return found


def main() -> None:
    """Random networks, for so many seconds."""
    os.environ["OMP_NUM_THREADS"] = "1"
    checkpoint.SAVE_INTERVAL_S = 0.0
    with tempfile.TemporaryDirectory() as folder:
        search(lambda seed: watched(seed, Path(folder) / "seed"))


if __name__ == "__main__":
    main()
