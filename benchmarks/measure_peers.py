"""Rows of public packages beside ours: time, memory and errors of `PEERS` on the work of `bench_algorithms.py`."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from layer_errors import layer_errors, logits_error
from measure import Part, peak_mb, ratios, seconds
from peers import GROUP, HOW_TO_GET, PEERS, Peer
from torch import Tensor, nn
from workloads import Llama, tokens


@dataclass(frozen=True)
class Work:
    """What ours and theirs are measured on; `plain` is the mean error of the layers' outputs with round-to-nearest."""

    model: Llama
    batches: list[Tensor]
    float_pass: Part
    plain: float


def measure_peers(work: Work, rounds: int) -> None:
    """Print a row for each package that is here: time as a ratio to the float pass, memory, and errors.

    What happens at a package's first use happens on a small model, and does not count.
    """
    rows = {name: peer for name, peer in PEERS.items() if importlib.util.find_spec(peer.package)}
    if len(rows) < len(PEERS):
        print("\n" + HOW_TO_GET, end="")
    if not rows:
        return
    threads = torch.get_num_threads()
    print(f"\nW4 public packages, ratio to the float pass (median of {rounds}; {threads} threads)")
    with tempfile.TemporaryDirectory() as folder:
        twin = in_transformers(work.model, folder)
        small = in_transformers(Llama(hidden=GROUP, inter=GROUP, layers=1).eval(), folder)
        passes = ratios(work.float_pass, {"float": functools.partial(_float_pass, twin, work.batches)}, 3)["float"]
        print(f"  {'float in transformers':<23} {statistics.median(passes):6.2f}", flush=True)
        for name, peer in rows.items():
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                try:
                    peer.quantize(copy.deepcopy(small), work.batches[:2])
                    torch.set_num_threads(threads)
                    text = _row(peer, work, [_run(peer, copy.deepcopy(twin), work) for _ in range(rounds)])
                except Exception as error:  # noqa: BLE001 - whatever stops one, the others go on
                    text = f"failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            print(f"  {name:<23} {text}", flush=True)


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


@dataclass(frozen=True)
class _Run:
    """The quantized model; wall and CPU time over those of the float pass; memory beyond the float pass's, in MB."""

    model: Any
    wall: float
    cpu: float
    memory: float


def _run(peer: Peer, model: Any, work: Work) -> _Run:
    base = peak_mb(work.float_pass)
    before = _times(work.float_pass)
    made, times = [], []

    def quantize() -> None:
        made.append(peer.quantize(model, work.batches))

    memory = peak_mb(lambda: times.append(_times(quantize))) - base
    reference = [statistics.mean(pair) for pair in zip(before, _times(work.float_pass), strict=True)]
    return _Run(made[0], times[0][0] / reference[0], times[0][1] / reference[1], memory)


def _times(part: Part) -> tuple[float, float]:
    """Wall and CPU time of one call."""
    started = time.process_time()
    wall = seconds(part)
    return wall, time.process_time() - started


@torch.no_grad()
def _row(peer: Peer, work: Work, runs: list[_Run]) -> str:
    """Medians, and errors as `bench_algorithms.errors` has them; a layer's weight is what it makes of unit vectors."""
    quantized, heldout = runs[-1].model, tokens(8, seed=77)
    wall, cpu, memory = (statistics.median(getattr(run, key) for run in runs) for key in ("wall", "cpu", "memory"))
    text = f"logits {logits_error(work.model, lambda batch: quantized(batch).logits, heldout):.4f}"
    if peer.keeps_inputs:
        linears = {name: layer for name, layer in work.model.named_modules() if isinstance(layer, nn.Linear)}
        weights = {
            name: quantized.get_submodule(_path_there(name))(torch.eye(layer.in_features)).T
            for name, layer in linears.items()
            if name != "lm_head"
        }
        left = statistics.mean(layer_errors(work.model, weights, heldout).values())
        text = f"layers {left:.5f}, {left / work.plain:.3f} of round-to-nearest, {text}"
    return f"{wall:6.2f} (CPU time {cpu:.2f})  memory {memory:+.0f} MB, {text}"


@torch.no_grad()
def _float_pass(model: Any, batches: list[Tensor]) -> None:
    for batch in batches:
        model(batch)
