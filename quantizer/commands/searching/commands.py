"""The commands `quantizer analyze` and `tune`: their options. What they do is imported when it
is done, so that `--help` needs no torch.
"""

from dataclasses import dataclass

import click

from quantizer.cli.arguments.grouped_command import command
from quantizer.cli.arguments.options import LOOK, MODEL, TABLE, Options, option, takes
from quantizer.cli.arguments.places import PathType
from quantizer.cli.terminal import process
from quantizer.commands.searching.run import minutes_option
from quantizer.evaluation.noise_methods import MAX_MEASURED, NOISE_METHODS
from quantizer.option_words import TEST_OPTIONS

_FOLDER = "quantizer.commands.searching"


@dataclass(frozen=True)
class AnalyzeOptions(Options):
    """The options of `quantizer analyze`."""

    budget: float | None = option(
        "Limit of the mean bits per weight, without scales, e.g. 4.5.",
        type=float,
        metavar="BITS",
    )
    size: str | None = option(
        "Limit of the size of all weights, in percent of that of the config, e.g. 60%.",
        metavar="SHARE",
    )
    max_mb: float | None = option(
        "Limit of the size of all weights with scales, in 10^6 bytes.", type=float, metavar="MB"
    )
    choices: str = option(
        "Bit widths to choose from, also float16 and bfloat16.",
        default="2,3,4,8",
        metavar="LIST",
    )
    passes: str | None = option(
        "How the noise at the output is found: measured at the smallest width (network), at "
        "every width (every), or predicted from gradients (fast).  [default: network, or fast "
        f"for more than {MAX_MEASURED} weights]",
        type=click.Choice(NOISE_METHODS),
    )
    tensors: bool = option(
        "Also measure each quantized tensor: with only it quantized, and with all others.",
        default=False,
    )
    metric: str | None = option(
        "Find the layers to leave in float, the fewest bytes, so that TEST holds, e.g. "
        "'top1_drop<=0.005'.",
        metavar="TEST",
    )
    apply: bool = option("Write the changed config into --config_file.", default=False)
    report: str | None = option(
        "Add the results to the report of this result folder.", type=PathType(), metavar="DIR"
    )


BUDGETS = ("budget", "size", "max_mb")
"""The options that limit the size. At most one may be given."""


@command()
@takes(
    *("metric", *BUDGETS, "choices", "passes", "tensors", "apply", "report"),
    *(*TABLE, *LOOK, *TEST_OPTIONS, "subset_len", "seed", "device", "memory"),
    kind=AnalyzeOptions,
)
def analyze(options: AnalyzeOptions) -> None:
    """Measure how much each weight loses at each bit width. With a budget, choose the best
    widths and write a config with them.

    If a single width for all weights is better, the config has that one. Without -o FILE the
    config is printed, and the table goes to standard error. With --metric, the config leaves
    layers in float instead, as few as test runs allow.

    \b
    quantizer analyze --config_file net.json --model my_model.py
    quantizer analyze --budget 4 --config net.json --model my_model.py -o mix.json
    quantizer analyze --metric 'sqnr_db>=20' --config net.json --model my_model.py
    """
    process.load(f"{_FOLDER}.analyze:show_losses")(options)


@dataclass(frozen=True)
class TuneOptions(Options):
    """The options of `quantizer tune`."""

    minutes: float = minutes_option("Begin no test of a config after so many minutes.")


@command()
@takes(
    *("config_file", "gate", "to_", "for_", *MODEL, "stride", "shuffle", "device"),
    *("eval_data", "evaluate", "subset_len", "skip_len", "fast_finetune", "memory", "seed"),
    *("minutes", "output_dir", "overwrite", "json", "debug"),
    kind=TuneOptions,
    output_dir="The folder of config and results.",
    to_="Leave out changes that NAME of `quantizer targets` cannot hold. May be repeated.",
    gate="The TEST to meet, e.g. 'top1_drop<=0.005'. May be repeated.",
)
def tune(options: TuneOptions) -> None:
    """Change a config until all gates hold: first what costs little, then what costs more, and
    layers in float last. No change is kept that gains nothing.

    The folder gets the changed config, its results, and tune.json with what each change gained
    and cost. The exit code is 1 if a gate does not hold in the end.

    \b
    quantizer tune --config net.json --model my_model.py --gate 'sqnr_db>=30'
    """
    process.load(f"{_FOLDER}.tune:show_tuned")(options)
