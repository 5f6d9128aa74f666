"""Calibrations apart become one, as if a single run had seen all their batches, in the order of
the folders.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantizer.calibration import absorption, fingerprint
from quantizer.calibration.request import StoredStatistics
from quantizer.config.model import Config
from quantizer.errors import ResultError
from quantizer.results.folder import QuantInfo

APART = "calibrate once on all data instead: several ranks can share it"


def statistics_of(info: QuantInfo) -> StoredStatistics:
    """What a calibration has seen.

    Raises:
        ResultError: the file is damaged.
    """
    return StoredStatistics(info.statistics(), int(info.header["batches"]))


def require_mergeable(infos: Sequence[QuantInfo], config: Config) -> None:
    """Refuse folders whose statistics do not make one calibration.

    Raises:
        ResultError: they are of different models or configs, or what was found needs values
            that are gone.
    """
    first = infos[0]
    for info in infos[1:]:
        for what in _differences(first.header, info.header):
            text = f"{info.folder} cannot be merged with {first.folder}: {what}"
            raise ResultError(text, help="calibrate both alike")
        if first.header.get("levels") != info.header.get("levels"):
            why = "their data have levelled channels by other factors"
            text = f"{info.folder} cannot be merged with {first.folder}: {why}"
            raise ResultError(text, help=APART)
    for why in _insufficient(first.header, config):
        raise ResultError(f"{first.folder} cannot be merged: {why}", help=APART)


def _differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """What keeps two calibrations from being of one model and config, in sentences."""
    if first["model"] != other["model"]:
        yield f"it is of {other['model']}, not of {first['model']}"
    for key, what in {"layers": "layer", "weights": "the weight"}.items():
        name = fingerprint.first_difference(first[key], other[key])
        if name is not None:
            yield f"{what} {name} differs"
    decisions = [absorption.refused(header.get("absorption", {})) for header in (first, other)]
    for name in sorted(decisions[0] ^ decisions[1]):
        yield (
            f"by the data of one, the high biases of {name} were absorbed, and not by those "
            "of the other"
        )
    for key, what in {
        "config": "the configs decide otherwise",
        "algorithms": "the algorithms differ",
        "inputs": "the shapes of the inputs differ",
        "fast_finetune": "only one is finetuned",
        "seed": "the seeds differ",
    }.items():
        if first.get(key) != other.get(key):
            yield what


def _insufficient(header: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Why statistics are not enough to find again what calibration found, in sentences."""
    for algorithm in config.algorithms:
        if algorithm.needs_data:
            yield (
                f"{algorithm.name} needs the values that layers read, and statistics do not "
                "hold them"
            )
    if header.get("fast_finetune"):
        yield (
            "fast finetuning needs the values that layers read, and statistics do not hold them"
        )
    if config.settings.include_bias_corr:
        yield "bias correction needs the outputs of the quantized network, whose scales change"
    if not header["batches"]:
        yield "it was quantized without data, so there is nothing to merge"


def merged_data(infos: Sequence[QuantInfo]) -> dict[str, Any]:
    """The fingerprint of all data; its digest is one of the digests."""
    prints = [info.header["data"] for info in infos]
    names = sorted({name for each in prints for name in each["inputs"]})
    inputs = {
        name: sorted({kind for each in prints for kind in each["inputs"].get(name, ())})
        for name in names
    }
    digest = hashlib.blake2b(
        "".join(each["digest"] for each in prints).encode(), digest_size=16
    ).hexdigest()
    samples, batches = (sum(each[key] for each in prints) for key in ("samples", "batches"))
    return {"samples": samples, "batches": batches, "inputs": inputs, "digest": digest}
