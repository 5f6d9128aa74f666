"""Images per second of calibration by 1 and 2 ranks of one thread each, ResNet-18, 96 images of
224x224.

`python benchmarks/bench_ranks.py [rounds]`; the two take turns. On two quiet cores 2 ranks are
1.8 times as fast.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from workloads import images, resnet18

from quantizer.calibration import observing
from quantizer.calibration.snapshots import observe_share
from quantizer.config.diagnostics import Sourced
from quantizer.config.model import ROLES, ConfigRule, ResolvedConfig, Selector, Settings
from quantizer.distributed import ALONE, Ranks
from quantizer.distributed.process_group import ProcessGroup
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch

TARGET = 1.8
COUNTS = (1, 2)
METHODS = ("maxmin", "mse")


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    model, batches = resnet18(), [Batch.of(x) for x in images(96, batch=4)]
    graph, size = trace(model, batches[0].args), sum(batch.size for batch in batches)
    for method in METHODS:
        values = {"method": Sourced(method)}
        rule = ConfigRule(
            Selector("all"), "overall", frozenset(ROLES), fields=dict.fromkeys(ROLES, values)
        )
        plan = resolve_plan(
            ResolvedConfig(Settings(), (rule,)), run_passes(graph, Settings()), graph
        )
        measured: dict[int, list[tuple[float, float]]] = {count: [] for count in COUNTS}
        gc.collect()
        gc.freeze()  # a fork that goes through what it has inherited copies it
        for _ in range(rounds):
            for count in COUNTS:
                measured[count].append(seconds(plan, batches, count))
        found = {count: [wall for wall, _ in rows] for count, rows in measured.items()}
        work = statistics.median(
            one / two for (_, one), (_, two) in zip(*measured.values(), strict=True)
        )
        speeds = {count: statistics.median(values) for count, values in found.items()}
        ratio = statistics.median(one / two for one, two in zip(*found.values(), strict=True))
        said = ", ".join(
            f"{count} rank{'s' * (count > 1)}: {size / speed:.1f} images/s"
            for count, speed in speeds.items()
        )
        print(
            f"calibration, {method}: {said}; ratio {ratio:.2f}, target {TARGET}; of processor "
            f"time {work:.2f}"
        )


def seconds(plan: Plan, batches: list[Batch], count: int) -> tuple[float, float]:
    """Wall and processor time of a calibration by forks of this process, those of the slowest,
    once all have joined.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = [fork(plan, batches, count, rank, Path(folder)) for rank in range(count)]
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * count
        times = [
            map(float, (Path(folder) / str(rank)).read_text().split()) for rank in range(count)
        ]
        wall, work = zip(*times, strict=True)
        return max(wall), max(work)


def fork(plan: Plan, batches: list[Batch], count: int, rank: int, folder: Path) -> int:
    """One rank; it leaves its time in the folder."""
    pid = os.fork()
    if pid:
        return pid
    url = f"file://{folder / 'meeting'}?rank={rank}&world_size={count}"
    group: Ranks = ProcessGroup(url, "gloo", 60) if count > 1 else ALONE
    calibration, network = observing.create_observers(plan), Network(plan.graph)
    with torch.no_grad():
        # The first batch costs a process more than others
        observing.observe_batches(observing.create_observers(plan), network, batches[:1])
    group.gather(None, "the start")
    began, worked = time.perf_counter(), time.process_time()
    with torch.no_grad():
        if count > 1:
            observe_share(calibration, network, batches, group)
        else:
            observing.observe_batches(calibration, network, batches)
        observing.observed_solution(calibration)
    (folder / str(rank)).write_text(
        f"{time.perf_counter() - began} {time.process_time() - worked}"
    )
    group.gather(None, "the end")
    os._exit(0)


if __name__ == "__main__":
    main()
