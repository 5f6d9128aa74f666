"""Where calibration data or weights are of no use, every algorithm says so or leaves finite
weights, no worse ones.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.extended import extended
from support.rescaling import difference, task_of
from torch import Tensor, nn

from quantizer import Config, ModelQuantizer
from quantizer.calibration.run_algorithms import load_run
from quantizer.config.algorithms import ALGORITHMS, PreQuantOptConfig
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError, ModelError
from quantizer.layerwise.adjustment import Adjustment, Task

INT4 = QuantizationSpec(bit_width=4, qscheme="per_channel", ch_axis=0)
GROUPS = QuantizationSpec(bit_width=4, qscheme="per_group", ch_axis=1, group_size=8)
READS_DATA = sorted(name for name, kind in ALGORITHMS.items() if kind.needs_data)
FOR_WEIGHTS = [name for name in READS_DATA if not ALGORITHMS[name].eases_activations]


class Cubed(nn.Module):
    """Layers with a norm before, and a power between them that overflows where inputs are
    large.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = (
            nn.LayerNorm(16),
            nn.Linear(16, 24),
            nn.Linear(24, 16),
        )
        self.behind, self.last = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, 16] to [N, T, 8]."""
        y = torch.relu(self.first(self.norm(x) + x))
        return self.last(self.behind(self.second(y * y * y)))  # type: ignore[no-any-return]


def data(batches: int = 3) -> list[Tensor]:
    """Gaussian batches of eight tokens."""
    return list(torch.randn(batches, 2, 4, 16, generator=torch.Generator().manual_seed(1)))


def run(name: str, task: Task) -> Adjustment:
    """An algorithm with its defaults."""
    return load_run(name)(task, ALGORITHMS[name](), Adjustment())


def check(task: Task, found: Adjustment) -> None:
    """No value that is not finite, and no layer that is worse than round-to-nearest."""
    assert all(
        value.isfinite().all() for own in found.parameters.values() for value in own.values()
    )
    for rounded in found.rounded.values():
        assert rounded.weight.isfinite().all()
        assert rounded.qparams.scale.isfinite().all()
        assert 0 <= rounded.after <= rounded.before


@pytest.mark.parametrize("name", READS_DATA)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e15])
def test_values_that_are_not_finite_are_named_by_layer_and_batch(name: str, bad: float) -> None:
    """NaN comes in with the second batch, or appears inside the network as a power of a finite
    value.
    """
    inputs = data()
    spec = GROUPS if ALGORITHMS[name].needs_groups else INT4
    task = task_of(Cubed(), inputs, spec, QuantizationSpec())
    inputs[1] = inputs[1].clone()
    inputs[1][0, 0, 0] = bad
    layer = "second" if math.isfinite(bad) else "first"
    with pytest.raises(
        DataError, match=rf"^batch 1: the input of .*{layer}.* \d+ NaN and \d+ infinite"
    ):
        run(name, task)


@pytest.mark.parametrize("name", READS_DATA)
def test_a_batch_of_another_shape_is_named(name: str) -> None:
    inputs = data(4)
    task = task_of(Cubed(), inputs, INT4, QuantizationSpec())
    inputs[3] = inputs[3][..., :12]
    with pytest.raises(
        DataError,
        match=r"^batch 3: .*input_0: expected \[b, 4, 16\] torch.float32, got \[2, 4, 12\]",
    ):
        run(name, task)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(name: str, bad: float) -> None:
    """In a model in memory, as checkpoints are checked when they are read; with whatever runs
    before the ranges.
    """
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    model[3].weight.data[1, 2] = bad
    is_before = issubclass(ALGORITHMS[name], PreQuantOptConfig)
    key = "pre_quant_opt_config" if is_before else "algo_config"
    config = Config.from_dict(
        {"global_quant_config": {"weight": {"dtype": "int4"}}, key: {"name": name}}
    )
    why = r"^the weights hold NaN or Inf: 1 of 128 values of 3\.weight"
    with pytest.raises(ModelError, match=why):
        ModelQuantizer(config).quantize_model(model, [x[0] for x in data()])


USELESS = {
    "zeros": lambda x: x * 0,
    "a dead channel": lambda x: x.index_fill(2, torch.tensor([5]), 0.0),
    "one token again and again": lambda x: data()[0][:1, :1].expand(2, 4, 16).contiguous(),
    "constant": lambda x: torch.full_like(x, -3.0),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kind", USELESS)
def test_data_that_tell_little_do_no_harm(name: str, kind: str) -> None:
    """Gram matrices of rank 0 and 1, channels without a range."""
    inputs = [USELESS[kind](x) for x in data()]
    task = task_of(Cubed(), inputs, INT4, QuantizationSpec())
    found = run(name, task)
    check(task, found)
    assert difference(task, found, data()) < 1e-4, "on other data as well"


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kind", ["zeros", "a zero row", "a zero column", "constant"])
def test_weights_without_a_range_do_no_harm(name: str, kind: str) -> None:
    """Scales of channels that are zero, factors of columns that are."""
    model, inputs = Cubed(), data()
    weight = model.second.weight.data
    where = {"zeros": ..., "a zero row": 3, "a zero column": (slice(None), 3), "constant": ...}[
        kind
    ]
    weight[where] = 1e-3 if kind == "constant" else 0.0
    task = task_of(model, inputs, INT4, QuantizationSpec())
    found = run(name, task)
    check(task, found)
    assert difference(task, found, inputs) < 1e-4


def test_inputs_whose_squares_float32_cannot_hold_decide_nothing() -> None:
    """Draws on which AWQ took factors for inputs of 1e-20, and lost up to 28 % by them."""
    for seed in (2803, 2951, 4189, 4782):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
        task = task_of(model, [1e-20 * x for x in data()], INT4, QuantizationSpec())
        check(task, run("awq", task))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", [1e-30, 1e30, *extended(1e-20, 1e20)])
@pytest.mark.parametrize("weights", [1e-40, 1e20, *extended(1.0)])
def test_sizes_beyond_what_float32_can_square_end_well(
    name: str, size: float, weights: float
) -> None:
    """Finite, or an error that names the layer."""
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    model[0].weight.data.mul_(weights)
    task = task_of(model, [size * x for x in data()], INT4, QuantizationSpec())
    try:
        found = run(name, task)
    except DataError as error:
        assert "the input of" in error.message
        assert size * max(weights, 1.0) > 1e15
    else:
        check(task, found)


@pytest.mark.parametrize("name", FOR_WEIGHTS)
def test_no_layer_ends_worse_where_there_is_nothing_to_gain(name: str) -> None:
    """White noise, and few tokens of it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for tokens in (16, 1024):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0))
        task = task_of(model, list(torch.split(x, 16)), INT4)
        check(task, run(name, task))
