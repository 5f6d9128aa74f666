"""Divides the data of a run into samples that calibrate and samples that judge."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from quantizer.calibration.held_back import (
    MIN_SAMPLES,
    MOST_WINDOWS,
    may_need_data,
    samples_to_calibrate,
)
from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.modes.test_mode import reads_calibration_data
from quantizer.cli.terminal.render import say_note
from quantizer.comparison.perplexity import next_tokens
from quantizer.config.load import load_preset
from quantizer.config.wording import counted
from quantizer.errors import UsageError
from quantizer.export.refusals import require_operators
from quantizer.export.targets import checked_target
from quantizer.sources.batches import Fingerprint
from quantizer.sources.data import Batches
from quantizer.sources.models import LoadedModel


@dataclass(frozen=True)
class DividedData:
    """The samples that calibrate, and the others, which judge.

    Attributes:
        calibration: the batches of calibrations.
        evaluation: the batches of tests.
        calib_options, test_options: those of the run, with the samples of each.
        sentence: says what was held back; empty if the data were apart already.
    """

    calibration: Batches
    evaluation: Batches
    calib_options: Options
    test_options: Options
    sentence: str = ""

    @property
    def has_other_evaluation(self) -> bool:
        """Return whether tests have data of another source."""
        return not self.sentence and self.evaluation is not self.calibration

    def with_config(self, path: str) -> "DividedData":
        """Return the same data for calibrations and tests with a config file."""
        return replace(
            self,
            calib_options=replace(self.calib_options, config_file=path),
            test_options=replace(self.test_options, config_file=path),
        )

    def calibrating(self, **changes: Any) -> Options:
        """Return the options of calib mode, with others by name."""
        return replace(self.calib_options, quant_mode="calib", gate=(), **changes)

    def testing(self, **changes: Any) -> Options:
        """Return the options of test mode, with others by name."""
        return replace(
            self.test_options, quant_mode="test", fast_finetune=None, overwrite=False, **changes
        )


def divide_data(options: Options, opened: session.OpenedRun) -> DividedData:
    """Return the data of calibration and of tests. Without evaluation data, the last quarter of
    the calibration data is held back.

    Raises:
        UsageError: there are too few data to divide, evaluation data are synthetic, or they are
            the calibration data.
    """
    loaded = opened.loaded
    if session.evaluates_on_synthetic(options, loaded):
        raise UsageError(
            "synthetic data cannot judge a config", help="give real data with --eval_data"
        )
    if _has_evaluation_data(options, loaded):
        evaluation = session.open_data(options, loaded, evaluation=True)
        if _are_same(opened.batches, evaluation):
            raise UsageError(
                "the evaluation data are the calibration data",
                help="give other --eval_data, or leave it out: then a part of the calibration "
                "data is held back",
            )
        return DividedData(opened.batches, evaluation, options, options)
    sizes = _batch_sizes(options, opened)
    first = samples_to_calibrate(sizes, opened.graph)
    if first is None:
        raise UsageError(
            f"{opened.batches.label} has one batch, and there is no other evaluation data",
            help="give --eval_data, add evaluation_data() to the model's file, or give more "
            "batches: a config is judged on data that calibration does not use",
        )
    return _divided(options, loaded, first, sum(sizes))


def data_of_run(options: Options, opened: session.OpenedRun, preset: str | None) -> DividedData:
    """Return the data of a run that tests one config. The last quarter is held back, unless
    there are other evaluation data, few samples, or nothing to calibrate.

    Args:
        options: of the run.
        opened: the model and its data.
        preset: that the run starts from, if it has no config file.
    """
    loaded = opened.loaded
    whole = DividedData(opened.batches, opened.batches, options, options)
    if session.evaluates_on_synthetic(options, loaded):
        return whole
    is_apart = _has_evaluation_data(options, loaded)
    windows = _windows(options, opened)
    if windows > MOST_WINDOWS:
        say_note(
            f"note: of the {windows} windows of {options.data}, the first {MOST_WINDOWS} are "
            "used: --subset_len N takes more or fewer"
        )
        fewer = replace(options, subset_len=MOST_WINDOWS)
        opened = opened.with_batches(session.open_data(fewer, loaded))
        whole = DividedData(opened.batches, opened.batches, fewer, options)
        if not is_apart:
            options = fewer
            whole = replace(whole, test_options=fewer)
    if is_apart:
        evaluation = session.open_data(options, loaded, evaluation=True)
        return replace(whole, evaluation=evaluation)
    if preset is None:
        config = session.read_config_file(options.config_file).config
    else:
        config = load_preset(preset)
    needs_data = may_need_data(config) or options.fast_finetune is not None
    if opened.batches.stands_in or not needs_data:
        return whole
    sizes = _batch_sizes(options, opened)
    first = samples_to_calibrate(sizes, opened.graph)
    if first is None or sum(sizes) < MIN_SAMPLES:
        return whole
    return _divided(options, loaded, first, sum(sizes))


def _windows(options: Options, opened: session.OpenedRun) -> int:
    """Return how many windows a text of `--data` has; 0 for other data, and if `--subset_len`
    says how many to use.
    """
    is_chosen = options.data is None or options.subset_len is not None
    if is_chosen or opened.batches.stands_in or next_tokens(opened.batches.first()) is None:
        return 0
    return sum(_batch_sizes(options, opened))


def _batch_sizes(options: Options, opened: session.OpenedRun) -> list[int]:
    """Return the number of samples of each batch of the calibration data, which are read.

    Raises:
        UsageError: a file of the run cannot hold the network, with any data.
    """
    for target in opened.options.for_:
        require_operators(checked_target(target, options.target_choices), opened.graph)
    return [batch.size for batch in opened.batches]


def _divided(options: Options, loaded: LoadedModel, first: int, samples: int) -> DividedData:
    """Return the data of which the first samples calibrate and the others judge.

    Args:
        options: of the run.
        loaded: the model.
        first: how many samples calibrate.
        samples: how many there are.
    """
    others = samples - first
    calib_options = replace(options, subset_len=first)
    test_options = replace(options, skip_len=first)
    words = f"--skip_len {first}"
    if options.subset_len is not None:
        test_options = replace(test_options, subset_len=others)
        words += f" --subset_len {others}"
    return DividedData(
        session.open_data(calib_options, loaded),
        session.open_data(test_options, loaded, evaluation=True),
        calib_options,
        test_options,
        f"the last {counted(others, 'sample')} of {samples} judge, and do not calibrate: "
        f"--subset_len {first} for calib, {words} for test",
    )


def _are_same(calibration: Batches, evaluation: Batches) -> bool:
    """Return whether both are the same batches. They are read only if the first ones are
    alike.
    """
    prints = []
    for batches in (calibration, evaluation):
        first = Fingerprint()
        first.update(batches.first())
        prints.append(first.to_json())
    if prints[0] != prints[1]:
        return False
    for batches in (calibration, evaluation):
        if batches.fingerprint is None:
            # The end of a pass completes the fingerprint
            deque(batches, maxlen=0)
    return calibration.fingerprint == evaluation.fingerprint


def _has_evaluation_data(options: Options, loaded: LoadedModel) -> bool:
    """Return whether tests have other data than calibration."""
    return bool(options.skip_len) or not reads_calibration_data(options, loaded)
