"""The report as a page: one HTML file that loads nothing, runs nothing, and takes every text for a text."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from eaglefeed.ops import wording
from eaglefeed.ops.report_parts import Page

__all__ = ["render"]


def render(page: Page) -> str:
    """The page's HTML."""
    return _template().render(page=page)


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("eaglefeed.ops"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["plain"] = wording.plain
    return environment.get_template("report.html.j2")
