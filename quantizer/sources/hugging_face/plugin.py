"""What loading folders of transformers adds."""

import re
from pathlib import Path

from quantizer.declarations import ModelKind, Plugin

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""How a model of the Hugging Face Hub is named: owner/name."""


def _is_named_by(spec: str) -> bool:
    path = Path(spec)
    return path.is_dir() or (bool(_HUB_NAME.fullmatch(spec)) and not path.exists())


PLUGIN = Plugin(
    "hugging_face",
    # It takes all folders that no other plug-in takes, and says what they lack
    rank=2000,
    models=(
        ModelKind(
            "a Hugging Face folder",
            "quantizer.sources.hugging_face.loader:load_model",
            _is_named_by,
            defers_weights=True,
        ),
    ),
    packages={"llm": ("transformers",)},
)
