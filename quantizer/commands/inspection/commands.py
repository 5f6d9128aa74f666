"""The commands `quantizer plan`, `inspect` and `doctor`: their options. What they do is
imported when it is done, so that `--help` needs no torch.
"""

import click

from quantizer.cli.arguments.grouped_command import GroupedOption, command
from quantizer.cli.arguments.options import LOOK, TABLE, Options, takes
from quantizer.cli.terminal import process

_FOLDER = "quantizer.commands.inspection"


@command()
@takes(
    *TABLE,
    "filter",
    "to_",
    "for_",
    "fast_finetune",
    "dpu_accuracy",
    "memory",
    *LOOK,
    to_="Check that NAME of `quantizer targets` can hold the plan. May be repeated.",
)
def plan(options: Options) -> None:
    """Show the effect of a config on a model: the layers that each rule matches, the spec of
    each tensor, the size before and after, and the memory for calibration.

    Only the first batches are read, for their shapes. Algorithms do not run, but names in their
    settings are checked.

    \b
    quantizer plan --config_file net.json --model my_model.py
    """
    process.load(f"{_FOLDER}.plan:show_plan")(options)


@command()
@takes(*TABLE, "filter", *LOOK)
@click.option(
    "--to",
    cls=GroupedOption,
    old_names=["--target"],
    type=click.Choice(["DPU"], case_sensitive=False),
    help="List which layers this device can run, and why it cannot run the others.",
)
@click.option(
    "--algorithms",
    is_flag=True,
    help="List blocks, groups of layers with one input, and where scaling factors fold.",
)
@click.option(
    "--gate",
    multiple=True,
    metavar="TEST",
    help="Exit with code 1 unless TEST holds, e.g. 'cpu_operators<=2'.",
)
def inspect(options: Options, to: str | None, algorithms: bool, gate: tuple[str, ...]) -> None:
    """List the name, operator and output shape of each layer, its quantized tensors, and why
    others stay in float.

    Without a config, all tensors count as quantized that can be. With --to DPU, or a config
    for the DPU, the table shows what the device can run. With --algorithms it shows blocks and
    groups of layers, by the names that scaling_layers and inside_layer_modules take. With -o
    FILE.py the network is also written as readable code, as calibration does.

    \b
    quantizer inspect --model my_model.py
    quantizer inspect --filter 'layer1.*' --model my_model.py
    quantizer inspect --to DPU --model my_model.py
    quantizer inspect --algorithms --model my_model.py
    """
    show = process.load(f"{_FOLDER}.inspect:show_layers")
    show(options, gate, to_dpu=to is not None, algorithms=algorithms)


@command()
@takes(
    *(name for name in LOOK if name not in ("output", "overwrite")),
    "to_",
    "subset_len",
    "seed",
    "device",
    "output_dir",
    "memory",
    to_="Also check that NAME of `quantizer targets` can hold the result. May be repeated.",
)
def doctor(options: Options) -> None:
    """Check machine, config, data and model before a run: what would be slow, wrong or left in
    float, with a remedy for each.

    Without --model only the machine and the config are checked. The exit code is 1 if there is
    an error.

    \b
    quantizer doctor --config_file net.json --model my_model.py
    """
    process.load(f"{_FOLDER}.doctor:show_checks")(options)
