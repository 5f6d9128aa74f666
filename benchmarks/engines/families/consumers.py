"""What reads the small models: the schemes and families of each consumer.

Imports only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Consumer:
    """An engine of language models.

    Attributes:
        name: of its program in `consumers/`, after `families_in_`.
        title: what tables call it.
        schemes: the names of those that it reads.
        for_llama: the names of those that it reads of LLaMA only, to save time.
        families: the names of those that it knows; empty for all.
        environment: the row of `ENVIRONMENTS` in which it runs; "" is the project's own
            environment.
        reference: the consumer whose outputs it must give; empty for test mode.
        is_exporters: whether the exporter runs it to verify files, and so knows its figures.
    """

    name: str
    title: str
    schemes: tuple[str, ...]
    for_llama: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    environment: str = ""
    reference: str = ""
    is_exporters: bool = False

    def schemes_of(self, family: str) -> tuple[str, ...]:
        """Return the names of the schemes that a family has; none if it is not known."""
        if self.families and family not in self.families:
            return ()
        return (*self.schemes, *self.for_llama) if family == "llama" else self.schemes

    @property
    def program(self) -> str:
        """Return the file name of its program."""
        return f"families_in_{self.name}.py"


_IN_LLAMA_CPP = (
    *("llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "gemma2", "gemma3"),
    *("gpt2", "gpt_neox", "bloom", "falcon", "starcoder2", "stablelm", "cohere"),
    *("olmo2", "granite", "mixtral", "qwen3_moe", "granite_moe"),
)
CONSUMERS = {
    "transformers": Consumer(
        "transformers",
        "transformers",
        (
            "w4",
            "w8",
            "w8a8_dynamic",
            "w8a8_static",
            "fp8",
            "nvfp4",
            "mxfp4",
            "gptq",
            "q8_0",
            "q4_0",
        ),
        is_exporters=True,
    ),
    "llama_cpp": Consumer(
        "llama_cpp", "llama.cpp (xllamacpp)", ("q8_0", "q4_0"), families=_IN_LLAMA_CPP
    ),
    "vllm": Consumer(
        "vllm",
        "vLLM on a CPU",
        ("w4_16", "w8a8_dynamic"),
        for_llama=("float_16", "mixed_16", "widths_16", "head_16", "w8a8_static", "fp8"),
        families=(
            *("llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "granite"),
            *("mixtral", "qwen3_moe"),
        ),
        environment="vllm",
        reference="transformers",
    ),
    "genai": Consumer(
        "genai", "ONNX Runtime GenAI", ("gptq",), families=("llama",), environment="genai"
    ),
}
"""In the order of tables."""
