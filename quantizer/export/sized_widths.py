"""The config of a run in one call, whose weights are within a size of the file: `--max_mb`."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from quantizer.config.document.document import Document, Text
from quantizer.config.document.edited import edited_text
from quantizer.config.load import load_text
from quantizer.config.model import QuantizationSpec
from quantizer.config.resources import preset_text
from quantizer.config.run_config import MadeFor, run_config
from quantizer.declarations import FILE_SIZE
from quantizer.errors import UsageError
from quantizer.evaluation.analyze import WatchedData, analyze_weights, width_candidates
from quantizer.evaluation.width_choice import LARGEST_SIZE, Budget, sized_config
from quantizer.export.destinations import DESTINATIONS, SIZED
from quantizer.export.exporter import Exporter, exporter_of
from quantizer.export.gates import Gate
from quantizer.export.limits import is_symmetric
from quantizer.export.refusals import layers_to_leave
from quantizer.export.targets import EXPORTERS
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.numerics.codes import bits_of
from quantizer.plan.fit.fitted_config import fitted_text
from quantizer.plan.fit.kept_float import keep_in_file, with_kept, with_ties
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.plan.size import weight_bytes
from quantizer.plugins import if_command
from quantizer.sources.kinds import advice_without_data

WIDTHS = (4, 8)
"""The widths that engines have kernels for."""
_ENTRY_BYTES = 128
"""At most what the header of a .safetensors file has of one tensor, without the name."""
_WORD_BITS = 32
_WORD_BYTES = 4
_PARTS = 4
"""The tensors of a layer with codes: codes, scales, zero points, and the shape."""
_SHAPE_BYTES = 16


def require_sized(
    max_mb: float | None, destination: str, target: str, *, has_config: bool, has_data: bool
) -> None:
    """Check that a limit of the size, if there is one, fits the other options of a run.

    Args:
        max_mb: the limit in million bytes; None for no limit.
        destination: the value of `--to`.
        target: the kind of file that the destination stands for.
        has_config: whether the run starts from a config of the user.
        has_data: whether the run has calibration data.

    Raises:
        UsageError: the limit does not fit them.
    """
    if max_mb is None:
        return
    otherwise = if_command("analyze", ", or use `quantizer analyze --max_mb`")
    if not isinstance(max_mb, (int, float)) or not 0 < max_mb < LARGEST_SIZE:
        raise UsageError(
            f"<--max_mb {max_mb}> is not a size", help="write for example <--max_mb 1500>"
        )
    if has_config and has_widths(destination, target):
        raise UsageError(
            "<--max_mb> chooses the widths of a new config, and this run has one already",
            help=f"leave one of them out{otherwise}",
        )
    if has_widths(destination, target) and not has_data:
        raise UsageError(
            "<--max_mb> measures what each weight loses in 4 bits, and there is no data",
            help="give <--data><shell:, or add calibration_data() to the model's file>"
            f"{advice_without_data()}",
        )


def has_widths(destination: str, target: str) -> bool:
    """Return whether each weight in the files of a destination may have 4 or 8 bits."""
    return destination in SIZED and target == SIZED[destination].transformers_target


@dataclass(frozen=True)
class SizedRun:
    """A run whose widths are chosen.

    Attributes:
        module: the float model.
        graph: its trace.
        data: what the loss of each weight is measured on.
        say: is called with each note on the choice.
    """

    module: nn.Module
    graph: Graph
    data: WatchedData
    say: Callable[[str], object]


def config_file(
    folder: Path,
    made_for: MadeFor,
    run: SizedRun,
    target: str,
    choices: Mapping[str, str],
    *,
    overwrite: bool,
) -> Path:
    """Return the path of the config in the folder of the run, which is written if it is new, or
    if it quantizes layers to keep in float.
    """
    kept = made_for.keep_float
    if EXPORTERS[target].by_tensor and kept:
        # A file has a weight of several layers once
        kept = with_ties(kept, run.graph)
    by_width = has_widths(made_for.destination, target)
    presets = [made_for.preset, *DESTINATIONS[made_for.destination].smaller]

    def text_of(preset: str) -> str:
        """Return a preset, fitted to the model and the file."""
        to_leave = layers_to_leave(target, choices)
        text, changes = fitted_text(preset_text(preset), preset, run.graph, to_leave)
        for change in changes:
            run.say(change)
        return with_kept(Text(preset, text), kept, run.graph)

    def new_text() -> str:
        """Return the first preset whose weights are within the limit, if there is one."""
        limit = None if by_width else made_for.max_mb
        return preset_within(presets, limit, run, text_of, exporter_of(target, choices))

    limit = made_for.max_mb if by_width else None
    finish = partial(config_within, max_mb=limit, run=run)
    path = run_config(folder, made_for, new_text, finish=finish, overwrite=overwrite)
    if keep_in_file(path, kept, run.graph, is_sized=made_for.max_mb is not None):
        run.say(f"{', '.join(kept)} added to exclude of {path}")
    return path


def preset_within(
    presets: Sequence[str],
    max_mb: float | None,
    run: SizedRun,
    text_of: Callable[[str], str],
    exporter: Exporter[Any],
) -> str:
    """Return the text of the first preset whose file takes at most `max_mb` million bytes.

    The weights alone are counted for a target that does not know the size of its files.

    Args:
        presets: their names, the largest first.
        max_mb: the limit; None for the first preset.
        run: the model.
        text_of: returns the text of a preset, fitted to the model.
        exporter: of the file.

    Raises:
        UsageError: all are too large.
    """
    least = 0
    what = "file takes"
    for name in presets:
        text = text_of(name)
        if max_mb is None:
            return text
        config = load_text(Text(name, text)).require()
        plan = resolve_plan(config, run_passes(run.graph, config.settings), run.graph)
        size = exporter.file_bytes(plan, run.module)
        if size is None:
            what = "weights take"
            _, size = weight_bytes(plan)
        least = size
        if least <= max_mb * 1e6:
            run.say(f"note: the {what} {least / 1e6:.4g} MB with the preset {name}")
            return text
    raise UsageError(
        f"<--max_mb {max_mb:g}> is too small: the {what} {least / 1e6:.4g} MB with the "
        f"preset {presets[-1]}",
        help="raise the limit, or quantize more layers with a config of your own",
    )


def size_gates(max_mb: float | None, destination: str, target: str) -> list[Gate]:
    """Return the gate of a limit that no choice of widths keeps by itself. A file has more than
    weights.
    """
    if max_mb is None or has_widths(destination, target):
        return []
    return [Gate(f"{FILE_SIZE}<={max_mb:g}", FILE_SIZE, "<=", max_mb, "<--max_mb>")]


def config_within(text: str, max_mb: float | None, run: SizedRun) -> str:
    """Return the text of a config with 4 or 8 bits for each weight, of the least noise whose
    checkpoint has at most `max_mb` million bytes of weights.

    Args:
        text: of a config with one width for all weights.
        max_mb: the limit; None to return the text as it is.
        run: the model and data.

    Raises:
        UsageError: 4 bits are too large.
        GateError: the config quantizes no weights to integers.
    """
    if max_mb is None:
        return text
    loaded = load_text(Text("the preset", text))
    config = loaded.require()
    graph = run_passes(run.graph, config.settings)
    plan = resolve_plan(config, graph, run.graph)
    limit = int(max_mb * 1e6)
    sizes = _FileSizes(plan, run.module)
    sizes.require_room(limit)
    most = sizes.total(-1)
    if limit >= most:
        run.say(
            f"note: {WIDTHS[-1]} bits everywhere take {most / 1e6:.4g} MB, within the limit"
        )
    if config.algorithms:
        names = ", ".join(algorithm.name for algorithm in config.algorithms)
        run.say(f"note: widths are chosen by the errors of round-to-nearest, without {names}")
    analysis = analyze_weights(plan, WIDTHS, run.data)
    rows = [replace(row, sizes=sizes.by_layer[row.name]) for row in analysis.rows]
    analysis = replace(analysis, rows=rows, other_bytes=sizes.floats)
    chosen = sized_config(
        config.document,
        plan,
        run.graph,
        analysis=analysis,
        budget=Budget(max_bytes=limit),
        batches=run.data.batches,
    )
    run.say(chosen.line(chosen.best, chosen.best))
    document = loaded.document or Document.of({}, "")
    return edited_text(document, chosen.document)


class _FileSizes:
    """The bytes that weights take in the files of a checkpoint, at most.

    Attributes:
        by_layer: the bytes of a layer's weight with each of `WIDTHS`.
        floats: the bytes of all that stays in float.
    """

    def __init__(self, plan: Plan, module: nn.Module) -> None:
        self.by_layer: dict[str, list[int]] = {}
        coded: list[str] = []
        candidates, _ = width_candidates(plan)
        for candidate in candidates:
            name = candidate.layers[0]
            node = plan.graph.by_name[name]
            # What a pass makes of a parameter is named after it, with "@"
            path = node.params["weight"].partition("@")[0]
            coded.append(path)
            rows, columns = plan.graph.weight(node).shape
            tensor = plan.tensors[name, "weights"]
            experts = node.attrs["groups"] if node.row.experts else 1
            specs = [candidate.with_width(candidate.specs[0], width) for width in WIDTHS]
            self.by_layer[name] = [
                _coded_bytes(path, (rows, columns), spec, scales=tensor.scales, experts=experts)
                for spec in specs
            ]
        self.floats = _float_bytes(module, coded)

    def require_room(self, limit: int) -> None:
        """Check that the smaller width fits into a limit.

        Raises:
            UsageError: it does not.
        """
        least = self.total(0)
        if limit < least:
            raise UsageError(
                f"<--max_mb {limit / 1e6:g}> is too small: with {WIDTHS[0]} bits everywhere "
                f"the file takes {least / 1e6:.4g} MB, of which {self.floats / 1e6:.4g} MB "
                "stay in float",
                help="raise the limit, or quantize more layers with a config of your own",
            )

    def total(self, index: int) -> int:
        """Return the size with one width for all layers."""
        return self.floats + sum(sizes[index] for sizes in self.by_layer.values())


def _float_bytes(model: nn.Module, coded: Collection[str]) -> int:
    """Return the most bytes that the tensors take in files that are not codes.

    Args:
        model: the float model. A tensor with several names is stored once.
        coded: the names of the weights that become codes.
    """
    total = _ENTRY_BYTES
    counted: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in coded or id(tensor) in counted:
            continue
        counted.add(id(tensor))
        values = tensor.numel() * tensor.element_size()
        total += values + len(name) + _ENTRY_BYTES
    return total


def _coded_bytes(
    name: str, shape: tuple[int, int], spec: QuantizationSpec, *, scales: int, experts: int = 1
) -> int:
    """Return the most bytes that a weight takes in files as codes.

    Args:
        name: of the weight.
        shape: its rows and columns, of all experts together.
        spec: of the weight.
        scales: how many scales it has.
        experts: how many experts it has, whose layers are stored apart, or in halves.
    """
    rows, columns = shape
    bits = bits_of(spec)
    stored_scales = max(scales, rows)
    words = rows * math.ceil(columns * bits / _WORD_BITS) + stored_scales
    if not is_symmetric(spec):
        words += math.ceil(stored_scales / rows) * math.ceil(rows * bits / _WORD_BITS)
    layers = 2 * experts if experts > 1 else 1
    overhead = _PARTS * (len(name) + _ENTRY_BYTES) + _SHAPE_BYTES
    return words * _WORD_BYTES + layers * overhead
