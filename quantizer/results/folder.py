"""The result folder: what calibration leaves and how commands read it back. checksums.json is
written last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from quantizer.calibration.snapshots import checked_statistics
from quantizer.calibration.solution import Solution
from quantizer.config.model import Settings
from quantizer.config.typed_fields import fits
from quantizer.errors import ResultError
from quantizer.nn.load import INFO as INFO
from quantizer.plan.model import JoinDecision, JoinPlan, Key
from quantizer.results.result_tensors import solution_of
from quantizer.results.validation import check_content, checked_json
from quantizer.storage.files import read_json, read_tensors
from quantizer.storage.opened_files import (
    OpenedFiles,
    OpenFile,
    SetKind,
    json_digest,
    open_files,
)

RESULT_FORMAT = 7  # 6: joins are decided by calibration; 7: the folder holds its graph
STATISTICS = "statistics.safetensors"
ALGORITHMS = "algorithms.json"
GRAPH, CONSTANTS = GRAPH_FILES = ("graph.json", "graph.safetensors")
"""The traced graph, and the constants of the model's code that it reads."""
PLAN, RESOLVED = ORIGINS = ("plan.json", "config.resolved.json")
"""Where decisions come from. quant_info.json does not name it: calibrations that decide the
same may differ in it.
"""
CHECKSUMS = "checksums.json"
"""Names every file of a calibration by its sha256. Readers open it first."""
REPORT, ANALYSIS = SEALED = ("report.json", "analysis.json")
"""What test mode and `analyze` found. Each has its own checksum, and the one of the calibration
that it is about.
"""
RUN_FILE, COMMANDS = "run.json", "commands"
"""The facts of the last run, and the commands that have made the results. Nothing else of it is
read.
"""
TESTED = (*SEALED, "report.html", "layers.csv", "exact.json", "export/verify.json")
"""The same and what is made of it. It holds for one calibration only."""
_AGAIN = "run --quant_mode calib again"
KIND = SetKind(
    CHECKSUMS,
    changed="was changed after calibration",
    missing="run --quant_mode calib first, with the same --output_dir",
    again=_AGAIN,
    main=INFO,
)


@dataclass(frozen=True)
class OpenedResults:
    """A calibration in a folder: its files, open and checked, and quant_info.json as values.

    Everything that is read of it is of this one calibration, whatever another run writes
    meanwhile.
    """

    files: OpenedFiles
    header: Mapping[str, Any]
    entries: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Return where it lies."""
        return self.files.folder

    @property
    def path(self) -> Path:
        """Return the path of quant_info.json."""
        return self.folder / INFO

    @cached_property
    def network(self) -> str:
        """Return the sha256 of quant_info.json, which equal calibrations have in common."""
        return self.files[INFO].digest()

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Return the content of plan.json.

        Raises:
            ResultError: it is damaged.
        """
        content: dict[str, Any] = checked_json(self.files[PLAN])
        return content

    @cached_property
    def commands(self) -> dict[str, list[str]]:
        """Return the commands that made these results, as words by mode.

        There are none where run.json is damaged or of others.
        """
        if RUN_FILE not in self.files:
            return {}
        try:
            sealed = read_json(self.files[RUN_FILE])[COMMANDS]
            commands = {
                mode: words
                for mode, words in sealed.items()
                if mode not in ("calibration", "checksum")
            }
            is_whole = self.sealed(commands) == sealed
        except (ResultError, LookupError, TypeError, AttributeError):
            return {}
        return commands if is_whole and fits(commands, dict[str, list[str]]) else {}

    def statistics(self) -> Mapping[str, Tensor]:
        """Return what calibration has seen, by `layer|role|name`.

        Raises:
            ResultError: the file is damaged.
        """
        file = self.files[STATISTICS]
        return checked_statistics(read_tensors(file), file.path)

    def about(self, name: str) -> dict[str, Any]:
        """Return what a file of SEALED says of this calibration; nothing where there is none,
        or it is of another.

        Raises:
            ResultError: the file was changed since it was written.
        """
        if name not in self.files:
            return {}
        file = self.files[name]
        content = checked_json(file)
        if not isinstance(content, dict):
            raise _useless(f"{file.path} is damaged: it is not an object")
        unsealed = {key: value for key, value in content.items() if key != "checksum"}
        if content.get("checksum") != json_digest(unsealed):
            help_ = f"remove {file.path}, then run the command that wrote it again"
            raise ResultError(f"{file.path} was changed after it was written", help=help_)
        return unsealed if content.get("calibration") == self.network else {}

    def sealed(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a file of SEALED, which says what it is about."""
        whole = {**content, "calibration": self.network}
        as_read: dict[str, Any] = json.loads(json.dumps(whole))
        return as_read | {"checksum": json_digest(as_read)}


@dataclass(frozen=True)
class QuantInfo(OpenedResults):
    """The same with the solution that the files hold."""

    solution: Solution

    @property
    def settings(self) -> Settings:
        """Return the global settings calibration ran with."""
        known = {f.name for f in fields(Settings)} - {"places"}
        return Settings(
            **{key: value for key, value in self.header["settings"].items() if key in known}
        )


def beyond_statistics(header: Mapping[str, Any], purpose: str) -> Iterator[str]:
    """Yield why statistics do not suffice to `purpose` a calibration, in sentences."""
    if header.get("fast_finetune"):
        yield (
            "fast finetuning needs the values that layers read, and statistics do not hold them"
        )
    if header["settings"]["include_bias_corr"]:
        yield "bias correction needs the outputs of the quantized network, whose scales change"
    if not header["batches"]:
        yield f"it was quantized without data, so there is nothing to {purpose}"


def stored_joins(header: Mapping[str, Any]) -> dict[str, JoinDecision]:
    """Return what a calibration has decided of joins."""
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
        join = JoinPlan(name=name, **{**stored, "scalable": tuple(stored["scalable"])})
        figures = {key: entry[key] for key in ("scale", "gains", "lost_bits", "lost_db")}
        decisions[name] = JoinDecision(join, **figures, left=tuple(left))
    return decisions


def read_info(folder: Path) -> QuantInfo:
    """Open the calibration in a folder, compare its files with their checksums and read its
    solution.

    Raises:
        ResultError: missing, unfinished, from another format, or a file was changed since.
    """
    opened = open_results(folder)
    files, header, entries = opened.files, opened.header, opened.entries
    try:
        return QuantInfo(files, header, entries, solution_of(files, header, entries))
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise _useless(f"{opened.path} is damaged: {type(error).__name__}: {error}") from error


def open_results(folder: Path) -> OpenedResults:
    """Open the calibration in a folder and compare its files with their checksums.

    Raises:
        ResultError: as `read_info` does.
    """
    files = open_files(folder, KIND, _listed, (*SEALED, RUN_FILE))
    content = _checked_info(files)
    return OpenedResults(files, content["header"], content["tensors"])


def open_written(folder: Path, names: Collection[str]) -> OpenedResults:
    """Open quant_info.json and the files `names` of a calibration that this process wrote while
    it holds the lock.

    What quant_info.json says is not checked again: for a large network that takes as long as
    writing it.

    Raises:
        ResultError: a file is missing or damaged.
    """

    def digests(index: OpenFile) -> Mapping[str, str]:
        return {
            name: digest for name, digest in _listed(index).items() if name in (INFO, *names)
        }

    files = open_files(folder, KIND, digests, (*SEALED, RUN_FILE))
    content = read_json(files[INFO])
    return OpenedResults(files, content["header"], content["tensors"])


def _listed(index: OpenFile) -> dict[str, str]:
    """Return the sha256 of each file of a calibration, as checksums.json has it."""
    content = read_json(index)
    listed = content.get("files") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or INFO not in listed:
        raise _useless(f"{index.path} is damaged: it is not a list of files")
    if not all(
        isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
        for digest in listed.values()
    ):
        raise _useless(f"{index.path} is damaged: it has no digest of a file")
    return listed


def _checked_info(files: OpenedFiles) -> dict[str, Any]:
    """Return the content of quant_info.json, if calibration can have written it together with
    the other files.
    """
    file = files[INFO]
    content: Any = read_json(file)
    if (
        not isinstance(content, dict)
        or content.get("complete") is not True
        or "header" not in content
    ):
        raise _useless(f"{file.path} is not complete: calibration did not finish")
    header = content["header"]
    if not isinstance(header, dict) or header.get("format") != RESULT_FORMAT:
        text = f"{file.path} is not of format {RESULT_FORMAT}, which this version reads"
        raise ResultError(text, help="calibrate again")
    named = header.get("files")
    listed = _listed(files[CHECKSUMS])
    if not isinstance(named, dict) or not named.items() <= listed.items():
        raise _useless(f"{file.path} is damaged: header/files has other files than {CHECKSUMS}")
    checked = {key: content.get(key) for key in ("header", "tensors")}
    if content.get("checksum") != json_digest(checked):
        raise _useless(f"{file.path} was changed after calibration")
    check_content(content, file.path)
    return content


def _useless(what: str) -> ResultError:
    return ResultError(what, help=_AGAIN)
