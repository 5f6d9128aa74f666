"""Memory of this process and of the machine, in bytes; None where the system does not say.
Imports no torch.
"""

import contextlib
import gc
import mmap
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_CGROUPS = Path("/sys/fs/cgroup")
_PAGE = mmap.PAGESIZE


def peak() -> int | None:
    """The most that was ever resident of this process."""
    if found := _table(Path("/proc/self/status")).get("VmHWM"):
        # The figure of getrusage is at least that of the process that started this one
        return found
    with contextlib.suppress(ImportError):
        import resource

        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest << 10
    return None


def resident() -> int | None:
    """What is resident of this process now; asked after each batch, so from the shortest file
    that says it.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python's search for cycles waits. What imports and traces make is kept: to look through
    all of it again and again takes a fifth of their time.
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
    """If `module` is imported here, no later search for cycles looks at what there is by then.
    For the command line: in a process of somebody else, garbage would stay as well.
    """
    is_new = module not in sys.modules
    with uncollected():
        yield
        if is_new:
            gc.freeze()


def available() -> int | None:
    """What this process can still take without swapping, under the limits of its control
    groups.
    """
    return min((free for _, free in _limits()), default=None)


def total() -> int | None:
    """What the machine has, or a control group allows."""
    return min((size for size, _ in _limits()), default=None)


def parsed(text: str) -> int:
    """The bytes that a size such as "8GB", "512 MB" or "1.5GiB" stands for.

    Raises:
        ValueError: it is none.

    >>> parsed("8GB"), parsed("0.5 gib")
    (8000000000, 536870912)
    """
    number, unit = text.strip(), ""
    while number and not (number[-1].isdigit() or number[-1] == "."):
        number, unit = number[:-1], number[-1] + unit
    size = float(number)
    if unit.strip().upper() not in UNITS or not 0 <= size < float("inf"):
        raise ValueError(text)
    return int(size * UNITS[unit.strip().upper()])


def in_words(size: int) -> str:
    """A size for people.

    >>> in_words(1_234_000_000), in_words(45_600_000)
    ('1.23 GB', '46 MB')
    """
    return f"{size / 1e9:.2f} GB" if size >= 10**9 else f"{size / 1e6:.0f} MB"


def _limits() -> Iterator[tuple[int, int]]:
    """Of the machine, and of each control group around this process that has a limit: its size,
    and what is free.
    """
    machine = _table(Path("/proc/meminfo"))
    if "MemTotal" in machine and "MemAvailable" in machine:
        yield machine["MemTotal"], machine["MemAvailable"]
    for folder in _groups():
        for limit, usage, cached in (
            ("memory.max", "memory.current", "file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
        ):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                size, used = (int((folder / name).read_text()) for name in (limit, usage))
                reclaimable = _table(folder / "memory.stat").get(cached, 0)
                yield size, max(0, size - max(0, used - reclaimable))


def _groups() -> Iterator[Path]:
    """The folders of the control groups around this process, of both versions."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                here = _CGROUPS / controllers / path.strip("/")
                yield from (
                    each for each in (here, *here.parents) if each.is_relative_to(_CGROUPS)
                )


def _table(path: Path) -> Mapping[str, int]:
    """Lines with a name, a number and perhaps "kB"; no lines where the file is missing."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, *words = line.replace(":", " ").split()
            if words and words[0].isdecimal():
                found[name] = int(words[0]) << (10 if words[1:] == ["kB"] else 0)
    return found
