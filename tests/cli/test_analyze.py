"""`quantizer analyze`: what it measures, and the configs with mixed widths that it writes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document, layer
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.cli.main import run_command

NETWORK = """
import sys
sys.path.insert(0, {here!r})
from test_analyze import {name}, data as calibration_data

def model():
    return {name}()
"""


class Small(nn.Module):
    """Two convolutions, one of them in groups, and a linear layer whose output hardly
    counts.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.quiet = nn.Linear(8, 5)
        self.loud = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.relu(self.first(x))).mean((2, 3))
        return self.loud(x) + 1e-3 * self.quiet(x)


class Decision(Small):
    """Says which classes there are."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) > 0).float()


class Shared(nn.Module):
    """One weight in two layers, beside an embedding, whose width cannot be chosen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 8)
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)
        self.outer.weight = self.inner.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.flatten(1)[:, :6].abs() * 5).long().clamp(max=15)
        return self.head(self.outer(self.inner(self.words(ids)).relu()))


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, 5, 5, generator=generator) for _ in range(5)]


LAYERED = document(
    layer(
        "Small::Small/Conv2d[first]/conv2d",
        tensor={"activation": {"method": "percentile", "percentage": 99.0}},
    ),
    layer(type="torch.nn.ReLU", roles=["activation"], bit_width=6),
    layer(
        type="torch.nn.Linear",
        roles=["input", "weights", "bias"],
        tensor={"weights": {"per_channel": True}},
    ),
    tensor={"bias": {"bit_width": 16}, "activation": {"symmetry": False, "signed": False}},
)
HIERARCHICAL = {
    "//": "kept",
    "global_quant_config": {
        "weight": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
    },
    "layer_type_quant_config": {"Linear": {"weight": {"dtype": "uint8", "symmetric": False}}},
    "layer_quant_config": {
        "quiet": {"weight": {"dtype": "int4"}, "input_tensors": {"dtype": "int8"}}
    },
}
CONFIGS: dict[str, dict[str, Any]] = {"layered": LAYERED, "hierarchical": HIERARCHICAL}

Analyze = Callable[..., int]


@pytest.fixture
def model(tmp_path: Path) -> Callable[[type[nn.Module]], str]:
    def write(kind: type[nn.Module]) -> str:
        path = tmp_path / f"{kind.__name__.lower()}.py"
        path.write_text(NETWORK.format(here=str(Path(__file__).parent), name=kind.__name__))
        return str(path)

    return write


@pytest.fixture
def analyze(tmp_path: Path, model: Callable[[type[nn.Module]], str]) -> Analyze:
    def run(content: dict[str, Any], *more: str, kind: type[nn.Module] = Small) -> int:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        return run_command(
            ["analyze", "--config_file", str(path), "--model", model(kind), *more]
        )

    return run


def plan_of(
    config: Path | str, model: str, capsys: pytest.CaptureFixture[str]
) -> dict[tuple[str, str], Any]:
    capsys.readouterr()
    assert run_command(["plan", "--config_file", str(config), "--model", model, "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    return {
        (row["name"], role): t["spec"]
        for row in layers
        for role, t in row.get("tensors", {}).items()
    }


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("choices", ["2,3,4,8", "2,4,float16"])
def test_the_written_config_plans_the_chosen_bits_and_changes_nothing_else(
    form: str,
    choices: str,
    analyze: Analyze,
    model: Callable[[type[nn.Module]], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = tmp_path / "mixed.json"
    assert (
        analyze(
            CONFIGS[form], "--budget", "3.2", "--choices", choices, "-o", str(written), "--json"
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    bits = {name: row["bits"] for row in told["layers"] for name in row["layers"]}
    assert len(set(bits.values())) > 1
    assert told["mixed"]["mean_bits"] <= 3.2
    assert run_command(["validate", str(written)]) == 0
    net = model(Small)
    before, after = (plan_of(path, net, capsys) for path in (tmp_path / "config.json", written))
    assert before.keys() == after.keys()
    for key, spec in after.items():
        if key[1] != "weights":
            assert spec == before[key], key
        elif spec["dtype"] == "int":
            few = form == "hierarchical" and spec["symmetric"] and bits[key[0]] < 8
            rule = "half_range" if few else "quant_max"
            assert spec == before[key] | {"bit_width": bits[key[0]], "symmetric_scale": rule}, (
                key
            )
        else:
            assert spec["dtype"] == bits[key[0]]


def test_a_choice_that_is_measured_to_be_worse_gives_way_to_the_uniform_width(
    analyze: Analyze,
    model: Callable[[type[nn.Module]], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written, config = tmp_path / "uniform.json", copy.deepcopy(HIERARCHICAL)
    config["global_quant_config"]["weight"]["symmetric_scale"] = "quant_max"
    assert analyze(config, "--budget", "3.4", "-o", str(written), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mixed"]["predicted_db"] > found["uniform"]["predicted_db"]
    assert found["mixed"]["measured_db"] < found["uniform"]["measured_db"]
    assert (found["written"], found["config"]) == ("uniform", json.loads(written.read_text()))
    assert {row["bits"] for row in found["layers"]} == {3}
    specs = plan_of(written, model(Small), capsys)
    weights = {
        (spec["bit_width"], spec["symmetric_scale"])
        for (_, role), spec in specs.items()
        if role == "weights"
    }
    assert weights == {(3, "quant_max")}
    assert analyze(config, "--budget", "3.4") == 0
    assert (
        "the uniform width measures better, so the config has that one"
        in capsys.readouterr().err
    )


def test_tables_name_layers_by_their_modules_when_asked(
    analyze: Analyze, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(HIERARCHICAL, "--names", "path", "--top", "2") == 0
    titles, *rows, note = capsys.readouterr().out.splitlines()
    assert titles.split()[0] == "layer"
    assert {row.split()[0] for row in rows} < {"first", "second", "quiet", "loud"}
    assert (len(rows), note) == (2, "… 2 more layers; --top all shows them")


def test_comments_stay_and_two_runs_print_the_same(
    analyze: Analyze, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for _ in range(2):
        assert analyze(HIERARCHICAL, "--budget", "3.4") == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    changed = json.loads(printed[0])
    assert changed["//"] == "kept"
    assert changed["layer_quant_config"]["quiet"]["input_tensors"] == {"dtype": "int8"}
    assert changed["global_quant_config"] == HIERARCHICAL["global_quant_config"]


@pytest.mark.parametrize("passes", ["network", "every", "fast"])
def test_noise_that_the_output_hardly_shows_costs_no_bits(
    passes: str, analyze: Analyze, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(HIERARCHICAL, "--passes", passes, "--budget", "3.5", "--json") == 0
    bits = {
        row["layers"][0].split("[")[1].split("]")[0]: row["bits"]
        for row in json.loads(capsys.readouterr().out)["layers"]
    }
    assert bits["quiet"] < bits["loud"]


def test_noise_is_that_of_the_network_with_one_weight_rounded(
    analyze: Analyze, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(HIERARCHICAL, "--passes", "every", "--json") == 0
    rows = {
        row["layers"][0]: row["noise"] for row in json.loads(capsys.readouterr().out)["layers"]
    }
    network = Small().requires_grad_(False)
    batches = data()[:4]  # as many as the output is compared on
    exact = [network(x) for x in batches]
    with torch.no_grad():
        weight = network.second.weight
        scale = weight.abs().amax((1, 2, 3), keepdim=True) / 3.5  # symmetric int3: -4 to 3
        weight.copy_((weight / scale).round().clamp(-4, 3) * scale)
        noise = sum(
            float((network(x) - y).square().sum()) for x, y in zip(batches, exact, strict=True)
        )
    signal = sum(float(y.square().sum()) for y in exact)
    assert rows["Small::Small/Conv2d[second]/conv2d"]["3"] == pytest.approx(
        noise / signal, rel=1e-3
    )


def test_small_noise_is_predicted_from_gradients(
    analyze: Analyze, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = {}
    for passes in ("fast", "every"):
        assert analyze(HIERARCHICAL, "--passes", passes, "--choices", "8", "--json") == 0
        noise[passes] = [
            row["noise"]["8"] for row in json.loads(capsys.readouterr().out)["layers"]
        ]
    ratios = [fast / every for fast, every in zip(*noise.values(), strict=True)]
    # 32 random projections: a standard deviation of a quarter
    assert all(0.6 < ratio < 1.6 for ratio in ratios)


def test_an_output_without_gradient_asks_for_measurement(
    analyze: Analyze, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(HIERARCHICAL, "--passes", "fast", kind=Decision) == 4
    error = capsys.readouterr().err
    assert "the model's output has no gradient by its weights" in error
    assert "--passes network" in error
    assert analyze(HIERARCHICAL, "--passes", "network", kind=Decision) == 0


def test_the_most_sensitive_weight_is_listed_first(
    analyze: Analyze, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(HIERARCHICAL) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    decibels = [float(line.split()[3]) for line in lines]
    assert decibels == sorted(decibels)
    assert "quiet" in lines[-1]


@pytest.mark.parametrize(
    ("option", "value", "most"), [("--size", "60%", 0.6), ("--max_mb", "0.0013", None)]
)
def test_sizes_count_all_weights_with_their_scales(
    option: str,
    value: str,
    most: float | None,
    analyze: Analyze,
    model: Callable[[type[nn.Module]], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = tmp_path / "mixed.json"
    assert analyze(HIERARCHICAL, option, value, "-o", str(written), "--json") == 0
    told = json.loads(capsys.readouterr().out)["mixed"]["weight_bytes"]
    sizes = []
    for config in (tmp_path / "config.json", written):
        assert (
            run_command(
                ["plan", "--config_file", str(config), "--model", model(Small), "--json"]
            )
            == 0
        )
        sizes.append(json.loads(capsys.readouterr().out)["weight_bytes"]["quantized"])
    assert sizes[1] == told <= (most * sizes[0] if most else 1300)


def test_layers_that_share_a_weight_get_one_width(
    analyze: Analyze,
    model: Callable[[type[nn.Module]], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = tmp_path / "mixed.json"
    config = {
        "global_quant_config": {
            "weight": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
        }
    }
    assert analyze(config, "--budget", "3.9", "-o", str(written), "--json", kind=Shared) == 0
    told = json.loads(capsys.readouterr().out)
    (kept,) = told["kept"].values()
    assert "not a linear or convolution layer" in kept
    bits = {
        key[0]: spec["bit_width"]
        for key, spec in plan_of(written, model(Shared), capsys).items()
    }
    inner, outer, head = (
        next(b for name, b in bits.items() if part in name)
        for part in ("inner", "outer", "head")
    )
    assert inner == outer != head


@pytest.mark.parametrize(
    ("more", "code", "sentence"),
    [
        (["--budget", "1.5"], 1, "the budget cannot be met: the smallest choice takes 2 bits"),
        (["--max_mb", "0.0001"], 1, "the budget cannot be met"),
        (["--budget", "3", "--size", "50%"], 2, "give one of them"),
        (["--size", "0.5"], 2, "--size 0.5 is not a size"),
        (["--size", "half%"], 2, "is not a share"),
        (["--budget", "nan"], 2, "--budget nan is not a size"),
        (["--budget", "1e308"], 2, "--budget 1e+308 is not a size"),
        (["--max_mb", "1e305"], 2, "--max_mb 1e+305 is not a size"),
        (["--choices", "2,x"], 2, "'x' is not a width"),
        (["--choices", ","], 2, "has no width"),
        (["--choices", "2,6", "--budget", "3.5"], 2, "the hierarchical form has no dtype int6"),
        (["--data", "random:0x4x5x5"], 2, ""),
    ],
)
def test_what_cannot_be_is_a_sentence(
    more: list[str],
    code: int,
    sentence: str,
    analyze: Analyze,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert analyze({"global_quant_config": {"weight": {"dtype": "int8"}}}, *more) == code
    error = capsys.readouterr().err
    assert "error:" in error.casefold()
    assert sentence in error
    assert "Traceback" not in error


def test_formats_without_integers_have_no_widths(
    analyze: Analyze, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        analyze({"global_quant_config": {"weight": {"dtype": "bfloat16"}}}, "--budget", "3")
        == 1
    )
    assert "its format is bfloat16, and only integers" in capsys.readouterr().err


def test_a_value_that_is_not_finite_names_the_layer(
    analyze: Analyze,
    model: Callable[[type[nn.Module]], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(model(Small))
    broken = path.read_text().replace(
        "return Small()",
        "net = Small(); net.first.bias.data[0] = 3e38; net.first.weight.data *= 1e38; return "
        "net",
    )
    path.write_text(broken)
    config = path.with_name("weights.json")
    config.write_text(json.dumps({"global_quant_config": {"weight": {"dtype": "int8"}}}))
    assert run_command(["analyze", "--config_file", str(config), "--model", str(path)]) == 4
    assert "batch 0: the input of Small::Small/Conv2d[second]/conv2d" in capsys.readouterr().err


class Silent(Small):
    """Returns zeros, as a network does whose last layer is not trained yet."""

    def __init__(self) -> None:
        super().__init__()
        for last in (self.loud, self.quiet):
            for parameter in last.parameters():
                nn.init.zeros_(parameter)


def test_noise_relative_to_an_output_of_zeros_is_not_known(
    analyze: Analyze, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"global_quant_config": {"weight": {"dtype": "int8"}}}
    assert analyze(weights, "--json", kind=Silent) == 0
    rows = json.loads(capsys.readouterr().out)["layers"]
    assert [list(row["noise"].values()) for row in rows] == [[None] * 4] * 4
