"""Time breakdown of hand-made traces: phases by name, overlaps, gaps."""

import gzip
import json

import pytest

from nn.observability.trace_breakdown import (
    DATA_WAIT,
    OTHER,
    STEP,
    Span,
    Trace,
    break_down,
    format_breakdown,
    phase_of,
    read_trace,
)

GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
ALL_TO_ALL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
MLP, EXCHANGE = "MLPs and cross", "all-to-all"


def traced(*kernels: tuple[str, float, float], annotations=((STEP, 0, 1000),)) -> Trace:
    return Trace(
        tuple(Span(*kernel) for kernel in kernels),
        tuple(Span(*annotation) for annotation in annotations),
    )


@pytest.mark.parametrize(
    ("kernel", "phase"),
    [
        ("_pooled_lookup", "lookup"),
        (
            "void fbgemm_gpu::split_embedding_codegen_forward_unweighted_v2_kernel<float, float>",
            "lookup",
        ),
        ("_segment_update_rows", "table update"),
        (
            "void split_embedding_backward_codegen_sgd_unweighted_kernel_warp_per_row_1<float>(long)",
            "table update",
        ),
        ("void split_embedding_backward_codegen_find_long_segments(int)", "sort"),
        (
            "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::Policy>",
            "sort",
        ),
        ("void linearize_index_kernel<long, long>(...)", "sort"),
        ("_expand_ids", "id expansion"),
        (
            "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int)",
            "id expansion",
        ),
        (
            "void at::native::(anonymous namespace)::indexSelectSmallIndex<long, long>(...)",
            "id expansion",
        ),
        ("_list_found", "host rows"),
        ("_exchange_rows", "host rows"),
        (ALL_TO_ALL, EXCHANGE),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce"),
        ("_dot_forward", "interaction"),
        ("_backward", "interaction"),
        (GEMM, MLP),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32>", MLP),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", MLP),
        ("triton_poi_fused_addcmul_relu_3", MLP),
        ("triton_red_fused_sum_native_batch_backward_1", MLP),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::threshold>(int)", MLP),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<2>, "
            "at::native::FusedSgdMathFunctor<float>>",
            "dense optimizer",
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<2>, "
            "at::native::UnaryOpFunctor<float, 2, 1, 1>, at::native::Copy<float, float>>",
            "copies",
        ),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
            "copies",
        ),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("_join_copy", "copies"),
        ("some_kernel_of_tomorrow", OTHER),
    ],
)
def test_a_kernels_name_tells_its_phase(kernel, phase):
    assert phase_of(kernel) == phase


def test_time_beside_another_phase_is_not_exposed():
    # GEMM 0-100, all-to-all 60-140, GEMM 180-200: one beside the other for 40 us, nothing for another 40
    measured = break_down(traced((GEMM, 0, 100), (ALL_TO_ALL, 60, 140), (GEMM, 180, 200)))
    assert measured.step_ms == pytest.approx(0.2)
    assert measured.phase(MLP).ms == pytest.approx(0.12)
    assert measured.phase(MLP).exposed_ms == pytest.approx(0.08)
    assert measured.phase(EXCHANGE).ms == pytest.approx(0.08)
    assert measured.phase(EXCHANGE).exposed_ms == pytest.approx(0.04)
    assert measured.overlap_ms == pytest.approx(0.04)
    assert measured.idle_ms == pytest.approx(0.04)


def test_kernels_of_one_phase_beside_each_other_are_summed_and_exposed_once():
    measured = break_down(traced((GEMM, 0, 100), (GEMM, 50, 120)))
    assert measured.phase(MLP).ms == pytest.approx(0.17)
    assert measured.phase(MLP).exposed_ms == pytest.approx(0.12)
    assert measured.overlap_ms == measured.idle_ms == 0


def test_exposed_times_overlap_and_idle_time_add_up_to_the_step():
    measured = break_down(
        traced(
            ("_pooled_lookup", 10, 40),
            (ALL_TO_ALL, 30, 90),
            (GEMM, 35, 80),
            ("_dot_forward", 85, 95),
            ("_segment_update", 130, 170),
            annotations=((STEP, 0, 50), (STEP, 50, 200), (DATA_WAIT, 80, 100)),
        )
    )
    parts = sum(phase.exposed_ms for phase in measured.phases)
    assert parts + measured.overlap_ms + measured.idle_ms == pytest.approx(measured.step_ms)
    assert measured.num_steps == 2
    assert measured.step_ms == pytest.approx(0.08)
    assert measured.phase("lookup").num_kernels == 0.5


def test_only_the_wait_for_data_that_leaves_the_gpu_idle_is_exposed():
    # The loader is waited for from 20 to 70 and the GPU works until 40; it stays idle until 90.
    measured = break_down(
        traced(
            (GEMM, 0, 40),
            (GEMM, 90, 100),
            annotations=((STEP, 0, 100), (DATA_WAIT, 20, 70)),
        )
    )
    assert measured.phase(DATA_WAIT).ms == pytest.approx(0.05)
    assert measured.phase(DATA_WAIT).exposed_ms == pytest.approx(0.03)
    assert measured.idle_ms == pytest.approx(0.02)


def test_without_kernels_the_marks_are_the_phases():
    annotations = ((STEP, 0, 100), ("lookup", 0, 30), ("dense pass", 30, 90))
    measured = break_down(traced(annotations=annotations))
    assert not measured.on_gpu
    assert measured.step_ms == pytest.approx(0.1)
    assert measured.phase("dense pass").exposed_ms == pytest.approx(0.06)
    assert measured.idle_ms == pytest.approx(0.01)
    assert "not annotated" in format_breakdown([measured])


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match=r"no range called 'train step'.*profile.steps=10"):
        break_down(traced((GEMM, 0, 1), annotations=()))


def test_a_chrome_trace_is_read_zipped_or_not(tmp_path):
    events = [
        {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 5.0, "dur": 2.5},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 9.0, "dur": 1.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": STEP, "ts": 5.0, "dur": 5.0},
        {"ph": "X", "cat": "user_annotation", "name": STEP, "ts": 0.0, "dur": 4.0},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0.0, "dur": 4.0},
        {"ph": "M", "name": "process_name"},
    ]
    text = json.dumps({"traceEvents": events})
    (tmp_path / "plain.json").write_text(text)
    with gzip.open(tmp_path / "rank0.json.gz", "wt") as stream:
        stream.write(text)
    for name in ("plain.json", "rank0.json.gz"):
        trace = read_trace(tmp_path / name)
        assert trace.kernels == (Span(GEMM, 5.0, 7.5), Span("Memcpy HtoD", 9.0, 10.0))
        assert trace.annotations == (Span(STEP, 0.0, 4.0),)


def test_the_table_shows_what_other_ranks_needed_for_a_phase():
    quick = break_down(traced((ALL_TO_ALL, 0, 50), (GEMM, 50, 100)))
    waiting = break_down(traced((ALL_TO_ALL, 0, 90), (GEMM, 90, 140)))
    alone, both = format_breakdown([waiting]), format_breakdown([waiting, quick])
    assert "0.050 to 0.090" in both
    assert " to " not in alone
    assert "longest kernels" in alone
