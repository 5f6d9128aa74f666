"""`--exact`: the tested network in the DPU's integers, compared with the simulation code for code."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from rich.console import RenderableType

from quantizer.cli.follow import progress
from quantizer.cli.options import RunOptions
from quantizer.cli.outcome import Outcome
from quantizer.cli.table_view import table_view
from quantizer.engine.events import Stage
from quantizer.engine.exact import ExactComparison, compare_exact
from quantizer.engine.result_files import write_json
from quantizer.engine.results import QuantInfo
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.report.dpu_tables import exact_table
from quantizer.sources.data import Batches


def require_dpu(device: str) -> None:
    """Refuse `--exact` for other devices.

    Raises:
        UsageError: the folder is calibrated for another device.
    """
    if device != "DPU":
        raise UsageError(
            f"--exact runs the integer arithmetic of the DPU, and this was calibrated for the {device}",
            help='calibrate with "target_device": "DPU"',
        )


def run_exact(options: RunOptions, outcome: Outcome, graph: Graph, info: QuantInfo, batches: Batches) -> Outcome:
    """Run the batches again in integers; adds the metric `exact_equal` and a table, and writes exact.json."""
    with Stage(progress(quiet=options.quiet), "exact", batches.total) as stage:
        found = compare_exact(graph, info.solution, stage.counted(batch.to("cpu") for batch in batches))
    content = asdict(found) | {"equal": found.equal}
    write_json(Path(options.output_dir) / "exact.json", content)
    metric = {"exact_equal": found.equal}
    return replace(
        outcome,
        metrics={**outcome.metrics, **metric},
        content={**outcome.content, "metrics": {**outcome.content["metrics"], **metric}, "exact": content},
        shown=[*outcome.shown, exact_table(found, table_view(options, graph)), *_lines(found)],
    )


def _lines(found: ExactComparison) -> list[RenderableType]:
    """What the table does not say: overflows, layers in float, and the answer."""
    overflows = [f"int32 overflow: the accumulator of {name}, batch {batch}" for name, batch in found.overflows.items()]
    floats = [f"in float: {name}: {why}" for name, why in found.floats.items()]
    codes, differing = sum(row.codes for row in found.layers), sum(row.differing for row in found.layers)
    return [*overflows, *floats, f"exact_equal {found.equal:.6g}: {differing} of {codes} codes differ"]
