"""Do what pyproject.toml cannot say: ship folders of the checkout inside the package, and
describe it by pages whose links lead somewhere from an index.
"""

import re
from functools import partial
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

DATA = ("schemas", "configs")
PAGE = ["*.css", "page.js", "templates/*.html", "templates/sections/*.html"]
EXAMPLES = (
    *("mnist.py", "resnet.py", "mnist.safetensors", "mnist_data.safetensors"),
    *(str(path.relative_to("examples")) for path in sorted(Path("examples").glob("tales/*"))),
    "tales.txt",
)
"""The files that `quantizer demo` writes, with --llm or without."""


PROJECT = Path("pyproject.toml").read_text("utf-8")
LINK = re.compile(r"\[(?P<text>[^][]+)\]\((?P<path>[\w./-]+)(?P<place>#[\w-]+)?\)")
PICTURE = re.compile(r'(?<==")docs/(?=[\w.]+\.png")')


def described(page: str) -> str:
    """Return a page of the checkout as the index shows it: pages of docs/ are on the site, and
    other files in the repository, if pyproject.toml has its address.
    """
    (site,) = re.findall(r'^Documentation = "(.+)"$', PROJECT, re.MULTILINE)
    repository = re.findall(r'^Repository = "(.+)"$', PROJECT, re.MULTILINE)
    text = Path(page).read_text("utf-8")
    text = PICTURE.sub(site, text)
    return LINK.sub(partial(outside, site=site, repository=repository), text)


def outside(link: re.Match[str], site: str, repository: list[str]) -> str:
    """Return a link to a file of the checkout as it is written outside of it."""
    path = link["path"]
    if path.startswith("docs/") and path.endswith(".md"):
        page = path.removeprefix("docs/").removesuffix(".md")
        page = re.sub(r"\bREADME$", "index", page)
        return f"[{link['text']}]({site}{page}.html{link['place'] or ''})"
    if repository:
        return f"[{link['text']}]({repository[0]}/blob/main/{path}{link['place'] or ''})"
    return link["text"]


class BuildWithExamples(build_py):
    """Copies the files of the demos, but not the other examples, into the package."""

    def run(self) -> None:
        super().run()
        for name in EXAMPLES:
            copy = Path(self.build_lib, "quantizer", "examples", name)
            self.mkpath(str(copy.parent))
            self.copy_file(str(Path("examples", name)), str(copy))


setup(
    long_description=f"{described('README.md')}\n{described('CHANGELOG.md')}",
    long_description_content_type="text/markdown",
    packages=[
        *find_packages(include=["quantizer", "quantizer.*"]),
        *(f"quantizer.{folder}" for folder in DATA),
    ],
    package_dir={f"quantizer.{folder}": folder for folder in DATA},
    package_data={"quantizer": ["py.typed", "__init__.pyi"], "quantizer.report.page": PAGE}
    | {f"quantizer.{folder}": ["*.json"] for folder in DATA},
    cmdclass={"build_py": BuildWithExamples},
)
