"""The report as one page: HTML, SVG and CSS in one file, which loads nothing."""
