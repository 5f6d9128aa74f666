"""Ship two folders of the checkout inside the package, which pyproject.toml cannot say."""

from setuptools import find_packages, setup

DATA = ("schemas", "configs")
PAGE = ["*.css", "page.js", "templates/*.html", "templates/sections/*.html"]

setup(
    packages=[
        *find_packages(include=["quantizer", "quantizer.*"]),
        *(f"quantizer.{folder}" for folder in DATA),
    ],
    package_dir={f"quantizer.{folder}": folder for folder in DATA},
    package_data={"quantizer": ["py.typed"], "quantizer.report.page": PAGE}
    | {f"quantizer.{folder}": ["*.json"] for folder in DATA},
)
