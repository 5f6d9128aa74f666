"""Fast finetuning: a layer's least squares, what it promises for every spec, and what a trained
network wins.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.extended import extended_except

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import config, document, layer
from support.corrections import corrected
from support.toys import built, traced
from torch import Tensor, nn

from quantizer.algorithms.finetuning import network as finetuned_network
from quantizer.algorithms.finetuning.layers import SOLVERS
from quantizer.algorithms.finetuning.network import FinetuningResult, finetune_network
from quantizer.algorithms.finetuning.rounding_problem import RoundingProblem, adaquant, adaround
from quantizer.calibration.solution import Solution, quantized_network
from quantizer.config.run_options import FINETUNE_MODES
from quantizer.errors import DataError
from quantizer.evaluation.compare import compare
from quantizer.graph.ir import Graph
from quantizer.graph.ops import OPS
from quantizer.graph.tracing.trace import trace
from quantizer.layerwise.adjustment import RoundedWeight
from quantizer.layerwise.patches import channel_rows, matrix_weight, patches, weight_matrix
from quantizer.nn.network import Network
from quantizer.numerics.granularity import to_rows
from quantizer.numerics.qparams import QParams
from quantizer.numerics.rounding import NEAREST
from quantizer.sources.batches import Batch

EXAMPLES = Path(__file__).parents[2] / "examples"
TOYS = [
    "residual",
    "mobile",
    "transposed",
    "branches",
    "tied",
    "reused",
    "containers",
    "attention",
]
SHAPES: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(5, 3), (2, 4, 5)),
    (nn.Linear(5, 3), (5,)),
    (nn.Conv1d(4, 6, 3, padding="same", dilation=2), (2, 4, 9)),
    (nn.Conv1d(4, 6, 4, padding="valid"), (2, 4, 9)),
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2), (2, 4, 7, 6)),
    (nn.Conv2d(4, 4, 3, groups=4), (4, 7, 6)),
    (nn.Conv3d(2, 4, 2, dilation=(1, 2, 1), padding=1), (1, 2, 4, 5, 4)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (2, 4, 5)),
    (
        nn.ConvTranspose2d(
            4, 6, 3, stride=(2, 3), padding=1, output_padding=(1, 2), dilation=(1, 2)
        ),
        (2, 4, 5, 4),
    ),
    (nn.ConvTranspose2d(2, 2, 1, padding=0, stride=2), (2, 2, 3, 3)),
    (nn.ConvTranspose2d(2, 2, 2, padding=2), (2, 2, 4, 4)),
    (nn.ConvTranspose3d(2, 4, 2, groups=2), (1, 2, 3, 3, 3)),
]


@pytest.mark.parametrize(
    ("module", "shape"), SHAPES, ids=[repr(module) for module, _ in SHAPES]
)
def test_patches_times_the_weight_are_the_layer(
    module: nn.Module, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module.bias.data.zero_()  # type: ignore[union-attr, operator]
    x, weight = torch.randn(shape), module.get_parameter("weight").detach()
    expected = channel_rows(module, module(x).detach())
    every = torch.arange(len(expected)).flip(0)
    product = patches(module, x, every) @ weight_matrix(module, weight).mT
    torch.testing.assert_close(
        product.transpose(0, 1).flatten(1), expected.flip(0), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(matrix_weight(module, weight_matrix(module, weight)), weight)


def test_every_operator_with_patches_is_tried() -> None:
    tried = {
        type(module).__name__.replace("ConvTranspose", "Conv_transpose").lower()
        for module, _ in SHAPES
    }
    assert tried == {
        name for name, row in OPS.items() if row.is_linear_or_convolution and not row.experts
    }


def problem(
    rows: int, depth: int, *, low: int = -4, high: int = 3, seed: int = 0, **more: Any
) -> RoundingProblem:
    """Random rows on correlated inputs, whose neighbours have correlation 0.9."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, 400, depth, generator=draw)
    inputs = noise.clone()
    for column in range(1, depth):
        inputs[..., column] = 0.9 * inputs[..., column - 1] + 0.19**0.5 * noise[..., column]
    weight = torch.randn(1, rows, depth, generator=draw)
    scale = weight.abs().amax(2).flatten() / high
    nearest = (weight / scale[:, None]).round().clamp(low, high)
    return RoundingProblem(
        weight=weight,
        nearest=nearest,
        inputs=inputs,
        targets=inputs @ weight.mT,
        scale=scale,
        zero_point=torch.zeros(rows),
        unit=torch.arange(rows)[None],
        quant_min=low,
        quant_max=high,
        **more,
    )


def test_coordinate_descent_comes_near_the_best_of_all_roundings() -> None:
    """The mean error of 40 rows is at most 1.25 times that of the best of 64 choices, and below
    round-to-nearest's.
    """
    task, integers = problem(40, 6), adaround(problem(40, 6))[0]
    low, high = task.bounds(task.scale)
    # errors() leaves out a constant: the error of the float weights themselves.
    constant = task.errors(task.weight / task.steps(task.scale), task.scale)
    choices = [
        torch.where(torch.tensor(up), high, low) for up in product((False, True), repeat=6)
    ]
    best = (
        torch.stack([task.errors(choice, task.scale) for choice in choices]).amin(0) - constant
    )
    found = task.errors(integers, task.scale) - constant
    nearest = task.errors(task.nearest, task.scale) - constant
    assert (best >= -1e-4).all()
    assert found.mean() <= 1.25 * best.mean()
    assert found.mean() <= 0.9 * nearest.mean()


@given(
    rows=st.integers(1, 5),
    depth=st.integers(1, 12),
    bits=st.integers(2, 8),
    seed=st.integers(0, 99),
)
@settings(derandomize=True, max_examples=25, deadline=None)
def test_no_row_ends_with_a_larger_error_than_plain_rounding(
    rows: int, depth: int, bits: int, seed: int
) -> None:
    task = problem(rows, depth, low=-(1 << (bits - 1)), high=(1 << (bits - 1)) - 1, seed=seed)
    before = task.errors(task.nearest, task.scale)
    room = 1e-5 * before.abs() + 1e-6  # float32's noise
    for solve in SOLVERS.values():
        integers, scale = solve(task)
        assert (task.errors(integers, scale) <= before + room).all()
        assert torch.equal(integers, integers.round())
        assert integers.min() >= task.quant_min
        assert integers.max() <= task.quant_max


def test_inputs_that_are_always_zero_leave_plain_rounding() -> None:
    task = problem(3, 4)
    silent = RoundingProblem(
        **{**vars(task), "inputs": task.inputs * 0, "targets": task.targets * 0}
    )
    assert torch.equal(adaround(silent)[0], task.nearest)


def test_the_command_line_offers_the_solvers() -> None:
    assert tuple(SOLVERS) == FINETUNE_MODES


def run(
    original: Graph, folder: Path, batches: Sequence[Batch], mode: str, content: dict[str, Any]
) -> Any:
    """The solution of plain calibration, and what finetuning made of it."""
    calibrated = corrected(original, config(folder, content), batches)
    made = finetune_network(
        calibrated.graph,
        calibrated.before,
        lambda: batches,
        mode,
        seed=0,
        done={},
        after_layer=lambda _: None,
    )
    return calibrated.graph, calibrated.before, made


def of_toy(name: str, folder: Path, mode: str, content: dict[str, Any]) -> Any:
    batches = [Batch(*built(name).call(size), None, None) for size in (6, 5)]
    return run(traced(name), folder, batches, mode, content)


def assert_on_the_codes(graph: Graph, before: Solution, made: FinetuningResult) -> None:
    """Quantizing again changes nothing, and each code is next to that of round-to-nearest with
    the same scales.
    """
    nodes = [node for node in graph.nodes if node.row.is_linear_or_convolution]
    assert nodes
    assert set(made.layers) == {node.name for node in nodes}
    # What there is without the last look at the output
    solution = before.with_rounded(made.layers)
    network, plain = quantized_network(graph, solution), Solution(solution.tensors)
    nearest = quantized_network(graph, plain)
    for name, found in made.layers.items():
        spec, scale = (
            solution.tensors[name, "weights"].spec,
            solution.tensors[name, "weights"].scale,
        )
        weight = network.layers[name].get_parameter("weight")
        assert torch.equal(weight, found.weight)
        difference = weight - nearest.layers[name].get_parameter("weight")
        moved = to_rows(difference, spec.cut) / scale.reshape(-1, 1)
        assert moved.abs().max() <= 1.01
        assert found.after <= found.before


@pytest.mark.parametrize(
    ("name", "mode"),
    extended_except(
        product(TOYS, SOLVERS),
        *((name, "adaround") for name in TOYS),
        ("residual", "adaquant"),
        ("transposed", "adaquant"),
    ),
)
def test_every_kind_of_layer_ends_on_its_grid_and_not_worse(
    name: str, mode: str, tmp_path: Path
) -> None:
    content = document(tensor={"weights": {"bit_width": 3, "per_channel": True}})
    graph, before, made = of_toy(name, tmp_path, mode, content)
    assert_on_the_codes(graph, before, made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("round_mode", "per_channel", "symmetry"),
    extended_except(
        product(sorted(NEAREST), (False, True), (False, True)),
        *[(name, name == "half_even", name == "half_up") for name in sorted(NEAREST)],
    ),
)
def test_every_spec(round_mode: str, per_channel: bool, symmetry: bool, tmp_path: Path) -> None:
    weights = {
        "bit_width": 4,
        "per_channel": per_channel,
        "symmetry": symmetry,
        "round_mode": round_mode,
    }
    content = document(tensor={"weights": {**weights, "signed": symmetry}})
    names = ["transposed", "mobile"]
    if per_channel == symmetry:
        names.reverse()
    for mode, name in zip(SOLVERS, names, strict=True):
        assert_on_the_codes(*of_toy(name, tmp_path, mode, content))


@pytest.mark.parametrize("mode", list(SOLVERS))
def test_powers_of_two_stay_powers_of_two(mode: str, tmp_path: Path) -> None:
    content = document(
        overall={"scale_type": "poweroftwo"}, tensor={"weights": {"bit_width": 4}}
    )
    _, before, made = of_toy("residual", tmp_path, mode, content)
    for name, found in made.layers.items():
        mantissa, _ = torch.frexp(found.qparams.scale)
        assert (mantissa == 0.5).all()
        if mode == "adaround":
            assert torch.equal(found.qparams.scale, before.tensors[name, "weights"].scale)


def test_float_layers_and_fine_grids_are_left_alone(tmp_path: Path) -> None:
    fine = layer(type="torch.nn.Linear", roles=["weights"], bit_width=16)
    content = document(layer(type="torch.nn.Conv2d", roles=[]), fine)
    graph, before, made = of_toy("mobile", tmp_path, "adaround", content)
    assert {node.op for node in graph.nodes if node.row.is_linear_or_convolution} == {
        "conv2d",
        "linear",
    }
    assert made.layers == {}
    assert made.solution == before


def test_the_same_seed_gives_the_same_and_finetuned_layers_are_not_solved_again(
    tmp_path: Path,
) -> None:
    content = document(tensor={"weights": {"bit_width": 3}})
    graph, before, first = of_toy("residual", tmp_path, "adaquant", content)
    batches = [Batch(*built("residual").call(size), None, None) for size in (6, 5)]
    steps: list[dict[str, RoundedWeight]] = []
    for done in ({}, dict(list(first.layers.items())[:2])):
        again = finetune_network(
            graph,
            before,
            lambda: batches,
            "adaquant",
            seed=0,
            done=done,
            after_layer=lambda found: steps.append(dict(found)),
        )
        for name, expected in first.layers.items():
            assert torch.equal(again.layers[name].weight, expected.weight)
            assert torch.equal(again.layers[name].qparams.scale, expected.qparams.scale)
    assert len(steps) == 2 * len(graph.nodes)
    assert steps[0] == {}
    assert len(steps[len(graph.nodes)]) == 2


def test_an_output_that_becomes_worse_undoes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = finetuned_network.fast_finetune

    def spoiled(
        reference: Any, quantized: Any, mode: str, **more: Any
    ) -> dict[str, RoundedWeight]:
        last = [node for node in quantized.network.graph.nodes if node.op == "linear"][-1]
        shape = quantized.network.layers[last.name].get_parameter("weight").shape
        quantizer = quantized.network.layers[last.name].quantizers["weights"]
        qparams = QParams(quantizer.scale, quantizer.zero_point)
        more["done"] = {last.name: RoundedWeight(torch.zeros(shape), qparams, 1.0, 0.5)}
        return original(reference, quantized, mode, **more)

    monkeypatch.setattr(finetuned_network, "fast_finetune", spoiled)
    _, before, made = of_toy("residual", tmp_path, "adaround", document())
    assert made.undone
    assert made.solution == before
    assert "undone" in made.summary


class Detector(nn.Module):
    """Boxes in pixels, and small scores."""

    def __init__(self, *, joined: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.boxes, self.scores, self.joined = nn.Linear(8, 4), nn.Linear(8, 2), joined

    def forward(self, x: Tensor) -> Any:
        boxes, scores = self.boxes(x) * 6400, self.scores(x)
        return (
            torch.cat([boxes, scores], 1) if self.joined else {"boxes": boxes, "scores": scores}
        )


@pytest.mark.parametrize(("joined", "scores"), [(False, "scores"), (True, "0.scores")])
def test_a_small_output_that_becomes_worse_undoes_everything(
    joined: bool, scores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the large one became better, and with it all outputs together."""
    original = finetuned_network.fast_finetune

    def spoiled(
        reference: Any, quantized: Any, mode: str, **more: Any
    ) -> dict[str, RoundedWeight]:
        name = next(
            node.name
            for node in quantized.network.graph.nodes
            if node.name.endswith("[scores]/linear")
        )
        quantizer = quantized.network.layers[name].quantizers["weights"]
        qparams = QParams(quantizer.scale, quantizer.zero_point)
        more["done"] = {name: RoundedWeight(torch.zeros(2, 8), qparams, 1.0, 0.5)}
        return original(reference, quantized, mode, **more)

    monkeypatch.setattr(finetuned_network, "fast_finetune", spoiled)
    batches = [
        Batch(
            (torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)),), {}, None, None
        )
        for seed in (0, 1)
    ]
    narrow = document(
        layer("Detector::Detector/Linear[boxes]/linear", roles=["weights"], bit_width=3),
        quantizable_data_type=["weights"],
    )
    graph = trace(Detector(joined=joined).eval(), batches[0].args)
    _, before, made = run(graph, tmp_path, batches, "adaround", narrow)
    assert made.undone
    assert made.solution == before
    assert f" ({scores}) dB" in made.summary


class Overflowing(nn.Module):
    """Its second layer's outputs are infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight.data.fill_(3e38)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).abs() * 1e3).clamp(-1, 1)


def test_an_infinite_error_names_its_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Overflowing().eval(), Batch((torch.randn(8, 4),), {}, None, None)
    content = document(quantizable_data_type=["weights"])
    with pytest.raises(
        DataError,
        match=r"error of Overflowing::Overflowing/Linear\[second\]/linear is not finite",
    ):
        run(trace(model, batch.args, {}), tmp_path, [batch], "adaround", content)


@pytest.fixture(scope="module")
def mobile_digits() -> Any:
    """The trained depthwise network's graph, calibration and evaluation batches."""
    pytest.importorskip("sklearn", reason="the digits come from scikit-learn (extra: examples)")
    sys.path.insert(0, str(EXAMPLES))
    try:
        import digits_mobile as example
    finally:
        sys.path.remove(str(EXAMPLES))
    calibration = [
        Batch((images,), {}, labels, None) for images, labels in example.calibration_data()
    ]
    evaluation = [
        Batch((images,), {}, labels, None) for images, labels in example.evaluation_data()
    ]
    return trace(example.model().eval(), calibration[0].args, {}), calibration, evaluation


def test_adaquant_knows_the_scale_that_cuts_nothing_off() -> None:
    """Weights on a grid that the observed scale misses by the factor between the rules."""
    on_grid = torch.tensor([[[7.0, -7.0, 3.0, 1.0]]])
    task = problem(1, 4, low=-8, high=7, uncut=7.5 / 7)
    scale = torch.tensor([7 / 7.5])
    near = (on_grid / scale).round().clamp(-8, 7)
    targets = task.inputs @ on_grid.mT
    found = replace(task, weight=on_grid, scale=scale, nearest=near, targets=targets)
    integers, best = adaquant(found)
    assert torch.allclose(integers * best, on_grid, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "gain_db"), [("adaround", 8.0), ("adaquant", 10.0)])
def test_learned_rounding_beats_nearest_in_three_bits(
    mobile_digits: Any, mode: str, gain_db: float, tmp_path: Path
) -> None:
    """W3A8 per channel: 80.8 % with round-to-nearest, 99.6 % (adaround) and 99.4 % (adaquant)
    with fast finetuning.
    """
    original, calibration, evaluation = mobile_digits
    unsigned = {"symmetry": False, "signed": False}
    tensor = {
        "weights": {"bit_width": 3, "per_channel": True},
        "activation": unsigned,
        "input": unsigned,
    }
    content = document(tensor={**tensor, "bias": {"bit_width": 32}})
    graph, before, made = run(original, tmp_path, calibration, mode, content)
    assert_on_the_codes(graph, before, made)
    assert not made.undone
    ratios = [layer.after / layer.before for layer in made.layers.values()]
    assert len(ratios) == 10
    assert max(ratios) <= 1.15
    assert statistics.median(ratios) <= 0.9
    compared = [
        compare(Network(graph), quantized_network(graph, s), evaluation)
        for s in (before, made.solution)
    ]
    plain, learned = (each.pairs()["top1"]["quantized"] for each in compared)
    print(
        f"\nW3A8 {mode}: top-1 {plain:.3f} -> {learned:.3f}, median layer error "
        f"{statistics.median(ratios):.2f}"
    )
    assert learned - plain >= 0.15
    assert compared[1].output.sqnr_db - compared[0].output.sqnr_db >= gain_db
