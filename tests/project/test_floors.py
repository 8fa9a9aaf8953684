"""Lower bounds of a step, against counts made by hand and published numbers."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import floors
from benchmarks.rows import ROOT, ROWS, compose_row
from benchmarks.train import RECORD_EVERY
from dataloading.randomness import power_law
from nn.build import model_spec, open_source
from nn.models.registry import declared_tables
from nn.step_floor import (
    FP8,
    SUSTAINED_FP8_SPEEDUP,
    SUSTAINED_SHARE,
    Floor,
    count_all_to_all,
    count_flops,
    count_hbm,
    floor_of,
    power_law_shares,
    sent_elements,
    unique_rows,
)
from nn.tiers.traffic import counted_share, power_law_share
from tests.helpers.command import hydra_that_reads_once
from tests.nn.models.test_kinds_of_tables import Kinds

# 3 numerical features, 2 tables of 100 and 50 rows, 8 columns, hotness 1 and 3.
SMALL = [
    "data.synthetic.cardinalities=[100,50]",
    "data.synthetic.hotness=[1,3]",
    "data.synthetic.num_numerical=3",
    "model.embedding_dim=8",
    "model.bottom_mlp=[16,8]",
    "model.top_mlp=[4,1]",
    "train.batch_size=64",
    "train.amp=bf16",
    "optimizer.name=sgd",
]
UNIQUE = {"cat_0": 5, "cat_1": 2}
MANY = {"cat_0": 100.0, "cat_1": 100.0}
MLPERF = [
    "data.synthetic.num_numerical=13",
    "data.synthetic.cardinalities=[40000000,39060,17295,7424,20265,3,7122,1543,63,40000000,3067956,"
    "405282,10,2209,11938,155,4,976,14,40000000,40000000,40000000,590152,12973,108,36]",
    "data.synthetic.hotness=[3,2,1,2,6,1,1,1,1,7,3,8,1,6,9,5,1,1,1,12,100,27,10,3,1,1]",
    "model.embedding_dim=128",
    "model.bottom_mlp=[512,256,128]",
    "model.top_mlp=[1024,1024,512,256,1]",
    "model.cross.num_layers=3",
    "model.cross.projection_dim=512",
]


@pytest.fixture(autouse=True, scope="module")
def reads_once():
    with hydra_that_reads_once():
        yield


def composed(*overrides: str, recipe: str = "dlrm"):
    config = compose_row(recipe, *SMALL, *overrides)
    return config, open_source(config).spec


def elements_for(case, world_size: int, own: dict[str, float] = MANY) -> dict[str, float]:
    config, spec = case
    return sent_elements(declared_tables(config.model, spec), spec, 10, world_size, own)


def sent_by_a_rank(
    case, world_size: int, own: dict[str, float] = MANY, *, expands: bool = False
) -> dict[str, float]:
    """Return what a rank of ten samples sends if they look up as many distinct rows of each table as `own` says."""
    sent = elements_for(case, world_size, own)
    return count_all_to_all(*case, 10, sent, own, world_size, expands=expands)


def test_flops_of_a_small_dlrm():
    counted = count_flops(*composed(), batch=10)
    # 3 numbers padded to 8; 8 + 3 products padded to 16; nobody asks for the gradient of the numbers
    layers = 6 * (8 * 16 + 16 * 8 + 16 * 4 + 4 * 1) - 2 * 8 * 16
    assert counted == {"MLPs and cross": 10 * layers, "dot interaction": 10 * 3 * 6 * 8}


def test_mlperfs_dcnv2_has_the_flops_of_its_rules():
    config = compose_row("dcnv2", *MLPERF)
    counted = count_flops(config, open_source(config).spec, batch=1)
    # 16.03 M multiplications a sample, six operations each (less the numbers' own gradient)
    assert counted["MLPs and cross"] == pytest.approx(96.2e6, rel=1e-3)


def test_bytes_of_a_small_dlrm():
    counted = count_hbm(*composed(), batch=10, unique=UNIQUE, sent={})
    parameters = (8 * 16 + 16) + (16 * 8 + 8) + (16 * 4 + 4) + (4 + 1)
    assert counted == {
        "batch": 10 * (2 * 4 * (3 + 1) + 3 * 4 * (1 + 3)),
        "rows read": 7 * 8 * 4,
        "embeddings": 5 * 10 * 2 * 8 * 2,
        "rows updated": 7 * 2 * 8 * 4,
        "activations": 2 * 10 * (8 + 16 + 16 + 4) * 2,
        "dense component": 4 * 4 * parameters,
    }


def test_every_table_counts_with_its_own_width_lookups_and_vectors():
    kinds = [
        f"model.name={Kinds.__module__}:Kinds",
        "data.synthetic.cardinalities=[50,40,7,300]",
        "data.synthetic.hotness=[3,1,2,5]",
        "train.amp=off",
    ]
    config, spec = composed(*kinds)
    tables = declared_tables(config.model, spec)
    # A table of two features without pooling, three others of one vector, and four of one column.
    assert [table.embedding_dim for table in tables] == [8, 8, 4, 1, 1, 1, 1]
    counted = count_hbm(
        config,
        spec,
        batch=10,
        unique={table.name: 2.0 + index for index, table in enumerate(tables)},
        sent={},
    )
    assert counted["rows read"] == 4 * (2 * 8 + 3 * 8 + 4 * 4 + 5 + 6 + 7 + 8)
    assert counted["rows updated"] == 2 * counted["rows read"]
    assert counted["embeddings"] == 5 * 10 * 4 * (3 * 8 + 8 + 4 + 4)
    # The ids of a feature come once.
    assert counted["batch"] == 10 * (2 * 4 * (3 + 1) + 3 * 4 * 11)
    floor = floor_of(config, spec, 1, power_law_shares(0))
    batch = config.train.batch_size
    read = 8 * unique_rows(40, batch, 3, power_law_share(40, 0)) + 8 * unique_rows(
        50, batch, 3, power_law_share(50, 0)
    )
    read += 4 * unique_rows(300, batch, 5, power_law_share(300, 0))
    for cardinality, hotness in ((50, 3), (40, 1), (7, 2), (300, 5)):
        read += unique_rows(cardinality, batch, hotness, power_law_share(cardinality, 0))
    assert floor.hbm["rows read"] == pytest.approx(4 * read)


def test_16_bit_tables_halve_the_bytes_of_rows_and_not_of_their_state():
    rule = "optimizer.embedding_name=adagrad"
    full, half = (
        count_hbm(
            *composed(rule, f"model.embedding_dtype={dtype}"), batch=10, unique=UNIQUE, sent={}
        )
        for dtype in ("fp32", "bf16")
    )
    assert half.pop("rows read") * 2 == full.pop("rows read")
    assert half.pop("rows updated") == 7 * 2 * 8 * (2 + 4)
    assert full.pop("rows updated") == 7 * 2 * 8 * (4 + 4)
    assert half == full


def test_dcnv2_counts_its_input_once_as_embeddings():
    one = composed("model.cross.num_layers=1", "model.cross.projection_dim=5", recipe="dcnv2")
    counted = count_hbm(*one, batch=10, unique=UNIQUE, sent={})
    # the bottom's 8 and 16, its output in x0, the cross layer's 5, x1 of 24, the top's 4
    assert counted["activations"] == 2 * 10 * (8 + 16 + 8 + 5 + 24 + 4) * 2
    parallel = composed(
        "model.cross.num_layers=1",
        "model.cross.projection_dim=5",
        "model.cross.structure=parallel",
        recipe="dcnv2",
    )
    counted = count_hbm(*parallel, batch=10, unique=UNIQUE, sent={})
    # the top sees x1 and the deep network's 4, padded to 32
    assert counted["activations"] == 2 * 10 * (8 + 16 + 8 + 5 + 32) * 2


@pytest.mark.parametrize(
    ("rule", "a_row"), [("sgd", 32), ("adagrad", 64), ("rowwise_adagrad", 36), ("adam", 96)]
)
def test_an_update_reads_and_writes_the_rules_state(rule, a_row):
    case = composed(f"optimizer.embedding_name={rule}")
    assert count_hbm(*case, batch=10, unique=UNIQUE, sent={})["rows updated"] == 7 * 2 * a_row


def test_fp32_and_fp16_send_embeddings_in_four_bytes():
    for amp, size, activation in (("bf16", 2, 2), ("fp16", 4, 2), ("off", 4, 4)):
        case = composed(f"train.amp={amp}")
        hbm = count_hbm(*case, batch=10, unique=UNIQUE, sent={})
        assert hbm["embeddings"] == 5 * 10 * 2 * 8 * size
        assert hbm["activations"] == 2 * 10 * 44 * activation
        sent = sent_by_a_rank(case, 2)
        assert sent["embeddings"] == sent["gradients"] == 10 * 2 * 8 * size / 2


def test_bytes_of_other_ranks_are_sent_and_received():
    case = composed()
    assert set(sent_by_a_rank(case, 1).values()) == {0}
    sent = sent_by_a_rank(case, 4)
    assert sent == {
        "ids": 0.75 * 10 * 4 * 4,
        "embeddings": 0.75 * 10 * 16 * 2,
        "gradients": 0.75 * 10 * 16 * 2,
    }
    assert sent_by_a_rank(case, 4, expands=True)["ids"] == 0.75 * 10 * 4 * 2
    alone, four = (
        count_hbm(*case, batch=10, unique=UNIQUE, sent=elements_for(case, world_size))
        for world_size in (1, 4)
    )
    assert four["embeddings"] == alone["embeddings"] / 5 * 8


@pytest.mark.parametrize(("exponent", "cardinality"), [(0, 3000), (1.0, 3000), (1.05, 50_000)])
def test_unique_rows_are_those_that_the_synthetic_stream_draws(exponent, cardinality):
    generator = np.random.default_rng(1)
    drawn = [
        len(np.unique(power_law(generator.random(20_000), cardinality, exponent)))
        for _ in range(20)
    ]
    expected = unique_rows(cardinality, 10_000, 2, power_law_share(cardinality, exponent))
    assert expected == pytest.approx(np.mean(drawn), rel=5e-3)


def test_unique_rows_follow_counts():
    share = counted_share(np.array([6, 3, 0, 1]))
    wanted = 3 - 0.4**5 - 0.7**5 - 0.9**5
    assert unique_rows(4, 5, 1, share) == pytest.approx(wanted)


def test_unique_rows_of_uniform_draws():
    assert unique_rows(10, 3, 2, power_law_share(10, 0)) == pytest.approx(10 * (1 - 0.9**6))
    assert unique_rows(1, 100, 1, power_law_share(1, 1.05)) == 1


def test_unique_rows_of_a_steep_law():
    # density x ** -2 over [1, 4): rows are drawn with 2/3, 2/9 and 1/9
    wanted = 3 - (1 / 3) ** 2 - (7 / 9) ** 2 - (8 / 9) ** 2
    assert unique_rows(3, 1, 2, power_law_share(3, 2.0)) == pytest.approx(wanted)


def test_equal_first_ids_expand_to_the_same_rows():
    generator = np.random.default_rng(1)
    rows = 5000
    bags = np.concatenate(
        [np.arange(rows)[:, None], generator.integers(0, rows, (rows, 9))], axis=1
    )
    drawn = [
        len(np.unique(bags[power_law(generator.random(400), rows, 1.05).astype(int)]))
        for _ in range(200)
    ]
    expected = unique_rows(rows, 400, 10, power_law_share(rows, 1.05), expands=True)
    assert expected == pytest.approx(np.mean(drawn), rel=0.02)
    assert expected < unique_rows(rows, 400, 10, power_law_share(rows, 0))


def test_expanded_features_store_one_id_per_row():
    case = compose_row("dlrm", *SMALL[:1], *SMALL[2:], "data.multi_hot.hotness=[1,3]")
    floor = floor_of(case, model_spec(case, open_source(case)), 2, power_law_shares(1.05))
    # Of 32 samples, an id of each feature, or fewer distinct rows.
    own = unique_rows(100, 32, 1, power_law_share(100, 1.05))
    assert floor.all_to_all["ids"] == pytest.approx(0.5 * 4 * (own + 32))
    unique = unique_rows(100, 64, 1, power_law_share(100, 1.05)) + unique_rows(
        50, 64, 3, power_law_share(50, 1.05), expands=True
    )
    assert floor.hbm["rows read"] == pytest.approx(unique / 2 * 8 * 4)


def test_the_floor_is_the_slowest_of_three_resources():
    floor = Floor(
        flops={"a": 2e9, "b": 2e9},
        hbm={"c": 43e9},
        all_to_all={"d": 0.394e9},
        flops_per_s=1e12,
        global_batch_size=1000,
    )
    assert floor.times_ms == pytest.approx({"FLOPs": 4, "HBM": 10, "all-to-all": 1})
    assert (floor.bound, floor.ms) == ("HBM", pytest.approx(10))


def test_the_memory_is_that_of_the_card_that_ran():
    case = composed()
    of_cards = [
        floor_of(*case, 1, power_law_shares(0), gpu=gpu).times_ms
        for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "")
    ]
    assert of_cards[0] == of_cards[2]
    assert of_cards[1]["HBM"] == pytest.approx(of_cards[0]["HBM"] * 4.3 / 3.0)
    assert of_cards[1]["FLOPs"] == of_cards[0]["FLOPs"]


def test_the_products_of_rankmixer_are_counted_in_8_bits():
    config = ROWS["rankmixer_1_100m_fp8"].config()
    flops = count_flops(config, model_spec(config, open_source(config)), 4096)
    # Two blocks of two products, each forward and for both gradients.
    assert flops[FP8] == 4096 * 2 * 2 * 3 * 2 * 16 * 768 * 2304
    assert flops["per-token networks"] == 0
    narrow = ROWS["rankmixer_1_100m"].config()
    wide = count_flops(narrow, model_spec(narrow, open_source(narrow)), 4096)
    assert wide["per-token networks"] == flops[FP8]
    assert sum(wide.values()) == sum(flops.values())


def test_the_sustained_floor_has_the_rates_of_the_power_limit():
    floor = Floor(
        flops={"a": 2e9, FP8: 2e9},
        hbm={"c": 4.3e9},
        all_to_all={},
        flops_per_s=1e12,
        global_batch_size=1000,
        sustained_share=0.5,
    )
    assert floor.times_ms["FLOPs"] == pytest.approx(2 + 1)
    assert floor.sustained_times_ms == pytest.approx(
        {"FLOPs": 4 + 4 / SUSTAINED_FP8_SPEEDUP, "HBM": 1, "all-to-all": 0}
    )
    assert floor.sustained_ms == floor.sustained_times_ms["FLOPs"] > floor.ms
    assert pytest.approx(0.75, abs=0.01) == SUSTAINED_SHARE


def test_distinct_rows_are_sent_where_they_are_fewer_than_vectors():
    sent = sent_by_a_rank(composed(), 2, {"cat_0": 4.0, "cat_1": 25.0})
    # 4 rows of the first table, 10 vectors of the second, whose 30 ids are 25 rows.
    assert sent["embeddings"] == sent["gradients"] == 0.5 * (4 + 10) * 8 * 2
    assert sent["ids"] == 0.5 * 4 * (4 + 25)


def test_nothing_of_a_replicated_table_is_sent():
    config, spec = composed()
    tables = declared_tables(config.model, spec)
    first = tables[0]
    shares = power_law_shares(0)
    all_sent, less = (
        floor_of(config, spec, 4, shares, replicated) for replicated in ((), (first.name,))
    )
    own = unique_rows(100, config.train.batch_size / 4, 1, power_law_share(100, 0))
    changes = {
        name: all_sent.all_to_all[name] - less.all_to_all[name] for name in ("ids", "embeddings")
    }
    assert changes["ids"] == pytest.approx(0.75 * own * 4)
    assert changes["embeddings"] == pytest.approx(0.75 * own * first.embedding_dim * 2)
    assert all_sent.hbm["embeddings"] - less.hbm["embeddings"] == pytest.approx(
        4 * changes["embeddings"]
    )
    assert all_sent.flops == less.flops
    nothing = floor_of(config, spec, 4, shares, [table.name for table in tables])
    assert set(nothing.all_to_all.values()) == {0}


def test_ranks_share_the_work():
    config, spec = composed()
    alone, two = (
        floor_of(config, spec, world_size, power_law_shares(1.05)) for world_size in (1, 2)
    )
    assert two.flops["MLPs and cross"] == alone.flops["MLPs and cross"] / 2
    assert two.hbm["rows updated"] == alone.hbm["rows updated"] / 2
    assert two.hbm["dense component"] == alone.hbm["dense component"]
    slower = composed("train.amp=off"), composed("train.amp=off", "train.tf32=false")
    rates = [
        floor_of(*config_and_spec, 1, power_law_shares(0)).flops_per_s for config_and_spec in slower
    ]
    assert alone.flops_per_s == 2 * rates[0] > 2 * rates[1]


@pytest.mark.doors
@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_benchmark_composes(name):
    row = ROWS[name]
    batch_size = row.config(Path("data") if row.needs_data else None).train.batch_size
    assert batch_size % row.world_size == 0
    if row.needs_data:
        return
    # evaluations fall together with records, so not among the profiled steps at the end
    assert row.train_rows % (batch_size * RECORD_EVERY) == 0
    assert (ROOT / f"configs/data/{row.tables}.yaml").exists()


def test_a_row_of_listens_wants_its_dataset(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["floors", "hstu_1"])
    with pytest.raises(SystemExit, match="2"):
        floors.main()
    assert "hstu_1: --data must name their dataset" in capsys.readouterr().err
