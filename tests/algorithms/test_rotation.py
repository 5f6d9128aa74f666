"""Rotation keeps the float function of any model, and what it turns has no outliers: what 4
bits need.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.extended import extended_except
from support.rescaling import difference, outputs, quantized_error, task_of
from support.structures import IDS, Mixture, Mobile, pretrained
from torch import Tensor, nn

from quantizer.algorithms.rotation.residual_stream import residuals
from quantizer.algorithms.rotation.rotation import rotation
from quantizer.algorithms.rotation.settings import RotationConfig
from quantizer.config.model import QuantizationSpec
from quantizer.graph.emit import emit
from quantizer.graph.ir import Graph
from quantizer.layerwise.adjustment import Adjustment, RoundedWeight, Task, apply_adjustment
from quantizer.nn.network import Network
from quantizer.nn.rare_layers import InputRotation

W4 = QuantizationSpec(bit_width=4, qscheme="per_channel", ch_axis=0)
A4 = QuantizationSpec(bit_width=4, is_dynamic=True, qscheme="per_token", ch_axis=-1)
USUAL = ("Llama", "Gemma", "OPT", "T5", "Bert", "ViT", "Mixtral", "Olmo2")
NOT_AT_ALL = RotationConfig(residual=False, values=False, online=False)


def families(*names: str) -> Any:
    """Tests of transformers' models run where it is installed; tracing those takes long."""
    cases = extended_except(names, *(name for name in names if name in USUAL))
    given = pytest.mark.parametrize("family", cases)
    return lambda test: pytest.mark.slow(given(test))


@functools.cache
def task(family: str) -> tuple[Task, list[Any]]:
    pytest.importorskip("transformers", reason="needs transformers (extra: llm)")
    model, inputs = pretrained(family)
    model = Shortened(model) if inputs[1:] else model
    return task_of(model, [inputs[0]], W4, A4), [inputs[0]]


class Shortened(nn.Module):
    """An encoder and a decoder, which reads the first tokens of the same texts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x, None, x[:, :5])


@families(
    "Llama", "Qwen2", "Mistral", "Gemma", "Phi3", "Cohere", "GPTNeoX", "OPT", "GPT2", "T5"
)
def test_the_residual_stream_of_decoders_turns(family: str) -> None:
    """Every layer that reads it is told, and the outputs stay: GQA, biases, offset norms,
    LayerNorm, tied heads.
    """
    given_task, inputs = task(family)
    found = rotation(given_task, RotationConfig(values=False, online=False), Adjustment())
    assert not found.remarks
    assert difference(given_task, found, inputs) < 1e-5
    whole = [residual for residual in residuals(given_task.graph) if residual.obstacle is None]
    assert len(whole) == 1
    assert len(whole[0].readers) >= 5
    head = (
        given_task.graph.nodes[-1].name if family != "Cohere" else next(iter(whole[0].readers))
    )
    assert head in whole[0].readers or family == "T5"


TURNED = (
    "Llama",
    "Qwen2",
    "Gemma",
    "Phi3",
    "OPT",
    "GPT2",
    "T5",
    "Bert",
    "ViT",
    "Mixtral",
    "Olmo2",
)
PARTS_ALONE = (
    ("Llama", "values"),
    ("OPT", "values"),
    ("Bert", "online"),
    ("Mixtral", "online"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "part"),
    extended_except(
        itertools.product(TURNED, ("values", "online", "all")),
        *((family, "all") for family in USUAL),
        *PARTS_ALONE,
    ),
)
def test_other_rotations_keep_the_function(family: str, part: str) -> None:
    parts = {key: part in (key, "all") for key in ("residual", "values", "online")}
    given_task, inputs = task(family)
    found = rotation(given_task, RotationConfig(**parts), Adjustment())
    assert found.parameters
    assert difference(given_task, found, inputs) < 1e-5
    if part == "values":
        assert not found.insertions
        # The values of each layer and their readers
        assert len(found.parameters) == (12 if family == "T5" else 4)


@families("Bert", "ViT", "Olmo2", "Mixtral")
def test_what_is_in_the_way_is_told(family: str) -> None:
    """Post-norm, a stream that the model returns, norms of what a layer adds, experts that
    write to it.
    """
    given_task, _ = task(family)
    found = rotation(given_task, RotationConfig(values=False, online=False), Adjustment())
    assert not found.parameters
    [remark] = found.remarks
    assert remark.layer in given_task.graph.by_name
    returned = family == "ViT"
    why = (
        "the model returns it, and would return it rotated"
        if returned
        else "would compute something else of it"
    )
    assert remark.text.startswith("the residual stream is not rotated: ")
    assert f"{why}, so the outliers between the blocks stay; " in remark.text
    assert ("take the model with its head" in remark.text) is returned
    assert remark.text.endswith('or write "residual": false to say that this is meant')


@pytest.mark.parametrize(
    "make",
    [lambda: (Mobile(), torch.randn(2, 3, 16, 16)), lambda: (Mixture(), torch.randn(2, 5, 16))],
)
def test_other_networks_stay_as_they_compute(
    make: Callable[[], tuple[nn.Module, Tensor]],
) -> None:
    torch.manual_seed(0)
    model, x = make()
    given_task = task_of(model, [x], W4, A4)
    assert (
        difference(given_task, rotation(given_task, RotationConfig(), Adjustment()), [x]) < 1e-5
    )


class Stream(nn.Module):
    """An embedding, a norm, and a sum around it, with spoilers."""

    def __init__(self, norm: nn.Module, spoil: str = "") -> None:
        super().__init__()
        self.embedding, self.norm, self.spoil = nn.Embedding(20, 24), norm, spoil
        self.inner, self.gamma = nn.Linear(24, 24), nn.Parameter(torch.rand(24) + 0.5)
        self.head = nn.Linear(24, 7, bias=False)

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids) * 3.0
        y = self.inner(self.norm(x))
        y = (
            y * self.gamma
            if self.spoil == "mul"
            else torch.tanh(y)
            if self.spoil == "tanh"
            else y
        )
        x = x - y / 2
        out = self.head(self.norm(x))
        return (out, x) if self.spoil == "returned" else out


class Decomposed(nn.Module):
    """A LayerNorm in single operators, its factors stored less one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(24) / 4),
            nn.Parameter(torch.randn(24)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean([-1], keepdim=True) + 1e-5).sqrt()
        return x * (1 + self.weight) + self.bias


def norms() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made = {"rms": nn.RMSNorm(24), "layer": nn.LayerNorm(24), "decomposed": Decomposed()}
    for norm in made.values():
        for parameter in norm.parameters():
            parameter.data += torch.randn(24) / 4
    return made | {"bare": nn.LayerNorm(24, elementwise_affine=False)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "spoil"),
    extended_except(
        itertools.product(
            ("rms", "layer", "decomposed", "bare"), ("", "tanh", "mul", "returned")
        ),
        *(("rms", ""), ("layer", ""), ("decomposed", ""), ("bare", "")),
        *(("rms", "tanh"), ("layer", "mul"), ("decomposed", "returned")),
    ),
)
def test_each_use_of_the_stream_counts(norm: str, spoil: str) -> None:
    """A norm that runs twice, a head without bias that takes one, and operators that no
    rotation passes.
    """
    ids = IDS % 20
    given_task = task_of(Stream(norms()[norm], spoil), [ids], W4, A4)
    found = rotation(given_task, RotationConfig(online=False), Adjustment())
    assert difference(given_task, found, [ids]) < 1e-5
    shared_decomposed = norm == "decomposed"  # its parameters have two readers
    if spoil or shared_decomposed:
        assert not found.parameters
        assert len(found.remarks) == 1
    else:
        assert set(found.parameters) >= {
            node.name for node in given_task.graph.nodes if node.op == "linear"
        }
        head = next(node.name for node in given_task.graph.nodes if "head" in node.name)
        assert ("bias" in found.parameters[head]) == (norm == "layer")


class Once(nn.Module):
    """A norm in single operators between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(9, 24), Decomposed(), nn.Linear(24, 7)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.inner(x)))


def test_a_layer_norm_in_single_operators_turns() -> None:
    x = torch.randn(2, 5, 9)
    given_task = task_of(Once(), [x], W4, A4)
    found = rotation(given_task, RotationConfig(online=False), Adjustment())
    assert not found.remarks
    assert len(found.parameters) == 4  # two layers, and the norm's two parameters
    assert difference(given_task, found, [x]) < 1e-5


def outlying(family: str = "Llama", gain: float = 8.0) -> tuple[Task, list[Any]]:
    """A decoder of which a few norm weights are eight times as large, as in trained language
    models.
    """
    pytest.importorskip("transformers", reason="needs transformers (extra: llm)")
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=200, num_hidden_layers=2, use_cache=False, **sizes
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + torch.randn(128) / 5
            parameter.data[torch.randperm(128)[:4]] *= gain
        else:
            parameter.data = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
    ids = [torch.randint(0, 200, (2, 32)) for _ in range(2)]
    return task_of(model, ids, W4, A4), ids


@pytest.mark.slow
def test_four_bits_of_weights_and_activations() -> None:
    """The error of W4A4 falls to about a half, most of it by the residual stream."""
    given_task, ids = outlying()
    plain = quantized_error(given_task, Adjustment(), ids)
    whole = quantized_error(
        given_task, rotation(given_task, RotationConfig(), Adjustment()), ids
    )
    stream = quantized_error(
        given_task,
        rotation(given_task, RotationConfig(values=False, online=False), Adjustment()),
        ids,
    )
    assert whole < 0.55 * plain
    assert whole < stream < 0.6 * plain


def test_inputs_of_turned_layers_have_no_outliers() -> None:
    """Largest over root mean square of what q, k, v, gate and up read: near that of normal
    numbers.
    """
    given_task, ids = outlying(gain=30.0)

    def peak(graph: Graph) -> float:
        seen: list[Tensor] = []
        sources = {
            next(node.refs())
            for node in graph.nodes
            if "_proj" in node.name and node.op == "linear"
        }
        Network(graph).observe((ids[0],), {}, dict.fromkeys(sources, lambda x: seen.append(x)))
        return max(float((x.abs().amax(-1) / x.square().mean(-1).sqrt()).max()) for x in seen)

    found = rotation(given_task, RotationConfig(), Adjustment())
    assert peak(given_task.graph) > 8
    assert peak(apply_adjustment(given_task.graph, found)) < 5


def test_runs_repeat_and_seeds_differ() -> None:
    given_task, _ = task("Llama")
    first, again, other = (
        rotation(given_task, RotationConfig(seed=seed), Adjustment()) for seed in (0, 0, 1)
    )
    pairs = [
        (own[key], again.parameters[name][key])
        for name, own in first.parameters.items()
        for key in own
    ]
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(
        torch.equal(a.weight, b.weight)
        for a, b in zip(first.insertions, again.insertions, strict=True)
    )
    name = first.insertions[0].readers[0]
    assert not torch.equal(first.parameters[name]["weight"], other.parameters[name]["weight"])


def test_nothing_asked_nothing_done() -> None:
    given_task, _ = task("Llama")
    assert rotation(given_task, NOT_AT_ALL, Adjustment()) == Adjustment()
    unplanned = Task(given_task.graph, {}, given_task.structure, given_task.batches)
    assert rotation(unplanned, RotationConfig(), Adjustment()) == Adjustment()


def test_layers_without_a_grid_for_inputs_get_no_operator() -> None:
    """A rotation at run time costs time and helps activations alone."""
    given_task, _ = task("Llama")
    weights = {key: spec for key, spec in given_task.specs.items() if key[1] == "weights"}
    found = rotation(
        Task(given_task.graph, weights, given_task.structure, given_task.batches),
        RotationConfig(),
        Adjustment(),
    )
    assert found.parameters
    assert not found.insertions


def test_what_was_found_before_is_turned_and_grids_of_other_weights_are_dropped() -> None:
    given_task, inputs = task("Llama")
    first = rotation(given_task, RotationConfig(seed=1), Adjustment())
    reader = first.insertions[0].readers[0]
    rounded = RoundedWeight(first.parameters[reader]["weight"], None, 0.0, 0.0)  # type: ignore[arg-type]
    second = rotation(
        given_task, RotationConfig(online=False), first.with_rounded({reader: rounded})
    )
    assert difference(given_task, second, inputs) < 1e-5
    assert second.insertions == first.insertions
    assert reader not in second.rounded  # its rows write the residual stream


def test_the_layer_exports_and_is_written_as_code() -> None:
    given_task, inputs = task("Llama")
    graph = apply_adjustment(
        given_task.graph, rotation(given_task, RotationConfig(), Adjustment())
    )
    assert emit(graph).count("quantizer.nn.InputRotation(64)") == 2
    network, (ids,) = Network(graph), inputs
    program = torch.export.export(
        network, (ids,), dynamic_shapes={"args": ({0: torch.export.Dim("batch")},)}
    )
    assert torch.equal(program.module()(ids)[0], outputs(graph, inputs)[0])


@pytest.mark.parametrize("channels", [1, 6, 48])
def test_the_layer_is_orthogonal_and_keeps_the_dtype(channels: int) -> None:
    layer = InputRotation(channels)
    layer.weight.data = torch.randint(0, 2, (channels,)) * 2.0 - 1
    x = torch.randn(3, 5, channels)
    assert torch.allclose(layer(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert list(layer.state_dict()) == ["weight"]  # the matrix follows from its size
