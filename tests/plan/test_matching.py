"""Each kind of selector, what it finds and how strong it is."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from support.toys import traced

from quantizer.config.model import ConfigRule, ResolvedConfig, Selector, Settings
from quantizer.errors import UsageError
from quantizer.graph.passes import run_passes
from quantizer.plan import selected
from quantizer.plan.match import match
from quantizer.plan.model import RANKS, Match
from quantizer.plan.resolve import resolve_plan
from quantizer.plan.selected import closest_layers
from quantizer.results.graph_file import trace_module
from quantizer.sources.batches import Batch

ROOT = "Residual::Residual/"
BLOCK = ROOT + "Sequential[layer1]/Block[{}]/"


def found(text: str, kind: str = "name", toy: str = "residual") -> Match:
    """What a selector finds in a toy after the passes."""
    original = traced(toy)
    graph = run_passes(original, Settings())
    return match(Selector("type" if kind == "type" else "name", text), graph, original)


def short(result: Match) -> list[str]:
    return [name.removeprefix(ROOT) for name in result.layers]


NAMES = [
    (ROOT + "Conv2d[conv1]/conv2d", "name", ["Conv2d[conv1]/conv2d"]),
    (ROOT + "Conv2d[conv1]/input.2", "name", ["Conv2d[conv1]/conv2d"]),
    (ROOT + "BatchNorm2d[bn1]/batch_norm", "name", ["Conv2d[conv1]/conv2d"]),
    ("Residual::input_0", "name", ["Residual::input_0"]),
    ("conv1", "path", ["Conv2d[conv1]/conv2d"]),
    ("bn1", "path", ["Conv2d[conv1]/conv2d"]),
    ("layer1.0.add", "name", ["Sequential[layer1]/Block[0]/add"]),
    ("layer1.0.relu.1", "name", ["Sequential[layer1]/Block[0]/ReLU[relu]/relu.1"]),
    ("flatten", "name", ["flatten"]),
    ("kind:head", "pattern", ["Linear[fc]/linear"]),
    ("layer1.1.conv2", "path", ["Sequential[layer1]/Block[1]/Conv2d[conv2]/conv2d"]),
    (
        "layer1.0",
        "path",
        [
            f"Sequential[layer1]/Block[0]/{name}"
            for name in ("Conv2d[conv1]/conv2d", "ReLU[relu]/relu", "Conv2d[conv2]/conv2d", "add", "ReLU[relu]/relu.1")
        ],
    ),
    (BLOCK.format("*") + "Conv2d[conv2]/conv2d", "pattern", [
        f"Sequential[layer1]/Block[{index}]/Conv2d[conv2]/conv2d" for index in (0, 1)
    ]),
    ("layer1.?.conv2", "pattern", [f"Sequential[layer1]/Block[{index}]/Conv2d[conv2]/conv2d" for index in (0, 1)]),
    ("layer1.[0-3].conv2", "pattern", [f"Sequential[layer1]/Block[{index}]/Conv2d[conv2]/conv2d" for index in (0, 1)]),
    (r"re:layer1\.[01]\.conv2", "pattern", [
        f"Sequential[layer1]/Block[{index}]/Conv2d[conv2]/conv2d" for index in (0, 1)
    ]),
    (r"re:.*/Linear\[fc\]/.*", "pattern", ["Linear[fc]/linear"]),
    *((f"*/Block{bracket}?]/Conv2d{bracket}conv2]/*", "pattern", [
        f"Sequential[layer1]/Block[{index}]/Conv2d[conv2]/conv2d" for index in (0, 1)
    ]) for bracket in ("[", "[[]")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "rank", "layers"), NAMES, ids=[row[0] for row in NAMES])
def test_names(text: str, rank: str, layers: list[str]) -> None:
    result = found(text)
    assert short(result) == layers
    assert RANKS[result.rank] == rank


def test_a_path_is_that_of_one_module_and_not_the_beginning_of_others() -> None:
    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    graph = trace_module(Deep(), Batch.of(torch.ones(2, 3)))
    result = match(Selector("name", "blocks.1"), graph, graph)
    assert result.layers == ("Deep::Deep/ModuleList[blocks]/Linear[1]/linear",)


NOTHING = [
    ROOT + "Conv2d[conv9]/conv2d",
    ROOT + "input.7",  # several layers in that scope
    "layer1.9",
    "layer1.0.add.1",
    "kind:heads",
    "kind:embedding",
    "conv",
    "*.nothing",
    "re:(",
    "re:conv",  # the whole name has to match
    "Conv2d[conv?]",  # brackets are no set of characters
    BLOCK.format("[01]") + "add",
]


@pytest.mark.parametrize("text", NOTHING)
def test_names_that_find_nothing(text: str) -> None:
    assert found(text).layers == ()


def test_kinds_are_found_in_any_model_and_none_is_no_error() -> None:
    assert [name.rpartition("/")[2] for name in found("kind:embedding", toy="tied").layers] == [
        "embedding"
    ]
    assert [name.rpartition("/")[2] for name in found("kind:head", toy="tied").layers] == [
        "linear"
    ]
    original = traced("residual")
    for text, findings in (("kind:embedding", 0), ("kind:embeddings", 1), ("embed*", 1)):
        config = ResolvedConfig(
            Settings(),
            (ConfigRule(Selector("exclude", text), "exclude[0]"),),
            form="hierarchical",
        )
        plan = resolve_plan(config, original, original)
        assert [finding.code for finding in plan.diagnostics] == ["QZ402"] * findings
    assert closest_layers(Selector("name", "kind:heads"), original)[0] == "kind:head"


def test_close_names_are_listed_once() -> None:
    original = traced("residual")
    names = set(original.by_name)
    for name in names:
        close = closest_layers(Selector("name", f"{name}s"), original)
        assert len(close) == len(set(close))


def test_an_old_name_is_taken_with_a_note() -> None:
    assert found(ROOT + "Conv2d[conv1]/conv2d").note is None
    note = found(ROOT + "Conv2d[conv1]/input.2").note
    assert note is not None
    assert "the only layer of that module" in note


TYPES = [
    ("torch.nn.Conv2d", "residual", 5),
    ("nn.Conv2d", "residual", 5),
    ("Conv2d", "residual", 5),
    ("conv2d", "residual", 5),
    ("torch.nn.functional.conv2d", "residual", 5),
    ("torch.nn.functional.relu", "residual", 5),
    ("torch.relu", "residual", 5),
    ("torch.nn.ReLU", "residual", 5),
    ("torch.add", "residual", 2),
    ("add", "residual", 2),
    ("support.toys.Block", "residual", 10),
    ("Block", "residual", 10),
    ("torch.nn.Linear", "residual", 1),
    ("Linear", "tied", 1),
    ("torch.nn.Embedding", "tied", 1),
    ("torch.cat", "branches", 1),
    ("Conv2d", "mobile", 2),  # a depthwise convolution is one
    ("torch.nn.SiLU", "functional", 1),
    ("torch.nn.BatchNorm1d", "in_place_view", 0),
    ("Conv3d", "residual", 0),
    ("Conv", "residual", 0),
    ("2d", "residual", 0),
]


@pytest.mark.parametrize(("text", "toy", "count"), TYPES)
def test_types(text: str, toy: str, count: int) -> None:
    result = found(text, "type", toy)
    assert len(result.layers) == count
    assert RANKS[result.rank] == "type"


def test_a_type_that_was_folded_away_names_what_is_gone() -> None:
    result = found("BatchNorm2d", "type")
    assert result.layers == ()
    assert len(result.absorbed) == 3


def test_a_norm_that_stays_is_found_by_its_type() -> None:
    result = found("torch.nn.BatchNorm2d", "type", "normalized")
    assert [name.rpartition("/")[2] for name in result.layers] == ["batch_norm"]


def test_the_order_of_strength() -> None:
    selectors = [("Conv2d", "type"), ("layer1.*.conv1", "name"), ("layer1.0.conv1", "name"),
                 (BLOCK.format(0) + "Conv2d[conv1]/conv2d", "name")]  # fmt: skip
    ranks = [found(text, kind).rank for text, kind in selectors]
    assert ranks == sorted(set(ranks))


def test_without_signals_the_time_is_checked_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(signal, "SIGALRM")
    assert short(found("re:conv1")) == ["Conv2d[conv1]/conv2d"]
    monkeypatch.setattr(selected, "MATCHING_S", 0)
    with pytest.raises(UsageError, match="takes more than 0 s to match names of layers"):
        found("re:conv1")


@pytest.mark.parametrize(
    "text", ["?*" * 20 + "!", "*a" * 30 + "!", "*[" * 30, "*?*" * 20 + "!"]
)
def test_a_glob_of_many_stars_is_fast(text: str) -> None:
    start = time.monotonic()
    assert not found(text).layers
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("text", "name", "fits"),
    [
        ("*Linear[fc]*", "N::N/Linear[fc]/linear", True),
        ("*Linear[[]fc]*", "N::N/Linear[fc]/linear", True),
        ("*Linear[[f]*", "N::N/Linear[[f]/linear", True),
        ("*[0-3]*", "N::N/Conv2d[2]/conv2d", False),
        ("N::?/*", "N::N/relu.1", True),
        ("N::?/*.", "N::N/relu.1", False),
    ],
)
def test_a_bracket_of_a_layer_name_is_literal(text: str, name: str, fits: bool) -> None:
    assert bool(selected.glob_of_names(text).fullmatch(name)) is fits


def test_a_timer_of_the_user_goes_on() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: calls.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        found("re:conv1")
        remaining, _ = signal.getitimer(signal.ITIMER_REAL)
        assert calls or 0 < remaining <= 0.02
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
