"""Only what pyproject.toml cannot say: two folders at the top of the checkout ship inside the package."""

from setuptools import find_packages, setup

DATA = ("schemas", "configs")

setup(
    packages=[
        *find_packages(include=["quantizer", "quantizer.*"]),
        *(f"quantizer.{folder}" for folder in DATA),
    ],
    package_dir={f"quantizer.{folder}": folder for folder in DATA},
    package_data={"quantizer": ["py.typed"], "quantizer.report.page": ["*.css", "page.js"]}
    | {f"quantizer.{folder}": ["*.json"] for folder in DATA},
)
