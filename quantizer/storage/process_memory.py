"""How much memory this process uses and may use, in bytes, or None where the system does not
report it. Imports no torch.

Also makes glibc return freed memory to the system. With other C libraries, that does nothing.
glibc allocates small blocks in a heap, which shrinks only from its end. Large blocks have
memory maps of their own, which the system gets back when a block is freed.
"""

import contextlib
import ctypes
import gc
import math
import mmap
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TRIM_AFTER_GROWTH = 128 << 20
"""The bytes by which the process has to grow until `trim_heap` is worth its time after a batch
or a step.
"""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""The numbers of these parameters of `mallopt` in malloc.h."""
_MAPPED_BLOCK_BYTES = 1 << 20
"""The size from which a block has a memory map of its own."""
_KEPT_AT_THE_END = 64 << 20
"""The bytes of free memory at the end of the heap that are not returned to the system."""
_KEPT_AFTER_MOVES = 300 << 20
"""The growth in bytes from which `trim_heap` is called after tensors were moved to a file."""
# Blocks stay in the heap if the machine has so much memory and the model is so large. Free
# blocks between used ones then take half a gigabyte with matrices of 50 MB, and two with GPTQ
_MUCH_MEMORY = 16 << 30
_LARGE_MODEL = 2 << 30
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


_least_resident = resident_bytes() or 0
_is_tuned = False
_keeps_freed_blocks = False


def trim_heap(beyond: int = 0) -> None:
    """Return free memory inside the heap to the system, by glibc's `malloc_trim`.

    Large tensors are freed while small ones between them stay. glibc then keeps the freed
    memory resident, up to the size of the network. But memory that was returned has to be
    mapped again when it is needed: trimming after each batch costs a tenth of a pass.

    Args:
        beyond: the bytes by which the resident memory has to have grown from its least value
            since the last call that trimmed. Otherwise nothing is done. 0 trims always.
    """
    global _least_resident
    resident = resident_bytes() or 0
    _least_resident = min(resident, _least_resident)
    if beyond and resident - _least_resident < beyond:
        return
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)
        _least_resident = resident_bytes() or 0


def tune_for_large_tensors(model_bytes: int) -> None:
    """Decide how glibc allocates the memory of large tensors. Only the first call counts.

    If the model is large and there is much memory, all blocks are in the heap, where the next
    tensor uses them again. The system would clear new memory page by page, which takes a third
    of the time of round-to-nearest. The control group of this process counts, too.

    Otherwise, each block above a megabyte has a memory map of its own. By default, glibc raises
    this limit up to 32 MB when it frees larger blocks. Blocks below the limit are in the heap,
    and a small block after them keeps the heap from shrinking.

    Args:
        model_bytes: the size of all tensors of the model.
    """
    global _is_tuned, _keeps_freed_blocks
    tune = _c_function("mallopt")
    if tune is None or _is_tuned:
        return
    total = total_bytes() or 0
    if total >= _MUCH_MEMORY and model_bytes >= _LARGE_MODEL:
        tune(_M_MMAP_MAX, 0)
        tune(_M_TRIM_THRESHOLD, _KEPT_AT_THE_END)
        _keeps_freed_blocks = True
    else:
        tune(_M_MMAP_THRESHOLD, _MAPPED_BLOCK_BYTES)
    _is_tuned = True


def kept_after_moves() -> int:
    """Return the bytes `beyond` for `trim_heap` after tensors were moved to a file."""
    if _keeps_freed_blocks:
        return _KEPT_AFTER_MOVES
    return 0


def keeps_freed_blocks() -> bool:
    """Return whether freed blocks stay resident until `trim_heap`, because
    `tune_for_large_tensors` chose the heap.
    """
    return _keeps_freed_blocks


def _c_function(name: str) -> Any:
    """Return a function of the C library, or None if it has none of this name."""
    try:
        library = ctypes.CDLL(None)
    except (TypeError, OSError):
        # Windows cannot open the process itself as a library
        return None
    return getattr(library, name, None)
