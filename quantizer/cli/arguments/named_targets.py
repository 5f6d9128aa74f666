"""Finds the targets that `--to` stands for, once the model is open."""

from dataclasses import replace
from typing import Any

from quantizer.cli.arguments.options import Options
from quantizer.export.destinations import checked_names, written_targets
from quantizer.export.refusals import require_extras


def named_targets(options: Options, model: Any) -> Options:
    """Return the options with the targets of `--to`, which test mode writes and
    other commands check.

    Raises:
        UsageError: packages are missing, or two destinations need different options.
    """
    words = options.to_
    options = replace(options, to_=())
    if options.quant_mode != "test":
        checked = checked_names(words, model)
        require_extras(checked, to_plan=True)
        return replace(options, for_=(*options.for_, *checked))
    targets, choices = written_targets(words, options.target_choices, model)
    require_extras(targets)
    return replace(options, deploy=(*options.deploy, *targets), target_options=choices)
