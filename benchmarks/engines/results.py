"""The files of results: one for each engine, with a row for each network."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from engines.table import NETWORKS, Engine

FOLDER = Path(__file__).with_name("results")
FEATURES = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
)
"""Features of processors that decide which kernels run, by their names in Linux."""


@dataclass(frozen=True)
class Machine:
    """Where the figures were measured.

    Attributes:
        features: those of `FEATURES` that the processor has.
        is_quiet: whether nothing else ran there, so that speeds mean something.
    """

    processor: str
    cores: int
    features: tuple[str, ...]
    is_quiet: bool

    @classmethod
    def current(cls, *, is_quiet: bool) -> Machine:
        """Return this machine."""
        processor = platform.processor() or platform.machine()
        features: set[str] = set()
        path = Path("/proc/cpuinfo")
        if path.exists():
            for line in path.read_text("utf-8").splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    processor = value.strip()
                if key.strip() in ("flags", "Features"):
                    features.update(value.split())
        known = tuple(name for name in FEATURES if name in features)
        return cls(processor, os.cpu_count() or 1, known, is_quiet)


@dataclass(frozen=True)
class Row:
    """What an engine makes of a network.

    Attributes:
        cannot_hold: why the network was not tried.
        failure: the message of the exporter or the engine.
        version: of the engine.
        kept, weights: of an engine that only converts here, how many weights have the codes and
            scales of the file, and how many weights the file has as codes.
        sqnr_db: the engine's outputs against test mode's, of the worst output; None if all are
            equal.
        float_db: the engine's outputs against the float network's.
        test_mode_db: test mode's outputs against the float network's.
        integer, multiplications: how many multiplications run in integers, and all; None if the
            engine does not tell.
        speed: float's time divided by the file's: median, lower and upper quartile, rounds.
        seconds: the median time of one run.
        size: of the file in bytes.
    """

    network: str
    config: str = ""
    cannot_hold: str = ""
    failure: str = ""
    version: str = ""
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    sqnr_db: float | None = None
    float_db: float | None = None
    test_mode_db: float | None = None
    kept: int | None = None
    weights: int | None = None
    integer: int | None = None
    multiplications: int | None = None
    speed: Mapping[str, float] | None = None
    seconds: float | None = None
    size: int | None = None

    @property
    def line(self) -> str:
        """Return the row in a few words."""
        if self.cannot_hold or self.failure:
            return self.cannot_hold or self.failure
        if self.weights is not None:
            return f"converts, with codes and scales of {self.kept} of {self.weights} weights"
        closeness = "equal"
        if self.sqnr_db is not None:
            closeness = f"{self.sqnr_db:.1f} dB"
        words = [closeness]
        if self.multiplications is not None:
            words.append(f"{self.integer} of {self.multiplications} in integers")
        if self.speed is not None:
            words.append(f"{self.speed['ratio']:.2f}x the speed of float")
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that have a value."""
        content: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if value not in (None, ""):
                content[name] = value
        return content


@dataclass(frozen=True)
class EngineResults:
    """The rows of one engine in the order of networks."""

    name: str
    target: str
    options: Mapping[str, str]
    machine: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()

    @classmethod
    def stored(cls, engine: Engine, folder: Path) -> EngineResults:
        """Return the file of an engine; without rows if there is none."""
        empty = cls(engine.name, engine.target, dict(engine.options))
        path = folder / f"{engine.name}.json"
        if not path.exists():
            return empty
        content = json.loads(path.read_text("utf-8"))
        rows = tuple(Row(**row) for row in content["rows"])
        return replace(empty, machine=content["machine"], rows=rows)

    def with_row(self, row: Row, machine: Machine) -> EngineResults:
        """Return the same with the row in place of the network's earlier one."""
        rows = {earlier.network: earlier for earlier in self.rows}
        rows[row.network] = row
        ordered = [rows[name] for name in NETWORKS if name in rows]
        return replace(self, machine=asdict(machine), rows=tuple(ordered))

    def store(self, folder: Path) -> None:
        """Write the file."""
        folder.mkdir(exist_ok=True)
        content = {
            "engine": self.name,
            "target": self.target,
            "options": dict(self.options),
            "machine": dict(self.machine),
            "rows": [row.to_json() for row in self.rows],
        }
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
