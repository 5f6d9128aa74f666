"""What test mode does besides, if asked: `--exact` runs the DPU's integers, `--deploy` writes
for other runtimes.
"""

from dataclasses import asdict, replace
from pathlib import Path

from rich.console import RenderableType

from quantizer.calibration.events import Stage
from quantizer.cli.follow import progress
from quantizer.cli.gates import EXACT_EQUAL, INT8_SHARE
from quantizer.cli.options import Options
from quantizer.cli.session import Outcome
from quantizer.cli.table_view import table_view
from quantizer.errors import OutOfMemoryError, ResultError, UsageError
from quantizer.evaluation.exact import ExactComparison, compare_exact
from quantizer.export import EXPORTERS, FOLDER, check, export, size_of
from quantizer.export.deployment import Deployment
from quantizer.graph.ir import Graph
from quantizer.report.dpu_tables import exact_table
from quantizer.results.folder import QuantInfo
from quantizer.sources.data import Batches
from quantizer.storage.files import write_json


def require_dpu(device: str) -> None:
    """Refuse `--exact` for other devices.

    Raises:
        UsageError: the folder is calibrated for another device.
    """
    if device != "DPU":
        said = (
            "--exact runs the integer arithmetic of the DPU, and this was calibrated for the "
            f"{device}"
        )
        raise UsageError(said, help='calibrate with "target_device": "DPU"')


def run_exact(
    options: Options,
    outcome: Outcome,
    graph: Graph,
    info: QuantInfo,
    batches: Batches,
    *,
    place: Path | None,
) -> Outcome:
    """Run the batches again in integers; adds the metric `exact_equal` and a table, and writes
    exact.json.
    """
    with Stage(progress(quiet=options.quiet), "exact", batches.total) as stage:
        found = compare_exact(
            graph, info.solution, stage.counted(batch.to("cpu") for batch in batches)
        )
    content = asdict(found) | {"equal": found.equal}
    if place is not None:
        write_json(place / "exact.json", content)
    metric = {EXACT_EQUAL: found.equal}
    return replace(
        outcome,
        metrics={**outcome.metrics, **metric},
        content={
            **outcome.content,
            "metrics": {**outcome.content["metrics"], **metric},
            "exact": content,
        },
        shown=[*outcome.shown, exact_table(found, table_view(options, graph)), *_lines(found)],
    )


def _lines(found: ExactComparison) -> list[RenderableType]:
    """What the table does not say: overflows, layers in float, and the answer."""
    overflows = [
        f"int32 overflow: the accumulator of {name}, batch {batch}"
        for name, batch in found.overflows.items()
    ]
    floats = [f"in float: {name}: {why}" for name, why in found.floats.items()]
    codes, differing = (
        sum(row.codes for row in found.layers),
        sum(row.differing for row in found.layers),
    )
    return [
        *overflows,
        *floats,
        f"exact_equal {found.equal:.6g}: {differing} of {codes} codes differ",
    ]


def require_one(options: Options, graph: Graph, info: QuantInfo) -> None:
    """Refuse before the run what no target of `--deploy` can express; one that can is written
    all the same.

    Raises:
        UsageError: why the first of them cannot.
    """
    refusals = []
    for target in dict.fromkeys(options.deploy):
        try:
            check(target, graph, info.solution.specs, info.settings.onnx_opset_version)
        except UsageError as refusal:
            refusals.append(refusal)
    if options.deploy and len(refusals) == len(set(options.deploy)):
        raise refusals[0]


def deploy(
    options: Options,
    outcome: Outcome,
    given: Deployment,
    total: int | None,
    *,
    place: Path | None,
) -> Outcome:
    """Write what `--deploy` asks for, verified, and `verify.json` beside it; adds to the
    outcome.

    Args:
        options: of the run.
        outcome: what test mode found.
        given: what exporters are given.
        total: how many batches there are to verify with, if that is known.

    A target that fails does not keep the others from being written, nor what was measured from
    being shown; the first failure is the outcome's error, whatever it is.

    Raises:
        ResultError: the folder cannot be written, or leads out of the result folder.
    """
    folder = (place or Path(options.output_dir)) / FOLDER
    if folder.is_symlink():
        raise ResultError(f"{folder} is a link to another folder", help="remove the link")
    files, lines, metrics = {}, [], {}
    refusals: list[Exception] = []
    for target in dict.fromkeys(options.deploy):
        path = folder / f"{given.graph.model}{EXPORTERS[target].suffix}"
        try:
            found = export(target, given, path, progress(quiet=options.quiet), total=total)
        except (ResultError, OutOfMemoryError):
            raise
        except Exception as refusal:  # noqa: BLE001 - of whatever class: it is raised when all is shown
            refusals.append(refusal)
            continue
        files[path.name] = found.to_json()
        size = f"{size_of(path) / 1024:.0f} kB"
        lines.append(f"deployed: {path}, {size}; against test mode, {found.figures()}")
        lines += map(table_view(options, given.graph).text, found.remarks)
        if found.default_session:
            lines.append(f"in a default session, {found.default_session.figures()}")
            lines += map(table_view(options, given.graph).text, found.default_session.lines)
            if found.default_session.kernels:
                metrics[INT8_SHARE] = found.default_session.kernels.share
        lines += [check.line for check in found.engines if check.agrees]
    if files or folder.exists():
        write_json(folder / "verify.json", files)
    shown = [
        *outcome.shown,
        *lines,
        *(str(refusal).partition("\n")[0] for refusal in refusals[1:]),
    ]
    content = {
        **outcome.content,
        "metrics": {**outcome.content["metrics"], **metrics},
        "deployed": files,
    }
    measured = {**outcome.metrics, **metrics}
    return replace(
        outcome,
        metrics=measured,
        content=content,
        shown=shown,
        error=next(iter(refusals), None),
    )
