"""What a consumer made of a case, compared with test mode or with another consumer."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.families.cases import Case
from engines.families.consumers import Consumer
from engines.figures import LONGEST_MESSAGE, worst_db

Arrays = dict[str, NDArray[Any]]


def row_of(consumer: Consumer, case: Case, folder: Path) -> dict[str, Any]:
    """Return the row of a case: `sqnr_db` is left out if outputs are equal.

    `tokens` are the generated tokens that are equal to those of the reference, and `of` all.
    """
    row: dict[str, Any] = {"family": case.family, "scheme": case.scheme}
    for name in ("refusal", "failure"):
        message = getattr(case, name)
        if message:
            return {**row, name: message[:LONGEST_MESSAGE]}
    if case.share:
        row["share"] = round(case.share, 3)
    if case.dequantized:
        row["dequantized"] = True
    if consumer.is_exporters and not case.is_read:
        row["unread"] = True
    if consumer.is_exporters:
        row["version"] = version(consumer.name)
        return row if case.sqnr_db is None else {**row, "sqnr_db": round(case.sqnr_db, 2)}
    outputs = folder / f"{consumer.name}.npz"
    if not outputs.exists():
        failure = (folder / f"{consumer.name}.txt").read_text("utf-8")
        short = " ".join(failure.split()).replace(str(folder), "FOLDER")
        if len(short) > LONGEST_MESSAGE:
            short = short[:LONGEST_MESSAGE].rpartition(" ")[0]
        return {**row, "failure": short}
    computed = _arrays(outputs)
    row["version"] = str(computed["version"])
    reference = _arrays(folder / f"{consumer.reference or 'expected'}.npz")
    figure = worst_db([_compared(reference, computed)], [_compared(computed, computed)])
    if figure is not None:
        row["sqnr_db"] = figure
    if consumer.reference:
        same = computed["tokens"] == reference["tokens"]
        row["tokens"], row["of"] = int(same.sum()), int(same.size)
    return row


def _compared(outputs: Arrays, computed: Arrays) -> NDArray[Any]:
    """Return the logits of all tokens, or those of the next one if that is all that an engine
    gives, with a mean of 0.
    """
    if "logits" in computed:
        return outputs["logits"]
    last = outputs["next_token"] if "next_token" in outputs else outputs["logits"][:, -1]
    centred: NDArray[Any] = last - last.mean(-1, keepdims=True)
    return centred


def _arrays(path: Path) -> Arrays:
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}
