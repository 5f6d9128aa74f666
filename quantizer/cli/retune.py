"""`quantizer retune`: new scales from what calibration has kept, without the model and without
data.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import click
from rich.text import Text

from quantizer.cli import session
from quantizer.cli.completion import layers_of_results
from quantizer.cli.options import TABLE, Options, command, option, takes, write_output
from quantizer.cli.places import Place
from quantizer.cli.reproduction import remember, with_config
from quantizer.cli.table_view import view_of
from quantizer.config.wording import closest
from quantizer.errors import UsageError
from quantizer.observers import METHODS, STATISTICS
from quantizer.printable import json_text, one_line
from quantizer.report.files import READ, write_report
from quantizer.results.calibrated_folder import CalibratedFolder
from quantizer.results.folder import open_written
from quantizer.results.result_set import locked, locked_as_opened
from quantizer.results.retune import Change, Retuned, retuned
from quantizer.results.write import check_owner


@dataclass(frozen=True)
class RetuneOptions(Options):
    """Those of all commands, and its own."""

    output_dir: str = option(
        "The result folder to write.  [default: the one that is read]",
        default="",
        show_default=False,
        metavar="DIR",
    )
    method: str | None = option("How ranges are found.", type=click.Choice(list(METHODS)))
    percentage: float | None = option(
        "Of the percentile method.", type=click.FloatRange(0, 100, min_open=True), metavar="P"
    )
    statistic: str | None = option(
        "What is made of the ranges of several batches.", type=click.Choice(list(STATISTICS))
    )
    layer: tuple[str, ...] = option(
        "Only this layer's activations: a name, a module path or a pattern; may be repeated.",
        default=(),
        metavar="NAME",
        shell_complete=layers_of_results,
    )
    dry_run: bool = option("Show what would change, and write no results.", default=False)


@command()
@click.argument("folder", default="quantize_result", type=Place(), metavar="[DIR]")
@takes(
    *(
        "method",
        "percentage",
        "statistic",
        "layer",
        "dry_run",
        "output_dir",
        "overwrite",
        "output",
        "json",
        *TABLE,
    ),
    kind=RetuneOptions,
    output="Write the config with the change to FILE.",
)
def retune(folder: str, options: RetuneOptions) -> None:
    """Find scales of activations anew from what calibration has kept: no model, no data, no
    waiting.

    The result is that of a calibration with the changed config, to the last bit. What was not
    kept cannot be had: the error says what that is.

    \b
    quantizer retune --method maxmin
    quantizer retune --percentage 99 --layer 'layer1.*' -o net.json
    """
    change = Change(options.method, options.percentage, options.statistic)
    if change == Change():
        raise UsageError(
            "nothing is changed", help="give --method, --percentage or --statistic"
        )
    if options.dry_run and options.output_dir:
        raise UsageError(
            "--dry_run writes no results",
            help="leave out --output_dir; -o FILE writes the config",
        )
    place = Path(folder)
    before = CalibratedFolder(place)
    found = retuned(before, change, _layers(options.layer, before) if options.layer else None)
    target = Path(options.output_dir or place)
    entries, _ = found.entries
    if not options.dry_run:
        is_same = target.resolve() == place.resolve()
        command = before.opened.commands.get("calib")
        with locked_as_opened(before.opened.files) if is_same else locked(target):
            check_owner(target, before.header["model"], overwrite=options.overwrite)
            found.write(target)
            opened, commands = open_written(target, READ), None
            # The result is that of a calibration with the changed config
            if command is not None:
                changed = with_config(command, Path(found.config.source).name)
                commands = remember(opened, "calib", changed)
            write_report(opened, commands=commands)
    if options.file:
        write_output(options.file, found.text)
    rows = _rows(before, found)
    if options.json:
        click.echo(json_text({"results": str(target), "tensors": rows}))
        return
    titles = ("layer", "tensor", "method", "scale before", "scale", "ratio")
    texts = [(*(str(row[key]) for key in _SHOWN), _ratio(row)) for row in rows]
    console, view = session.console(), view_of(options, before.plan["paths"])
    console.print(view.listing(titles, texts, numbers=titles[3:], what="tensor"))
    said = (
        "would change; nothing is written" if options.dry_run else f"retuned; results: {target}"
    )
    console.print(Text(one_line(f"{len(entries)} tensors {said}")), soft_wrap=True)


_SHOWN = ("layer", "tensor", "method", "scale_before", "scale")


def _layers(words: tuple[str, ...], folder: CalibratedFolder) -> frozenset[str]:
    """The layers that names, module paths or patterns mean.

    Raises:
        UsageError: one means none.
    """
    known = {layer for layer, _ in folder.activations}
    names = {name: str(folder.plan["paths"].get(name, name)) for name in known}
    found: set[str] = set()
    for word in words:
        here = {
            name
            for name, path in names.items()
            if word in (name, path) or fnmatchcase(path, word)
        }
        if not here:
            near = closest(word, names.values())
            raise UsageError(
                f"--layer {word!r} finds no activation with a scale",
                help=f"did you mean {near}?" if near else "`quantizer plan` shows all layers",
            )
        found |= here
    return frozenset(found)


def _rows(folder: CalibratedFolder, found: Retuned) -> list[dict[str, object]]:
    entries, _ = found.entries
    return [
        {
            "layer": layer,
            "tensor": role,
            "method": found.tensors[layer, role].after.method,
            "scale_before": folder.entries[layer][role]["scale"],
            "scale": entry["scale"],
        }
        for (layer, role), entry in entries.items()
    ]


def _ratio(row: dict[str, object]) -> str:
    before, after = row["scale_before"], row["scale"]
    return (
        f"{after / before:.4f}"
        if isinstance(before, float) and isinstance(after, float) and before
        else ""
    )
