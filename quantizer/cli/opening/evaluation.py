"""Says what a test runs on and measures with, and how texts are split into samples."""

from functools import partial

from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import unmoved
from quantizer.errors import UsageError
from quantizer.sources.data import TEXTS, find_files, is_synthetic
from quantizer.sources.models import Evaluate, LoadedModel, load_evaluate
from quantizer.sources.windows import DEFAULT_SEQ_LEN, Windows, longest_window

_OF_TEXTS = ("tokenizer", "stride", "seq_len", "shuffle")
"""The options that only texts have."""


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


def read_windows(
    options: Options, loaded: LoadedModel, data: str | None, calibrated: int | None = None
) -> Windows:
    """Return how texts are split into samples.

    Args:
        options: of the command.
        loaded: the model, with its own tokenizer if it has one.
        data: of `--data` or `--eval_data`.
        calibrated: tokens per sample without `--seq_len`; 512, or the model's maximum, if None.

    Raises:
        UsageError: the lengths do not fit each other or the model, or the data is not text.
    """
    names = [name for name in _OF_TEXTS if getattr(options, name)]
    has_example = loaded.calibration_data is None and loaded.example is not None
    is_example = data is None and has_example
    if (is_example or is_synthetic(data)) and "seq_len" in names:
        # It sets the length of the example input, and of sequences that the model samples.
        names.remove("seq_len")
    if is_synthetic(data) and options.eval_data:
        # They are for the texts of --eval_data.
        names.clear()
    if names and (data is None or find_files(data)[0] != TEXTS):
        raise UsageError(
            f"--{names[0]} is for texts, but the data is not text",
            help="give --data FILE.txt, or leave out the option",
        )
    longest = longest_window(loaded.module)
    if options.seq_len and longest and options.seq_len > longest:
        raise UsageError(
            f"--seq_len {options.seq_len} is too long: the model has {longest} positions",
            help=f"use at most --seq_len {longest}",
        )
    tokenizer = loaded.tokenizer
    if options.tokenizer:
        # Only --tokenizer needs it
        from quantizer.sources.tokenizer import load_tokenizer

        tokenizer = partial(
            load_tokenizer, str(unmoved(options.tokenizer)), trust=options.trust
        )
    default = min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)
    seq_len = options.seq_len or calibrated or default
    shuffle_seed = None
    if options.shuffle:
        shuffle_seed = options.seed
    return Windows(tokenizer, seq_len, options.stride, shuffle_seed, options.trust)
