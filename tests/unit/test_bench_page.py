"""docs/benchmarks.md and its plots are made from the results that were kept."""

from __future__ import annotations

from xml.etree import ElementTree

from bench import page
from bench.__main__ import BENCHMARKS
from bench.page import _figure, _plain
from bench.plots import bars, ratios
from bench.report import Bar, Figure, Spread


def test_the_page_and_the_plots_are_made_from_the_results() -> None:
    found = page.results()
    assert set(found) <= set(BENCHMARKS)
    assert page.PAGE.read_text(encoding="utf-8") == page.render(found), "run `python -m bench.page`"
    for name, text in page.plots(found).items():
        assert (page.IMAGES / name).read_text(encoding="utf-8") == text, "run `python -m bench.page`"
        assert f"](images/{name})" in page.render(found)


def test_a_figure_is_kept_whole() -> None:
    figure = Figure("a", "b", "c", Spread(1.0, 0.5, 2.0), at_most=1.5, bars=(Bar("p", "g", "replicad", 3.0),))
    assert _figure(_plain(figure)) == figure


def test_a_bar_is_as_long_as_its_value_and_a_wide_range_is_logarithmic() -> None:
    def widths(*values: float) -> list[float]:
        text = bars("t", [Bar("t", "", name, value) for name, value in zip("abc", values, strict=False)])
        tree = ElementTree.fromstring(text)
        return [float(one.attrib["width"]) for one in tree.iter() if one.tag.endswith("rect")]

    one, two, four = widths(1, 2, 4)
    assert (round(one * 2), round(two * 2)) == (round(two), round(four))
    one, hundred, nothing = widths(1, 100, 0)
    assert 0 < one < hundred
    assert nothing == 0
    assert "(logarithmic)" in bars("t", [Bar("t", "", "a", 1), Bar("t", "", "b", 100)])
    assert "(logarithmic)" not in bars("t", [Bar("t", "", "a", 1), Bar("t", "", "b", 2)])


def test_texts_of_a_plot_are_texts() -> None:
    ElementTree.fromstring(bars("a < b & c", [Bar("", "<g>", '"n"', 1.0)]))
    ElementTree.fromstring(ratios("a < b", [Figure("x & y", "", "", Spread(1.0, 0.5, 0.0))]))


def test_a_goal_that_was_not_met_says_no() -> None:
    missed = Figure("slow", "2 s", "1 s", Spread(2.0, 2.0, 2.0), at_most=1.0)
    one = {
        "title": "Latency: x", "date": "d", "machine": "m", "load": "0.1", "command": "python -m bench latency",
        "seconds": 1, "figures": [_plain(missed)],
    }  # fmt: skip
    text = page.render({"latency": one})
    assert "| slow | 2 s | 1 s | 2.00 (2.00 to 2.00) | <= 1 | **no** |" in text
    assert "`python -m bench latency`" in text
