"""`quantizer init`: writes a preset as a config to start from. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import click

from quantizer.cli.help import GroupedCommand
from quantizer.cli.options import SETTINGS
from quantizer.cli.write_text import write_text
from quantizer.config.resources import resource
from quantizer.errors import UsageError

PRESETS = {"CPU": "cpu_int8.json", "GPU": "gpu.json", "DPU": "dpu.json"}
STRATEGIES = {
    "weight_only": "weight_int8.json",
    "static": "static_fp8.json",
    "dynamic": "dynamic_int8.json",
    "smoothquant": "smoothquant_int8.json",
    "awq": "awq_int4_group.json",
    "gptq": "gptq_int4_group.json",
}
"""Files of the hierarchical form."""


@click.command(cls=GroupedCommand, context_settings=SETTINGS)
@click.option(
    "--device",
    type=click.Choice(list(PRESETS), case_sensitive=False),
    default="CPU",
    show_default=True,
    help="What the network is to run on.",
)
@click.option(
    "--strategy",
    type=click.Choice(list(STRATEGIES)),
    help="Write the hierarchical form: weights only, activations in calibrated (static) or run-time (dynamic) ranges, "
    "or an algorithm.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(readable=False),
    default="quantize_config.json",
    show_default=True,
    metavar="FILE",
    help="Where to write it; - for standard output.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
def init(device: str, strategy: str | None, output: str, overwrite: bool) -> None:
    """Write a config to start from that is valid for the device.

    \b
    quantizer init --device DPU -o net.json
    quantizer init --strategy dynamic -o net.json
    """
    text = _preset(device, strategy)
    if output == "-":
        click.echo(text, nl=False)
        return
    if Path(output).is_dir():
        raise UsageError(f"{output} is a directory", help="give the path of a file with -o")
    if Path(output).exists() and not overwrite:
        raise UsageError(f"{output} is there already", help="write another file with -o, or give --overwrite")
    write_text(output, text)
    click.echo(
        f"wrote {output}; `quantizer validate {output}` checks it, `quantizer explain KEY` explains a key", err=True
    )


def _preset(device: str, strategy: str | None) -> str:
    """The text of the preset; it names its schema by a path that does not hold where the new file is."""
    if strategy and device == "DPU":
        raise UsageError("--strategy does not go with --device DPU", help="the DPU has the layered form only")
    name = STRATEGIES[strategy] if strategy else PRESETS[device]
    preset = resource("configs", name).read_text("utf-8").splitlines(keepends=True)
    text = "".join(line for line in preset if not line.lstrip().startswith('"$schema"'))
    return text.replace('"target_device": "CPU"', f'"target_device": "{device}"') if strategy else text
