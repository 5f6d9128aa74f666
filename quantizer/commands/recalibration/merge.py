"""`quantizer merge`: merges result folders that were calibrated on parts of the data."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantizer.calibration import fingerprint, steps
from quantizer.calibration.request import CalibrationRequest, StoredStatistics, decisions_of
from quantizer.calibration.target import Target
from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.run_folder import (
    from_here,
    log_run,
    option_words,
    read_commands,
    write_calibration,
)
from quantizer.cli.terminal.follow import run_display
from quantizer.cli.terminal.output import Outcome, show
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.commands.recalibration.commands import MergeOptions
from quantizer.config.model import ResolvedConfig
from quantizer.config.wording import counted
from quantizer.errors import ResultError
from quantizer.graph.tracing.parameters import with_views
from quantizer.results.calibrated import check_model, stored_config
from quantizer.results.folder import (
    COMMANDS_KEY,
    ORIGIN_FILES,
    QuantInfo,
    read_info,
    why_statistics_insufficient,
)
from quantizer.results.graph_file import example_batch, reuse_or_trace
from quantizer.results.result_set import locked, require_result_folder
from quantizer.results.write import check_owner, require_expendable
from quantizer.sources.data import Batches
from quantizer.torch_state import seed_everything

_ALIKE = "calibrate both alike"
_TOGETHER = "calibrate once on all data instead: several ranks can share it"


def merge_folders(folders: tuple[str, ...], options: MergeOptions) -> None:
    """Write the result folder that several others make, and print what came out."""
    places = list(map(Path, folders))
    folder = from_start(options.output)
    require_result_folder(folder)
    with notes_on_stderr(options.quiet):
        outcome = _merge(places, folder, options)
    show(outcome, options)


def _merge(places: list[Path], folder: Path, options: Options) -> Outcome:
    """Merge the statistics of calibrations, and write the results of all data to a folder."""
    infos = [read_info(place) for place in places]
    is_merged = "merge" in read_commands(folder).get(COMMANDS_KEY, ())
    require_expendable(folder, places, overwrite=options.overwrite or is_merged)
    first = infos[0]
    seed = first.header["seed"]
    config = stored_config(first)
    # The places of settings in the user's config are those of the first calibration.
    origins = {name: first.files[name].content() for name in ORIGIN_FILES}
    _require_mergeable(infos, config)
    seed_everything(seed)
    loaded = session.open_model(options)
    batch = example_batch(first.header)
    with locked(folder), log_run(folder, options):
        original = with_views(reuse_or_trace(loaded.module, batch, first))
        check_model(first, original)
        check_owner(folder, original.model, overwrite=options.overwrite)
        batches = Batches(
            lambda: iter((batch,)),
            "an example input",
            fingerprint=_merged_data(infos),
            # The first note on data that is not real
            stamp=next(filter(None, (info.header["stamp"] for info in infos)), None),
        )
        request = CalibrationRequest(
            target=Target(original),
            config=config,
            batches=batches,
            events=run_display({}, quiet=options.quiet),
            seed=seed,
            statistics=tuple(
                StoredStatistics(info.statistics(), int(info.header["batches"]))
                for info in infos
            ),
            kept=first.solution.kept,
        )
        state = steps.run_calibration(request)
        # Only the options that affect the results or name their folder
        words = option_words(options, ("model", "weights", "trust"))
        merged = [from_here(str(place)) for place in places]
        words += ["--output", from_here(str(options.output))]
        command = ("merge", ["quantizer", "merge", *merged, *words])
        write_calibration(folder, request, state, original, command=command, origins=origins)
    tensors = len(state.plan.tensors)
    seen = state.calibration.batches
    content = {"tensors": tensors, "batches": seen, "results": str(folder)}
    line = f"{counted(tensors, 'tensor')} calibrated on {counted(seen, 'batch')}"
    return Outcome({}, content, [f"{line}; results: {folder}"])


def _require_mergeable(infos: Sequence[QuantInfo], config: ResolvedConfig) -> None:
    """Check that the statistics of folders can be merged into one calibration.

    Args:
        infos: the open folders.
        config: of the calibrations.

    Raises:
        ResultError: the folders are of different models or configs, or more than statistics is
            needed to calibrate.
    """
    first = infos[0]
    if first.settings != config.settings:
        why = "its header has other settings than its config"
        raise ResultError(f"{first.folder} cannot be merged: {why}", help=_TOGETHER)
    for info in infos[1:]:
        text = f"{info.folder} cannot be merged with {first.folder}"
        for why in _model_differences(first.header, info.header):
            raise ResultError(f"{text}: {why}", help=_ALIKE)
        both = (first.solution.kept, info.solution.kept)
        for name, decision in decisions_of(*both).items():
            for why in decision.differences(*(kept.get(name, {}) for kept in both)):
                raise ResultError(f"{text}: {why}", help=_TOGETHER)
        for why in _setting_differences(first.header, info.header):
            raise ResultError(f"{text}: {why}", help=_ALIKE)
    reasons: list[str] = []
    for algorithm in config.algorithms:
        if algorithm.needs_data:
            reasons.append(
                f"{algorithm.name} needs the values that layers read, and statistics do not "
                "hold them"
            )
    insufficient = [why for why, _ in why_statistics_insufficient(first.header, "merge")]
    for why in (*reasons, *insufficient):
        raise ResultError(f"{first.folder} cannot be merged: {why}", help=_TOGETHER)


def _model_differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about what differs in the models of two calibrations."""
    if first["model"] != other["model"]:
        yield f"it is of {other['model']}, not of {first['model']}"
    for key, called in (("layers", "layer"), ("weights", "the weight")):
        name = fingerprint.first_difference(first[key], other[key])
        if name is not None:
            yield f"{called} {name} differs"


def _setting_differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about what two calibrations were asked to do differently."""
    sentences = {
        "config": "their configs quantize differently",
        "algorithms": "the algorithms differ",
        "inputs": "the shapes of the inputs differ",
        "fast_finetune": "only one is finetuned",
        "seed": "the seeds differ",
    }
    for key, sentence in sentences.items():
        if first.get(key) != other.get(key):
            yield sentence


def _merged_data(infos: Sequence[QuantInfo]) -> dict[str, Any]:
    """Return one fingerprint of the data of all folders. Its digest is the hash of theirs."""
    parts = [info.header["data"] for info in infos]
    kinds: dict[str, set[Any]] = {}
    for data in parts:
        for name, input_kinds in data["inputs"].items():
            kinds.setdefault(name, set()).update(input_kinds)
    digests = "".join(data["digest"] for data in parts)
    return {
        "samples": sum(data["samples"] for data in parts),
        "batches": sum(data["batches"] for data in parts),
        "inputs": {name: sorted(kinds[name]) for name in sorted(kinds)},
        "digest": hashlib.blake2b(digests.encode(), digest_size=16).hexdigest(),
    }
