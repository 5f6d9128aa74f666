"""What reading texts adds."""

from quantizer.declarations import DataKind, Plugin

BATCH_SIZE = 1
"""By default: a window has hundreds of tokens, and each of them a row of logits."""

PLUGIN = Plugin(
    "texts",
    rank=20,
    data=(
        DataKind(
            "texts",
            "text",
            "quantizer.sources.texts.text:open_texts",
            (".txt", ".jsonl", ".parquet"),
            options={
                "tokenizer": "For texts: a tokenizer.json or its folder, if MODEL has none.",
                "seq_len": "For texts: tokens per sample.  [default: as calibrated, or 512]",
                "stride": (
                    "For texts: tokens between the starts of samples.  [default: --seq_len]"
                ),
                "shuffle": "For texts: shuffle them by --seed.",
            },
            batch_size=BATCH_SIZE,
            refusal=("the data is not text", "give <--data FILE.txt>, or leave out the option"),
        ),
    ),
    parts={"read rows of .parquet files": "quantizer.sources.texts.documents:read_rows"},
    packages={"llm": ("tokenizers",), "parquet": ("pyarrow",)},
)
