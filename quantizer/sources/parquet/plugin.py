"""What reading texts in .parquet files adds."""

from quantizer.declarations import DataKind, Plugin

PLUGIN = Plugin(
    "parquet",
    rank=21,
    needs=("texts",),
    data=(DataKind("texts", suffixes=(".parquet",)),),
    parts={"read rows of .parquet files": "quantizer.sources.parquet.rows:read_rows"},
    packages={"parquet": ("pyarrow",)},
)
