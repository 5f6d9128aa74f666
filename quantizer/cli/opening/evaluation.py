"""Says what a test runs on and measures with, and which options its data read."""

from typing import Any

from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import unmoved
from quantizer.errors import UsageError
from quantizer.sources.arguments import DEFAULT_SEQ_LEN, longest_window
from quantizer.sources.kinds import is_synthetic
from quantizer.sources.models import Evaluate, LoadedModel, load_evaluate

_OF_SOME_KINDS = ("preprocess", "tokenizer", "stride", "seq_len", "shuffle")
"""The options that only some kinds of data read."""


def evaluation_option(options: Options, loaded: LoadedModel) -> str | None:
    """Return the value of `--eval_data`, or of `--data` if that is also for evaluation; None
    for the data of the model's file.

    Synthetic data are for calibration, so the file's own data are preferred.
    """
    if options.eval_data is not None:
        return options.eval_data
    if is_synthetic(options.data) and loaded.evaluation_data is not None:
        return None
    return options.data


def evaluates_on_synthetic(options: Options, loaded: LoadedModel) -> bool:
    """Return whether test mode runs on synthetic data. They have no labels."""
    return is_synthetic(evaluation_option(options, loaded))


def reads_calibration_data(options: Options, loaded: LoadedModel) -> bool:
    """Return whether tests read from where calibrations with these options read."""
    option = evaluation_option(options, loaded)
    if option is None and options.data is None:
        return loaded.evaluation_data is loaded.calibration_data
    return option == options.data


def evaluator_of(options: Options, loaded: LoadedModel) -> Evaluate | None:
    """Return the user's `evaluate`, from --evaluate or the model's file; None if there is none,
    or if the data are synthetic.

    Raises:
        UsageError: `--evaluate` is given for synthetic data.
    """
    if evaluates_on_synthetic(options, loaded):
        if options.evaluate:
            raise UsageError(
                "--evaluate needs real data: metrics on synthetic data mean nothing",
                help="give --eval_data, or evaluation_data() in the model's file",
            )
        return None
    if options.evaluate:
        return load_evaluate(str(unmoved(options.evaluate)), loaded.directions)
    return loaded.evaluate


def options_of_kinds(options: Options, loaded: LoadedModel, data: str | None) -> dict[str, Any]:
    """Return the options that were given and that only some kinds of data read, by name.

    Args:
        options: of the command.
        loaded: the model.
        data: of `--data` or `--eval_data`.
    """
    given: dict[str, Any] = {}
    for name in _OF_SOME_KINDS:
        value = getattr(options, name)
        if value:
            given[name] = unmoved(value) if isinstance(value, str) else value
    if data is None and loaded.calibration_data is None and loaded.example is not None:
        # It sets the length of the example input
        given.pop("seq_len", None)
    if is_synthetic(data) and options.eval_data:
        # The others are for --eval_data
        return {name: value for name, value in given.items() if name == "seq_len"}
    return given


def sample_length(options: Options, loaded: LoadedModel, calibrated: int | None = None) -> int:
    """Return how many tokens a sample of text has.

    Args:
        options: of the command.
        loaded: the model.
        calibrated: without `--seq_len`; 512, or the model's maximum, if None.

    Raises:
        UsageError: the model has fewer positions.
    """
    longest = longest_window(loaded.module)
    if options.seq_len and longest and options.seq_len > longest:
        raise UsageError(
            f"--seq_len {options.seq_len} is too long: the model has {longest} positions",
            help=f"use at most --seq_len {longest}",
        )
    return options.seq_len or calibrated or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)
