"""Ship folders of the checkout inside the package, which pyproject.toml cannot say."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

DATA = ("schemas", "configs")
PAGE = ["*.css", "page.js", "templates/*.html", "templates/sections/*.html"]
EXAMPLE = ("digits.py", "resnet.py", "digits.safetensors", "digits_data.safetensors")
"""The files that `quantizer demo` writes."""


class BuildWithExample(build_py):
    """Copies the files of the demo, but not the other examples, into the package."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib, "quantizer", "examples")
        self.mkpath(str(folder))
        for name in EXAMPLE:
            self.copy_file(str(Path("examples", name)), str(folder / name))


setup(
    packages=[
        *find_packages(include=["quantizer", "quantizer.*"]),
        *(f"quantizer.{folder}" for folder in DATA),
    ],
    package_dir={f"quantizer.{folder}": folder for folder in DATA},
    package_data={"quantizer": ["py.typed", "__init__.pyi"], "quantizer.report.page": PAGE}
    | {f"quantizer.{folder}": ["*.json"] for folder in DATA},
    cmdclass={"build_py": BuildWithExample},
)
