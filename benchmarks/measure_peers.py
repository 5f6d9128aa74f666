"""Rows of public packages beside ours: time, memory and errors of `PEERS` on the work of `bench_algorithms.py`."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
import re
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from layer_errors import layer_errors, logits_error
from measure import Part, peak_mb, ratios, seconds
from peers import GROUP, HOW_TO_GET, PEERS, Peer
from torch import Tensor, nn
from workloads import Llama, tokens


def measure_peers(model: Llama, batches: list[Tensor], float_pass: Part, plain: float, rounds: int) -> None:
    """Print a row for each package that is here: time as a ratio to the float pass, memory, and errors.

    Args:
        plain: mean error of the layers' outputs with plain rounding.
        rounds: after one on a small model, in which happens what happens at first use.
    """
    rows = {name: peer for name, peer in PEERS.items() if importlib.util.find_spec(peer.package)}
    if len(rows) < len(PEERS):
        print(HOW_TO_GET)
    if not rows:
        return
    print(f"\nW4 public packages, ratio to the float pass (median of {rounds}; {torch.get_num_threads()} threads)")
    with tempfile.TemporaryDirectory() as folder:
        twin = in_transformers(model, folder)
        small = in_transformers(Llama(hidden=GROUP, inter=GROUP, layers=1).eval(), folder)
        passes = ratios(float_pass, {"float": functools.partial(_float_pass, twin, batches)}, 3)["float"]
        print(f"  {'float in transformers':<23} {statistics.median(passes):6.2f}", flush=True)
        for name, peer in rows.items():
            try:
                with _silence():
                    peer.quantize(copy.deepcopy(small), batches[:2])
                    runs = [_run(peer, copy.deepcopy(twin), batches, float_pass) for _ in range(rounds)]
                text = f"{statistics.median(ratio for _, ratio, _ in runs):6.2f}  memory {runs[0][2]:+.0f} MB"
                print(f"  {name:<23} {text}, {_errors(peer, model, runs[0][0], plain)}", flush=True)
            except Exception as error:  # noqa: BLE001 - whatever stops one, the others go on
                print(f"  {name:<23} failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


def in_transformers(model: Llama, folder: str) -> Any:
    """The same function as a model of transformers; its config, which some packages look for, is in the folder.

    Raises:
        ValueError: its logits are others.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, hidden = model.embed_tokens.weight.shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=len(model.get_parameter("layers.0.gate_proj.weight")),
        num_hidden_layers=len(model.layers),
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config.save_pretrained(folder)
    config.name_or_path = folder
    twin: Any = LlamaForCausalLM(config)
    twin.eval()
    twin.load_state_dict({_path_there(name): tensor for name, tensor in model.state_dict().items()})
    x = tokens(1)
    if (error := logits_error(model, lambda batch: twin(batch).logits, x)) > 1e-9:
        raise ValueError(f"the model in transformers is another one: its logits are off by {error:.2g}")
    return twin


def _path_there(name: str) -> str:
    """A parameter's path in transformers' model."""
    if name.startswith("lm_head"):
        return name
    return "model." + re.sub(r"\b(gate|up|down)_proj", r"mlp.\1_proj", name)


def _run(peer: Peer, model: Any, batches: list[Tensor], float_pass: Part) -> tuple[Any, float, float]:
    """The quantized model, time over that of the float pass, and memory beyond the float pass's in MB."""
    made, times = [], []

    def quantize() -> None:
        made.append(peer.quantize(model, batches))

    before, base = seconds(float_pass), peak_mb(float_pass)
    extra = peak_mb(lambda: times.append(seconds(quantize))) - base
    return made[0], times[0] / statistics.mean([before, seconds(float_pass)]), extra


@torch.no_grad()
def _errors(peer: Peer, model: Llama, quantized: Any, plain: float) -> str:
    """As in `bench_algorithms.errors`; a layer's weight is what it makes of the unit vectors."""
    heldout = tokens(8, seed=77)
    text = f"logits {logits_error(model, lambda batch: quantized(batch).logits, heldout):.4f}"
    if not peer.keeps_inputs:
        return text
    paths = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"]
    layers = {name: quantized.get_submodule(_path_there(name)) for name in paths}
    weights = {name: layer(torch.eye(layer.in_features)).T for name, layer in layers.items()}
    left = statistics.mean(layer_errors(model, weights, heldout).values())
    return f"layers {left:.5f}, {left / plain:.3f} of plain rounding, {text}"


@torch.no_grad()
def _float_pass(model: Any, batches: list[Tensor]) -> None:
    for batch in batches:
        model(batch)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Packages tell a lot."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        yield
