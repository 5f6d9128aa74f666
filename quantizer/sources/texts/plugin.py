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
            (".txt", ".jsonl", ".parquet"),
            options=("tokenizer", "stride", "seq_len", "shuffle"),
            refusal=("the data is not text", "give <--data FILE.txt>, or leave out the option"),
        ),
    ),
    parts={"read rows of .parquet files": "quantizer.sources.texts.documents:read_rows"},
    packages={"llm": ("tokenizers",), "parquet": ("pyarrow",)},
)
