"""Says what a test runs on, and what it measures with."""

from quantizer.cli.options import Options
from quantizer.cli.start_folder import unmoved
from quantizer.errors import UsageError
from quantizer.sources.data import is_synthetic
from quantizer.sources.models import Evaluate, LoadedModel, load_evaluate


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
