"""A small trained language model: characters of Python sources. `python
tests/support/character_model.py` trains it again.

The weights are stored beside this file, in 8 bits with a scale for each row; the text is what
every Python brings along.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS = Path(__file__).parent / "character_model.safetensors"
TRAINED_ON = (
    "argparse",
    "ast",
    "calendar",
    "cmd",
    "configparser",
    "contextlib",
    "csv",
    "difflib",
    "doctest",
    "enum",
)
TRAINED_ON += (
    "fractions",
    "inspect",
    "ipaddress",
    "locale",
    "optparse",
    "pathlib",
    "pdb",
    "pickle",
    "subprocess",
)
HELD_OUT = ("shlex", "statistics", "tarfile", "textwrap", "zipfile")
LENGTH, WIDTH, BLOCKS, CHARACTERS = 128, 128, 3, 96
STEPS, BATCH, RATE = 1500, 32, 2e-3


class Block(nn.Module):
    """Causal attention and a feed-forward part, each after a norm and around a shortcut."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, WIDTH] to the same."""
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class CharacterModel(nn.Module):
    """Codes [N, LENGTH] to logits of the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = (
            nn.Embedding(CHARACTERS, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
        )
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Causal."""
        x = self.characters(codes) + self.places(torch.arange(codes.shape[1]))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def trained() -> CharacterModel:
    """With the weights of the file."""
    stored = load_file(WEIGHTS)
    state = {}
    for name, values in stored.items():
        if not name.endswith(".scale"):
            state[name] = values.float() * stored[f"{name}.scale"].float()
    model = CharacterModel().eval()
    model.load_state_dict(state)
    return model


def in_8_bits(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The codes of each parameter, and a scale for each of its rows; vectors have one row."""
    stored = {}
    for name, values in state.items():
        scale = (values.abs().amax(-1, keepdim=True) / 127).half()
        stored[name] = (values / scale.float()).round().clamp(-127, 127).to(torch.int8)
        stored[f"{name}.scale"] = scale
    return stored


def codes(modules: tuple[str, ...]) -> Tensor:
    """The sources of modules of the standard library: newline is 0, then come the printable
    characters of ASCII.
    """
    library = Path(sysconfig.get_path("stdlib"))
    text = "".join(
        (library / f"{name}.py").read_text(encoding="utf-8")
        for name in modules
        if _is_file(library, name)
    )
    return torch.tensor(
        [0 if c == "\n" else ord(c) - 31 for c in text if c == "\n" or " " <= c <= "~"]
    )


def sequences(modules: tuple[str, ...], count: int, seed: int = 0) -> Tensor:
    """Passages of a text, drawn from all over it: [count, LENGTH]."""
    text = codes(modules)
    starts = torch.randint(
        len(text) - LENGTH, (count,), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


def _is_file(library: Path, name: str) -> bool:
    return (library / f"{name}.py").is_file()  # some versions have a package of that name


def train() -> CharacterModel:
    """Minutes on two cores; prints the loss."""
    torch.manual_seed(0)
    model = CharacterModel().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    passages = sequences(TRAINED_ON, STEPS * BATCH)
    for step, batch in enumerate(torch.split(passages, BATCH)):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(step, round(loss.item(), 3), flush=True)
    return model


if __name__ == "__main__":
    save_file(in_8_bits(train().state_dict()), WEIGHTS)
