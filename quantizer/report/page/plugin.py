"""What the page and the drawings of a report add."""

from quantizer.declarations import Plugin

_FUNCTIONS = {
    "page": "quantizer.report.page.page:page",
    "diff page": "quantizer.report.page.page:diff_page",
    "plots": "quantizer.report.page.plots:write_plots",
    "events": "quantizer.report.page.plots:write_events",
}

PLUGIN = Plugin("page", report=_FUNCTIONS)
