"""llama.cpp through its CPU binding xllamacpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def served(path: Path, length: int = 32) -> Any:
    """A file with room for so many tokens, attention and its cache in float32."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = length, 1, 0
    settings.warmup = False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(settings)


def next_probabilities(server: Any, prompt: list[int] | str, size: int) -> tuple[Tensor, int]:
    """The logarithms of the next token's probabilities, NaN where there is none, and how many
    tokens the prompt has.
    """
    question = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": size}
    answer = server.handle_completions(question | {"ignore_eos": True, "cache_prompt": False})
    values = torch.full((size,), torch.nan)
    for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        values[entry["id"]] = entry["logprob"]
    return values, answer["usage"]["prompt_tokens"]
