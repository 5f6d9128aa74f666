"""`--deploy`: the tested network written for other runtimes, each file verified and told in one line."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from quantizer.cli.options import RunOptions
from quantizer.cli.outcome import Outcome
from quantizer.engine.files import write_json
from quantizer.engine.results import QuantInfo
from quantizer.errors import ResultError
from quantizer.export import EXPORTERS, FOLDER, export
from quantizer.export.deployment import Deployment, Verification
from quantizer.graph.ir import Graph
from quantizer.sources.data import Batches


def deploy(options: RunOptions, outcome: Outcome, graph: Graph, info: QuantInfo, batches: Batches) -> Outcome:
    """Write what `--deploy` asks for, verified on the first batch, and `verify.json` beside it; adds to the outcome.

    Raises:
        UsageError: a target cannot express a layer of this config.
        ResultError: the folder cannot be written, or leads out of the result folder.
    """
    folder = Path(options.output_dir) / FOLDER
    if folder.is_symlink():
        raise ResultError(f"{folder} is a link to another folder", help="remove the link")
    batch = next(iter(batches)).to("cpu")
    deployment = Deployment(graph, info.solution, batch.args, batch.kwargs, info.settings.onnx_opset_version)
    files, lines = {}, []
    for target in dict.fromkeys(options.deploy):
        path = folder / f"{graph.model}{EXPORTERS[target].suffix}"
        verification = export(target, deployment, path)
        files[path.name] = asdict(verification)
        lines.append(_line(path, verification))
    write_json(folder / "verify.json", files)
    return replace(outcome, content={**outcome.content, "deployed": files}, shown=[*outcome.shown, *lines])


def _line(path: Path, found: Verification) -> str:
    return (
        f"deployed: {path}, {path.stat().st_size / 1024:.0f} kB; against test mode, {found.compared} differ by at most "
        f"{found.max_difference:.3g}, {found.equal:.2%} are equal"
    )
