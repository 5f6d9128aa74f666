"""`quantizer init`: writes a preset as a config to start from. Imports no torch."""

import importlib
import shutil
import sys
from pathlib import Path

import click

from quantizer.cli.options import MODEL, Options, command, output_option, takes, write_output
from quantizer.cli.typed import refuse_typed
from quantizer.config.forms.form import form_of
from quantizer.config.resources import load_resource, presets, resource
from quantizer.errors import UsageError

DEVICES = {"CPU": "cpu_int8", "GPU": "gpu", "DPU": "dpu"}
STRATEGIES = {
    "weight_only": "weight_int8",
    "static": "static_fp8",
    "dynamic": "dynamic_int8",
    "smoothquant": "smoothquant_int8",
    "awq": "awq_int4_group",
    "gptq": "gptq_int4_group",
    **{
        name: name for name in ("gguf_q4_0", "gguf_q4_1", "gguf_q5_0", "gguf_q5_1", "gguf_q8_0")
    },
}
"""The preset for each device, and for each strategy, all of these in the hierarchical form."""


@command()
@click.option(
    "--device",
    type=click.Choice(list(DEVICES), case_sensitive=False),
    help="What the network is to run on.  [default: CPU]",
)
@click.option(
    "--strategy",
    type=click.Choice(list(STRATEGIES)),
    metavar="NAME",
    help=(
        "Write the hierarchical form: weights only, activations in calibrated (static) or "
        "run-time (dynamic) ranges, an algorithm, or a type of blocks of llama.cpp: "
        f"{', '.join(STRATEGIES)}."
    ),
)
@click.option(
    "--preset",
    type=click.Choice(presets()),
    metavar="NAME",
    help="Write one of the presets of --list.",
)
@click.option("--list", "list", is_flag=True, help="List every preset and when to use it.")
@output_option(
    default="quantize_config.json",
    show_default=True,
    help="Where to write it; - for standard output.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@takes(*MODEL, model="Also say whether another strategy suits this model better.")
def init(
    device: str | None,
    strategy: str | None,
    preset: str | None,
    list: bool,  # noqa: A002 - the option
    output: str,
    overwrite: bool,
    options: Options,
) -> None:
    """Write a config to start from that is valid for the device.

    \b
    quantizer init --list
    quantizer init --device DPU -o net.json
    quantizer init --strategy dynamic -o net.json
    quantizer init --preset mxfp4 -o net.json
    quantizer init --strategy static --model my_model.py -o net.json
    """
    if list:
        click.echo(_listing(), nl=False)
        return
    text = _text(device, strategy, preset)
    proposed = _proposed(strategy, options)
    if output == "-":
        click.echo(text, nl=False)
        return
    if Path(output).is_dir():
        raise UsageError(f"{output} is a directory", help="give the path of a file with -o")
    if Path(output).exists() and not overwrite:
        raise UsageError(
            f"{output} is there already", help="write another file with -o, or give --overwrite"
        )
    write_output(output, text)
    click.echo(
        f"wrote {output}; `quantizer validate {output}` checks it, `quantizer explain KEY` "
        "explains a key",
        err=True,
    )
    if proposed:
        click.echo(proposed, err=True)


def _proposed(strategy: str | None, options: Options) -> str | None:
    """What is said of the model, if there is one."""
    if options.model is None:
        refuse_typed(MODEL, "with --model init looks whether the strategy suits the model")
        return None
    found: str | None = importlib.import_module("quantizer.cli.proposal").proposal(
        strategy, options
    )
    return found


def _listing() -> str:
    """Each preset with its comment, which says when to use it; a line each, unless a terminal
    is too narrow.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    formatter = click.HelpFormatter(indent_increment=0, width=width)
    formatter.write_dl(
        [(name, load_resource("configs", f"{name}.json")["//"]) for name in presets()]
    )
    return f"{formatter.getvalue()}`quantizer init --preset NAME` writes one of them\n"


def _text(device: str | None, strategy: str | None, preset: str | None) -> str:
    """The text of the preset; it names its schema by the address, as the preset's path does not
    hold elsewhere.
    """
    if strategy and preset:
        raise UsageError("--strategy and --preset both name a preset", help="give one of them")
    name = preset or (STRATEGIES[strategy] if strategy else DEVICES[device or "CPU"])
    form = form_of(load_resource("configs", f"{name}.json"))
    address = load_resource("schemas", f"{form}.schema.json")["$id"]
    text = resource("configs", f"{name}.json").read_text("utf-8")
    text = text.replace(f"../schemas/{form}.schema.json", address)
    if not device or not (strategy or preset):
        return text
    if form == "layered":
        raise UsageError(
            f"the preset {name} says its device itself",
            help="leave out --device, or change the file",
        )
    if device == "DPU":
        given = f"--strategy {strategy}" if strategy else f"--preset {preset}"
        raise UsageError(
            f"{given} does not go with --device DPU", help="the DPU has the layered form only"
        )
    return text.replace('"target_device": "CPU"', f'"target_device": "{device}"')
