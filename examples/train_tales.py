"""Trains the language model that `quantizer demo --llm` writes, and writes the text that judges
it: short tales that a grammar tells.

    pip install '.[llm]'
    python examples/train_tales.py

The tales are made up here, word by word, so they have the licence of this package (Apache-2.0)
and are as many as training takes. No tale of `tales.txt` was trained on. Each choice of the
grammar has a known probability. The last line printed is the perplexity that these choices
leave. On average, no model can be below it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).with_name("tales")
HELD_OUT = FOLDER.with_suffix(".txt")
HELD_OUT_TALES, HELD_OUT_SEED = 100, 1_000_000
END = "<|endoftext|>"
VOCABULARY, LENGTH = 640, 256
STEPS, BATCH, RATE = 1000, 16, 4e-3
TALES_IN_A_SEQUENCE = 4
"""More than LENGTH tokens."""

Choice = TypeVar("Choice")


def words(line: str) -> list[str]:
    """Return the words of a line."""
    return line.split()


ANIMALS = words("fox bear hare mouse owl goose frog badger wolf cat dog hen pig cow duck")
NATURES = words("little old clever lazy brave shy hungry kind young sad proud wise")
COLOURS = words("red blue green yellow white black brown grey")
THINGS = words("key ring lamp drum kite spoon bell boat coat ball book hat cup stone box")
FRUITS = words("apple pear plum nut berry carrot cake egg")
PLACES = [
    "in a hollow tree",
    "near the mill",
    "under the bridge",
    "by the sea",
    "behind the hill",
    "at the market",
    "in the garden",
    "in a cave",
    "on the island",
    "at the castle",
]
WEATHERS = ["the sun was shining", "it was raining", "snow was falling", "a cold wind blew"]
TIMES = ["One day", "In the morning", "At night", "Then", "After a while", "The next day"]
DEEDS = words("sang danced slept played walked talked laughed waited worked cooked swam")
FEELINGS = words("happy sad afraid proud tired glad angry hungry cold")
HANDLING = words("found lost hid wanted painted broke washed mended sold carried")
NUMBERS = words("zero one two three four five six seven eight nine ten")
HEROES = {"she": words("Mira Ada Nora Lily Ruth"), "he": words("Tom Otto Felix Hugo Sam")}
OBJECT_FORMS = {"she": "her", "he": "him"}


class Teller:
    """Tells tales from a seed.

    Attributes:
        nats: minus the logarithm of the probability of all choices so far.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.nats = 0.0

    def pick(self, choices: Sequence[Choice]) -> Choice:
        """Return one of the choices. The first are the most probable, as some words of a
        language are, and the fourth is half as probable as the first.
        """
        weights = [rank**-0.5 for rank in range(1, len(choices) + 1)]
        (index,) = self._random.choices(range(len(choices)), weights)
        self.nats -= math.log(weights[index] / sum(weights))
        return choices[index]

    def tale(self) -> str:
        """Return a tale of a hero who meets two friends. Names, animals, things and numbers
        come again later, so that a model has to look far back.
        """
        pronoun = self.pick(list(HEROES))
        name = self.pick(HEROES[pronoun])
        home = self.pick(PLACES)
        described = f"{self.pick(NATURES)} {self.pick(ANIMALS)}"
        sentences = [
            f"Once there was {article(described)} {described} called {name}, who lived {home}."
        ]
        for _ in range(2):
            friend = self.pick(ANIMALS)
            sentences.append(self._meeting(name, friend))
            for _ in range(self.pick([2, 3, 1, 4])):
                event = self.pick([self._deed, self._handling, self._words, self._gift])
                sentences.append(event(name, pronoun, friend))
        mood = f"{pronoun.capitalize()} was {self.pick(FEELINGS)}, and so was the {friend}."
        sentences.append(f"So {name} went back to live {home}. {mood}")
        return " ".join(sentences)

    def _meeting(self, name: str, friend: str) -> str:
        nature = self.pick(NATURES)
        met = f"{name} met {article(nature)} {nature} {friend}"
        if self.pick([True, False]):
            return f"{self.pick(TIMES)} {met} {self.pick(PLACES)}."
        return f"One day, when {self.pick(WEATHERS)}, {met}."

    def _deed(self, name: str, pronoun: str, friend: str) -> str:
        who = self.pick(["they", f"the {friend}", pronoun])
        deeds = f"{self.pick(DEEDS)} and {self.pick(DEEDS)}"
        if self.pick([True, False]):
            return f"{self.pick(TIMES)} {who} {deeds} {self.pick(PLACES)}."
        were = "were" if who == "they" else "was"
        reason = f"because {who} {were} {self.pick(FEELINGS)}"
        return f"{who[0].upper()}{who[1:]} {deeds}, {reason}."

    def _handling(self, name: str, pronoun: str, friend: str) -> str:
        who, other = self.pick([(name, f"the {friend}"), (f"The {friend}", name)])
        colour, thing = self.pick(COLOURS), self.pick(THINGS)
        handled = f"{who} {self.pick(HANDLING)} {article(colour)} {colour} {thing}"
        if self.pick([True, False]):
            return f"{handled} {self.pick(PLACES)}."
        return f"{handled}, and {other} {self.pick(HANDLING)} the {thing} again."

    def _words(self, name: str, pronoun: str, friend: str) -> str:
        speaker, listener = self.pick([(name, friend), (f"the {friend}", name)])
        colour, thing = self.pick(COLOURS), self.pick(THINGS)
        said = self.pick(
            [
                f"Where is my {colour} {thing}, {listener}?",
                f"I am {self.pick(FEELINGS)}, {listener},",
                f"Come with me, {listener},",
            ]
        )
        return f'"{said}" said {speaker}.'

    def _gift(self, name: str, pronoun: str, friend: str) -> str:
        fruit, had = self.pick(FRUITS), self.pick(range(2, 11))
        given = self.pick(range(1, had))
        gave = f"gave {NUMBERS[given]} of them to {OBJECT_FORMS[pronoun]}"
        left = f'"Now I have {NUMBERS[had - given]}," said the {friend}.'
        return f"The {friend} had {NUMBERS[had]} {fruit}s and {gave}. {left}"


def article(word: str) -> str:
    """Return the article before a word.

    >>> article("old"), article("lazy")
    ('an', 'a')
    """
    return "an" if word[0] in "aeiou" else "a"


def tales(count: int, seed: int) -> tuple[str, float]:
    """Return so many tales, an empty line between them, and the nats of their choices."""
    teller = Teller(seed)
    told = [teller.tale() for _ in range(count)]
    return "\n\n".join(told) + "\n", teller.nats


def tokenizer() -> PreTrainedTokenizerFast:
    """Return byte pairs as in GPT-2, which llama.cpp knows, trained on tales."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(END, special=True)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([tales(2000, seed=0)[0]], trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, bos_token=END, eos_token=END, model_max_length=LENGTH
    )


def architecture() -> LlamaForCausalLM:
    """Return the untrained LLaMA: 361 thousand parameters in two blocks."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def batch_of(encoder: PreTrainedTokenizerFast, step: int) -> Tensor:
    """Return the sequences of a step, [BATCH, LENGTH]. Each begins somewhere in a tale, as the
    windows of a text do.
    """
    sequences: list[Tensor] = []
    for number in range(BATCH):
        seed = 1 + step * BATCH + number
        tokens = encoder(tales(TALES_IN_A_SEQUENCE, seed)[0])["input_ids"]
        start = random.Random(seed).randrange(len(tokens) - LENGTH)
        sequences.append(torch.tensor(tokens[start : start + LENGTH]))
    return torch.stack(sequences)


def trained(encoder: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the model after STEPS batches, and print its loss."""
    torch.manual_seed(0)
    model = architecture()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    for step in range(STEPS):
        batch = batch_of(encoder, step)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(step, round(loss.item(), 3), flush=True)
    return model


def main() -> None:
    """Write the folder and the text."""
    text, nats = tales(HELD_OUT_TALES, HELD_OUT_SEED)
    HELD_OUT.write_text(text, encoding="utf-8")
    encoder = tokenizer()
    encoder.save_pretrained(FOLDER)
    settings = FOLDER / "tokenizer_config.json"
    # Readers with an older transformers do not know the class's new name
    text_of_settings = settings.read_text("utf-8")
    settings.write_text(
        text_of_settings.replace("TokenizersBackend", "PreTrainedTokenizerFast")
    )
    trained(encoder).bfloat16().save_pretrained(FOLDER)
    count = len(encoder(text)["input_ids"])
    print(f"{count} tokens; their choices leave a perplexity of {math.exp(nats / count):.3f}")


if __name__ == "__main__":
    main()
