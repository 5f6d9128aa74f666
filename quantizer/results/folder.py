"""Read a result folder: the files that calibration and tests write, opened and checked."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.config.forms.form import missing_of_results, remedy
from quantizer.config.json_types import fits
from quantizer.config.model import Settings
from quantizer.errors import DAMAGE_ERRORS, ResultError
from quantizer.nn.load import INFO_FILE as INFO_FILE
from quantizer.plan.model import JoinDecision, JoinPlan, Key
from quantizer.plugins import plugin_steps
from quantizer.results.result_tensors import solution_of
from quantizer.results.validation import check_content, checked_json
from quantizer.storage.files import read_json, read_tensors
from quantizer.storage.folder_list import is_digest
from quantizer.storage.opened_files import (
    FileSetKind,
    OpenedFiles,
    OpenFile,
    json_digest,
    open_files,
)

RESULT_FORMAT = 7  # 6: joins are decided by calibration; 7: the folder holds its graph
STATISTICS_FILE = "statistics.safetensors"
ALGORITHMS_FILE = "algorithms.json"
GRAPH_FILE = "graph.json"
CONSTANTS_FILE = "graph.safetensors"
GRAPH_FILES = (GRAPH_FILE, CONSTANTS_FILE)
"""The traced graph, and its tensors that the model's code has as constants."""
PLAN_FILE = "plan.json"
RESOLVED_CONFIG_FILE = "config.resolved.json"
ORIGIN_FILES = (PLAN_FILE, RESOLVED_CONFIG_FILE)
"""The files that say which line of the config decides each setting. quant_info.json does not
list them: configs that say the same in other words give the same calibration, but not the same
origins.
"""
CHECKSUMS_FILE = "checksums.json"
"""Lists the files of a calibration with their sha256. It is the index of the set, which readers
open first.
"""
REPORT_FILE = "report.json"
ANALYSIS_FILE = "analysis.json"
FINDINGS_FILES = (REPORT_FILE, ANALYSIS_FILE)
"""The findings of test mode and of `analyze`. Each has a checksum, and the sha256 of the
calibration that it is about: see `OpenedResults.read_findings`.
"""
TUNE_FILE = "tune.json"
"""What each step of `quantizer tune` gained, with the same two sums."""
RUN_FILE = "run.json"
COMMANDS_KEY = "commands"
"""The key of run.json that has the commands that made the results. Only this key is read."""
FILES_OF_TESTS = (
    *FINDINGS_FILES,
    TUNE_FILE,
    "report.html",
    "layers.csv",
    "exact.json",
    "export/verify.json",
)
"""All files about one calibration that are removed when another one replaces it."""
_REPORT_INPUTS = (INFO_FILE, PLAN_FILE, STATISTICS_FILE, ALGORITHMS_FILE)
_CALIBRATE_AGAIN = "run <--quant_mode calib> again"
_CALIBRATION_KEY = "calibration"
_CHECKSUM_KEY = "checksum"
RESULT_SET_KIND = FileSetKind(
    CHECKSUMS_FILE,
    changed="was changed after calibration",
    missing="run <--quant_mode calib> first, with the same <--output_dir>",
    again=_CALIBRATE_AGAIN,
    main=INFO_FILE,
)


@dataclass(frozen=True)
class OpenedResults:
    """The open files of a calibration. They stay those of this calibration if another run
    replaces them in the folder.

    Attributes:
        files: open, and compared with their checksums.
        header: the facts of the calibration, from quant_info.json.
        entries: of quant_info.json for each quantized tensor, by layer and role.
    """

    files: OpenedFiles
    header: Mapping[str, Any]
    entries: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Return the folder of the files."""
        return self.files.folder

    @property
    def path(self) -> Path:
        """Return the path of quant_info.json."""
        return self.folder / INFO_FILE

    @cached_property
    def identity(self) -> str:
        """Return the sha256 of quant_info.json, which identifies the quantized network."""
        return self.files[INFO_FILE].digest()

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Return the content of plan.json.

        Raises:
            ResultError: it is damaged.
        """
        content: dict[str, Any] = checked_json(self.files[PLAN_FILE])
        return content

    @cached_property
    def commands(self) -> dict[str, list[str]]:
        """Return the commands that made these results, each as a list of words, by mode.

        Return none if run.json is missing, damaged, or about other results. The last run may
        have written only that file.
        """
        if RUN_FILE not in self.files:
            return {}
        try:
            stored = read_json(self.files[RUN_FILE])[COMMANDS_KEY]
            commands = dict(stored)
            for key in (_CALIBRATION_KEY, _CHECKSUM_KEY):
                commands.pop(key, None)
            is_about_this = self.with_checksum(commands) == stored
        except (ResultError, *DAMAGE_ERRORS):
            return {}
        if is_about_this and fits(commands, dict[str, list[str]]):
            return commands
        return {}

    def statistics(self) -> Mapping[str, Tensor]:
        """Return the statistics of all observers, by `layer|role|name`.

        Raises:
            ResultError: the file is damaged.
        """
        from quantizer.calibration.snapshots import checked_statistics

        file = self.files[STATISTICS_FILE]
        return checked_statistics(read_tensors(file), file.path)

    def read_findings(self, name: str) -> dict[str, Any]:
        """Return the content of a file of `FINDINGS_FILES`. Return nothing if the file is
        missing or about another calibration.

        Raises:
            ResultError: the file is damaged, or was changed after it was written.
        """
        if name not in self.files:
            return {}
        file = self.files[name]
        content = checked_json(file)
        if not isinstance(content, dict):
            raise _calibrate_again(f"{file.path} is damaged: it is not an object")
        findings = dict(content)
        checksum = findings.pop(_CHECKSUM_KEY, None)
        if checksum != json_digest(findings):
            help_ = f"remove {file.path}, then run the command that wrote it again"
            raise ResultError(f"{file.path} was changed after it was written", help=help_)
        if findings.get(_CALIBRATION_KEY) != self.identity:
            return {}
        return findings

    def with_checksum(self, findings: Mapping[str, Any]) -> dict[str, Any]:
        """Return findings with what `read_findings` checks: the identity of this calibration,
        and a checksum.
        """
        whole = {**findings, _CALIBRATION_KEY: self.identity}
        # The checksum is that of the values after reading: tuples become lists, keys texts
        as_read: dict[str, Any] = json.loads(json.dumps(whole))
        return as_read | {_CHECKSUM_KEY: json_digest(as_read)}


@dataclass(frozen=True)
class QuantInfo(OpenedResults):
    """The open files of a calibration, with the solution that they contain."""

    solution: Solution

    @property
    def settings(self) -> Settings:
        """Return the global settings of the calibration."""
        return Settings(**self.header["settings"])


def why_statistics_insufficient(
    header: Mapping[str, Any], purpose: str
) -> Iterator[tuple[str, str]]:
    """Yield sentences that say why a calibration cannot be derived from statistics alone, with
    the key of a config that has to be off, or an empty text.

    Args:
        header: of quant_info.json.
        purpose: the verb of what the caller wants to do, such as "merge".
    """
    for step in plugin_steps():
        took_effect = header.get(step.keeps) or header["settings"].get(step.setting)
        if step.why_data and took_effect:
            yield step.why_data, step.setting or ""
    if not header["batches"]:
        yield f"it was quantized without data, so there is nothing to {purpose}", ""


def stored_joins(header: Mapping[str, Any]) -> dict[str, JoinDecision]:
    """Return how a calibration has quantized joins, by the name of the join.

    It is the inverse of `write.joins_entry`. JSON has lists where the classes have tuples.
    """
    decisions: dict[str, JoinDecision] = {}
    for name, entry in header["joins"].items():
        left: list[Key] = []
        for layer, roles in entry["left"].items():
            left += [(layer, role) for role in roles]
        stored = dict(entry["join"])
        for field in ("sources", "alone", "observed", "inputs", "divisible"):
            stored[field] = tuple((layer, role) for layer, role in stored[field])
        if stored["single"] is not None:
            stored["single"] = tuple(stored["single"])
        stored["scalable"] = tuple(stored["scalable"])
        join = JoinPlan(name=name, **stored)
        figures = {key: entry[key] for key in ("scale", "gains", "lost_bits", "lost_db")}
        decisions[name] = JoinDecision(join, **figures, left=tuple(left))
    return decisions


def read_info(folder: Path) -> QuantInfo:
    """Open the calibration in a folder, compare its files with their checksums and read its
    solution.

    Raises:
        ResultError: it is missing, incomplete, of another format, or a file was changed.
    """
    opened = open_results(folder)
    _require_plugins(opened)
    try:
        solution = solution_of(opened.files, opened.header, opened.entries)
        return QuantInfo(opened.files, opened.header, opened.entries, solution)
    except DAMAGE_ERRORS as error:
        raise _calibrate_again(
            f"{opened.path} is damaged: {type(error).__name__}: {error}"
        ) from error


def _require_plugins(opened: OpenedResults) -> None:
    """Refuse results that were made with a plug-in that is not there.

    Raises:
        ResultError: naming all of them.
    """
    missing = ", ".join(missing_of_results(opened.header))
    if missing:
        raise ResultError(
            f"{opened.folder} was calibrated with what is not there: the plug-in {missing}",
            help=f"{remedy(missing)}, or calibrate again without it",
        )


def open_results(folder: Path) -> OpenedResults:
    """Open the calibration in a folder and compare its files with their checksums.

    Raises:
        ResultError: it is missing, incomplete, of another format, or a file was changed.
    """
    files = open_files(folder, RESULT_SET_KIND, _read_digests, (*FINDINGS_FILES, RUN_FILE))
    content = _checked_info(files)
    return OpenedResults(files, content["header"], content["tensors"])


def open_written(folder: Path) -> OpenedResults:
    """Open what a report reads of a calibration that this process has just written, while it
    holds the lock.

    The content of quant_info.json is not validated again. For a large network this takes as
    long as writing it.

    Raises:
        ResultError: a file is missing or damaged.
    """

    def read_some_digests(index: OpenFile) -> Mapping[str, str]:
        digests = _read_digests(index)
        return {name: digests[name] for name in digests if name in _REPORT_INPUTS}

    optional = (*FINDINGS_FILES, RUN_FILE)
    files = open_files(folder, RESULT_SET_KIND, read_some_digests, optional)
    content = read_json(files[INFO_FILE])
    return OpenedResults(files, content["header"], content["tensors"])


def _read_digests(index: OpenFile) -> dict[str, str]:
    """Return the sha256 of each file of a calibration, from checksums.json.

    Raises:
        ResultError: the file is damaged.
    """
    content = read_json(index)
    digests: dict[str, str] | None = None
    if isinstance(content, dict):
        digests = content.get("files")
    if not isinstance(digests, dict) or INFO_FILE not in digests:
        raise _calibrate_again(f"{index.path} is damaged: it is not a list of files")
    for digest in digests.values():
        if not is_digest(digest):
            raise _calibrate_again(f"{index.path} is damaged: a file has no sha256")
    return digests


def listed_files(folder: Path) -> list[str]:
    """Return the names of the files of the calibration in a folder; none if there is none, or
    if its list of checksums is damaged.
    """
    try:
        index = OpenFile.open(folder / CHECKSUMS_FILE)
        return [CHECKSUMS_FILE, *_read_digests(index)]
    except (ResultError, OSError):
        return []


def _checked_info(files: OpenedFiles) -> dict[str, Any]:
    """Return the content of quant_info.json.

    Raises:
        ResultError: it is of another format, was changed, or calibration cannot have written it
            together with the other files.
    """
    file = files[INFO_FILE]
    content: dict[str, Any] = read_json(file)
    is_complete = isinstance(content, dict) and content.get("complete") is True
    if not is_complete or "header" not in content:
        raise _calibrate_again(f"{file.path} is not complete: calibration did not finish")
    header = content["header"]
    if not isinstance(header, dict) or header.get("format") != RESULT_FORMAT:
        text = f"{file.path} is not of format {RESULT_FORMAT}, which this version reads"
        raise ResultError(text, help="calibrate again")
    digests = header.get("files")
    listed = _read_digests(files[CHECKSUMS_FILE])
    if not isinstance(digests, dict) or not digests.items() <= listed.items():
        raise _calibrate_again(
            f"{file.path} is damaged: header/files has other files than {CHECKSUMS_FILE}"
        )
    checked = {key: content.get(key) for key in ("header", "tensors")}
    if content.get(_CHECKSUM_KEY) != json_digest(checked):
        raise _calibrate_again(f"{file.path} was changed after calibration")
    check_content(content, file.path)
    return content


def _calibrate_again(message: str) -> ResultError:
    """Return an error whose help is to calibrate again."""
    return ResultError(message, help=_CALIBRATE_AGAIN)
