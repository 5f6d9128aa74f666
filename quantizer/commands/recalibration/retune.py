"""`quantizer retune`: recomputes scales from stored statistics, without model and data."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import click

from quantizer.cli.arguments.places import from_start, write_output
from quantizer.cli.run_folder import from_here, remember
from quantizer.cli.terminal import output
from quantizer.cli.terminal.output import view_of
from quantizer.commands.recalibration.calibrated_folder import CalibratedFolder
from quantizer.commands.recalibration.commands import RetuneOptions
from quantizer.commands.recalibration.retuned_folder import (
    Change,
    RetunedFolder,
    retune_activations,
)
from quantizer.config.wording import counted, did_you_mean
from quantizer.errors import UsageError
from quantizer.printable import json_text
from quantizer.report.content import write_report
from quantizer.report.next_step import without_places
from quantizer.results.folder import open_written
from quantizer.results.result_set import locked, locked_as_opened, require_result_folder
from quantizer.results.write import check_owner, require_expendable


def retune_folder(folder: str, options: RetuneOptions) -> None:
    """Write the results of a folder again with other ranges, and print what changed."""
    change = Change(options.method, options.percentage, options.statistic)
    if change == Change():
        raise UsageError(
            "there is nothing to change", help="give --method, --percentage or --statistic"
        )
    if options.dry_run and options.output_dir:
        raise UsageError(
            "--dry_run writes no results",
            help="leave out --output_dir; -o FILE writes the config",
        )
    place = from_start(folder)
    before = CalibratedFolder(place)
    layers = _layers(options.layer, before) if options.layer else None
    name = Path(options.file).name if options.file else ""
    result = retune_activations(before, change, layers, name)
    target = from_start(options.output_dir) if options.output_dir else place
    if not options.dry_run:
        require_result_folder(target)
        require_expendable(target, [place], overwrite=options.overwrite)
        _write(before, result, target, options)
    if options.file:
        write_output(options.file, result.text)
    rows = _rows(before, result)
    if options.json:
        click.echo(json_text({"results": str(target), "tensors": rows}))
        return
    titles = ("layer", "tensor", "method", "scale before", "scale", "ratio")
    texts = [(*map(str, row.values()), _ratio(row)) for row in rows]
    view = view_of(options, before.plan["paths"])
    console = output.console(exact=view.is_exact)
    table = view.listing(titles, texts, numbers=titles[3:], what="tensor")
    output.print_table(table, console)
    line = counted(len(rows), "tensor")
    if options.dry_run:
        line += " would change; nothing is written"
    else:
        line += f" retuned; results: {target}"
    output.print_line(line, console)


def _write(
    before: CalibratedFolder, result: RetunedFolder, target: Path, options: RetuneOptions
) -> None:
    """Write the result folder and its report."""
    files = before.opened.files
    is_same = target.resolve() == before.opened.folder.resolve()
    lock = locked_as_opened(files) if is_same else locked(target)
    with lock:
        check_owner(target, before.header["model"], overwrite=options.overwrite)
        entries, statistics = result.entries
        before.write(
            target,
            result.config,
            entries=entries,
            planned=result.planned(),
            statistics=statistics,
        )
        opened = open_written(target)
        commands = None
        for name, words in _commands(before.opened.commands, target, options).items():
            commands = remember(opened, name, words)
            opened = open_written(target)
        write_report(opened, commands=commands)


def _commands(
    before: Mapping[str, Sequence[str]], target: Path, options: RetuneOptions
) -> dict[str, list[str]]:
    """Return the commands that make the retuned results again: a calibration with the changed
    config, if it was written, or else the same two steps.

    Args:
        before: those of the results before.
        target: the folder of the retuned results.
        options: of the command.
    """
    if "calib" not in before:
        return {}
    folder = from_here(str(target))
    calib = [*without_places(before["calib"]), "--output_dir", folder]
    if options.file:
        return {"calib": _with_config(calib, from_here(options.file))}
    if "retune" in before:
        return {}
    words = ["quantizer", "retune", folder]
    for name in ("method", "percentage", "statistic"):
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    for layer in options.layer:
        words += ["--layer", layer]
    return {"calib": calib, "retune": words}


def _layers(words: tuple[str, ...], folder: CalibratedFolder) -> frozenset[str]:
    """Return the layers of names, module paths or patterns.

    Raises:
        UsageError: one matches no layer.
    """
    path_of = {}
    for name, _ in folder.activations:
        path_of[name] = str(folder.plan["paths"].get(name, name))
    layers: set[str] = set()
    for word in words:
        matching = set()
        for name, path in path_of.items():
            if word in (name, path) or fnmatchcase(path, word):
                matching.add(name)
        if not matching:
            remedy = "`quantizer plan` shows all layers"
            remedy = did_you_mean(word, path_of.values(), remedy)
            raise UsageError(
                f"--layer {word!r} matches no activation with a scale", help=remedy
            )
        layers |= matching
    return frozenset(layers)


def _rows(folder: CalibratedFolder, result: RetunedFolder) -> list[dict[str, object]]:
    """Return the columns of each tensor."""
    entries, _ = result.entries
    rows: list[dict[str, object]] = []
    for (layer, role), entry in entries.items():
        row = {
            "layer": layer,
            "tensor": role,
            "method": result.tensors[layer, role].after.method,
            "scale_before": folder.entries[layer][role]["scale"],
            "scale": entry["scale"],
        }
        rows.append(row)
    return rows


def _ratio(row: dict[str, object]) -> str:
    before = row["scale_before"]
    after = row["scale"]
    if not isinstance(before, float) or not isinstance(after, float) or not before:
        return ""
    return f"{after / before:.4f}"


def _with_config(words: Sequence[str], name: str) -> list[str]:
    """Return the command of a calibration with this config file.

    >>> _with_config(["quantizer", "--quant_mode", "calib", "--seed", "1"], "config.json")
    ['quantizer', '--quant_mode', 'calib', '--config_file', 'config.json', '--seed', '1']
    """
    others = list(words)
    if "--config_file" in others:
        place = others.index("--config_file")
        del others[place : place + 2]
    return [*others[:3], "--config_file", name, *others[3:]]
