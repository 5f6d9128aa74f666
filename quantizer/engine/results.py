"""The result folder: what calibration leaves and how test mode reads it back. quant_info.json is written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import quantizer
from quantizer.config.model import Config, Settings
from quantizer.config.resolved import resolved_document
from quantizer.engine import fingerprint
from quantizer.engine.calibrate import Calibration
from quantizer.engine.result_files import json_parts, read_json, sha256, write_bytes, write_json, write_tensors
from quantizer.engine.result_set import finish, replaced_set
from quantizer.engine.result_tensors import TENSORS, header_of, solution_of, tensors_of
from quantizer.engine.solution import Solution, encoded, writes_inplace
from quantizer.engine.stored_checks import check_content
from quantizer.engine.tensor_shards import left_files, write_shards
from quantizer.errors import ResultError
from quantizer.graph.edits import with_weights
from quantizer.graph.emit import emit, is_emitted
from quantizer.graph.ir import Graph
from quantizer.graph.module_names import path_names
from quantizer.nn.load import GROUP_SCALES
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import JoinDecision, Key, Plan
from quantizer.plan.size import weight_bytes

FORMAT = 6  # 5: histograms of samples have weights; 6: joins are decided by calibration
INFO = "quant_info.json"
STATISTICS = "statistics.safetensors"
ALGORITHMS = "algorithms.json"
ORIGINS = ("plan.json", "config.resolved.json")
"""Where decisions come from, for people to read. Files that say the same differ in it, so no sum names these."""
ANALYSIS = "analysis.json"
RUN_FILE, COMMANDS = "run.json", "commands"
"""The facts of the last run, and what they say of the commands that have made the results."""
TESTED = ("report.json", "report.html", "layers.csv", "exact.json", "export/verify.json", ANALYSIS)
"""What test mode and `analyze` found, which holds for one calibration only."""


@dataclass(frozen=True)
class QuantInfo:
    """quant_info.json as values, and what the files beside it add."""

    header: Mapping[str, Any]
    solution: Solution
    entries: Mapping[str, Any]
    path: Path

    @property
    def settings(self) -> Settings:
        """The global settings calibration ran with."""
        known = {f.name for f in fields(Settings)} - {"places"}
        return Settings(**{key: value for key, value in self.header["settings"].items() if key in known})


def check_owner(folder: Path, model: str, *, overwrite: bool) -> None:
    """Refuse to write over the results of another model.

    Raises:
        ResultError: the folder holds some, and `overwrite` is not set.
    """
    if overwrite or not (folder / INFO).exists():
        return
    try:
        owner = read_json(folder / INFO)["header"]["model"]
    except (ResultError, KeyError, TypeError):
        return  # nothing anyone could use
    if owner != model:
        raise ResultError(
            f"{folder} holds results of {owner}, not of {model}", help="choose another --output_dir or add --overwrite"
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
    """Write everything `test` needs, in place of what was there; that stays until all is written.

    `run` goes into the header and is the same in equal runs: `fingerprint.model` at least, `Job.header` where there was
    one. `origins` are files of ORIGINS in place of its own.
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
        "joins": {name: _join_entry(calibration, network, decision) for name, decision in found.joins.items()},
        **header_of(network, found),
        **run,
    }
    entries: dict[str, dict[str, Any]] = {}
    for (layer, role), tensor in found.tensors.items():
        notes = {"notes": list(found.notes[layer, role])} if (layer, role) in found.notes else {}
        entries.setdefault(layer, {})[role] = _entry(calibration, network, (layer, role), tensor) | notes
    write_info(folder, header, entries)


def write_info(folder: Path, header: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Write quant_info.json, after which the folder is a complete calibration."""
    content = {"header": header, "tensors": entries}
    write_json(folder / INFO, content | {"checksum": _checksum(content), "complete": True})


@contextmanager
def replaced_results(folder: Path) -> Iterator[Path]:
    """A folder for the files of a calibration, which take the place of those of another, and of what its tests found.

    Raises:
        ResultError: they cannot be written; then the other is as it was.
    """
    tensors = [name for each in TENSORS for name in left_files(folder / each)]
    with replaced_set(folder, (INFO, *tensors, STATISTICS, ALGORITHMS, *ORIGINS, *TESTED, *_generated(folder))) as new:
        yield new


def _origins(plan: Plan, config: Config) -> dict[str, Iterable[bytes]]:
    """The files of ORIGINS."""
    return dict(zip(ORIGINS, map(json_parts, (_planned(plan, config), resolved_document(config))), strict=True))


def _planned(plan: Plan, config: Config) -> dict[str, Any]:
    """plan.json: the plan, what it makes of the weights' size, and the file that its places are in."""
    before, after = weight_bytes(plan)
    paths = {"paths": path_names(plan.graph)}
    sizes = {"weight_bytes": {"float": before, "quantized": after}}
    file = {"config": {"name": Path(config.source).name, "text": config.text}} if config.text else {}
    return plan.to_json() | paths | sizes | file


def names_of(folder: Path) -> list[str]:
    """The files that a complete calibration consists of, quant_info.json last."""
    return [*read_json(folder / INFO)["header"]["files"], *ORIGINS, INFO]


def _generated(folder: Path) -> list[str]:
    """The network's code that a calibration of any model has left, which says so itself."""
    try:
        name = f"{read_json(folder / INFO)['header']['model']}.py"
        is_ours = name.isprintable() and is_emitted((folder / name).read_text("utf-8")) and "/" not in name
    except (ResultError, KeyError, TypeError, OSError, ValueError):
        return []
    return [name] if is_ours else []


def _entry(calibration: Calibration, network: Network, key: tuple[str, str], tensor: QuantizedTensor) -> dict[str, Any]:
    """One tensor of quant_info.json."""
    layer, role = key
    plan = calibration.plan
    planned = plan.tensors.get(key) or plan.left[key]
    entry = planned.decided() | {
        "module": network.module_names[layer],
        "inplace": writes_inplace(plan.graph, layer, role),
    }
    if tensor.codes is not None:
        entry["codes"] = {"shape": list(tensor.codes.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
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


def _join_entry(calibration: Calibration, network: Network, decision: JoinDecision) -> dict[str, Any]:
    """How a join was decided, with the tensors that are not quantized for it as they would be."""
    left: dict[str, dict[str, Any]] = {}
    for key in decision.left:
        tensor = QuantizedTensor(calibration.plan.left[key].spec).at(calibration.observers[key].qparams())
        left.setdefault(key[0], {})[key[1]] = _entry(calibration, network, key, tensor)
    known = {key: value for key, value in asdict(decision).items() if key != "left"}
    return known | {"left": left}


def stored_joins(header: Mapping[str, Any]) -> dict[str, JoinDecision]:
    """Return what a calibration has decided of joins."""
    decisions: dict[str, JoinDecision] = {}
    for name, entry in header["joins"].items():
        left: list[Key] = []
        for layer, roles in entry["left"].items():
            left += [(layer, role) for role in roles]
        decisions[name] = JoinDecision(**{**entry, "left": tuple(left)})
    return decisions


def read_info(folder: Path) -> QuantInfo:
    """The calibration in a folder, its files checked against the sums in the header.

    Raises:
        ResultError: missing, unfinished, from another format, or a file was changed since.
    """
    finish(folder)
    path = folder / INFO
    content = read_json(path)
    if not isinstance(content, dict) or content.get("complete") is not True or "header" not in content:
        raise _useless(f"{path} is not complete: calibration did not finish")
    header = content["header"]
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ResultError(f"{path} has another format than {FORMAT}, which this version reads", help="calibrate again")
    if not isinstance(header.get("files"), dict):
        raise _useless(f"{path} is damaged: header/files is no list of files")
    for name, digest in header["files"].items():
        if "/" in name or not (folder / name).is_file():
            raise _useless(f"{folder / name} is missing")
        if sha256(folder / name) != digest:
            raise _useless(f"{folder / name} was changed after calibration")
    if content.get("checksum") != _checksum({key: content.get(key) for key in ("header", "tensors")}):
        raise _useless(f"{path} was changed after calibration")
    check_content(content, path)
    try:
        return QuantInfo(header, solution_of(folder, header, content["tensors"]), content["tensors"], path)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise _useless(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _useless(what: str) -> ResultError:
    return ResultError(what, help="run --quant_mode calib again")


def _checksum(content: Mapping[str, Any]) -> str:
    """A digest of quant_info.json's content, whatever its layout."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
