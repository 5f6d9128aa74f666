"""The result folder: what calibration leaves and how commands read it back. checksums.json is
written last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quantizer
from quantizer.config.model import Config, Settings
from quantizer.config.resolved import resolved_document
from quantizer.config.typed_fields import fits
from quantizer.engine import fingerprint
from quantizer.engine.calibrate import Calibration
from quantizer.engine.result_files import (
    json_parts,
    read_bytes,
    read_json,
    read_tensors,
    sha256,
    write_bytes,
    write_json,
    write_tensors,
)
from quantizer.engine.result_set import replaced_set
from quantizer.engine.result_tensors import TENSORS, header_of, solution_of, tensors_of
from quantizer.engine.solution import Solution, encoded, writes_inplace
from quantizer.engine.stored_checks import check_content, checked_json, checked_statistics
from quantizer.engine.tensor_shards import left_files, write_shards
from quantizer.errors import ResultError
from quantizer.graph.edits import with_weights
from quantizer.graph.emit import emit, is_emitted
from quantizer.graph.ir import Graph
from quantizer.graph.module_names import path_names
from quantizer.nn.load import GROUP_SCALES
from quantizer.nn.load import INFO as INFO
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.opened_files import OpenedFiles, OpenFile, SetKind, json_digest, open_files
from quantizer.plan.model import JoinDecision, JoinPlan, Key, Plan
from quantizer.plan.size import weight_bytes

FORMAT = 6  # 5: histograms of samples have weights; 6: joins are decided by calibration
STATISTICS = "statistics.safetensors"
ALGORITHMS = "algorithms.json"
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
AGAIN = "run --quant_mode calib again"
KIND = SetKind(
    CHECKSUMS,
    changed="was changed after calibration",
    missing="run --quant_mode calib first, with the same --output_dir",
    again=AGAIN,
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
        """Where it lies."""
        return self.files.folder

    @property
    def path(self) -> Path:
        """The path of quant_info.json."""
        return self.folder / INFO

    @cached_property
    def network(self) -> str:
        """The sha256 of quant_info.json, which calibrations of one network have in common."""
        return self.files[INFO].digest()

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The content of plan.json.

        Raises:
            ResultError: it is damaged.
        """
        content: dict[str, Any] = checked_json(self.files[PLAN])
        return content

    @cached_property
    def commands(self) -> dict[str, list[str]]:
        """The commands that made these results, as words by mode; none where run.json is
        damaged or of others.
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
            raise _useless(f"{file.path} is damaged: it is no object")
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
        """The global settings calibration ran with."""
        known = {f.name for f in fields(Settings)} - {"places"}
        return Settings(
            **{key: value for key, value in self.header["settings"].items() if key in known}
        )


def check_owner(folder: Path, model: str, *, overwrite: bool) -> None:
    """Refuse to write over the results of another model, or over code of the user's.

    Raises:
        ResultError: the folder holds some, and `overwrite` is not set, or a file with the name
            of the network's code.
    """
    code = folder / f"{model}.py"
    if code.is_file() and not is_emitted(code.read_text("utf-8", "replace")):
        help_ = "move it to another folder, or choose another --output_dir"
        raise ResultError(
            f"{code} is not a file that quantizer wrote, and would be replaced", help=help_
        )
    if overwrite or not (folder / INFO).exists():
        return
    try:
        owner = read_json(folder / INFO)["header"]["model"]
    except (ResultError, KeyError, TypeError):
        return  # nothing anyone could use
    if owner != model:
        raise ResultError(
            f"{folder} holds results of {owner}, not of {model}",
            help="choose another --output_dir or add --overwrite",
        )


def write_results(
    folder: Path,
    original: Graph,
    config: Config,
    calibration: Calibration,
    found: Solution,
    run: Mapping[str, Any],
    origins: Mapping[str, Iterable[bytes] | bytes] | None = None,
) -> None:
    """Write everything `test` needs, in place of what was there; that stays until all is
    written.

    `run` goes into the header and is the same in equal runs: `fingerprint.model` at least,
    `Job.header` where there was one. `origins` are files of ORIGINS in place of its own.
    """
    graph = calibration.plan.graph
    found = encoded(graph, found)
    network = Network(with_weights(graph, found.weights))
    with replaced_results(folder) as new:
        for name, content in (origins or _origins(calibration.plan, config)).items():
            write_bytes(new / name, content)
        _write(new, original, config, calibration, found, network, run)


def _write(
    folder: Path,
    original: Graph,
    config: Config,
    calibration: Calibration,
    found: Solution,
    network: Network,
    run: Mapping[str, Any],
) -> None:
    plan, graph = calibration.plan, calibration.plan.graph
    files = {STATISTICS: write_tensors(folder / STATISTICS, calibration.state_dict())}
    for name, tensors in tensors_of(network, found).items():
        files |= write_shards(folder / name, tensors)
    files[f"{graph.model}.py"] = write_bytes(folder / f"{graph.model}.py", emit(graph).encode())
    if found.algorithms:
        files[ALGORITHMS] = write_json(folder / ALGORITHMS, found.algorithms)
    settings = {key: value for key, value in asdict(config.settings).items() if key != "places"}
    header = {
        "format": FORMAT,
        "model": graph.model,
        "quantizer": quantizer.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "settings": settings,
        "batches": calibration.batches,
        "inputs": fingerprint.input_shapes(original),
        "call": fingerprint.call_paths(original),
        "config": fingerprint.decisions(plan),
        "files": files,
        "joins": {
            name: _join_entry(calibration, network, decision)
            for name, decision in found.joins.items()
        },
        **header_of(network, found),
        **run,
    }
    entries: dict[str, dict[str, Any]] = {}
    for (layer, role), tensor in found.tensors.items():
        notes = (
            {"notes": list(found.notes[layer, role])} if (layer, role) in found.notes else {}
        )
        entries.setdefault(layer, {})[role] = (
            _entry(calibration, network, (layer, role), tensor) | notes
        )
    write_info(folder, header, entries)


def write_info(folder: Path, header: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Write quant_info.json and checksums.json, after which the folder is a complete
    calibration.
    """
    content = {"header": header, "tensors": entries}
    digest = write_json(
        folder / INFO, content | {"checksum": json_digest(content), "complete": True}
    )
    origins = {name: sha256(folder / name) for name in ORIGINS}
    write_json(folder / CHECKSUMS, {"files": {**header["files"], **origins, INFO: digest}})


def write_copy(folder: Path, opened: OpenedResults) -> None:
    """Write the files of an opened calibration to another folder, in place of what was there.

    Raises:
        ResultError: they cannot be written.
    """
    with replaced_results(folder) as new:
        for name in opened.files.names:
            if name not in (*SEALED, RUN_FILE):
                write_bytes(new / name, opened.files[name].parts())


@contextmanager
def replaced_results(folder: Path) -> Iterator[Path]:
    """A folder for the files of a calibration, which take the place of those of another, and of
    what its tests found.

    Raises:
        ResultError: they cannot be written; then the other is as it was.
    """
    tensors = [name for each in TENSORS for name in left_files(folder / each)]
    with replaced_set(
        folder, (INFO, *tensors, STATISTICS, ALGORITHMS, *ORIGINS, *TESTED, *_generated(folder))
    ) as new:
        yield new


def _origins(plan: Plan, config: Config) -> dict[str, Iterable[bytes]]:
    """The files of ORIGINS."""
    return dict(
        zip(
            ORIGINS,
            map(json_parts, (_planned(plan, config), resolved_document(config))),
            strict=True,
        )
    )


def _planned(plan: Plan, config: Config) -> dict[str, Any]:
    """plan.json: the plan, what it makes of the weights' size, and the file that its places are
    in.
    """
    before, after = weight_bytes(plan)
    paths = {"paths": path_names(plan.graph)}
    sizes = {"weight_bytes": {"float": before, "quantized": after}}
    file = (
        {"config": {"name": Path(config.source).name, "text": config.text}}
        if config.text
        else {}
    )
    return plan.to_json() | paths | sizes | file


def _generated(folder: Path) -> list[str]:
    """The network's code that a calibration of any model has left, which says so itself."""
    try:
        name = f"{read_json(folder / INFO)['header']['model']}.py"
        is_ours = (
            name.isprintable()
            and is_emitted(read_bytes(folder / name).decode())
            and "/" not in name
        )
    except (ResultError, KeyError, TypeError, OSError, ValueError):
        return []
    return [name] if is_ours else []


def _entry(
    calibration: Calibration, network: Network, key: tuple[str, str], tensor: QuantizedTensor
) -> dict[str, Any]:
    """One tensor of quant_info.json."""
    layer, role = key
    plan = calibration.plan
    planned = plan.tensors.get(key) or plan.left[key]
    entry = planned.decided() | {
        "module": network.module_names[layer],
        "inplace": writes_inplace(plan.graph, layer, role),
    }
    if tensor.codes is not None:
        entry["codes"] = {
            "shape": list(tensor.codes.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
    observer, spec, scale = calibration.observers.get(key), tensor.spec, tensor.scale
    if observer is None:
        return entry
    low, high = torch.as_tensor(observer.low), torch.as_tensor(observer.high)
    if spec.qscheme == "per_group":
        entry |= {"scales_in": GROUP_SCALES, "scale_shape": list(scale.shape)}
        low, high = low.min(), high.max()
    else:
        entry["scale"] = scale.tolist()
        if spec.dtype == "int":
            entry["zero_point"] = tensor.zero_point.tolist()
            if spec.scale_type == "poweroftwo":
                entry["position"] = (-torch.log2(scale)).round().to(torch.int32).tolist()
    if spec.dtype == "int":
        entry |= {"quant_min": spec.quant_min, "quant_max": spec.quant_max}
    return entry | {"observed_min": low.tolist(), "observed_max": high.tolist()}


def _join_entry(
    calibration: Calibration, network: Network, decision: JoinDecision
) -> dict[str, Any]:
    """How a join was decided, with the tensors that are not quantized for it as they would
    be.
    """
    left: dict[str, dict[str, Any]] = {}
    for key in decision.left:
        tensor = QuantizedTensor(calibration.plan.left[key].spec).at(
            calibration.observers[key].qparams()
        )
        left.setdefault(key[0], {})[key[1]] = _entry(calibration, network, key, tensor)
    return joins_entry(decision, left)


def joins_entry(
    decision: JoinDecision, left: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what quant_info.json says of a join; `left` are the entries of the tensors that it
    does without.
    """
    join = {
        key: value
        for key, value in asdict(decision.join).items()
        if key not in ("name", "parts")
    }
    known = {key: value for key, value in vars(decision).items() if key not in ("join", "left")}
    return {**known, "join": join, "left": left}


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
    """The sha256 of each file of a calibration, as checksums.json has it."""
    content = read_json(index)
    listed = content.get("files") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or INFO not in listed:
        raise _useless(f"{index.path} is damaged: it is no list of files")
    if not all(
        isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
        for digest in listed.values()
    ):
        raise _useless(f"{index.path} is damaged: it has no digest of a file")
    return listed


def _checked_info(files: OpenedFiles) -> dict[str, Any]:
    """The content of quant_info.json, if calibration can have written it together with the
    other files.
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
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        text = f"{file.path} has another format than {FORMAT}, which this version reads"
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
    return ResultError(what, help=AGAIN)
