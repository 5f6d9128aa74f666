"""A Python without torch, numpy and safetensors: `python -c BLOCKED …` is the command line in
it.
"""

from __future__ import annotations

BLOCK = """
import sys

class Missing:
    asked = []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors", "numpy"):
            self.asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
BLOCKED = BLOCK + "from quantizer.cli.main import main\nmain()\n"
