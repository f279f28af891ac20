"""The report in a real browser: at a phone's width and a desktop's, light and dark."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import chromium
import report_runs
from eaglefeed.ops.facts import RunFacts
from eaglefeed.ops.report import write_report

pytestmark = pytest.mark.skipif(chromium.BINARY is None, reason="Chromium is not installed")
RUNS: dict[str, Callable[[], RunFacts]] = {
    "usual": report_runs.usual,
    "finished": report_runs.finished,
    "empty": report_runs.empty,
    "hostile": report_runs.hostile,
    "long": lambda: report_runs.usual(num_points=2100),
}
_CONTRAST = """
(() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b }
  const ground = light(getComputedStyle(document.body).backgroundColor)
  return Math.min(...[...document.querySelectorAll('p, dt, dd, small, th, td, li, summary, time, h2, .state, .plot')]
    .map(e => light(getComputedStyle(e).color))
    .map(c => (Math.max(c, ground) + 0.05) / (Math.min(c, ground) + 0.05)))
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Page]:
    with chromium.opened() as page:
        yield page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_report(facts(), tmp_path_factory.mktemp(name)).page for name, facts in RUNS.items()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", RUNS)
def test_a_page_fits_loads_nothing_and_complains_of_nothing(
    browser: chromium.Page, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    browser.show(pages[name], width=width, scheme=scheme)
    assert browser.value("window.innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [pages[name].as_uri()]
    assert browser.value("document.querySelectorAll('script, img, iframe').length") == 0
    hidden = "[...document.querySelectorAll('section')].filter(s => s.offsetHeight < 40 || s.offsetWidth < 300).length"
    assert browser.value(hidden) == 0
    assert browser.value(_CONTRAST) >= 4.5


def test_dark_is_dark_and_light_is_light(browser: chromium.Page, pages: dict[str, Path]) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        browser.show(pages["usual"], width=1280, scheme=scheme)
        grounds.append(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(253, 253, 252)", "rgb(22, 22, 21)"]


def test_every_plot_has_a_name_words_and_a_table(browser: chromium.Page, pages: dict[str, Path]) -> None:
    browser.show(pages["usual"], width=1280)
    count = "document.querySelectorAll('{}').length"
    num_plots = browser.value(count.format("figure svg[role=img]"))
    assert num_plots == 9
    for part in ("svg > title", "svg > desc", "figure details table", "figure figcaption h3"):
        assert browser.value(count.format(part)) == num_plots, part
    assert browser.value("[...document.querySelectorAll('svg desc')].every(e => e.textContent.includes('between'))")
    ids = "[...document.querySelectorAll('[id]')].map(e => e.id)"
    assert browser.value(f"new Set({ids}).size === {ids}.length")


def test_sections_stand_in_the_order_in_which_one_asks(browser: chromium.Page, pages: dict[str, Path]) -> None:
    browser.show(pages["usual"], width=360)
    told = browser.value("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert told == [
        *("Where the items are", "Over time", "Training", "Trouble", "What was fed", "Who worked", "Contract"),
        *("Timeline", "What this report does not know"),
    ]


def test_a_script_in_a_page_would_not_run(browser: chromium.Page, pages: dict[str, Path], tmp_path: Path) -> None:
    """The page's own policy, should a text ever get through."""
    page = pages["empty"].read_text().replace("</main>", "<script>document.title = 'run'</script></main>")
    (tmp_path / "page.html").write_text(page)
    browser.show(tmp_path / "page.html", width=1280)
    assert browser.value("document.title") == "new · eaglefeed report"
    assert browser.complaints
