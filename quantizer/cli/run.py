"""`--quant_mode float|calib|test`: one function each, from options to an exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from quantizer.cli import runlog, session
from quantizer.cli.gates import parse_gate
from quantizer.cli.options import RunOptions
from quantizer.cli.progress import BatchProgress
from quantizer.engine import calibrate, checkpoint, evaluate, results
from quantizer.engine.attach import quantized_network
from quantizer.engine.files import locked, write_bytes, write_json
from quantizer.errors import GateError
from quantizer.nn.network import Network
from quantizer.report import summary, tables
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.models import Evaluate, LoadedModel, load_evaluate


def run(options: RunOptions) -> int:
    """Run one mode; the exit code is 0, or that of the error raised."""
    gates = [parse_gate(text) for text in options.gate]
    session.seed_everything(options.seed)
    with session.told_notes(options.quiet):
        metrics = MODES[options.quant_mode](options)
    failed = [gate.text for gate in gates if not gate.holds(metrics)]
    if failed:
        raise GateError(f"not met: {', '.join(failed)}", help="the table above shows which layers lose most")
    return 0


def run_float(options: RunOptions) -> dict[str, float]:
    """The float model alone: its metrics on the evaluation data."""
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded, evaluation=True)
    metrics = _measure(options, loaded, loaded.module, batches, "float")
    if options.json:
        print(session.as_json({"metrics": metrics}))
    else:
        session.console().print(*(f"{name} {value:.6g}" for name, value in metrics.items()), sep="\n")
    return metrics


def run_calib(options: RunOptions) -> dict[str, float]:
    """Calibrate and write the result folder."""
    read = session.read_config(options.config_file)
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded)
    folder = Path(options.output_dir)
    with locked(folder), runlog.recorded(folder, options):
        original = session.trace_model(options, loaded, batches)
        results.check_owner(folder, original.model, overwrite=options.overwrite)
        plan = session.make_plan(read, original, quiet=options.quiet)
        _show_layers(options, plan)
        network = Network(plan.graph)
        calibration = calibrate.start(plan, network)
        keeper = checkpoint.Checkpoint(
            folder, original, read.config, {"seed": options.seed, "batch_size": options.batch_size}
        )
        skip = keeper.restore(calibration) if options.resume else 0
        with BatchProgress("calib", None, bar=session.shows_bars(), quiet=options.quiet) as progress:
            progress.advance(skip)
            try:
                calibrate.run(
                    calibration, network, _rest(options, batches, skip), lambda c: _after(keeper, c, progress)
                )
            except KeyboardInterrupt:
                keeper.save(calibration)
                session.console(stderr=True).print(
                    f"stopped after {calibration.batches} batches; --resume goes on from there"
                )
                raise
        run_facts = {"seed": options.seed, "data": batches.fingerprint, "stamp": batches.stamp}
        results.write_results(folder, original, read.config, calibration, network, run_facts)
        keeper.remove()
    _tell_calibrated(options, plan, calibration, folder)
    return {}


def run_test(options: RunOptions) -> dict[str, float]:
    """Compare the calibrated network with the float one and report."""
    folder = Path(options.output_dir)
    info = results.read_info(folder)
    loaded = session.open_model(options)
    batches = session.open_data(options, loaded, evaluation=True)
    with locked(folder), runlog.recorded(folder, options):
        original = session.trace_model(options, loaded, batches)
        results.check_model(info, original)
        if options.config_file is not None:
            read = session.read_config(options.config_file)
            results.check_plan(info, read.config, session.make_plan(read, original, quiet=True).tensors)
        graph = session.apply_passes(original, info.settings)
        reference, quantized = Network(graph), quantized_network(graph, info.tensors)
        quantized.to(session.device_of(options))
        with BatchProgress("test", None, bar=session.shows_bars(), quiet=options.quiet) as progress:
            compared = evaluate.compare(reference, quantized, _on_device(options, batches), progress.advance)
        pairs = _metric_pairs(options, loaded, quantized, batches, compared)
        return _report(options, folder, info, compared, pairs, batches.stamp)


MODES: dict[str, Callable[[RunOptions], dict[str, float]]] = {"float": run_float, "calib": run_calib, "test": run_test}


def _measure(
    options: RunOptions, loaded: LoadedModel, model: Callable[..., Any], batches: Batches, label: str
) -> dict[str, float]:
    """The user's metrics of one model; top-1 accuracy when there is no evaluate() but the data has targets."""
    function: Evaluate | None = load_evaluate(options.evaluate) if options.evaluate else loaded.evaluate
    with (
        BatchProgress(label, None, bar=session.shows_bars(), quiet=options.quiet) as progress,
        torch.no_grad(),
    ):
        if function is not None:
            return function(model, _counted((batch.raw for batch in batches), progress))
        return evaluate.accuracy(model, _counted(_on_device(options, batches), progress))


def _metric_pairs(
    options: RunOptions, loaded: LoadedModel, quantized: Network, batches: Batches, compared: evaluate.Comparison
) -> dict[str, dict[str, float]]:
    """Each metric of the float and the quantized network, on the same batches."""
    if options.evaluate is None and loaded.evaluate is None:
        return compared.accuracies()
    before = _measure(options, loaded, loaded.module, batches, "evaluate float")
    after = _measure(options, loaded, quantized, batches, "evaluate quantized")
    return {name: {"float": value, "quantized": after[name]} for name, value in before.items() if name in after}


def _report(
    options: RunOptions,
    folder: Path,
    info: results.QuantInfo,
    compared: evaluate.Comparison,
    pairs: dict[str, dict[str, float]],
    stamp: str | None,
) -> dict[str, float]:
    """Print and write what test mode found; returns the figures gates may ask for."""
    rows = summary.layer_rows(compared, {key: spec for key, (spec, _, _) in info.tensors.items()})
    metrics = compared.metrics()
    for name, pair in pairs.items():
        metrics |= {
            f"{name}_float": pair["float"],
            name: pair["quantized"],
            f"{name}_drop": pair["float"] - pair["quantized"],
        }
    stamp = stamp or info.header.get("stamp")
    report = summary.report(metrics, rows, stamp)
    write_json(folder / "report.json", report)
    write_bytes(folder / "layers.csv", summary.as_csv(rows).encode())
    if options.json:
        print(session.as_json(report))
        return metrics
    console = session.console()
    console.print(tables.damage_table(rows))
    if pairs:
        console.print(tables.metric_table(pairs))
    console.print(*(f"{name} {value:.6g}" for name, value in compared.metrics().items()), sep="\n")
    if stamp:
        console.print(f"note: {stamp}")
    console.print(f"results: {folder}", soft_wrap=True)
    return metrics


def _after(keeper: checkpoint.Checkpoint, calibration: calibrate.Calibration, progress: BatchProgress) -> None:
    progress.advance()
    keeper.save_now_and_then(calibration)


def _rest(options: RunOptions, batches: Batches, skip: int) -> Iterator[Batch]:
    """The batches that a resumed run has not seen; the others are read again, for the fingerprint."""
    for index, batch in enumerate(_on_device(options, batches)):
        if index >= skip:
            yield batch


def _on_device(options: RunOptions, batches: Batches) -> Iterator[Batch]:
    device = session.device_of(options)
    return (batch.to(device) for batch in batches)


def _counted(items: Iterable[Any], progress: BatchProgress) -> Iterator[Any]:
    for item in items:
        yield item
        progress.advance()


def _show_layers(options: RunOptions, plan: Any) -> None:
    if options.inspect:
        session.console(stderr=options.json).print(tables.layer_table(plan, plan.graph))


def _tell_calibrated(options: RunOptions, plan: Any, calibration: calibrate.Calibration, folder: Path) -> None:
    """The end of a calibration: rules with their matches, and where the results are."""
    found = {"tensors": len(plan.tensors), "batches": calibration.batches, "results": str(folder)}
    if options.json:
        print(session.as_json(found | {"rules": plan.to_json()["rules"]}))
        return
    console = session.console()
    if not options.quiet:
        console.print(tables.rule_table(plan))
    console.print(
        f"{found['tensors']} tensors calibrated on {found['batches']} batches; results: {folder}", soft_wrap=True
    )
