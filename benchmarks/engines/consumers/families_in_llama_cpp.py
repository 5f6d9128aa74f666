"""Runs `model.gguf` in llama.cpp: the logits of the token that follows each prompt."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from case_folders import Call, run_folders
from in_llama_cpp import logits, served


def main() -> None:
    """Run all folders."""
    run_folders("llama_cpp", run, version("xllamacpp"), is_forked=True)


def run(folder: Path, call: Call) -> dict[str, Any]:
    """Return the log-probabilities of the next token."""
    with np.load(folder / "expected.npz") as expected:
        size = int(expected["logits"].shape[-1])
    prompts = call["input_ids"]
    path = folder / "model_with_words.gguf"
    write_with_words(folder / "model.gguf", path, size)
    server = served(path, prompts.shape[1])
    rows = [logits(server, prompt.tolist(), size) for prompt in prompts]
    return {"next_token": np.stack(rows)}


def write_with_words(source: Path, path: Path, size: int) -> None:
    """Copy a file without a tokenizer, and add words, without which llama.cpp cannot answer."""
    file = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, file.fields[gguf.Keys.General.ARCHITECTURE].contents())
    for name, entry in file.fields.items():
        is_written_anyway = name.startswith(("GGUF.", "tokenizer."))
        if not is_written_anyway and name != gguf.Keys.General.ARCHITECTURE:
            writer.add_key_value(name, entry.contents(), entry.types[0])
    writer.add_tokenizer_model("llama")
    # llama.cpp looks for these words in files of LLaMA and Phi-3
    words = ["<unk>", "<s>", "</s>", "<0x0A>", "<|endoftext|>"]
    writer.add_token_list([*words, *map(str, range(len(words), size))])
    writer.add_token_scores([-float(index) for index in range(size)])
    writer.add_token_types([2, 3, 3, *[1] * (size - 3)])
    for tensor in file.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
