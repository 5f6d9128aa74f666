"""What reading texts adds."""

from quantizer.declarations import DataKind, Plugin

PLUGIN = Plugin(
    "texts",
    rank=20,
    data=(
        DataKind(
            "texts",
            "text",
            "quantizer.sources.texts.text:open_texts",
            (".txt", ".jsonl"),
            options=("tokenizer", "stride", "seq_len", "shuffle"),
            refusal=("the data is not text", "give <--data FILE.txt>, or leave out the option"),
        ),
    ),
    packages={"llm": ("tokenizers",)},
)
