"""Runs `model.gguf` in llama.cpp: the logits of the token that follows each prompt."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import work_folder
import xllamacpp


def main() -> None:
    """Run and measure times."""
    (prompts,) = work_folder.inputs()
    server = served(work_folder.folder() / "model.gguf", prompts.shape[1])
    floating = served(work_folder.folder() / "float.gguf", prompts.shape[1])
    size = vocabulary_size(server)
    outputs = [np.stack([logits(server, prompt.tolist(), size) for prompt in prompts])]
    facts: dict[str, Any] = {"version": version("xllamacpp")}
    first = prompts[0].tolist()
    facts |= work_folder.times(
        lambda: answer(server, first, 1), lambda: answer(floating, first, 1)
    )
    work_folder.finish(outputs, facts)


def served(path: Path, length: int) -> Any:
    """Return a server of a file, with attention and its cache in float32."""
    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx = 2 * length
    settings.n_parallel = 1
    settings.n_gpu_layers = 0
    settings.cpuparams.n_threads = 1
    settings.cpuparams_batch.n_threads = 1
    settings.warmup = False
    settings.cache_prompt = False
    kinds = xllamacpp.llama_flash_attn_type
    settings.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(settings)


def answer(server: Any, prompt: list[int], count: int) -> Any:
    """Return the answer for the next token with the log-probabilities of so many tokens."""
    question = {
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": count,
        "cache_prompt": False,
    }
    return server.handle_completions(question)


def logits(server: Any, prompt: list[int], size: int) -> Any:
    """Return the logits of the next token with a mean of 0."""
    values = np.full(size, np.nan, np.float32)
    content = answer(server, prompt, size)["choices"][0]["logprobs"]["content"]
    for entry in content[0]["top_logprobs"]:
        values[entry["id"]] = entry["logprob"]
    return values - values.mean()


def vocabulary_size(server: Any) -> int:
    """Return the number of tokens that the model knows."""
    with np.load(work_folder.folder() / "test_mode.npz") as stored:
        return int(stored["output_0"].shape[-1])


if __name__ == "__main__":
    main()
