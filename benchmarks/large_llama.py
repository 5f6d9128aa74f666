"""Hugging Face folders of LLaMAs of any size with random bfloat16 weights, made without ever
holding one in memory.

`python benchmarks/large_llama.py FOLDER [layers] [width] [intermediate]`: 28, 3072, 8192: 3.2
billion parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.files import write_json, write_tensors

VOCABULARY = 32000
SHARD_BYTES = 1 << 30


def main() -> None:
    """Make the folder that the command line names."""
    folder, *sizes = sys.argv[1:]
    make(Path(folder), *map(int, sizes))


def make(folder: Path, layers: int = 28, width: int = 3072, intermediate: int = 8192) -> None:
    """Write config.json, the shards and their index; heads have 128 channels, 8 of them keys
    and values.
    """
    heads = width // 128
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=min(8, heads),
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            name: each.shape for name, each in LlamaForCausalLM(config).named_parameters()
        }
    places: dict[str, str] = {}
    for number, shard in enumerate(_shards(shapes), 1):
        file = f"model-{number:05}.safetensors"
        write_tensors(folder / file, shard, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def _shards(shapes: dict[str, torch.Size]) -> Iterator[dict[str, Tensor]]:
    seeds, shard, size = count(), dict[str, Tensor](), 0
    for name, shape in shapes.items():
        shard[name] = DeferredTensor(
            shape, torch.bfloat16, partial(_random, shape, next(seeds))
        )
        size += 2 * shape.numel()
        if size > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _random(shape: torch.Size, seed: int) -> Tensor:
    """Norms of ones, and matrices that keep the size of what they multiply."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device)
    return values.mul_(shape[1] ** -0.5).bfloat16().cpu()


if __name__ == "__main__":
    main()
