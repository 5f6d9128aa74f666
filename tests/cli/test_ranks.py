"""Several ranks of one run: the bytes of one process, one voice, and an end when a rank fails
or is lost.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document, layer
from support.extended import extended, extended_except
from support.forked import run_ranks
from support.runs import differing

from quantizer.algorithms.equalization import powers_of_two
from quantizer.calibration.events import RunStage
from quantizer.cli.main import run_command
from quantizer.observers import Observer
from quantizer.results.checkpoint import Checkpoints

pytestmark = pytest.mark.slow

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x))).mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def model():
    torch.manual_seed(0)
    return Net()

def calibration_data():
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 6, 6, generator=g) * (1 + i), torch.arange(4)) for i in range(7)]

def other_for_each_rank():
    import os
    return calibration_data()[int(os.environ.get("RANK", 0)) :]

def shuffled_by_rank():
    import os
    data = calibration_data()
    return data[::-1] if os.environ.get("RANK") == "1" else data

def other_weights_by_rank():
    import os
    net = model()
    if os.environ.get("RANK") == "1":
        with torch.no_grad():
            net.head.bias[2] += 1e-7
    return net

def another_layer_by_rank():
    import os
    net = model()
    if os.environ.get("RANK") == "1":
        net.blocks[1].down = nn.Sequential(nn.Linear(12, 6), nn.Tanh())
    return net

def evaluate(model, data):
    with torch.no_grad():
        return {"seen": float(sum(len(x) for x, _ in data))}
"""
NOT_FINITE = """
def overflowing():
    data = calibration_data()
    data[5][0][0] = 3e38
    return data

class Rooted(Net):
    def forward(self, x):
        return super().forward(torch.sqrt(x + 100))

def rooted():
    torch.manual_seed(0)
    return Rooted()

def below():
    data = calibration_data()
    data[5][0][0] = -101
    return data
"""
"""Data and a model that give infinity and NaN in batch 5."""
METHODS = ("maxmin", "percentile", "mse")
ALGORITHMS = {"gptq", "awq", "gptaq", "smoothquant", "rotation"}


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL + NOT_FINITE)
    return str(tmp_path / "net.py")


def config_file(tmp_path: Path, kind: str) -> str:
    """A config of this kind: a method, the hierarchical form, a device, or algorithms with "+"
    between them.
    """
    spec = {"dtype": "int8", "observer_cls": "PerTensorMSEObserver"}
    content: dict[str, Any] = {"global_quant_config": {"input_tensors": spec, "weight": spec}}
    if kind != "hierarchical":
        method = kind if kind in METHODS else "maxmin"
        content = document(tensor={"activation": {"method": method}})
        content |= {"include_bias_corr": kind == "bias correction"}
    if kind == "statistics":
        conv = layer(type="torch.nn.Conv2d", tensor={"activation": {"method": "entropy"}})
        first = {"symmetry": False, "signed": False, "calib_statistic_method": "median"}
        last = {
            "method": "percentile",
            "symmetry": False,
            "signed": False,
            "calib_statistic_method": "mean",
        }
        head = layer("Net::Net/Linear[head]/linear", tensor={"activation": last})
        content = document(conv, head, tensor={"activation": {"method": "mse"}, "input": first})
        content |= {"include_bias_corr": True}
    if kind == "dpu":  # diffs, and the modal statistic
        content = json.loads(
            (Path(__file__).parents[2] / "configs" / "dpu.json").read_text("utf-8")
        )
        content |= {"include_bias_corr": False}
    if kind == "weights":
        content = {"global_quant_config": {"weight": spec}}
    names = kind.split("+")
    if ALGORITHMS.issuperset(names):
        algorithms: list[dict[str, Any]] = [{"name": name} for name in names]
        if names == ["gptaq"]:
            algorithms[0]["true_sequential"] = False
        content |= {"algorithms": algorithms}
    path = tmp_path / f"{kind.replace(' ', '_')}.json"
    path.write_text(json.dumps(content))
    return str(path)


def calib(net: str, config: str, folder: Path, *more: str) -> list[str]:
    return [
        "--quant_mode",
        "calib",
        "--model",
        net,
        "--config_file",
        config,
        "--output_dir",
        str(folder),
        *more,
    ]


def stopping(number: int, batches: int, act: Callable[[], Any]) -> Callable[[int], None]:
    """What makes rank `number` do something when it observes a batch after so many. The first
    rank alone measures input channels before that, which does not count.
    """

    def before(rank: int) -> None:
        plain, seen, is_counted = Observer.observe, 0, True
        measure = powers_of_two.decide_input_levels

        def decide_input_levels(*args: Any, **options: Any) -> Any:
            nonlocal is_counted
            is_counted = False
            levels = measure(*args, **options)
            is_counted = True
            return levels

        def observe(self: Observer, x: torch.Tensor, companion: Observer | None = None) -> None:
            nonlocal seen
            plain(self, x, companion)
            if rank == number and is_counted and x.dim() == 4 and x.shape[:2] == (4, 3):
                seen += 1
                if seen > batches:
                    act()

        Observer.observe = observe  # type: ignore[method-assign]
        powers_of_two.decide_input_levels = decide_input_levels

    return before


KINDS: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "statistics": ((2, 3), []),
    "hierarchical": ((3,), []),
    "dpu": ((2,), ["--fast_finetune", "adaround"]),
    "smoothquant": ((3,), ["--fast_finetune", "adaquant"]),
    "rotation": ((2,), []),
}
"""Configs with the numbers of ranks and further options; bias correction is in two of them."""


def tell_progress(rank: int) -> None:
    """Have this rank print how far each stage has come."""
    plain = RunStage.__exit__

    def leave(self: RunStage, *error: Any) -> None:
        print(f"{self.name}: {self.done} of {self.total}", file=sys.stderr)
        plain(self, *error)

    RunStage.__exit__ = leave  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("kind", extended_except(KINDS, "statistics", "dpu", "rotation"))
def test_any_number_of_ranks_writes_the_same_bytes(kind: str, net: str, tmp_path: Path) -> None:
    counts, more = KINDS[kind]
    config = config_file(tmp_path, kind)
    assert run_command(calib(net, config, tmp_path / "one", "-q", *more)) == 0
    for count in counts:
        command = calib(net, config, tmp_path / str(count), *more)
        found = run_ranks(count, command, tmp_path / "ranks", before=tell_progress)
        assert [rank.code for rank in found] == [0] * count, found[0].err
        assert differing(tmp_path / "one", tmp_path / str(count)) == set()
        assert "calibrated on 7 batches" in found[0].out
        assert "calib: 7 of 7" in found[0].err, "progress counts the batches of all ranks"
        assert {(rank.out, rank.err) for rank in found[1:]} == {("", "")}
        assert json.loads((tmp_path / str(count) / "run.json").read_text())["ranks"] == count
    assert json.loads((tmp_path / "one" / "run.json").read_text())["ranks"] == 1


MANY = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
    )

def calibration_data():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, 6, 6, generator=g) for _ in range(40)]
"""
"""A network with 200 samples. With weights of 4 bits, it needs more than the first 40."""


def test_any_number_of_ranks_corrects_biases_on_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(MANY)
    config = tmp_path / "config.json"
    content = document(tensor={"weights": {"bit_width": 4}}, include_bias_corr=True)
    config.write_text(json.dumps(content))
    for count in (1, 2, 3):
        command = calib(str(tmp_path / "many.py"), str(config), tmp_path / str(count))
        found = run_ranks(count, command, tmp_path / "ranks")
        assert [rank.code for rank in found] == [0] * count, found[0].err
        assert differing(tmp_path / "1", tmp_path / str(count)) == set()
        (samples,) = re.findall(r"biases of 3 layers .* after (\d+) samples", found[0].err)
        assert 40 < int(samples) < 200


def test_more_ranks_than_batches(net: str, tmp_path: Path) -> None:
    config = config_file(tmp_path, "bias correction")
    assert run_command(calib(net, config, tmp_path / "one", "-q", "--subset_len", "8")) == 0
    found = run_ranks(
        3, calib(net, config, tmp_path / "3", "--subset_len", "8"), tmp_path / "ranks"
    )
    assert [rank.code for rank in found] == [0] * 3, found[0].err
    assert differing(tmp_path / "one", tmp_path / "3") == set()


@pytest.mark.parametrize(("kind", "runs"), [("awq+gptq", 2), ("gptaq", 1)])
def test_sums_over_tokens_are_the_same_in_every_run_and_near_those_of_one_process(
    kind: str, runs: int, net: str, tmp_path: Path
) -> None:
    config = config_file(tmp_path, kind)
    assert run_command(calib(net, config, tmp_path / "one", "-q")) == 0
    folders = [tmp_path / f"run{number}" for number in range(runs)]
    for folder in folders:
        found = run_ranks(2, calib(net, config, folder), tmp_path / "ranks")
        assert [rank.code for rank in found] == [0] * 2, found[0].err
        assert differing(folders[0], folder) == set()
    assert_near(tmp_path / "one", folders[0])


def assert_near(one: Path, other: Path) -> None:
    """That the errors of rounded layers are those of sums in another order."""
    expected, found = (
        json.loads((folder / "algorithms.json").read_text())["rounded"]
        for folder in (one, other)
    )
    assert expected.keys() == found.keys()
    for name, errors in expected.items():
        assert found[name]["error"] == pytest.approx(errors["error"], rel=1e-3)


def test_a_stopped_algorithm_goes_on_with_another_number_of_ranks(
    net: str, tmp_path: Path
) -> None:
    """Three ranks stop after two groups, one stops after two more, and two come to the end."""
    config = config_file(tmp_path, "gptq")
    assert run_command(calib(net, config, tmp_path / "whole", "-q")) == 0

    def stop(groups: int) -> None:
        plain = Checkpoints.advanced

        def advanced(self: Checkpoints, stage: RunStage) -> None:
            plain(self, stage)
            if stage.name == "gptq" and stage.done == groups:
                raise KeyboardInterrupt

        Checkpoints.advanced = advanced  # type: ignore[method-assign]

    command = calib(net, config, tmp_path / "q")
    found = run_ranks(3, command, tmp_path / "ranks", before=lambda rank: stop(2))
    assert [rank.code for rank in found] == [130, 40, 40], (
        "only the first rank writes checkpoints"
    )
    command.append("--resume")
    found = run_ranks(1, command, tmp_path / "ranks", before=lambda rank: stop(4))
    assert found[0].code == 130
    assert "the algorithms resume after 2 groups of gptq" in found[0].err
    found = run_ranks(2, command, tmp_path / "ranks")
    assert [rank.code for rank in found] == [0, 0], found[0].err
    assert "the algorithms resume after 4 groups of gptq" in found[0].err
    assert_near(tmp_path / "whole", tmp_path / "q")


def test_test_mode_finds_the_same_and_the_users_metric_sees_all_data(
    net: str, tmp_path: Path
) -> None:
    config = config_file(tmp_path, "maxmin")
    assert run_command(calib(net, config, tmp_path / "one", "-q")) == 0
    command = ["--quant_mode", "test", "--model", net, "--output_dir", str(tmp_path / "one")]
    assert run_command([*command, "--gate", "seen>=28", "-q"]) == 0
    table, report = (tmp_path / "one" / name for name in ("layers.csv", "report.json"))
    expected = [table.read_bytes(), report.read_bytes()]
    figures = json.loads(expected[1])
    for count, least, code in ((3, 28, 0), (2, 29, 1)):
        found = run_ranks(count, [*command, "--gate", f"seen>={least}"], tmp_path / "ranks")
        # Only the first rank judges gates
        assert [rank.code for rank in found] == [code, *[0] * (count - 1)], found[0].err
        assert {rank.out for rank in found[1:]} == {""}
        if code == 0:
            assert [table.read_bytes(), report.read_bytes()] == expected
        assert table.read_bytes() == expected[0]
        other = json.loads(report.read_bytes())
        # The report has the command, and the command the gate
        for name in ("metrics", "layers", "outputs", "batches"):
            assert other.get(name) == figures.get(name)


@pytest.mark.parametrize(
    ("count", "model", "data", "said"),
    [
        (3, "model", "overflowing", "activation of Net::Net/mean: 0 NaN and "),
        (2, "rooted", "below", "activation of Rooted::Rooted/sqrt: 108 NaN and 0 infinite"),
    ],
)
def test_one_message_names_rank_batch_and_layer_of_a_value_that_is_not_finite(
    count: int, model: str, data: str, said: str, net: str, tmp_path: Path
) -> None:
    command = calib(
        f"{net}:{model}",
        config_file(tmp_path, "maxmin"),
        tmp_path / "q",
        "--data",
        f"{net}:{data}",
        "-q",
    )
    found = run_ranks(count, [*command, "--rank_timeout", "5"], tmp_path / "ranks")
    assert [rank.code for rank in found] == [4] * count
    assert f"error: rank {5 % count}: batch 5: " in found[0].err
    assert said in found[0].err
    assert found[0].err.count("error:") == 1
    assert {(rank.out, rank.err) for rank in found[1:]} == {("", "")}
    assert not (tmp_path / "q" / "quant_info.json").exists()


@pytest.mark.parametrize(
    ("count", "number", "sign"), [(3, 1, signal.SIGKILL), (2, 1, signal.SIGSTOP)]
)
def test_a_rank_that_is_lost_ends_the_others(
    count: int, number: int, sign: int, net: str, tmp_path: Path
) -> None:
    command = calib(net, config_file(tmp_path, "maxmin"), tmp_path / "q", "--rank_timeout", "2")
    began = time.monotonic()
    found = run_ranks(
        count,
        command,
        tmp_path / "ranks",
        before=stopping(number, 1, lambda: os.kill(os.getpid(), sign)),
    )
    # A busy machine is slow; by default it would take 60 seconds
    assert time.monotonic() - began < 40
    assert [rank.code for rank in found] == [
        -sign if rank == number else 40 for rank in range(count)
    ]
    assert f"error: rank {number} " in found[0].err
    assert found[0].err.count("error:") == 1


@pytest.mark.parametrize(
    ("is_of_user", "code", "told"),
    [
        (False, 70, "rank 1: ZeroDivisionError: made up"),
        (True, 3, "rank 1: your code raised ZeroDivisionError: made up"),
    ],
)
def test_an_unexpected_error_of_one_rank_is_told_by_the_first(
    is_of_user: bool,
    code: int,
    told: str,
    net: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("made up")

    for module in ("failures", "modes.torchrun"):
        place = f"quantizer.cli.{module}.ends_in_user_code"
        monkeypatch.setattr(place, lambda _error: is_of_user)
    command = calib(net, config_file(tmp_path, "maxmin"), tmp_path / "q", "-q")
    found = run_ranks(2, command, tmp_path / "ranks", before=stopping(1, 1, fail))
    assert [rank.code for rank in found] == [code, code]
    assert f"error: {told}" in found[0].err


@pytest.mark.parametrize(
    ("factory", "code", "said"),
    [
        ("other_for_each_rank", 40, "the ranks are at different steps: rank 0 at "),
        ("shuffled_by_rank", 4, "gives rank 1 other batches than rank 0"),
    ],
)
def test_ranks_that_read_other_data_are_refused(
    factory: str, code: int, said: str, net: str, tmp_path: Path
) -> None:
    command = calib(
        net, config_file(tmp_path, "maxmin"), tmp_path / "q", "--data", f"{net}:{factory}"
    )
    found = run_ranks(2, command, tmp_path / "ranks")
    assert [rank.code for rank in found] == [code] * 2
    assert said in found[0].err


def test_test_mode_refuses_ranks_that_read_other_data(net: str, tmp_path: Path) -> None:
    assert run_command(calib(net, config_file(tmp_path, "maxmin"), tmp_path / "q", "-q")) == 0
    command = ["--quant_mode", "test", "--model", net, "--output_dir", str(tmp_path / "q")]
    found = run_ranks(2, [*command, "--data", f"{net}:shuffled_by_rank"], tmp_path / "ranks")
    assert [rank.code for rank in found] == [4, 4]
    assert "gives rank 1 other batches than rank 0" in found[0].err
    assert json.loads((tmp_path / "q" / "report.json").read_text())["metrics"] == {}


def test_a_rank_that_does_not_come_is_not_waited_for(net: str, tmp_path: Path) -> None:
    command = calib(net, config_file(tmp_path, "maxmin"), tmp_path / "q", "--rank_timeout", "1")
    found = run_ranks(
        2, command, tmp_path / "ranks", before=lambda rank: os._exit(9) if rank else None
    )
    assert [rank.code for rank in found] == [40, 9]
    assert (
        "error: the ranks did not find each other within 1 s: 1 of 2 have joined"
        in found[0].err
    )


@pytest.mark.real
def test_torchrun_starts_them(net: str, tmp_path: Path) -> None:
    config = config_file(tmp_path, "maxmin")
    assert run_command(calib(net, config, tmp_path / "one", "-q")) == 0
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "quantizer",
    ]
    done = subprocess.run(
        [*launch, *calib(net, config, tmp_path / "2")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("calibrated on 7 batches") == 1
    # They have the digest of the code that a process has loaded, and this one has loaded more
    have_the_code = {"graph.json", "quant_info.json", "checksums.json", "report.json"}
    have_the_code.add("report.html")
    assert differing(tmp_path / "one", tmp_path / "2") <= have_the_code


@pytest.mark.parametrize(
    ("kind", "stops", "last"),
    [
        # Three ranks stop at their second batches, then one stops after two more
        ("hierarchical", [(3, 1, 3), (1, 2, 5)], 3),
        *extended(("bias correction", [(2, 1, 2)], 3)),
    ],
)
def test_a_stopped_run_goes_on_with_another_number_of_ranks(
    kind: str, stops: list[tuple[int, int, int]], last: int, net: str, tmp_path: Path
) -> None:
    config = config_file(tmp_path, kind)
    data = ("--data", f"{net}:calibration_data")
    assert run_command(calib(net, config, tmp_path / "whole", "-q", *data)) == 0
    command = calib(net, config, tmp_path / "q", *data)

    def interrupt() -> None:
        raise KeyboardInterrupt

    def stop(batches: int) -> Callable[[int], None]:
        return lambda rank: stopping(rank, batches, interrupt)(rank)

    for count, batches_of_each, batches in stops:
        found = run_ranks(count, command, tmp_path / "ranks", before=stop(batches_of_each))
        assert [rank.code for rank in found] == [130] * count, found[0].err
        told = f"calib stopped after {batches} batches; --resume continues from"
        assert told in found[0].err
        command = [*command, "--resume"]
    found = run_ranks(last, command, tmp_path / "ranks")
    assert [rank.code for rank in found] == [0] * last, found[0].err
    assert differing(tmp_path / "whole", tmp_path / "q") == set()


def other_version(rank: int) -> None:
    if rank == 1:
        torch.__version__ = "9.0.0"


def other_seed(rank: int) -> None:
    os.environ["QUANTIZER_SEED"] = str(rank)


def other_config(rank: int) -> None:
    """A file of the same name, as another machine may have one."""
    if rank == 1:
        path = Path("config.json")
        path.write_text(path.read_text().replace('"maxmin"', '"mse"'))


def own_folder(rank: int) -> None:
    """Each rank finds files of its own under the same names."""
    place = Path(str(rank))
    shutil.copytree("given", place)
    os.chdir(place)


DIFFERENT: dict[str, tuple[str, Callable[[int], None], str]] = {
    "weights": ("other_weights_by_rank", lambda rank: None, "weight head.bias"),
    "graph": (
        "another_layer_by_rank",
        lambda rank: None,
        "layer Net::Net/ModuleList[blocks]/Block[1]/",
    ),
    "version": ("model", other_version, f"torch is 9.0.0, not {torch.__version__}"),
    "option": ("model", other_seed, "--seed is 1, not 0"),
    "config": ("model", other_config, "config overall_quantize_config"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_that_would_not_compute_the_same_are_refused(
    kind: str, net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory, change, what = DIFFERENT[kind]
    (tmp_path / "given").mkdir()
    shutil.copy(config_file(tmp_path, "maxmin"), tmp_path / "given" / "config.json")
    monkeypatch.chdir(tmp_path)

    def before(rank: int) -> None:
        own_folder(rank)
        change(rank)

    command = calib(f"{net}:{factory}", "config.json", tmp_path / "q", "-q")
    # Two ranks show a difference; with three, the third is silent too
    count = 3 if kind == "weights" else 2
    ranks = run_ranks(count, command, tmp_path / "ranks", before=before)
    assert [rank.code for rank in ranks] == [40] * count, ranks[0].err
    assert f"error: rank 1 differs from rank 0: {what}" in ranks[0].err
    assert {rank.err for rank in ranks[1:]} == {""}
    assert not (tmp_path / "q" / "quant_info.json").exists()


@pytest.mark.parametrize("kind", ["weights", "results"])
def test_test_mode_refuses_ranks_that_would_not_measure_the_same(
    kind: str, net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given").mkdir()
    folders = {"maxmin": "given/q"}
    if kind == "results":
        folders["mse"] = "other"
    for method, name in folders.items():
        command = calib(net, config_file(tmp_path, method), tmp_path / name, "-q")
        assert run_command(command) == 0

    def before(rank: int) -> None:
        own_folder(rank)
        if kind == "results" and rank == 1:
            shutil.rmtree("q")
            shutil.copytree(tmp_path / "other", "q")

    changed = {
        "weights": ("other_weights_by_rank", "weight head.bias"),
        "results": ("model", "results is "),
    }
    factory, what = changed[kind]
    command = ["--quant_mode", "test", "--model", f"{net}:{factory}", "--output_dir", "q"]
    ranks = run_ranks(2, command, tmp_path / "ranks", before=before)
    assert [rank.code for rank in ranks] == [40, 40], ranks[0].err
    assert f"error: rank 1 differs from rank 0: {what}" in ranks[0].err
    assert json.loads((tmp_path / "0" / "q" / "report.json").read_text())["metrics"] == {}
