"""Write a result folder. checksums.json is written last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import quantizer
from quantizer.calibration import fingerprint
from quantizer.calibration.observing import Calibration
from quantizer.calibration.solution import Solution, encoded, writes_inplace
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.model import Config
from quantizer.errors import ResultError
from quantizer.graph.edits import with_weights
from quantizer.graph.emit import emit, is_emitted
from quantizer.graph.ir import Graph
from quantizer.graph.module_names import path_names
from quantizer.nn.load import GROUP_SCALES
from quantizer.nn.load import INFO as INFO
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import JoinDecision, Plan
from quantizer.plan.size import weight_bytes
from quantizer.results.folder import (
    ALGORITHMS,
    CHECKSUMS,
    FORMAT,
    GRAPH_FILES,
    ORIGINS,
    RUN_FILE,
    SEALED,
    STATISTICS,
    TESTED,
    OpenedResults,
)
from quantizer.results.graph_file import write_graph
from quantizer.results.result_set import replaced_set
from quantizer.results.result_tensors import TENSORS, header_of, tensors_of
from quantizer.storage.files import (
    json_parts,
    read_bytes,
    read_json,
    sha256,
    write_bytes,
    write_json,
    write_tensors,
)
from quantizer.storage.opened_files import json_digest
from quantizer.storage.tensor_shards import shard_files, write_shards


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

    `run` goes into the header and is the same in equal runs: `fingerprint.model_digests` at
    least, `CalibrationRequest.header` where there was one. `origins` are files of ORIGINS in
    place of its own.
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
    files |= write_graph(folder, original)
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
        "call": fingerprint.input_call_paths(original),
        "config": fingerprint.plan_digest(plan),
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
    present = [path.name for path in folder.glob("*.safetensors")]
    tensors: list[str] = []
    for name in TENSORS:
        tensors += [name, *shard_files(name, present)]
    names = (INFO, *tensors, STATISTICS, ALGORITHMS, *GRAPH_FILES, *ORIGINS, *TESTED)
    with replaced_set(folder, (*names, *_generated(folder))) as new:
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
