"""`--onnx_profile tuned`: what stays in float follows from measured times, deploy.json has it, and
repeats it without measuring.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from support.maps import Joined
from support.maps import images as maps
from support.runs import ROOT
from torch import Tensor, nn

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package, reason="files are written with it (extra: onnx)")

import onnx

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import QuantizerError, ResultError, UsageError
from quantizer.export.onnx import verify
from quantizer.export.onnx.speed import Feed
from quantizer.export.onnx.tuned import tuner
from quantizer.export.onnx.tuned.costs import BlockCost, BorderCost, Costs, TwoSides
from quantizer.export.onnx.tuned.profiles import Kernel, Profile, RuntimeMeter
from quantizer.export.performance import Speed
from quantizer.export.targets import require_choices

UNSIGNED: dict[str, Any] = {"symmetry": False, "signed": False}
CONFIG = document(
    tensor={"input": UNSIGNED, "weights": {"per_channel": True}, "activation": UNSIGNED}
)
FIRST = "Net::Net/Conv2d[first]/conv2d"


class Net(nn.Module):
    """Three convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 8, 3),
            nn.Conv2d(8, 4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).relu()).relu())


def images() -> Tensor:
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def calibrated() -> quantizer.Result:
    torch.manual_seed(0)
    return quantizer.calibrate(Net().eval(), CONFIG, [images()])


class FakeMeter:
    """Kernels of a real session with made-up times: integers are slow in the first layer."""

    conditions: Mapping[str, Any] = {
        "runtime": "fake",
        "processor": "none",
        "threads": 1,
        "vnni": True,
    }
    tuned_ratio = 1.5
    float_ratio = 1.0
    spread = 1.0

    def __init__(self, threads: int | None = None) -> None:
        pass

    def profile(self, model: bytes, feed: Feed) -> Profile:
        real = RuntimeMeter().profile(model, feed)
        kernels: list[Kernel] = []
        for kernel in real.kernels:
            seconds = 1e-3 if kernel.op_type in ("Conv", "FusedConv") else 1e-6
            if kernel.op_type == "QLinearConv":
                seconds = 5e-3 if "[first]" in kernel.name else 2e-4
            kernels.append(replace(kernel, seconds=seconds))
        return Profile(real.optimized, tuple(kernels))

    def speeds(self, models: Sequence[bytes], floating: bytes, feed: Feed) -> list[Speed]:
        return [self.speed(onnx.load_from_string(model)) for model in models]

    def speed(self, model: onnx.ModelProto) -> Speed:
        layers = quantized(model)
        ratio = self.tuned_ratio
        if not layers:
            ratio = self.float_ratio
        elif "Net::input_0" in layers:
            ratio = 0.8
        return Speed(ratio, ratio / self.spread, ratio * self.spread, 9)


def quantized(model: onnx.ModelProto) -> set[str]:
    """The layers whose outputs, or whose inputs, a file quantizes: those of its activations."""
    names: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            names.add(node.name.rsplit(".", 3)[0])
    return names


def no_meter(threads: int | None = None) -> RuntimeMeter:
    raise AssertionError("nothing may be measured")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeMeter]:
    class Meter(FakeMeter):
        """One that the test may change."""

    monkeypatch.setattr(tuner, "METER", Meter)
    return Meter


def export(result: quantizer.Result, folder: Path, **options: Any) -> Any:
    return result.export("onnx", folder / "net.onnx", onnx_profile="tuned", **options)


def deployed(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "deploy.json").read_text())
    return content


def test_what_integers_make_slower_stays_in_float(fake: type, tmp_path: Path) -> None:
    verification = export(calibrated(), tmp_path)
    layers = quantized(onnx.load(tmp_path / "net.onnx"))
    # The second layer reads codes of the first one's output, which keeps its quantization
    assert layers == {"Net::Net/relu", "Net::Net/relu.1", "Net::Net/Conv2d[third]/conv2d"}
    content = deployed(tmp_path)
    assert list(content["float_layers"]) == [FIRST]
    times = content["float_layers"][FIRST]
    assert times["integers_ms"] == pytest.approx([5.0, 5.0], rel=0.1)
    assert times["float_ms"] == pytest.approx([1.0, 1.0], rel=0.1)
    assert content["float_activations"] == [["Net::input_0", "input"]]
    assert content["speeds"]["chosen"] == [1.5, 1.5]
    assert content["measured"]["batches"] == [1, 4]
    assert verification.sqnr_db > 100
    line = verification.remarks[0]
    assert line.startswith(
        "1 layer in float, chosen for batches of 1 and 4 on 1 thread of none"
    )
    reasons = verification.default_session.kernels.floating
    assert "left there for speed" in reasons[FIRST]


def test_a_choice_is_repeated_without_measuring(
    fake: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = calibrated()
    export(result, tmp_path)
    names = ("net.onnx", "deploy.json")
    before = [(tmp_path / name).read_bytes() for name in names]
    monkeypatch.setattr(tuner, "METER", no_meter)
    export(result, tmp_path, overwrite=True)
    assert [(tmp_path / name).read_bytes() for name in names] == before
    other = tmp_path / "other"
    # Another calibration of the same network and config
    export(calibrated(), other, deploy_file=str(tmp_path / "deploy.json"))
    assert [(other / name).read_bytes() for name in names] == before


def test_open_sizes_are_measured_at_those_of_the_first_batch(fake: Any, tmp_path: Path) -> None:
    batches = [maps(16, 16), maps(24, 32)]
    config = str(ROOT / "configs" / "cpu_int8.json")
    result = quantizer.calibrate(Joined().eval(), config, batches, dynamic="height,width")
    export(result, tmp_path)
    value = onnx.load(tmp_path / "net.onnx").graph.input[0]
    names = [size.dim_param for size in value.type.tensor_type.shape.dim]
    assert names == ["batch", "", "height", "width"]
    assert deployed(tmp_path)["speeds"]["chosen"] == [1.5, 1.5]


def test_a_file_that_is_never_faster_computes_in_float(fake: Any, tmp_path: Path) -> None:
    fake.tuned_ratio = 0.9
    torch.manual_seed(0)
    made = quantizer.quantize(
        Net().eval(), [images()], "onnx", config=CONFIG, folder=tmp_path, onnx_profile="tuned"
    )
    verification = made.verification
    assert verification.default_session is not None
    assert verification.default_session.kernels is not None
    assert "int8 weights, float activations" in made.verdict[0]
    tmp_path = made.path.parent
    assert quantized(onnx.load(made.path)) == set()
    assert verification.default_session.kernels.share == 0.0
    content = deployed(tmp_path)
    assert len(content["float_layers"]) == 3
    assert content["speeds"]["chosen"] == [1.0, 1.0]


def test_a_busy_machine_is_refused(fake: Any, tmp_path: Path) -> None:
    fake.spread = 1.5
    with pytest.raises(UsageError, match="too busy to measure") as refused:
        export(calibrated(), tmp_path)
    assert "`deploy_file`" in str(refused.value.help)
    assert not (tmp_path / "deploy.json").exists()


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.pop(name)


def with_value(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.update({name: value})


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[quantizer.Result, Path]:
    """A result, and the folder of its tuned file."""
    folder = tmp_path_factory.mktemp("tuned")
    result = calibrated()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "METER", FakeMeter)
        export(result, folder)
    return result, folder


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_value("format", 2), "is not a deploy.json of format 1"),
        (without("speeds"), "is not a deploy.json of format 1"),
        (with_value("float_activations", ["conv"]), "is not a deploy.json of format 1"),
        (with_value("measured", {}), "is not a deploy.json of format 1"),
        (with_value("network", "0" * 16), "was measured for another network"),
        (with_value("weights", "int8"), 'was measured with onnx_weights="int8"'),
        (
            with_value("float_activations", [["Net::gone", "activation"]]),
            "leaves activation of Net::gone in float, which this network does not quantize",
        ),
    ],
)
def test_a_deploy_file_that_does_not_fit_is_refused(
    example: tuple[quantizer.Result, Path],
    change: Callable[[dict[str, Any]], object],
    text: str,
    tmp_path: Path,
) -> None:
    result, folder = example
    content = deployed(folder)
    change(content)
    (tmp_path / "deploy.json").write_text(json.dumps(content))
    with pytest.raises(QuantizerError, match=text) as refused:
        export(result, tmp_path)
    assert "to measure again" in str(refused.value.help)
    assert not (tmp_path / "net.onnx").exists()


def test_a_deploy_file_must_be_there_and_json(
    example: tuple[quantizer.Result, Path], tmp_path: Path
) -> None:
    result, _ = example
    with pytest.raises(ResultError, match=r"gone\.json"):
        export(result, tmp_path, deploy_file=str(tmp_path / "gone.json"))
    (tmp_path / "deploy.json").write_text("{")
    with pytest.raises(ResultError, match=r"deploy\.json"):
        export(result, tmp_path)


def test_options_that_do_not_go_together() -> None:
    tuned = {"onnx_profile": "tuned"}
    require_choices(tuned | {"deploy_file": "deploy.json", "onnx_weights": "int8"}, ["onnx"])
    with pytest.raises(UsageError, match="changes which layers are quantized"):
        require_choices(tuned, ["onnx", "pt2"])
    with pytest.raises(UsageError, match="--deploy_file is only for --onnx_profile tuned"):
        require_choices({"deploy_file": "deploy.json", "onnx_profile": "fast"}, ["onnx"])


@pytest.mark.parametrize("profile", ["tensorrt", "npu"])
def test_weights_that_a_profile_ignores_are_refused(profile: str) -> None:
    choices = {"onnx_profile": profile, "onnx_weights": "uint8"}
    with pytest.raises(UsageError, match="--onnx_weights is only for --onnx_profile exact, fa"):
        require_choices(choices, ["onnx"])
    require_choices(choices | {"onnx_weights": "auto"}, ["onnx"])


def test_figures_of_a_run_are_those_of_the_file(
    example: tuple[quantizer.Result, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python and on the command line; the digest is that of the other calibrations, too."""
    result, folder = example
    monkeypatch.setattr(tuner, "METER", no_meter)
    torch.manual_seed(0)
    made = quantizer.quantize(
        Net().eval(),
        [images()],
        "onnx",
        config=CONFIG,
        folder=tmp_path / "python",
        onnx_profile="tuned",
        deploy_file=folder / "deploy.json",
    )
    assert made.comparison.metrics["sqnr_db"] > result.test().metrics["sqnr_db"] + 0.1
    tested = {row["layer"] for row in made.comparison.layers if row["tensor"] == "input"}
    assert "Net::input_0" not in tested
    run_source(tmp_path)
    monkeypatch.chdir(tmp_path)
    common = ["--model", "net.py", "--config_file", "config.json", "-q"]
    assert run_command(["--quant_mode", "calib", *common]) == 0
    options = ["--deploy", "onnx", "--onnx_profile", "tuned"]
    file = ["--deploy_file", str(folder / "deploy.json")]
    assert run_command(["--quant_mode", "test", *common, *options, *file]) == 0
    place = Path("quantize_result")
    report = json.loads((place / "report.json").read_text())
    assert report["metrics"]["sqnr_db"] == pytest.approx(made.comparison.metrics["sqnr_db"])
    written = place / "export" / "Net.onnx"
    assert written.read_bytes() == made.path.read_bytes()
    assert deployed(written.parent) == deployed(folder)


@pytest.mark.parametrize("profile", ["exact", "tuned"])
def test_a_slow_file_says_what_is_not_slower(
    profile: str,
    example: tuple[quantizer.Result, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, folder = example
    slow = Speed(0.5, 0.49, 0.51, 9)
    monkeypatch.setattr(verify, "measured_speed", lambda *_, **__: slow)
    options = {"deploy_file": str(folder / "deploy.json")} if profile == "tuned" else {}
    file = tmp_path / "net.onnx"
    verification = result.export("onnx", file, onnx_profile=profile, **options)
    assert verification.default_session is not None
    line = verification.default_session.summary_lines[0]
    assert ('slower: use onnx_profile="tuned"' in line) == (profile == "exact")


A, B = "a", "b"


def border(block: str, readers: set[str], **changes: Any) -> BorderCost:
    plain = BorderCost(
        (block, "activation"),
        block,
        frozenset(readers),
        frozenset(),
        is_fused=True,
        to_integers=1.0,
        to_floats=1.0,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("integers", "floats", "to_integers", "chosen"),
    [
        ((1, 1), (5, 5), 1, set()),
        ((5, 1), (1, 5), 1, {A}),
        ((5, 1), (1, 1.5), 1, {A, B}),
        # Codes for b would cost more than b gains
        ((5, 1), (1, 5), 9, {A, B}),
        ((5, 5), (1, 1), 1, {A, B}),
        ((1, 5), (5, 1), 9, {B}),
    ],
)
def test_the_choice_follows_from_the_times(
    integers: tuple[float, float],
    floats: tuple[float, float],
    to_integers: float,
    chosen: set[str],
) -> None:
    blocks = {A: BlockCost(integers[0], floats[0]), B: BlockCost(integers[1], floats[1])}
    costs = Costs(blocks, (border(A, {B}, to_integers=to_integers),))
    assert costs.choices()[0] == chosen


def test_an_activation_stays_quantized_where_a_kernel_needs_its_codes() -> None:
    blocks = {A: BlockCost(1, 1), B: BlockCost(1, 1)}
    fused = Costs(blocks, (border(A, {B}),))
    key = (A, "activation")
    assert fused.left_out({A}) == set()
    assert fused.left_out({B}) == set()
    assert fused.left_out({A, B}) == {key}
    made_of_floats = Costs(blocks, (border(A, {B}, is_fused=False),))
    assert made_of_floats.left_out({B}) == {key}


def test_two_sides_are_as_cheap_as_any() -> None:
    draw = random.Random(0)
    for _ in range(20):
        names = "abcdef"
        alone = {name: (draw.random(), draw.random()) for name in names}
        between = {pair: draw.random() / 2 for pair in itertools.permutations(names, 2)}
        sides = TwoSides()
        for name, (first, second) in alone.items():
            sides.cost(name, on_first=first, on_second=second)
        for (first, second), cost in between.items():
            sides.cost_apart(first, second, cost)

        def total(chosen: set[str]) -> float:
            cost = sum(alone[name][name not in chosen] for name in names)  # noqa: B023
            for (first, second), part in between.items():  # noqa: B023
                if first in chosen and second not in chosen:
                    cost += part
            return cost

        every = itertools.product((False, True), repeat=len(names))
        best = min(
            total({name for name, is_first in zip(names, row, strict=True) if is_first})
            for row in every
        )
        assert total(sides.first_side()) == pytest.approx(best)


@pytest.mark.parametrize(("size", "clips"), [(8.0, 1), (0.5, 0)])
def test_the_codes_of_a_gate_end_where_it_does(
    size: float, clips: int, fake: type, tmp_path: Path
) -> None:
    """Small inputs do not reach -3, so their steps stay."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.Conv2d(8, 8, 3)).eval()
    result = quantizer.calibrate(layers, CONFIG, [size * images()])
    verification = result.export(
        "onnx", tmp_path / "net.onnx", [size * images()], onnx_profile="tuned"
    )
    file = onnx.load(tmp_path / "net.onnx")
    steps: list[float] = []
    for tensor in file.graph.initializer:
        if tensor.name.endswith("Conv2d[0]/conv2d.activation.scale"):
            steps.append(float(onnx.numpy_helper.to_array(tensor)))
    codes_to_the_end = 3 / steps[0]
    is_whole = abs(codes_to_the_end - round(codes_to_the_end)) < 1e-4
    assert is_whole == bool(clips)
    assert sum(node.op_type == "Clip" for node in file.graph.node) == clips
    assert (verification.equal > 0.999) == bool(clips)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file takes twice as long as the float network, for 2 ms."""
    speed = Speed(0.5, 0.49, 0.51, 9, float_seconds=1e-3)
    monkeypatch.setattr(verify, "measured_speed", lambda *_, **__: speed)


def run_source(folder: Path) -> None:
    """A model and a config in a folder, which becomes the current one."""
    source = (
        "import sys, torch\n"
        f"sys.path.insert(0, {str(ROOT / 'tests' / 'export')!r})\n"
        "from test_tuned import images, Net\n"
        "def model():\n    torch.manual_seed(0)\n    return Net()\n"
        "def calibration_data():\n    return [images()]\n"
    )
    (folder / "net.py").write_text(source)
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.usefixtures("slow")
def test_a_run_whose_file_is_slow_leaves_layers_in_float(
    fake: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The next run, and Python, repeat the choice without measuring."""
    run_source(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = [
        "run",
        "net.py",
        "--to",
        "onnx",
        "--config_file",
        "config.json",
        "-o",
        "one",
        "-q",
    ]
    assert run_command(command) == 0
    out = capsys.readouterr().out
    assert "Note: profile mixed: 1 layer in float, chosen for batches of 1 and 4" in out
    assert "Next: check in config.json and one/export/deploy.json, and repeat this in" in out
    assert "--to onnx --onnx_profile mixed --gate " in out
    folder = tmp_path / "one" / "export"
    assert list(deployed(folder)["float_layers"]) == [FIRST]
    written = (folder / "Net.onnx").read_bytes()
    assert "Net::input_0" not in quantized(onnx.load_from_string(written))
    metrics = json.loads((tmp_path / "one" / "report.json").read_text())["metrics"]
    with monkeypatch.context() as patched:
        patched.setattr(tuner, "METER", no_meter)
        assert run_command(command) == 0
    assert (folder / "Net.onnx").read_bytes() == written
    torch.manual_seed(0)
    made = quantizer.quantize(
        Net().eval(), [images()], "onnx", config=CONFIG, folder=tmp_path / "two"
    )
    assert made.path.read_bytes() == written
    assert made.comparison.metrics["sqnr_db"] == pytest.approx(metrics["sqnr_db"])


@pytest.mark.usefixtures("slow")
def test_a_run_keeps_integers_where_float_is_fastest(
    fake: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.float_ratio, fake.tuned_ratio, fake.spread = 1.0, 0.7, 2.0
    run_source(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_command(["run", "net.py", "--config_file", "config.json"]) == 0
    out = capsys.readouterr().out
    assert "In float, it would be faster: --onnx_profile tuned" in out
    model = onnx.load("quantize_result/export/Net.onnx")
    assert "Net::input_0" in quantized(model)


@pytest.mark.parametrize(
    "options", [("--onnx_profile", "fast"), ("--to", "tensorrt", "--preset", "tensorrt_int8")]
)
@pytest.mark.usefixtures("slow")
def test_a_profile_that_is_given_is_kept(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "METER", no_meter)
    run_source(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_command(["run", "net.py", *options]) == 0
    assert not (tmp_path / "quantize_result" / "export" / "deploy.json").exists()


@pytest.mark.usefixtures("slow")
def test_a_choice_for_another_network_is_made_anew_by_a_run(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_source(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_command(["run", "net.py", "--config_file", "config.json"]) == 0
    before = deployed(tmp_path / "quantize_result" / "export")
    changed = json.dumps(document(tensor={"input": UNSIGNED, "activation": UNSIGNED}))
    (tmp_path / "config.json").write_text(changed)
    assert run_command(["run", "net.py", "--config_file", "config.json"]) == 0
    after = deployed(tmp_path / "quantize_result" / "export")
    assert before["network"] != after["network"]
    assert before["float_layers"].keys() == after["float_layers"].keys()


def test_short_calls_are_not_worth_a_choice() -> None:
    slow = Speed(0.5, 0.49, 0.51, 9, remedy="--onnx_profile tuned", float_seconds=5e-5)
    assert not slow.asks_for_floats
    assert replace(slow, float_seconds=5e-4).asks_for_floats
    assert not replace(slow, float_seconds=5e-4, remedy="").asks_for_floats
