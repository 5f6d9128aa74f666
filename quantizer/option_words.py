"""Names options in sentences. Each surface prints its own word for an option: the shell its
option, Python its argument.

A sentence marks an option with its values, as in "use <--deploy onnx or pt2>". A part that only
one surface prints is marked as in "give <--data><shell:, or add data() to the file>".
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_MARK = re.compile(r"<(?:--(?P<options>[^<>]*)|(?P<surface>shell|python):(?P<part>[^<>]*))>")

TEST_OPTIONS = ("eval_data", "evaluate", "skip_len")
"""The options about data that only test runs take."""


@dataclass(frozen=True)
class Option:
    """An option that a sentence names.

    Attributes:
        name: without dashes.
        values: those that the sentence lists.
        joint: what is between the last two values.
    """

    name: str
    values: tuple[str, ...] = ()
    joint: str = " or "

    def listed(self, values: tuple[str, ...]) -> str:
        """Return values as the sentence lists them.

        >>> Option("deploy").listed(("onnx", "pt2", "gguf"))
        'onnx, pt2 or gguf'
        """
        first = ", ".join(values[:-1])
        return self.joint.join(filter(None, (first, *values[-1:])))


Words = Callable[[tuple[Option, ...]], str]
"""Returns what a surface prints for the options in a mark."""


class Sentence(str):
    """A text in the words of the shell, which keeps its marks.

    Attributes:
        marked: the text with marks, to be part of another text.

    >>> sentence = Sentence("use <--deploy onnx or pt2><shell:, or none>")
    >>> print(sentence)
    use --to onnx or pt2, or none
    """

    marked: str

    def __new__(cls, text: str) -> "Sentence":
        marked = marked_text(text)
        sentence = super().__new__(cls, worded(marked, in_shell))
        sentence.marked = marked
        return sentence


def marked_text(text: str) -> str:
    """Return a text with its marks."""
    return text.marked if isinstance(text, Sentence) else text


def worded(text: str, words: Words, surface: str = "shell") -> str:
    """Return a text in the words of a surface.

    Args:
        text: with marks.
        words: of the surface; they may have marks themselves.
        surface: whose parts stay, "shell" or "python"; "" to leave them marked.
    """

    def word(match: re.Match[str]) -> str:
        if match["options"] is not None:
            return words(_options(match["options"]))
        if not surface:
            return match[0]
        return match["part"] if match["surface"] == surface else ""

    return _MARK.sub(word, marked_text(text))


def in_shell(options: tuple[Option, ...]) -> str:
    """Return options as the shell takes them. `deploy` names the target of a file, which
    Python calls so, and the shell has one option for targets and destinations.

    >>> in_shell((Option("deploy", ("onnx",)), Option("onnx_profile", ("npu",))))
    '--to onnx --onnx_profile npu'
    """
    text = _written(options)
    return re.sub(r"--deploy\b", "--to", text)


def marked(*options: Option) -> str:
    """Return the mark that names options in a sentence."""
    return f"<{_written(options)}>" if options else ""


def _written(options: tuple[Option, ...]) -> str:
    parts = []
    for option in options:
        parts.append(f"--{option.name} {option.listed(option.values)}".rstrip())
    return " ".join(parts)


def _options(text: str) -> tuple[Option, ...]:
    """Return the options of a mark, such as `deploy onnx, pt2 or gptq`."""
    options = []
    for part in text.split(" --"):
        name, _, listed = part.partition(" ")
        joint = " and " if " and " in listed else " or "
        values = listed.replace(joint, ", ").split(", ") if listed else []
        options.append(Option(name, tuple(values), joint))
    return tuple(options)
