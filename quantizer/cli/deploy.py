"""`--deploy`: the tested network written for other runtimes, each file verified and told in one line."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path

from quantizer.cli.options import RunOptions
from quantizer.cli.outcome import Outcome
from quantizer.engine.result_files import write_json
from quantizer.engine.results import QuantInfo
from quantizer.errors import ModelError, QuantizerError, ResultError, UsageError
from quantizer.export import EXPORTERS, FOLDER, check, export
from quantizer.export.deployment import Deployment, Verification
from quantizer.graph.ir import Graph
from quantizer.sources.data import Batches

logger = logging.getLogger(__name__)


def require_one(options: RunOptions, graph: Graph, info: QuantInfo) -> None:
    """Refuse before the run what no target of `--deploy` can express; one that can is written all the same.

    Raises:
        UsageError: why the first of them cannot.
    """
    refusals = []
    for target in dict.fromkeys(options.deploy):
        try:
            check(target, graph, info.solution, info.settings.onnx_opset_version)
        except UsageError as refusal:
            refusals.append(refusal)
    if options.deploy and len(refusals) == len(set(options.deploy)):
        raise refusals[0]


def deploy(options: RunOptions, outcome: Outcome, graph: Graph, info: QuantInfo, batches: Batches) -> Outcome:
    """Write what `--deploy` asks for, verified on the first batch, and `verify.json` beside it; adds to the outcome.

    A target that is refused does not keep the others from being written; the refusal is raised after them.

    Raises:
        UsageError: a target cannot express a layer of this config.
        ModelError: a target cannot translate a layer.
        ResultError: the folder cannot be written, or leads out of the result folder.
    """
    folder = Path(options.output_dir) / FOLDER
    if folder.is_symlink():
        raise ResultError(f"{folder} is a link to another folder", help="remove the link")
    batch = next(iter(batches)).to("cpu")
    deployment = Deployment(graph, info.solution, batch.args, batch.kwargs, info.settings.onnx_opset_version)
    files, lines = {}, []
    refusals: list[QuantizerError] = []
    for target in dict.fromkeys(options.deploy):
        path = folder / f"{graph.model}{EXPORTERS[target].suffix}"
        try:
            verification = export(target, deployment, path)
        except (UsageError, ModelError) as refusal:
            refusals.append(refusal)
            continue
        files[path.name] = asdict(verification)
        lines.append(_line(path, verification))
    if files:
        write_json(folder / "verify.json", files)
    if refusals:  # the outcome is not shown then
        for line in [*lines, *(refusal.message for refusal in refusals[1:])]:
            logger.warning("%s", line)
        raise refusals[0]
    return replace(outcome, content={**outcome.content, "deployed": files}, shown=[*outcome.shown, *lines])


def _line(path: Path, found: Verification) -> str:
    return (
        f"deployed: {path}, {path.stat().st_size / 1024:.0f} kB; against test mode, {found.compared} differ by at most "
        f"{found.max_difference:.3g}, {found.equal:.2%} are equal"
    )
