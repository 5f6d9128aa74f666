"""Read the options of texts."""

from functools import partial

from quantizer.cli.options import Options
from quantizer.cli.start_folder import unmoved
from quantizer.errors import UsageError
from quantizer.sources.data import TEXTS, find_files, is_synthetic
from quantizer.sources.models import LoadedModel
from quantizer.sources.windows import DEFAULT_SEQ_LEN, Windows, longest_window

_OF_TEXTS = ("tokenizer", "stride", "seq_len", "shuffle")
"""The options that only texts have."""


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
