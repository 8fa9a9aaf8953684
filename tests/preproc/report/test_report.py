"""report.png and the distributions in it: every kind of dataset is drawn, without an empty panel."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from preproc.report.console import COVERAGE_LIMITS, ColumnSummary, LabelSum, SplitSummary
from preproc.report.distributions import BLOCK_ROWS, BLOCKS, NUM_BINS, read_distributions
from preproc.report.plot import MOST_ROWS, ReportFacts, draw

FACTS = ReportFacts(
    "shop",
    {
        "train": SplitSummary(900, {"click": LabelSum(90)}),
        "test": SplitSummary(100, {"click": LabelSum(5)}),
    },
    2,
)
UNLABELLED = {"train": SplitSummary(900), "test": SplitSummary(100)}


def distribution(tmp_path, values):
    path = tmp_path / "numerical.bin"
    np.asarray(values, "<f4").tofile(path)
    return read_distributions(path, ["x"], "float32", len(values))["x"]


def categorical(*, covered: bool = True) -> ColumnSummary:
    coverage = [[max(50 // limit, 1), 900 - limit] for limit in COVERAGE_LIMITS]
    return ColumnSummary(0.1, 50, 20, coverage if covered else None, 900)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw without rendering, and return the panels' titles and all texts."""
    figures = []
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda self, _: figures.append(self.figure))

    def drawn(columns: dict[str, ColumnSummary], facts: ReportFacts = FACTS):
        draw(tmp_path / "report.png", columns, facts)
        axes = figures[-1].axes
        titles = [a.get_title(loc="left") for a in axes if a.get_title(loc="left")]
        texts = [text.get_text() for a in axes for text in a.texts]
        return titles, [*(text.get_text() for text in figures[-1].texts), *texts]

    return drawn


def test_a_distribution_has_quantiles_and_all_values(tmp_path):
    values = np.random.default_rng(0).normal(3, 2, 5000).astype("f4")
    found = distribution(tmp_path, values)
    assert (found.rows, sum(found.counts), len(found.counts)) == (5000, 5000, NUM_BINS)
    assert found.quantiles[3] == pytest.approx(np.median(values), rel=1e-5)
    assert (found.quantiles[0], found.quantiles[-1]) == pytest.approx((values.min(), values.max()))
    assert found.mean == pytest.approx(values.mean(), rel=1e-4)
    constant = distribution(tmp_path, [7] * 9)
    assert (constant.low, constant.high, sum(constant.counts)) == (7, 7, 9)
    # Half less is the same number, of this size.
    large = distribution(tmp_path, [2.0**64] * 9)
    assert (large.low, sum(large.counts)) == (large.high, 9)


@pytest.mark.parametrize("numbers", [24, 100, 2000])
def test_whole_numbers_have_no_comb(tmp_path, numbers):
    counts = distribution(tmp_path, np.arange(20 * numbers) % numbers).counts
    assert len(counts) <= NUM_BINS
    # Values beyond the 1 % quantiles are in the first and the last bin, which may have fewer numbers.
    assert len({*counts[1:-1]}) == 1


def test_many_rows_are_read_in_blocks_from_the_first_to_the_last(tmp_path):
    found = distribution(tmp_path, np.arange(BLOCKS * BLOCK_ROWS * 3))
    assert found.rows == BLOCKS * BLOCK_ROWS
    assert found.quantiles[0] == 0
    assert found.quantiles[-1] == pytest.approx(BLOCKS * BLOCK_ROWS * 3 - 1, rel=1e-5)


def test_the_columns_of_a_split_are_told_apart(tmp_path):
    path = tmp_path / "numerical.bin"
    np.array([[1, 5], [3, 9], [100, 100]], "<f2").tofile(path)
    found = read_distributions(path, ["a", "b"], "float16", 2)
    assert (found["a"].mean, found["b"].mean) == (2, 7)
    assert read_distributions(tmp_path / "absent", [], "float16", 2) == {}


def test_numericals_have_their_distribution_and_categoricals_their_coverage(tmp_path, drawn):
    columns = {
        "price": ColumnSummary(0.2, rows=900, distribution=distribution(tmp_path, [1, 2, 4])),
        "item": categorical(),
    }
    titles, texts = drawn(columns)
    assert titles == [
        *("missing, % of rows", "values after transforms, 1 % to 99 % (3 rows)"),
        *("missing, % of rows", "values kept, % of those seen, limit 2"),
        "rows whose value is kept, % of those that have one",
    ]
    assert "shop   ·   1 numerical and 1 categorical features" in texts
    assert "train 900 rows, click 10.00 %   ·   test 100 rows, click 5.00 %" in texts
    assert {"2.333", "20.0", "20 of 50, 40 %"} <= set(texts)


def test_one_kind_of_features_leaves_no_panel_for_the_other(tmp_path, drawn):
    one = ColumnSummary(0.0, rows=9, distribution=distribution(tmp_path, [3.0] * 9))
    titles, texts = drawn({"price": one}, ReportFacts("shop", UNLABELLED, 1))
    assert len(titles) == 2
    assert "always 3" in texts
    assert "train 900 rows   ·   test 100 rows" in texts
    many = {f"label {n}$": LabelSum(45) for n in range(9)} | {"stars": LabelSum(3150, False)}
    _, texts = drawn({"price": one}, ReportFacts("shop", {"train": SplitSummary(900, many)}))
    for part in (r"train 900 rows, label 0\$ 5.00 %, ", r"label 8\$ 5.00 %, stars mean 3.5"):
        assert part in " ".join(texts[1:3])
    assert max(len(text) for text in texts) < 180
    titles, _ = drawn({"item": categorical(covered=False)})
    assert titles == ["missing, % of rows", "values kept, % of those seen, limit 2"]
    assert drawn({})[0] == []


def test_more_features_than_a_picture_holds_are_counted(drawn):
    _, texts = drawn({f"c{n}": categorical(covered=False) for n in range(MOST_ROWS + 3)})
    assert any("3 features are not drawn; report.json has all" in text for text in texts)
