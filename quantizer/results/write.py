"""Write a result folder: statistics, codes, the code of the network, and checksums.json at the
end.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quantizer
from quantizer.calibration import fingerprint
from quantizer.calibration.observing import Calibration
from quantizer.calibration.solution import Solution, encode_parameters, writes_inplace
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.model import ResolvedConfig
from quantizer.errors import DAMAGE_ERRORS, ResultError, UsageError
from quantizer.graph.edits import with_weights
from quantizer.graph.emit import emit
from quantizer.graph.ir import Graph
from quantizer.graph.names import path_names
from quantizer.nn.load import GROUP_SCALES
from quantizer.nn.load import INFO_FILE as INFO_FILE
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.plan.model import JoinDecision, Key, Plan
from quantizer.plan.size import weight_bytes
from quantizer.results.folder import (
    ALGORITHMS_FILE,
    CHECKSUMS_FILE,
    FILES_OF_TESTS,
    FINDINGS_FILES,
    GRAPH_FILES,
    ORIGIN_FILES,
    PLAN_FILE,
    RESOLVED_CONFIG_FILE,
    RESULT_FORMAT,
    RUN_FILE,
    STATISTICS_FILE,
    OpenedResults,
    listed_files,
)
from quantizer.results.graph_file import write_graph
from quantizer.results.result_set import holding, replace_set
from quantizer.results.result_tensors import TENSOR_FILES, header_of, tensors_of
from quantizer.storage.files import (
    json_parts,
    read_json,
    sha256,
    write_bytes,
    write_json,
    write_shards,
    write_tensors,
)
from quantizer.storage.opened_files import json_digest

_NAMES_OF_CALIBRATION = (
    INFO_FILE,
    CHECKSUMS_FILE,
    STATISTICS_FILE,
    ALGORITHMS_FILE,
    *GRAPH_FILES,
    *ORIGIN_FILES,
    *TENSOR_FILES,
    RUN_FILE,
    "run.log",
    "checkpoint.calibration.json",
    "checkpoint.algorithms.json",
    "checkpoint.finetune.json",
)
"""The files that a calibration writes, except shards and the code of the network."""


def check_owner(folder: Path, model: str, *, overwrite: bool) -> None:
    """Check that no results of another model and no files of the user's would be replaced.

    Raises:
        ResultError: the folder holds results of another model and `overwrite` is not set.
        UsageError: a file in the way is not quantizer's, or was changed.
    """
    names = dict.fromkeys([*_NAMES_OF_CALIBRATION, *FILES_OF_TESTS, *listed_files(folder)])
    with holding(folder) as place:
        place.require_ours(*names, f"{model}.py")
    if overwrite or not (folder / INFO_FILE).exists():
        return
    try:
        owner = read_json(folder / INFO_FILE)["header"]["model"]
    except (ResultError, *DAMAGE_ERRORS):
        # Such results are damaged, so nobody needs them
        return
    if owner != model:
        raise ResultError(
            f"{folder} holds results of {owner}, not of {model}",
            help="choose another <--output_dir> or add <--overwrite>",
        )


def require_expendable(folder: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Check that a command that derives results from others replaces no other calibration.

    Args:
        folder: to write to.
        sources: the folders that the results are derived from.
        overwrite: whether the user allows it.

    Raises:
        UsageError: the folder holds another calibration.
    """
    if overwrite or not (folder / INFO_FILE).exists():
        return
    for source in sources:
        if folder.samefile(source):
            return
    raise UsageError(
        f"{folder} holds another calibration",
        help="choose another folder, or add <--overwrite>",
    )


def write_results(
    folder: Path,
    original: Graph,
    calibration: Calibration,
    solution: Solution,
    *,
    config: ResolvedConfig,
    run: Mapping[str, Any],
    origins: Mapping[str, Iterable[bytes] | bytes] | None = None,
) -> None:
    """Write the result folder of a calibration. The old results stay until all files are
    written.

    Args:
        folder: the result folder.
        original: the graph of the model.
        calibration: the plan and the observers.
        solution: how each tensor is quantized.
        config: the config of the calibration.
        run: further entries of the header of quant_info.json: those of
            `CalibrationRequest.header`, or at least those of `fingerprint.model_digests`. Equal
            runs must have equal entries.
        origins: the content of `ORIGIN_FILES`, by name. By default it is made from plan and
            config.

    Raises:
        ResultError: the folder cannot be written.
    """
    plan = calibration.plan
    graph = plan.graph
    solution = encode_parameters(graph, solution)
    network = Network(with_weights(graph, solution.weights))
    modules = network.module_names
    if origins is None:
        origins = {
            PLAN_FILE: json_parts(_plan_content(plan, config)),
            RESOLVED_CONFIG_FILE: json_parts(resolved_document(config)),
        }
    with replace_results(folder) as new_folder:
        for name, content in origins.items():
            write_bytes(new_folder / name, content)
        statistics = calibration.state_dict()
        files = {STATISTICS_FILE: write_tensors(new_folder / STATISTICS_FILE, statistics)}
        for name, tensors in tensors_of(network, solution).items():
            files |= write_shards(new_folder / name, tensors)
        files |= write_graph(new_folder, original)
        code = f"{graph.model}.py"
        files[code] = write_bytes(new_folder / code, emit(graph).encode())
        if solution.algorithms:
            path = new_folder / ALGORITHMS_FILE
            files[ALGORITHMS_FILE] = write_json(path, solution.algorithms)
        settings = asdict(config.settings)
        del settings["places"]
        header = {
            "format": RESULT_FORMAT,
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
            "joins": _joins_entries(calibration, modules, solution),
            **run,
            **header_of(network, solution),
        }
        write_info(new_folder, header, _tensor_entries(calibration, modules, solution))


def write_info(folder: Path, header: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Write quant_info.json and checksums.json, the last files of a calibration.

    Args:
        folder: the folder with all other files.
        header: the facts of the calibration.
        entries: of each quantized tensor, by layer and role.
    """
    content = {"header": header, "tensors": entries}
    with_checksum = {**content, "checksum": json_digest(content), "complete": True}
    files = dict(header["files"])
    for name in ORIGIN_FILES:
        files[name] = sha256(folder / name)
    files[INFO_FILE] = write_json(folder / INFO_FILE, with_checksum)
    write_json(folder / CHECKSUMS_FILE, {"files": files})


def write_copy(folder: Path, opened: OpenedResults) -> None:
    """Write the files of an open calibration to another folder. They replace the results there.

    Raises:
        ResultError: they cannot be written.
    """
    with replace_results(folder) as new_folder:
        for name in opened.files.names:
            if name not in (*FINDINGS_FILES, RUN_FILE):
                write_bytes(new_folder / name, opened.files[name].parts())


@contextmanager
def replace_results(folder: Path) -> Iterator[Path]:
    """Yield an empty folder for the files of a calibration. When the `with` block ends, they
    replace those of the previous calibration, and the files of its tests are removed.

    Raises:
        ResultError: something cannot be written. The old results are complete then.
    """
    old_names = [*FILES_OF_TESTS, *listed_files(folder)]
    with replace_set(folder, old_names, CHECKSUMS_FILE) as new_folder:
        yield new_folder


def config_file(config: ResolvedConfig) -> dict[str, str]:
    """Return the entry of plan.json with the user's config file."""
    return {"name": Path(config.source).name, "text": config.text}


def _plan_content(plan: Plan, config: ResolvedConfig) -> dict[str, Any]:
    """Return the content of plan.json: the plan, the sizes of the weights, and the config
    file.
    """
    before, after = weight_bytes(plan)
    content = plan.to_json()
    content["paths"] = path_names(plan.graph)
    content["weight_bytes"] = {"float": before, "quantized": after}
    if config.text:
        content["config"] = config_file(config)
    return content


def _tensor_entries(
    calibration: Calibration, modules: Mapping[str, str], solution: Solution
) -> dict[str, dict[str, Any]]:
    """Return the tensors of quant_info.json, by layer and role."""
    entries: dict[str, dict[str, Any]] = {}
    for key, tensor in solution.tensors.items():
        layer, role = key
        entry = _entry(calibration, modules, key, tensor)
        if key in solution.notes:
            entry["notes"] = list(solution.notes[key])
        entries.setdefault(layer, {})[role] = entry
    return entries


def _entry(
    calibration: Calibration, modules: Mapping[str, str], key: Key, tensor: QuantizedTensor
) -> dict[str, Any]:
    """Return a tensor of quant_info.json."""
    layer, role = key
    plan = calibration.plan
    planned = plan.tensors.get(key) or plan.left[key]
    entry = planned.decided()
    entry["module"] = modules[layer]
    entry["inplace"] = writes_inplace(plan.graph, layer, role)
    if tensor.codes is not None:
        entry["codes"] = {
            "shape": list(tensor.codes.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
    observer = calibration.observers.get(key)
    if observer is None:
        return entry
    spec = tensor.spec
    low = torch.as_tensor(observer.low)
    high = torch.as_tensor(observer.high)
    if spec.stored.has_groups:
        # There are too many groups to list their scales and ranges in a JSON file
        entry["scales_in"] = GROUP_SCALES
        entry["scale_shape"] = list(tensor.scale.shape)
        low = low.min()
        high = high.max()
    else:
        entry["scale"] = tensor.scale.tolist()
        if spec.dtype == "int":
            entry["zero_point"] = tensor.zero_point.tolist()
            if spec.scale_type == "poweroftwo":
                entry["position"] = scale_positions(tensor.scale)
    if spec.dtype == "int":
        entry["quant_min"] = spec.quant_min
        entry["quant_max"] = spec.quant_max
    entry["observed_min"] = low.tolist()
    entry["observed_max"] = high.tolist()
    return entry


def scale_positions(scale: Tensor) -> Any:
    """Return the positions of power-of-two scales: the number of bits after the binary point.

    >>> scale_positions(torch.tensor([0.25, 2.0]))
    [2, -1]
    """
    exponents = torch.log2(scale).round()
    return (-exponents).to(torch.int32).tolist()


def _joins_entries(
    calibration: Calibration, modules: Mapping[str, str], solution: Solution
) -> dict[str, Any]:
    """Return the entries of all joins in the header, by the name of the join.

    The entries of tensors that a join leaves unquantized say how they would be quantized:
    `retune` may decide otherwise for the join.
    """
    entries: dict[str, Any] = {}
    for name, decision in solution.joins.items():
        left: dict[str, dict[str, Any]] = {}
        for key in decision.left:
            layer, role = key
            unscaled = QuantizedTensor(calibration.plan.left[key].spec)
            tensor = unscaled.with_qparams(calibration.observers[key].qparams())
            left.setdefault(layer, {})[role] = _entry(calibration, modules, key, tensor)
        entries[name] = joins_entry(decision, left)
    return entries


def joins_entry(
    decision: JoinDecision, left: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the entry of a join in the header of quant_info.json.

    Args:
        decision: how the join is quantized.
        left: the entries of the tensors that the join leaves unquantized.
    """
    join = asdict(decision.join)
    del join["name"], join["parts"]
    return {**vars(decision), "join": join, "left": left}
