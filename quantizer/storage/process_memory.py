"""Return how much memory this process uses and may use, in bytes, or None where the system does
not report it. Imports no torch.
"""

import contextlib
import gc
import math
import mmap
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)
"""The names of the limit, of the usage and of the page cache in memory.stat, for version 2 and
for version 1 of control groups. The usage includes the page cache, which can be reclaimed.
"""


def peak_bytes() -> int | None:
    """Return the largest resident memory that this process has had."""
    # Preferred to getrusage, whose figure is at least that of the process that started this one
    most_resident = _numbers(Path("/proc/self/status")).get("VmHWM")
    if most_resident:
        return most_resident
    with contextlib.suppress(ImportError):
        import resource

        most_resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform != "darwin":
            most_resident *= 1024
    return most_resident


def resident_bytes() -> int | None:
    """Return the resident memory of this process."""
    # This is called after each batch, so it reads the shortest file that has the figure
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * mmap.PAGESIZE


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection inside the `with` block.

    Imports and traces keep nearly all objects that they make. The collector would search these
    for cycles again and again, which takes a fifth of the time of an import or a trace.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def importing(module: str) -> Iterator[None]:
    """Suspend garbage collection inside the `with` block. If the block imports `module` for the
    first time, later collections skip all objects that exist at its end.
    """
    is_new = module not in sys.modules
    with pause_garbage_collection():
        yield
        if is_new:
            skip_existing_objects()


def skip_existing_objects() -> None:
    """Make later garbage collections skip all objects that exist now.

    For the command line only. In a process of the user's, garbage that exists at this moment
    would stay in memory as well.
    """
    gc.freeze()


def stop_collecting() -> None:
    """Leave all garbage where it is, because the process is about to end."""
    gc.disable()
    gc.freeze()


def available_bytes() -> int | None:
    """Return how much more memory this process can use without swapping, within the limits of
    its control groups.
    """
    return min((free for _, free in _limits()), default=None)


def total_bytes() -> int | None:
    """Return the memory of the machine, or the limit of a control group if that is lower."""
    return min((size for size, _ in _limits()), default=None)


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as "8GB", "512 MB" or "1.5GiB".

    Raises:
        ValueError: the text is not such a size.

    >>> parse_size("8GB"), parse_size("0.5 gib")
    (8000000000, 536870912)
    """
    parts = re.fullmatch(r"(.*[\d.])\s*([^\d.]+)", text.strip())
    if parts is None:
        raise ValueError(text)
    number, unit = parts.groups()
    size = float(number) * _UNITS.get(unit.upper(), math.nan)
    if not 0 <= size < math.inf:
        raise ValueError(text)
    return int(size)


def size_text(size: int) -> str:
    """Return a number of bytes as text, in GB, MB or kB.

    >>> size_text(1_234_000_000), size_text(45_600_000), size_text(7_800)
    ('1.23 GB', '46 MB', '8 kB')
    """
    if size >= 10**9:
        return f"{size / 1e9:.2f} GB"
    if size >= 10**6:
        return f"{size / 1e6:.0f} MB"
    return f"{size / 1e3:.0f} kB"


def _limits() -> Iterator[tuple[int, int]]:
    """Yield size and free memory, in bytes, of the machine and of each control group that
    limits this process.
    """
    machine = _numbers(Path("/proc/meminfo"))
    if "MemTotal" in machine and "MemAvailable" in machine:
        yield machine["MemTotal"], machine["MemAvailable"]
    for folder in _cgroups():
        for limit, usage, cache in _CGROUP_FILES:
            # The file is missing for the other version, and says "max" without a limit
            with contextlib.suppress(OSError, ValueError):
                size = int((folder / limit).read_text())
                used = int((folder / usage).read_text())
                reclaimable = _numbers(folder / "memory.stat").get(cache, 0)
                used = max(0, used - reclaimable)
                yield size, max(0, size - used)


def _cgroups() -> Iterator[Path]:
    """Yield the folders of the control groups that contain this process, of both versions."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            folder = _CGROUPS / controllers / path.strip("/")
            while folder.is_relative_to(_CGROUPS):
                yield folder
                folder = folder.parent


def _numbers(path: Path) -> Mapping[str, int]:
    """Return the numbers of a file of /proc or a control group by name, in bytes.

    Its lines have the form `name 123` or `name: 123 kB`. Other lines are skipped. Without the
    file, there are no numbers.
    """
    numbers: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, *words = line.replace(":", " ").split()
            if not words or not words[0].isdecimal():
                continue
            numbers[name] = int(words[0])
            if words[1:] == ["kB"]:
                numbers[name] *= 1024
    return numbers
