"""Merge separate calibrations into one, as if a single run had seen all their batches in the
order of the folders.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantizer.calibration import fingerprint
from quantizer.calibration.request import StoredStatistics
from quantizer.calibration.step import decisions_of
from quantizer.config.model import Config
from quantizer.errors import ResultError
from quantizer.results.folder import QuantInfo, why_statistics_insufficient

_ALIKE = "calibrate both alike"
_TOGETHER = "calibrate once on all data instead: several ranks can share it"


def statistics_of(info: QuantInfo) -> StoredStatistics:
    """Return the statistics of a calibration.

    Raises:
        ResultError: their file is damaged.
    """
    return StoredStatistics(info.statistics(), int(info.header["batches"]))


def require_mergeable(infos: Sequence[QuantInfo], config: Config) -> None:
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
    for why in _insufficient(first.header, config):
        raise ResultError(f"{first.folder} cannot be merged: {why}", help=_TOGETHER)


def _model_differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about what differs in the models of two calibrations."""
    if first["model"] != other["model"]:
        yield f"it is of {other['model']}, not of {first['model']}"
    layer = fingerprint.first_difference(first["layers"], other["layers"])
    if layer is not None:
        yield f"layer {layer} differs"
    weight = fingerprint.first_difference(first["weights"], other["weights"])
    if weight is not None:
        yield f"the weight {weight} differs"


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


def _insufficient(header: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield sentences that say what a calibration needs besides statistics."""
    for algorithm in config.algorithms:
        if algorithm.needs_data:
            yield (
                f"{algorithm.name} needs the values that layers read, and statistics do not "
                "hold them"
            )
    yield from why_statistics_insufficient(header, "merge")


def merged_data(infos: Sequence[QuantInfo]) -> dict[str, Any]:
    """Return one fingerprint of the data of all folders. Its digest is the hash of theirs."""
    samples = 0
    batches = 0
    kinds: dict[str, set[Any]] = {}
    digest = hashlib.blake2b(digest_size=16)
    for info in infos:
        data = info.header["data"]
        samples += data["samples"]
        batches += data["batches"]
        digest.update(data["digest"].encode())
        for name, input_kinds in data["inputs"].items():
            kinds.setdefault(name, set()).update(input_kinds)
    inputs = {name: sorted(kinds[name]) for name in sorted(kinds)}
    return {
        "samples": samples,
        "batches": batches,
        "inputs": inputs,
        "digest": digest.hexdigest(),
    }
