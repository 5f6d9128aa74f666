"""GPTAQ and Qronos: GPTQ that makes up for the errors of its inputs as well."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.rescaling import with_rounded_weights
from support.roundings import (
    CHANNELS,
    autoregressive,
    decaying,
    layer_names,
    linear,
    remarks,
    resumed,
    solved,
    task_of,
    to_nearest,
    weight_of,
)
from torch import Tensor, nn

from quantizer.algorithms.gptq.algorithms import gptaq, gptq, qronos
from quantizer.algorithms.gptq.layers import round_layers
from quantizer.algorithms.gptq.settings import (
    ColumnRounding,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
)
from quantizer.algorithms.gptq.target import (
    GptaqTarget,
    GptqTarget,
    Member,
    Products,
    QronosTarget,
)
from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.adjustment import Adjustment, Run, Task
from quantizer.layerwise.gram import Drift, Gram
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams
from quantizer.nn.network import Network
from quantizer.numerics.qparams import QParams

RUNS: dict[str, tuple[Run, ColumnRounding]] = {
    "gptq": (gptq, GPTQConfig()),
    "gptaq": (gptaq, GPTAQConfig()),
    "qronos": (qronos, QronosConfig()),
}
ASYMMETRIC = ("gptaq", "qronos")


def stack(bits: int) -> Task:
    """Five layers, each of which sees the errors of those before it."""
    torch.manual_seed(0)
    layers = [part for _ in range(5) for part in (nn.Linear(96, 96), nn.ReLU())]
    batches = torch.split(3 * decaying(2048, 96, seed=1), 512)
    return task_of(nn.Sequential(*layers[:-1]), batches, replace(CHANNELS, bit_width=bits))


@torch.no_grad()
def output_error(task: Task, found: Adjustment) -> float:
    """Of the whole network on other inputs."""
    x = 3 * decaying(2048, 96, seed=2)
    expected: Tensor = Network(task.graph)(x)
    return float(
        (Network(with_rounded_weights(task.graph, found))(x) - expected).square().sum()
    )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_layers_make_up_for_counts_at_the_end_of_a_stack(bits: int) -> None:
    """Both are better than GPTQ, as their papers say (arXiv 2504.02692, 2505.11695)."""
    task = stack(bits)
    errors = {
        name: output_error(task, run(task, settings, Adjustment()))
        for name, (run, settings) in RUNS.items()
    }
    assert errors["gptaq"] < 0.95 * errors["gptq"]
    assert errors["qronos"] < 0.8 * errors["gptq"]


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_where_inputs_have_no_error_it_is_gptq(name: str) -> None:
    """The first layer reads what the float network reads; to the last bit if the damping is the
    same.
    """
    run, settings = RUNS[name]
    settings = replace(settings, alpha=0.25 if name == "gptaq" else 0.0)  # type: ignore[call-arg]
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    x = decaying(2048, 64, seed=1)
    found, _ = solved(weight, x, settings=settings, run=run)
    expected, _ = solved(weight, x, settings=GPTQConfig(damp_percent=settings.damp_percent))
    assert (
        torch.equal(found.weight, expected.weight)
        and found.after == expected.after < 0.7 * found.before
    )


def mismatched(depth: int, seed: int, tokens: int = 256) -> tuple[Tensor, Tensor]:
    """Inputs of a layer in the float network and in the rounded one, [tokens, depth]."""
    f = autoregressive(tokens, depth, seed)
    mixing = torch.randn(depth, depth, generator=torch.Generator().manual_seed(seed)) / depth
    return f, f + 0.5 * f @ mixing


def rounded_weight(
    weight: Tensor, f: Tensor, x: Tensor, aim: GptqTarget, spec: QuantizationSpec = CHANNELS
) -> Tensor:
    """One linear layer rounded for these inputs; to nearest where nothing is gained."""
    layer = linear(weight)
    gram, drift = Gram(layer), Drift(layer)
    gram.add(x)
    drift.add(f, x)
    products = [Products(gram.matrix[0], drift.matrix[0])]
    found = round_layers([Member.of("layer", layer, spec, None)], products, len(x), aim).layers
    return found["layer"].weight


def rounded_column(column: Tensor, qparams: QParams) -> Tensor:
    """Symmetric, half to even, [rows]."""
    scale = qparams.scale.flatten().double()
    return (column / scale).round().clamp(-4, 3) * scale


def gptaq_by_definition(
    weight: Tensor, f: Tensor, x: Tensor, settings: GPTAQConfig, qparams: QParams
) -> Tensor:
    """Column by column, each with least squares of its own over the columns that are left
    (arXiv 2504.02692).
    """
    w, gram = weight.double(), x.T.double() @ x.double()
    h = gram + settings.damp_percent * gram.diagonal().mean() * torch.eye(len(gram))
    for i in range(len(h) - 1):
        error = (f[:, i] - x[:, i]).double() @ x[:, i + 1 :].double()
        made_up = torch.linalg.solve(h[i + 1 :, i + 1 :], error)
        w[:, i + 1 :] += settings.alpha * torch.outer(weight[:, i].double(), made_up)
    target = w.clone()
    for j in range(len(h)):
        q = rounded_column(w[:, j], qparams)
        if j + 1 < len(h):
            w[:, j + 1 :] += torch.outer(
                w[:, j] - q, torch.linalg.solve(h[j + 1 :, j + 1 :], h[j + 1 :, j])
            )
        w[:, j] = q
    assert not torch.equal(target, w)
    return w.float()


def qronos_by_definition(
    weight: Tensor, f: Tensor, x: Tensor, damping: float, qparams: QParams
) -> Tensor:
    """Each column the best for all others as they are, then those that are left fitted anew
    (arXiv 2505.11695).
    """
    w, depth = weight.double(), weight.shape[1]
    pull = torch.eye(depth).double() * damping**0.5
    a = torch.cat([x.double(), pull])
    outputs = torch.cat([f.double() @ w.T, pull @ w.T])
    q = w.clone()
    for j in range(depth):
        left = outputs - a @ q.T + a[:, [j]] * q[:, j]
        q[:, j] = rounded_column(a[:, j] @ left / a[:, j].square().sum(), qparams)
        if j + 1 < depth:
            q[:, j + 1 :] = torch.linalg.lstsq(
                a[:, j + 1 :], outputs - a[:, : j + 1] @ q[:, : j + 1].T
            ).solution.T
    return q.float()


@pytest.mark.parametrize("seed", range(3))
def test_both_do_what_their_papers_define(seed: int) -> None:
    """Their fast forms against the definitions, in float64 on the data itself."""
    weight = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed))
    f, x = mismatched(24, seed)
    qparams = nearest_qparams(CHANNELS, weight)
    asymmetric, fitted = GPTAQConfig(desc_act=False), QronosConfig(alpha=1e-3, desc_act=False)
    expected = gptaq_by_definition(weight, f, x, asymmetric, qparams)
    assert torch.allclose(
        rounded_weight(weight, f, x, GptaqTarget(asymmetric)), expected, atol=1e-5
    )
    largest = float(torch.linalg.eigvalsh(x.T.double() @ x.double())[-1])
    assert QronosTarget(fitted).damping(x.T @ x) == pytest.approx(1e-3 * largest, rel=1e-2)
    expected = qronos_by_definition(
        weight, f, x, QronosTarget(fitted).damping(x.T @ x), qparams
    )
    assert torch.allclose(
        rounded_weight(weight, f, x, QronosTarget(fitted)), expected, atol=1e-5
    )


def test_four_weights_come_near_to_the_best_of_all_choices() -> None:
    """The outputs of the float network against all 8^4 roundings, in the mean of 40 draws."""
    aims = {
        "gptq": GptqTarget(GPTQConfig()),
        "gptaq": GptaqTarget(GPTAQConfig(alpha=1.0)),
        "qronos": QronosTarget(QronosConfig()),
    }
    errors: dict[str, list[float]] = {name: [] for name in (*aims, "best")}
    codes = torch.cartesian_prod(*(torch.arange(-4.0, 4.0),) * 4)
    for seed in range(40):
        weight = torch.randn(1, 4, generator=torch.Generator().manual_seed(seed))
        f, x = mismatched(4, seed)
        choices = {name: rounded_weight(weight, f, x, aim) for name, aim in aims.items()}
        choices["best"] = codes * nearest_qparams(CHANNELS, weight).scale
        for name, choice in choices.items():
            errors[name].append(float((choice @ x.T - weight @ f.T).square().sum(1).min()))
    mean = {name: sum(found) / len(found) for name, found in errors.items()}
    assert mean["qronos"] <= 1.5 * mean["best"]
    assert mean["qronos"] <= 0.25 * mean["gptq"]
    assert mean["gptaq"] <= 0.75 * mean["gptq"]


def test_no_share_of_the_inputs_errors_is_gptq() -> None:
    """alpha 0, to the last bit."""
    task = stack(3)
    whole, none = (
        gptq(task, GPTQConfig(), Adjustment()),
        gptaq(task, GPTAQConfig(alpha=0.0), Adjustment()),
    )
    assert all(
        torch.equal(each.weight, none.rounded[name].weight)
        for name, each in whole.rounded.items()
    )


@pytest.mark.parametrize("name", ASYMMETRIC)
@pytest.mark.parametrize("true_sequential", [True, False])
def test_an_interrupted_run_goes_on_beside_the_float_network(
    name: str, true_sequential: bool
) -> None:
    """After two of five groups; and each weight is one of its scale."""
    run, settings = RUNS[name]
    settings = replace(settings, true_sequential=true_sequential)
    states: list[Adjustment] = []
    task = replace(stack(4), after_group=lambda found, done: states.append(found))
    whole = run(task, settings, Adjustment())
    again = run(resumed(task, 2), settings, states[1])
    assert list(whole.rounded) == layer_names(task.graph) == list(again.rounded)
    for layer, rounded in whole.rounded.items():
        assert torch.equal(again.rounded[layer].weight, rounded.weight)
        assert torch.equal(
            nearest(rounded.weight, task.specs[layer, "weights"], rounded.qparams),
            rounded.weight,
        )


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_dead_inputs_and_few_tokens_leave_finite_weights(name: str) -> None:
    """Three tokens, and a channel of zeros."""
    run, settings = RUNS[name]
    x = decaying(3, 96, seed=1)
    x[:, 5] = 0
    task = replace(stack(3), batches=task_of(nn.Linear(96, 96), [x], CHANNELS).batches)
    found = run(task, settings, Adjustment())
    first = layer_names(task.graph)[0]
    plain = to_nearest(weight_of(task.graph, first), task.specs[first, "weights"])
    assert all(
        each.weight.isfinite().all() and each.after <= each.before
        for each in found.rounded.values()
    )
    assert torch.equal(found.rounded[first].weight[:, 5], plain[:, 5])


def test_a_fit_to_few_tokens_is_told() -> None:
    """Ninety-six unknowns of a row and as many equations; more damping helps as more tokens
    do.
    """
    few = replace(
        stack(4),
        batches=task_of(nn.Linear(96, 96), [3 * decaying(96, 96, seed=1)], CHANNELS).batches,
    )
    found, damped = (
        qronos(few, QronosConfig(alpha=alpha), Adjustment()) for alpha in (1e-6, 1e-3)
    )
    few_tokens = (
        "qronos fits its 96 inputs to 96 tokens, and with fewer than 384 the result may not hold "
        "for other data"
    )
    assert all(any(few_tokens in text for text in texts) for texts in remarks(found).values())
    assert output_error(few, damped) < 0.5 * output_error(few, found)
    assert not any(
        "tokens" in remark.text
        for remark in qronos(stack(4), QronosConfig(), Adjustment()).remarks
    )
