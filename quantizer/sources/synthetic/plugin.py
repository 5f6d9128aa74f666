"""What making data from the model adds."""

from quantizer.declarations import DataKind, Plugin

PLUGIN = Plugin(
    "synthetic",
    rank=23,
    data=(
        DataKind(
            "synthetic data",
            opener="quantizer.sources.synthetic.synthetic:open_synthetic",
            word="synthetic",
            options={"seq_len": "For synthetic data: tokens per sample."},
            refusal=("the data are not synthetic", "leave out the option"),
            is_synthetic=True,
            advice="<--data synthetic> makes data from the model itself",
        ),
    ),
)
