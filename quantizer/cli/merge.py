"""`quantizer merge`: merges result folders that were calibrated on parts of the data."""

from dataclasses import dataclass
from pathlib import Path

import click

from quantizer.calibration import steps
from quantizer.calibration.request import CalibrationRequest
from quantizer.calibration.target import TracedTarget
from quantizer.cli import runlog, session
from quantizer.cli.follow import run_display
from quantizer.cli.options import Options, command, takes
from quantizer.cli.outcome import Outcome
from quantizer.cli.places import PathType
from quantizer.cli.reproduction import read_commands, remember, words_of_merge
from quantizer.cli.start_folder import from_start
from quantizer.cli.tuned_run import results_folder_option
from quantizer.config.wording import counted
from quantizer.errors import UsageError
from quantizer.graph.parameters import with_views
from quantizer.report.files import REPORT_INPUTS, write_report
from quantizer.results.calibrated import reuse_or_trace, stored_config
from quantizer.results.calibrated_inputs import example_batch
from quantizer.results.folder import (
    COMMANDS_KEY,
    ORIGIN_FILES,
    QuantInfo,
    open_written,
    read_info,
)
from quantizer.results.merge import merged_data, require_mergeable, statistics_of
from quantizer.results.result_set import locked, require_result_folder
from quantizer.results.same_calibration import check_model
from quantizer.results.write import check_owner, require_expendable, write_results
from quantizer.seeding import seed_everything
from quantizer.sources.data import Batches


@dataclass(frozen=True)
class MergeOptions(Options):
    """The options of `quantizer merge`."""

    output: str = results_folder_option("The result folder to write.")


@command()
@click.argument("folders", nargs=-1, required=True, type=PathType(), metavar="DIR DIR...")
@takes(
    "model",
    "weights",
    "trust",
    "output",
    "overwrite",
    "json",
    model="The model that was calibrated: file.py, file.py:factory or a Hugging Face folder.",
    kind=MergeOptions,
)
def merge(folders: tuple[str, ...], options: MergeOptions) -> None:
    """Merge result folders that were calibrated on different data, with the same model and
    config.

    The result is that of a single run over all batches, in the order of the folders. Give the
    model too: a result folder never makes code run.

    \b
    quantizer merge monday tuesday --model my_model.py -o both
    """
    if len(folders) < 2:
        raise UsageError(
            "there is only one folder to merge", help="give two or more result folders"
        )
    places = list(map(Path, folders))
    folder = from_start(options.output)
    require_result_folder(folder)
    with session.notes_on_stderr(options.quiet):
        outcome = _merge(places, folder, options)
    session.show(outcome, options)


def _merge(places: list[Path], folder: Path, options: Options) -> Outcome:
    """Merge the statistics of calibrations, and write the results of all data to a folder."""
    infos = [read_info(place) for place in places]
    is_merged = "merge" in read_commands(folder).get(COMMANDS_KEY, ())
    require_expendable(folder, places, overwrite=options.overwrite or is_merged)
    first = infos[0]
    config = stored_config(first)
    # The places of settings in the user's config are those of the first calibration.
    origins = {name: first.files[name].content() for name in ORIGIN_FILES}
    require_mergeable(infos, config)
    seed_everything(infos[0].header["seed"])
    loaded = session.open_model(options)
    batch = example_batch(infos[0].header)
    with locked(folder), runlog.log_run(folder, options):
        original = with_views(reuse_or_trace(loaded.module, batch, first))
        check_model(infos[0], original)
        check_owner(folder, original.model, overwrite=options.overwrite)
        batches = Batches(
            lambda: iter((batch,)),
            "an example input",
            fingerprint=merged_data(infos),
            stamp=_stamp(infos),
        )
        request = CalibrationRequest(
            target=TracedTarget(original),
            config=config,
            batches=batches,
            events=run_display({}, quiet=options.quiet),
            seed=infos[0].header["seed"],
            statistics=tuple(statistics_of(info) for info in infos),
            kept=first.solution.kept,
        )
        state = steps.run_calibration(request)
        header = request.header(state)
        write_results(
            folder,
            original,
            state.calibration,
            state.solution,
            config=config,
            run=header,
            origins=origins,
        )
        opened = open_written(folder, REPORT_INPUTS)
        commands = remember(opened, "merge", words_of_merge(options, places))
        write_report(opened, commands=commands)
    tensors = len(state.plan.tensors)
    seen = state.calibration.batches
    content = {"tensors": tensors, "batches": seen, "results": str(folder)}
    line = f"{counted(tensors, 'tensor')} calibrated on {counted(seen, 'batch')}"
    return Outcome({}, content, [f"{line}; results: {folder}"])


def _stamp(infos: list[QuantInfo]) -> str | None:
    """Return the first note on data that is not real."""
    for info in infos:
        stamp: str | None = info.header["stamp"]
        if stamp:
            return stamp
    return None
