"""`python tests/prose/check.py`: lints the sentences that readers see, with proselint.

house_style.json has the words that are not used, what to write instead, the longest sentence,
and which of proselint's checks run. Each finding is printed with its file and line.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from prose.texts import Text, texts
from proselint.checks import __register__ as PROSELINT_CHECKS
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckResult, types
from proselint.registry.checks.engine import Fancy
from proselint.tools import LintFile

STYLE: dict[str, Any] = json.loads(Path(__file__).with_name("house_style.json").read_text())
_BOUNDARY = re.compile(
    r"""(?<=[.!?])[\s)"]+(?=\S)  # the end of a sentence
    | \n\s*\n                    # an empty line
    | \n\s*(?:[-*]|\d+\.)\s      # the next item of a list
    | \n\ {2,}\d+\ {2,}          # the next exit code
    | \|                         # the next cell of a table
    | ^\#+.*$                    # a heading
    """,
    re.MULTILINE | re.VERBOSE,
)
_WORD = re.compile(r"[^\W_]\S*")
_FILE_NAME = re.compile(r"`?[\w./-]+\.(?:md|py|ipynb|json|html|ya?ml|toml|svg|png)`?")


def main() -> int:
    """Print each finding, then how many there are of each kind. Returns the exit code."""
    register()
    kinds: Counter[str] = Counter()
    for text in texts():
        for kind, line, message in findings(text):
            kinds[kind] += 1
            print(f"{text.file}:{line}: {kind}: {message}")
    for kind, count in kinds.most_common():
        print(f"{count:5} {kind}")
    return 1 if kinds else 0


def register() -> None:
    """Register proselint's checks and those of the house style, once."""
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(PROSELINT_CHECKS)
        registry.register_many(tuple(house_checks()))


def house_checks() -> Iterator[Check]:
    """Yield a check for each row of house_style.json."""
    for group in ("terms", "plain_words"):
        for words, advice in STYLE[group].items():
            yield _absent(rf"\b(?:{words})\b", f"house.{group}", advice)
    for pattern, advice in STYLE["patterns"].items():
        yield _absent(pattern, "house.patterns", advice)
    yield Check(check_type=long_sentences, path="house.long_sentence")
    yield Check(check_type=chained_sentences, path="house.chained_sentence")


def _absent(pattern: str, path: str, advice: str) -> Check:
    """Return a check that finds what a pattern matches, in any case of letters."""
    return Check(
        check_type=types.ExistenceSimple(pattern=pattern),
        engine=Fancy(),
        path=path,
        message=f"'{{}}': {advice}",
    )


def long_sentences(content: str, check: Check) -> Iterator[CheckResult]:
    """Yield the sentences that have too many words. Code counts as one word."""
    longest = STYLE["longest_sentence"]
    for words in _sentences(content):
        if len(words) > longest:
            advice = f"{len(words)} words, at most {longest}"
            yield _result(check, content, words, advice)


def chained_sentences(content: str, check: Check) -> Iterator[CheckResult]:
    """Yield the sentences with too many relative words."""
    chain = STYLE["relative_words"]
    for words in _sentences(content):
        relative = [word for word in words if word[0].strip(",").lower() in chain["words"]]
        if len(relative) > chain["most"]:
            advice = f"{len(relative)} of {', '.join(chain['words'])}, at most {chain['most']}"
            yield _result(check, content, words, advice)


def _sentences(content: str) -> Iterator[list[re.Match[str]]]:
    """Yield the words of each sentence."""
    begin = 0
    for boundary in [*_BOUNDARY.finditer(content), None]:
        end = len(content) if boundary is None else boundary.start()
        yield list(_WORD.finditer(content, begin, end))
        begin = end if boundary is None else boundary.end()


def _result(check: Check, content: str, words: list[re.Match[str]], advice: str) -> CheckResult:
    """Return a finding about a sentence, with its first words."""
    span = (words[0].start(), words[-1].end())
    begin = " ".join(content[slice(*span)].split())[:60]
    return CheckResult(check.path, f"{advice}: {begin}", span, None)


def findings(text: Text) -> Iterator[tuple[str, int, str]]:
    """Yield the kind, the line and the message of each finding in a text."""
    for line, link in text.links:
        if _FILE_NAME.fullmatch(link):
            yield "house.link_text", line, f"{link}: write the title of the page, or what it is"
    if not text.content.strip():
        return
    checks = {"house": True, **STYLE["proselint"]}
    config = Config(max_errors=DEFAULT["max_errors"], checks=checks)
    # proselint takes "multiply" for an adverb
    content = text.content.replace("multiply-add", "multiply add")
    for finding in LintFile(text.file, content).lint(config):
        result = finding.check_result
        # Not an adverb, as in multiply-adds
        if "multiply-" in f"\n{text.content}"[slice(*result.span)]:
            continue
        # proselint puts an empty line before the content.
        row = text.content.count("\n", 0, max(result.span[0] - 1, 0))
        line = text.lines[min(row, len(text.lines) - 1)]
        yield result.check_path, line, result.message


if __name__ == "__main__":
    sys.exit(main())
