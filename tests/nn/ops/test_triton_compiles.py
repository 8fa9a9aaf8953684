"""Kernels are compiled for an H200 where there is none: the interpreter takes what the compiler refuses."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("triton")

POINTERS = {
    "*i32": ["keys", "is_good", "blocks", "columns", "hotness", "rounding_key", "updates_before"],
    "*i64": ["order", "sums_keys", "weight_offset", "state1_offset", "state2_offset", "key_base"],
    "*fp32": ["state1", "state2", "sums", "scalars", "partial_sums", "factor"],
    "*i8": ["sums_exist"],
    "*bf16": ["gradients", "grad", "products", "x0", "factors", "grad_factor", "activation", "out"],
}
SIGNATURE = {name: dtype for dtype, names in POINTERS.items() for name in names} | {
    **dict.fromkeys(
        ["first_keys", "reciprocals", "first_id", "out_column", "first_start", "first_row"], "*i64"
    ),
    **dict.fromkeys(["slot_start", "slot_offset", "source_rows", "target_rows"], "*i64"),
    **dict.fromkeys(["source_stride", "target_stride", "count", "width"], "i32"),
    **dict.fromkeys(["counts", "exists", "first_pair", "ids", "id_stride", "num_ids"], "*i32"),
    **{"slot_rows": "*i32", "settings": ("fp32",) * 5},
    "masked": "*bf16",
    # Of 8-bit products; the sizes of a matrix are multiples of 16, which makes wide loads and stores.
    **dict.fromkeys(["x", "factor_of_x0", "wide"], "*bf16"),
    **{"words": "*i32", "scales": ("*fp32", "*fp32")},
    **{"touched": "*u8", "touched_start": "*i64"},
}


@pytest.mark.doors
def test_kernels_compile_for_a_gpu_that_is_not_there():
    # Triton decides at its import whether it interprets, so it takes a process.
    done = subprocess.run(
        [sys.executable, "-c", "from tests.nn.ops.test_triton_compiles import run; run()"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled") == 175
    # An optimizer without a branch, and a state of a kind that the kernel does not know.
    assert done.stdout.count("refused True") == 2
    # A warp that updates rows of one state does not wait for others, whether it notes the rows that it changes or not.
    assert "barriers of row-wise Adagrad: 0 and 0" in done.stdout
    # A warp has whole rows.
    assert "shuffles and barriers of a norm's gradient in bf16: {(20, 0)}" in done.stdout
    # As which AutoInt's products were wrong on a GPU.
    assert "wgmma of AutoInt's layer: 0" in done.stdout
    # The processor cuts numbers off, the layer rounds them; 16 bits and float32 stay as they are.
    assert "TF32 of AutoInt's layer is rounded: [False, True, False, True]" in done.stdout


def run() -> None:
    from triton.compiler import CompilationError

    from nn.embedding.optimizer import table_rule
    from nn.embedding.rules import adagrad
    from nn.embedding.triton_launcher import branch_of
    from nn.ops.triton import batch_norm, column_sums
    from nn.ops.triton.cross_net import Depth, Layers, _cross_backward
    from nn.ops.triton.dense_updates import _dense_adagrad, _dense_adam, _dense_sgd
    from nn.ops.triton.dot_interaction import Shape, _dot_forward_of_rows
    from nn.ops.triton.dropout import Counters, _dropout
    from nn.ops.triton.embedding_bag import Listed, _pooled_lookup, _segment_update, _table_update
    from nn.ops.triton.mlp import _logit_forward, _relu_backward
    from nn.ops.triton.parameters import ALIGN, Blocks, _cast
    from nn.ops.triton.row_sums import FLOAT32_P, SUMS, _row_sums, _sum_of_rows
    from nn.ops.triton.served_lookup import _cold_rows, _served_lookup
    from nn.tiers.row_copy import _copy_rows, _exchange_rows
    from nn.tiers.slot_map import DeviceMoves
    from serving.gpu.vectors import Vector

    of_update = {"factors": "*fp32", "num_rows": "*i64", "listed": Listed("*i32", "*i32", "*fp32")}
    untracked = dict.fromkeys(("touched", "touched_start"))
    update = {"ONE_HOT": True, "ALIGN": 16, "LENGTH": 32, "GROUP": 4, "BLOCK_D": 128}
    update |= {"BY_PRODUCT": True, "STRIDE": 3328, "WIDTH": 128, "num_warps": 1}
    for weights, name, level, source in (
        ("*fp32", "adam", 0, "sum"),
        ("*fp32", "rowwise_adagrad", 1, "one"),
        ("*bf16", "sgd", 0, "one"),
        ("*bf16", "adagrad", 1, "sum"),
        ("*fp16", "adam", 0, "listed"),
        ("*fp16", "rowwise_adagrad", 0, "sum"),
        ("*bf16", "ftrl", 1, "listed"),
        ("*fp32", "lion", 0, "sum"),
        ("*fp32", "sgd_momentum", 0, "one"),
    ):
        branch = branch_of(table_rule(name))
        dtypes = of_update | {"weights": weights}
        constants = {"LEVEL": level, "L2": level == 1, "SOURCE": source}
        constants |= dict.fromkeys(("BOUNDED", "SLOTS", "PREFETCHES"), level == 0)
        # The width of all tables, or of each.
        constants["WIDTH"] = 128 * (source == "sum")
        constants |= untracked if level else {}
        build(_segment_update, dtypes, **update | constants, **branch)
        # Of replicated tables, which are float32.
        of_table = {"weights": "*fp32", "gradients": "*fp32", "num_rows": "i32"}
        sizes = {"L2": level == 1, "WIDTH": 120, "ROWS": 4, "BLOCK_D": 128, "num_warps": 1}
        build(_table_update, of_table, **branch, **sizes)
    branch = branch_of(table_rule("rowwise_adagrad"))
    dtypes = of_update | {"weights": "*fp32"}
    constants = {"LEVEL": 0, "SOURCE": "sum"}
    constants |= dict.fromkeys(("L2", "BOUNDED", "SLOTS", "PREFETCHES"), False)
    alone = update | {"ONE_HOT": False, **branch, **constants}
    barriers = [
        build(_segment_update, dtypes, **alone, **tracking).count("bar.sync")
        for tracking in (untracked, {})
    ]
    print("barriers of row-wise Adagrad:", barriers[0], "and", barriers[1])
    dtypes = dict.fromkeys(("steps", "rate", "found_inf"), "*fp32")
    dtypes |= {"blocks": Blocks, "table": "*i64", "eps": "fp32", "numbers": ("fp32",) * 6}
    for kernel, num_tensors in ((_dense_adagrad, 3), (_dense_adam, 4), (_dense_sgd, 2)):
        build(kernel, dtypes | {"tensors": ("*fp32",) * num_tensors}, ALIGN=ALIGN)
    build(_cast, dtypes | {"tensors": ("*fp32", "*bf16")}, ALIGN=ALIGN)
    for branch in (
        {"UPDATE": None, "STATES": ("none", "none")},
        {"UPDATE": adagrad.RULE.kernel, "STATES": ("column", "none")},
    ):
        try:
            constants = {"LEVEL": 0, "SOURCE": "sum"}
            constants |= dict.fromkeys(("L2", "BOUNDED", "SLOTS", "PREFETCHES"), False)
            dtypes = of_update | {"weights": "*fp32"}
            build(_segment_update, dtypes, **update, **branch, **constants, **untracked)
        except CompilationError as error:
            print("refused", "table optimizer" in str(error.__cause__ or error))
    for weights in ("*fp32", "*bf16"):
        for bounded in (True, False):
            kind = {"BOUNDED": bounded, "IS_MEAN": bounded}
            build(
                _pooled_lookup,
                {"weights": weights, "num_rows": "*i64"},
                **kind,
                ALIGN=16,
                BLOCK=32,
                BLOCK_D=128,
            )
    numbers = dict.fromkeys((*Vector._fields, "is_fetched", "first_key", "order"), "*i64")
    for weights, is_complete in (("*i8", False), ("*bf16", True)):
        kind = dict.fromkeys(["HAS_COLD", "HAS_RAGGED"], not is_complete)
        dtypes = {"weights": weights, "scales": "*fp32", "places": "*i32", "vectors": Vector}
        scaled = {"HAS_SCALES": not is_complete, "ALIGN": 16, "BLOCK_D": 128}
        build(_served_lookup, dtypes | numbers, BLOCK=32, **kind, **scaled)
        dtypes |= numbers | {"counts": "*i64"}
        build(_cold_rows, dtypes, ROWS=128, num_warps=32, **scaled)
    for dtype in ("*fp32", "*bf16"):
        rows = dict.fromkeys(("source", "target"), dtype)
        build(_copy_rows, rows, ROWS=8, BLOCK_D=128)
        moves = dict.fromkeys(("rows", "slots", "returned"), "*i32") | {"moves": DeviceMoves}
        strides = dict.fromkeys(("host_stride", "arena_stride", "width"), "i32")
        pointers = dict.fromkeys(("host", "arena"), dtype)
        build(_exchange_rows, moves | strides | pointers, ROWS=8, BLOCK_D=128)
    for ids in ("*i32", "*i64"):
        build_mapping(ids)
    for index in range(3):
        build(_cross_backward, {"columns": "i32", "x": Layers}, S=Depth(index, 3))
    for scale in (1.0, 2.0):
        build(_relu_backward, {"columns": "i32"}, SCALE=scale)
    logit = {"columns": "i32", "weight": "*bf16", "bias": "*bf16", "logits": "*fp32"}
    build(_logit_forward, logit)
    of_rows = {"num_outputs": "i32", "offsets": "*i64", "layout_table": "*i64"}
    shape = Shape(27, 128, True, 16, 32, 128, "ieee")
    for weights, kept, bottom in (("*fp32", "*bf16", "*bf16"), ("*bf16", "*fp32", "*fp16")):
        dtypes = {"weights": weights, "kept": kept, "bottom": bottom, "out": bottom, **of_rows}
        build(_dot_forward_of_rows, dtypes, num_warps=1, S=shape, KEEPS=True)
    for values in ("*fp32", "*bf16"):
        dtypes_of_sums = {"values": values, "sums": "*fp32"}
        build(column_sums._column_sums, dtypes_of_sums, **column_sums.SIZES)
    names = ("num_valid", "mean", "rstd", "weight", "bias", "mean_sums")
    statistics = dict.fromkeys(names, "*fp32") | {"num_valid": "*i64", "columns": "i32"}
    for dtype in ("*fp32", "*bf16"):
        matrices = dict.fromkeys(("x", "out", "grad"), dtype) | statistics
        build(batch_norm._moments, matrices | {"sums": "*fp64"})
        build(batch_norm._gradient_sums, matrices | {"sums": "*fp32"})
        build(batch_norm._normalise, matrices)
        build(batch_norm._input_gradient, matrices)
        pointers = {"x": dtype, "out": dtype, "at": Counters("*i32", "*i32", "*i64", "*i64")}
        build(_dropout, pointers | {"columns": "i32", "scale": "fp32"})
        tables = {"tables": (dtype, dtype, "*fp32"), "indices": ("*i32", "*i64", "*i64")}
        numbers = {
            "scales": ("fp32",) * 3,
            "at": Counters(*["*i64"] * 4),
            "scale": "fp32",
            "columns": "i32",
        }
        sizes = {"TABLES": 3, "DROPS": True, "BLOCK_P": 4, "BLOCK_C": 512}
        base = {} if dtype == "*fp32" else {"base": None}
        build(_sum_of_rows, {"out": dtype, "base": dtype} | tables | numbers, **sizes, **base)
        sums = {"grad": dtype, "index": "*i64", "sums": "*fp32", "columns": "i32", "rows": "i32"}
        block = {"P": FLOAT32_P} if dtype == "*fp32" else {}
        build(_row_sums, sums, C=64, **SUMS | block)

    build_fp8()
    build_jagged()
    build_hstu_attention()
    build_layer_norm()
    build_rankmixer()
    build_masked_cross()
    build_compressed_interaction()
    build_fields()


def build_fields() -> None:
    """Compile the kernel of AutoInt's layer in both directions, of the default options and of the largest."""
    from nn.ops.triton import target_attention as kernels

    wgmma, rounded, names = 0, [], kernels._interact.arg_names
    for dtype, fields, columns, precision in (
        ("*bf16", 39, 16, "ieee"),
        ("*fp32", 39, 16, "tf32"),
        ("*fp32", 39, 16, "ieee"),
        ("*fp32", 64, 32, "tf32"),
    ):
        shape = kernels.FieldShape(fields, 2, columns, precision, 64, columns)
        for gradients, options in (
            ("constexpr", kernels.FIELDS_FORWARD),
            (dtype, kernels.FIELDS_BACKWARD),
        ):
            dtypes = dict.fromkeys(names[:2], dtype) | dict.fromkeys(names[2:4], gradients)
            nothing = {(2,): None, (3,): None} if gradients == "constexpr" else {}
            aligned = names[: 2 if nothing else 4]
            kind = {"aligned": aligned, "inside": nothing, "S": shape}
            code = build(kernels._interact, dtypes, **kind, **options)
            wgmma += code.count("wgmma")
        rounded.append("cvt.rna.tf32" in code)
    print("wgmma of AutoInt's layer:", wgmma)
    print("TF32 of AutoInt's layer is rounded:", rounded)


def build_masked_cross() -> None:
    """Compile the kernels of FCN's layers, of the default options with dropout, and without."""
    from nn.ops.triton import cross_net, layer_norm
    from nn.ops.triton.dropout import Counters

    for dtype, drops in (("*bf16", True), ("*fp32", True), ("*fp32", False)):
        names = ("x", "out", "grad", "factor", "crossed")
        dtypes = dict.fromkeys(names, dtype) | {"eps": "fp32", "scale": "fp32"}
        aligned = list(names)
        dtypes |= {"small": ("*fp32",) * 4, "at": Counters(dtype, dtype, "*i64", "*i64")}
        kind = {"aligned": aligned, "S": layer_norm.Shape(312, 512, 4, DROPS=drops)}
        nothing = {
            (cross_net._masked_cross.arg_names.index("at"), number): None for number in (0, 1)
        }
        build(cross_net._masked_cross, dtypes, inside=nothing, **kind)
        results = (dtype, dtype, dtype, "*fp32")
        build(cross_net._masked_gradient, dtypes | {"results": results}, 8, **kind)


def build_compressed_interaction() -> None:
    """Compile the kernels of xDeepFM's layers: of 39 features in the first layer, and in one behind it."""
    from nn.ops.triton import cross_net as kernels

    for dtype, precision in (("*bf16", "tf32"), ("*fp32", "tf32"), ("*fp32", "ieee")):
        names = ("a", "padded", "by", "out", "x", "v", "grad")
        dtypes = dict.fromkeys(names, dtype) | {"weight": "*fp32", "partial": "*fp32"}
        change = kernels.EXACT if precision == "ieee" else {}
        for inputs, block in ((39, 64), (16, 16)):
            shape = kernels.Pairs(precision, 39, inputs, 16, 64, block, 16)
            back = kernels.Pairs(precision, inputs, 39, 16, block, 64, 16)
            kind = {"aligned": [*dtypes, "rows"], "S": shape}
            build(kernels._pad, dtypes, IS_FIRST=inputs == 39, **kind)
            products = kind | kernels.PRODUCTS | change
            build(kernels._pair_products, dtypes, TO_K=True, **products)
            for of_result in (shape, back):
                build(kernels._pair_products, dtypes, TO_K=False, **products | {"S": of_result})
            build(kernels._pair_gradient, dtypes, **kind | kernels.OF_PAIRS | change)


def build_layer_norm() -> None:
    """Compile the kernels of layer norms, of narrow and of wide rows."""
    from triton import next_power_of_2

    from nn.ops.triton import layer_norm as kernels
    from nn.ops.triton.dropout import Counters

    of_columns = dict.fromkeys(("weight", "bias", "sums"), "*fp32")
    numbers = {"eps": "fp32", "scale": "fp32", "at": Counters(*["*i64"] * 4)}
    for dtype, columns, chosen in (
        ("*bf16", 64, False),
        ("*bf16", 512, True),
        ("*fp32", 100, True),
    ):
        matrices = dict.fromkeys(("x", "u", "a", "grad", "out", "of_x", "beside"), dtype)
        dtypes, block = matrices | of_columns | numbers, next_power_of_2(columns)
        width = columns * (3 if chosen else 1)
        is_wide = block >= kernels.WIDE
        rows, stages = (1, kernels.WIDE_STAGES) if is_wide else (2048 // block, 1)
        shape = kernels.Shape(columns, block, rows, width, chosen, chosen, stages)
        aligned = [*matrices, *of_columns, "u_stride", "of_u_stride"] * (columns != 100)
        for kernel in (kernels._norm, kernels._norm_gradient, kernels._gate):
            build(kernel, dtypes, aligned=aligned, S=shape)
        results = {"out": kernels.GateGradients, "of_u": dtype, "of_a": dtype}
        aligned += ["of_u", "of_a"] * (columns != 100)
        build(kernels._gate_gradient, dtypes | results, aligned=aligned, S=shape)


def build_rankmixer() -> None:
    """Compile the kernels of RankMixer's blocks, of one with 100 million weights and of a small one."""
    from triton import next_power_of_2

    from nn.ops.triton import rankmixer as kernels

    pairs = {"y": None, "y_bias": None}
    of_columns = dict.fromkeys(("weight", "bias", "of_norm", "of_bias", "sums"), "*fp32")
    for dtype, columns in (("*bf16", 768), ("*fp32", 32)):
        matrices = dict.fromkeys(("x", "y", "grad", "hidden", "out", "of_sum"), dtype)
        dtypes = matrices | of_columns | {"y_bias": "*fp32", "eps": "fp32", "columns": "i32"}
        dtypes["terms"] = kernels.Terms
        aligned, block = [name for name in dtypes if name != "eps"], next_power_of_2(columns)
        piece, waits = min(block, kernels.PIECE), set[tuple[int, int]]()
        for mixes, given in ((False, {}), (True, pairs), (True, {"y_bias": None})):
            shape, least = (
                kernels.Shape(columns, block, size // block, T=16, MIXES=mixes, PIECE=piece)
                for size in (kernels.FORWARD, kernels.BACKWARD)
            )
            kind = {"aligned": aligned, **given}
            build(kernels._norm, dtypes, S=shape, **kind, **kernels.NORM)
            code = build(kernels._norm_backward, dtypes, S=least, **kind, **kernels.NORM_GRADIENT)
            loop = code.partition("\n$L__BB0_2")[2].partition("bra")[0]
            waits.add((loop.count("shfl.sync"), loop.count("bar.sync")))
        print(f"shuffles and barriers of a norm's gradient in {dtype[1:]}: {waits}")
        build(kernels._add_mixed, dtypes, aligned=aligned, S=shape, **kernels.NORM)
        build(kernels._activate, dtypes, aligned=aligned)
        build(kernels._activation_gradient, dtypes, aligned=aligned)


def build_hstu_attention() -> None:
    """Compile the kernels of HSTU's attention; the blocks of a head of 128 columns fit into a GPU's memory."""
    from nn.ops.triton import hstu_attention as kernels

    dtypes = dict.fromkeys(("q", "k", "v", "grad", "out", "of_k", "of_v", "of_q"), "*bf16")
    dtypes |= dict.fromkeys(("starts", "lengths", "q_starts", "q_lengths", "norm"), "*i64")
    aligned = [*dtypes]
    dtypes |= {"scale": "fp32", "blocks": "i32", "x": kernels.Operands, "counts": kernels.Counts}
    shape = kernels.Shape(4, 128, *[4 * 512] * 4, 1, True, "tf32")
    for name, blocks in (
        ("_forward", kernels.FORWARD),
        ("_of_keys", kernels.OF_KEYS),
        ("_of_queries", kernels.OF_QUERIES),
        *((name, kernels.FEW_QUERIES) for name in ("_forward", "_of_keys", "_of_queries")),
    ):
        kernel = getattr(kernels, name)
        build(kernel, dtypes, aligned=aligned, S=shape, **blocks)


def build_fp8() -> None:
    """Compile the kernels of 8-bit products."""
    from nn.ops.triton.cross_net import Depth, Layers
    from nn.ops.triton.fp8 import cross_net as fp8_cross_net
    from nn.ops.triton.fp8 import quantise as fp8

    sizes = ("num_rows", "num_columns", "x", "x0", "rows", "words", "out", "activation", "wide")
    alone = {"wide": None, "sums": None}
    for rows, kind in (
        ("*fp8e4nv", {"bias": None}),
        ("*fp8e4nv", {"activation": None, "bias": None, **alone}),
        # GELU of per-token networks, and its gradient.
        ("*fp8e4nv", {"activation": None, **alone}),
        ("*fp8e5", {"wide": None}),
        ("*fp8e5", {"words": None}),
    ):
        dtypes = {"rows": rows, "bias": "*fp32", "sums": "*fp32"}
        build(fp8._quantise, dtypes, aligned=sizes, **fp8.OPTIONS | kind)
    for kind in ({}, {"out": None}):
        kind |= {"aligned": sizes, **fp8.OPTIONS}
        build(fp8_cross_net._add_product, {"rows": "*fp8e4nv"}, **kind)
    for without in ("words", "wide"):
        kind = {"S": Depth(0, 3), without: None}
        kind |= {"aligned": sizes, **fp8_cross_net.OF_LAYERS}
        dtypes = {"rows": "*fp8e5", "x": Layers}
        build(fp8_cross_net._cross_backward, dtypes, **kind)


def build_mapping(ids: str) -> None:
    """Compile the kernels of `nn.tiers.slot_kernels`."""
    from nn.tiers import slot_kernels as kernels
    from nn.tiers.slot_map import DeviceMoves

    names = ("first", "end", "offset", "slot_of_row", "row_of_slot", "is_missing", "counts", "hand")
    names += ("found", "rows", "slots", "returned")
    bytes_ = dict.fromkeys(("pins", "is_changed"), "*u8")
    pointers = (
        dict.fromkeys(names, "*i32") | bytes_ | {"ids": ids, "positions": "*i64", "count": "i32"}
    )
    pointers |= {"x": kernels._Ids, "of_map": kernels._Map, "moves": DeviceMoves}
    block = {"BLOCK": kernels.BLOCK}
    for kernel in (kernels._find_missing, kernels._to_slots):
        build(kernel, pointers, **block)
    if ids == "*i32":
        build(kernels._release, pointers, NUM_COUNTS=kernels.NUM_COUNTS, **block)
        build(kernels._take_slots, pointers, **block)
        pointers["x"] = kernels._Search
        build(kernels._count_found, pointers, **block)
        block["BLOCK_WORDS"] = kernels.BLOCK_WORDS
        build(kernels._list_found, pointers, PROGRAMS=3000, ALL=4096, **block)


def build_jagged() -> None:
    """Compile the kernels over positions of samples; blocks of keys and queries as for short and for long ones."""
    from nn.ops.triton import jagged, jagged_attention, target_attention
    from nn.ops.triton.jagged_attention import Operands, Saved, Shape

    at = {"at": ("*i32", "*i32", "*i32")}
    for kernel, how in ((jagged._expand, "mean"), (jagged._pool, "last")):
        build(kernel, at | dict.fromkeys(("values", "out"), "*bf16"), HOW=how, P=32, D=64)
    of_unit = at | dict.fromkeys(("query", "events", "weighted", "of_events", "of_query"), "*bf16")
    of_unit |= {"parameters": ("*fp32",) * 6, "partial": "*fp32"}
    sizes = target_attention.Shape(True, target_attention.BLOCK_P, 16, 80, 40, 16, 128, 64)
    build(target_attention._forward, of_unit, 4, 1, S=sizes)
    build(target_attention._backward, of_unit, 8, 1, S=sizes)
    of_sample = dict.fromkeys(("samples", "starts", "lengths"), "*i32") | {"width": "i32"}
    build(jagged_attention._clear, of_sample | {"values": "*bf16", "count": "i32"}, BLOCK=256)
    scores = at | dict.fromkeys(("scores", "grad", "result"), "*fp32")
    for grad in ({}, {"grad": None}):
        build(jagged._softmax, scores, BLOCK_P=32, BLOCK_H=2, num_warps=1, **grad)
    for dtype, is_long, has_bias, max_queries in (
        ("*bf16", True, False, "i32"),
        ("*bf16", False, True, "i32"),
        ("*fp32", False, True, "constexpr"),  # one query per sample
    ):
        shape = Shape(4, 64, 64, 200 * has_bias, 22 * has_bias, True, "ieee")
        bias = ("*fp32" if has_bias else "constexpr",) * 3
        numbers = (*["i32"] * 4, max_queries, "i32", "fp32")
        x = Operands(*[dtype] * 3, *bias, *["*i32"] * 4, *numbers)
        inside = {(0, at): None for at in range(3, 6) if not has_bias}
        inside |= {(0, 14): 1} if max_queries == "constexpr" else {}
        queries, keys = (128, 64) if is_long else (32, 32)
        dtypes = dict.fromkeys(("out", "of_q", "of_k", "of_v"), dtype)
        dtypes |= dict.fromkeys(("log_sums", "by_distance", "by_time"), "*fp32")
        dtypes |= {"x": x, "saved": Saved(dtype, dtype, "*fp32", "*fp32")}
        for kernel, sizes in (
            (jagged_attention._forward, {"M": queries, "N": keys}),
            (jagged_attention._query_gradient, {"M": queries, "N": keys}),
            (jagged_attention._key_gradient, {"M": keys, "N": queries}),
            (jagged_attention._bias_sums, {}),
        ):
            if sizes or has_bias:
                build(kernel, dtypes, 8 if is_long else 4, inside=inside, S=shape, **sizes)


def build(
    kernel,
    dtypes: dict,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: Sequence[str] = (),
    inside: dict | None = None,
    maxnreg: int | None = None,
    **constants,
) -> str:
    """Compile a kernel, whose arguments of a `NamedTuple` have it as their dtype; names and `aligned` are of its fields too."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    known, values, attrs = SIGNATURE | dtypes, dict(inside or {}), {}

    def kind_of(name: str, path: tuple[int, ...]) -> Any:
        kind: Any = "constexpr" if name in constants else known.get(name, "i32")
        if not isinstance(kind, str | tuple):
            return kind(*(kind_of(each, (*path, at)) for at, each in enumerate(kind._fields)))
        if name in constants:
            values[path] = constants[name]
            used.add(name)
        elif name in aligned:
            attrs[path] = [["tt.divisibility", 16]]
        return kind

    used = set[str]()
    signature = {name: kind_of(name, (at,)) for at, name in enumerate(kernel.arg_names)}
    assert used == constants.keys()
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attrs)
    compiled = compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg},
    )
    print("compiled", kernel.__name__)
    return compiled.asm["ptx"]
