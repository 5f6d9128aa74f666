"""The pages of the site that follow from the package, which are in no checkout."""

from __future__ import annotations

import runpy

from support.runs import ROOT

_PROGRAM = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))
SITE_PAGES: dict[str, str] = _PROGRAM["site_pages"]()
"""By place in docs/."""
with_links = _PROGRAM["with_links"]
