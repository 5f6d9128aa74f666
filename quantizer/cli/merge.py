"""`quantizer merge`: the statistics of result folders that were calibrated apart become one
calibration.
"""

from pathlib import Path

import click

from quantizer.calibration import steps
from quantizer.calibration.job import Job
from quantizer.calibration.target import TracedTarget
from quantizer.cli import runlog, session
from quantizer.cli.follow import followed
from quantizer.cli.options import Options, command, takes
from quantizer.cli.places import Place
from quantizer.cli.reproduction import remember, words_of_merge
from quantizer.cli.session import Outcome
from quantizer.errors import UsageError
from quantizer.report.files import READ, write_report
from quantizer.results.calibrated import example_batch, recalled, stored_config
from quantizer.results.folder import ORIGINS, QuantInfo, open_written, read_info
from quantizer.results.merge import merged_data, require_mergeable, statistics_of
from quantizer.results.result_set import locked
from quantizer.results.same_calibration import check_model
from quantizer.results.write import check_owner, write_results
from quantizer.seeding import seed_everything
from quantizer.sources.data import Batches


@command()
@click.argument("folders", nargs=-1, required=True, type=Place(), metavar="DIR DIR...")
@takes(
    "model",
    "weights",
    "trust",
    "output",
    "overwrite",
    "json",
    "quiet",
    model="The model that was calibrated: file.py, file.py:factory or a Hugging Face folder.",
    output="The result folder to write.  [default: quantize_result]",
)
def merge(folders: tuple[str, ...], options: Options) -> None:
    """Make one calibration of result folders that were calibrated on different data, with one
    model and one config.

    Ranges and histograms are those of a single run over all batches, in the order of the
    folders. Result folders are data: no code runs because one of them names it, so the model is
    an option.

    \b
    quantizer merge monday tuesday --model my_model.py -o both
    """
    if len(folders) < 2:
        raise UsageError("merge needs two result folders or more")
    places, folder = [Path(each) for each in folders], Path(options.output or "quantize_result")
    with session.notes_on_stderr(options.quiet):
        outcome = _merged(places, folder, options)
    session.show(outcome, options)


def _merged(places: list[Path], folder: Path, options: Options) -> Outcome:
    infos = [read_info(place) for place in places]
    first = infos[0]
    config = stored_config(first)
    # Places in the user's own file are those of the first calibration.
    origins = {name: first.files[name].content() for name in ORIGINS}
    require_mergeable(infos, config)
    seed_everything(infos[0].header["seed"])
    loaded = session.open_model(options)
    batch = example_batch(infos[0].header)
    with locked(folder), runlog.recorded(folder, options):
        original = recalled(loaded.module, batch, first)
        check_model(infos[0], original)
        check_owner(folder, original.model, overwrite=options.overwrite)
        job = Job(
            TracedTarget(original),
            config,
            Batches(
                lambda: iter((batch,)),
                "an example input",
                fingerprint=merged_data(infos),
                stamp=_stamp(infos),
            ),
            followed({}, quiet=options.quiet),
            seed=infos[0].header["seed"],
            statistics=tuple(statistics_of(info) for info in infos),
            absorption=first.solution.absorption,
            levels=first.solution.levels,
        )
        steps.run(job)
        write_results(
            folder, original, config, job.calibration, job.solution, job.header, origins
        )
        opened = open_written(folder, READ)
        commands = remember(opened, "merge", words_of_merge(options, places))
        write_report(opened, commands=commands)
    said = (
        f"{len(job.plan.tensors)} tensors calibrated on {job.calibration.batches} batches; "
        f"results: {folder}"
    )
    found = {
        "tensors": len(job.plan.tensors),
        "batches": job.calibration.batches,
        "results": str(folder),
    }
    return Outcome({}, found, [said])


def _stamp(infos: list[QuantInfo]) -> str | None:
    return next((info.header["stamp"] for info in infos if info.header["stamp"]), None)
