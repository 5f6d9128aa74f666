"""Random edits of JSON values and of tensors in files, each by a seed: what someone may have
written into a result.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quantizer.results.folder import ORIGIN_FILES
from quantizer.storage.opened_files import json_digest

HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        7,
        0.5,
        -0.0,
        1e308,
        -1e308,
        2**31,
        -(2**63),
        10**40,
        1e-320,
    ),
    *(
        "",
        "x",
        "../../x",
        "int",
        "float32",
        "module_0",
        "module_99",
        "\ud800",
        "a" * 300,
        "per_channel",
        "e8m0",
    ),
    *([], {}, [[]], [0] * 5, {"x": 1}, [1e308] * 3, [None], {"0": []}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a nested JSON value."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from places(item, (*path, key))


def edited(
    value: Any, draw: random.Random, hostile: Sequence[Any] = HOSTILE
) -> tuple[Any, str]:
    """A copy with one value replaced, removed, doubled or changed a little, and what was
    done.
    """
    value = json.loads(json.dumps(value))
    *around, last = draw.choice([path for path in places(value) if path])
    inside = value
    for key in around:
        inside = inside[key]
    before, where = inside[last], "/".join(map(str, (*around, last)))
    kind = draw.choice(["replace", "replace", "remove", "rename", "nudge"])
    if kind == "remove":
        del inside[last]
    elif kind == "rename" and isinstance(inside, dict):
        inside[str(draw.choice(hostile))[:50]] = inside.pop(last)
    elif kind == "nudge" and isinstance(before, (int, float)) and not isinstance(before, bool):
        inside[last] = before * draw.choice([-1, 0, 2, 1e6, 1.5]) + draw.choice([0, 1, -1])
    else:
        inside[last] = draw.choice(hostile)
    return value, f"{kind} {where}, which was {json.dumps(before)[:60]}"


def edit_tensors(path: Path, draw: random.Random) -> str:
    """Change one tensor of a file: its values, its shape, its dtype or its name; or remove
    it.
    """
    tensors = load_file(path)
    if not tensors:
        return "nothing"
    name = draw.choice(sorted(tensors))
    tensor = tensors.pop(name)
    changes: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "remove": dict,
        "rename": lambda: {f"{name}x": tensor},
        "nan": lambda: {
            name: torch.full_like(tensor, float("nan"))
            if tensor.is_floating_point()
            else tensor + 1
        },
        "inf": lambda: {
            name: torch.full_like(tensor, float("inf"))
            if tensor.is_floating_point()
            else tensor * 0
        },
        "negative": lambda: {name: -tensor if tensor.dtype != torch.bool else tensor},
        "zero": lambda: {name: torch.zeros_like(tensor)},
        "longer": lambda: {name: torch.cat([tensor.reshape(-1), tensor.reshape(-1)])},
        "shorter": lambda: {name: tensor.reshape(-1)[: tensor.numel() // 2].clone()},
        "flat": lambda: {name: tensor.reshape(-1)},
        "double": lambda: {name: tensor.double()},
        "int64": lambda: {name: tensor.long() if tensor.isfinite().all() else tensor},
        "bytes": lambda: {name: tensor.to(torch.uint8)},
    }
    kind = draw.choice(sorted(changes))
    save_file(
        tensors | {key: value.contiguous() for key, value in changes[kind]().items()}, path
    )
    return f"{kind} {name} of {path.name}"


def sealed(folder: Path) -> None:
    """Make the sums of a result folder right again, as whoever edits it can."""
    path = folder / "quant_info.json"
    info = json.loads(path.read_text())
    files = (
        info.get("header", {}).get("files") if isinstance(info.get("header"), dict) else None
    )
    if isinstance(files, dict):
        for name in files:
            if (
                "/" not in name
                and len(name) < 200
                and "\ud800" not in name
                and (folder / name).is_file()
            ):
                files[name] = _digest(folder / name)
    content = {key: info.get(key) for key in ("header", "tensors")}
    path.write_text(json.dumps(info | {"checksum": json_digest(content)}))
    index = folder / "checksums.json"
    listed = json.loads(index.read_text())
    named = files if isinstance(files, dict) else {}
    names = (*ORIGIN_FILES, path.name)
    listed["files"] = {
        **listed["files"],
        **named,
        **{name: _digest(folder / name) for name in names},
    }
    index.write_text(json.dumps(listed))
    report = folder / "report.json"
    told = json.loads(report.read_text())
    told = {key: value for key, value in told.items() if key != "checksum"} | {
        "calibration": _digest(path)
    }
    report.write_text(json.dumps(told | {"checksum": json_digest(told)}))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
