"""Runs `model-compressed-tensors` in vLLM on the CPU, without compilation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import numpy as np
import vllm
from case_folders import NEW_TOKENS, Call, run_folders


def main() -> None:
    """Run all folders."""
    run_folders("vllm", run, vllm.__version__, is_forked=True)


def run(folder: Path, call: Call) -> dict[str, Any]:
    """Return the tokens that follow, and the log-probabilities of the first of them."""
    with np.load(folder / "expected.npz") as expected:
        size = int(expected["logits"].shape[-1])
    model = folder / "model-compressed-tensors"
    engine = vllm.LLM(
        str(model),
        # By itself, vLLM computes models in float32 in bfloat16
        dtype=json.loads((model / "config.json").read_text("utf-8"))["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=32,
        max_num_seqs=len(call["input_ids"]),
        max_logprobs=size,
        enable_prefix_caching=False,
    )
    settings = vllm.SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, logprobs=size, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": row.tolist()} for row in call["input_ids"]]
    tokens: list[list[int]] = []
    rows = np.zeros((len(prompts), size), np.float32)
    for index, answer in enumerate(engine.generate(prompts, settings, use_tqdm=False)):
        [output] = answer.outputs
        tokens.append(list(output.token_ids))
        for token, entry in output.logprobs[0].items():
            rows[index, token] = entry.logprob
    return {"next_token": rows, "tokens": np.array(tokens)}


if __name__ == "__main__":
    main()
