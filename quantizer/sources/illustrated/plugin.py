"""What reading texts with images adds."""

from quantizer.declarations import Plugin

PLUGIN = Plugin(
    "illustrated",
    needs=("texts", "images"),
    parts={
        "make batches of texts with images": (
            "quantizer.sources.illustrated.rows:IllustratedRows"
        )
    },
)
