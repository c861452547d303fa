"""One instance of every kernel beside the attention passes, of SpMM, reductions, pair attention, wsb and sorting."""

from edgeless.kernels import Kernel

CUDA = "edgeless::cuda"
SPMM = f"{CUDA}::spmm"
WSB = f"{CUDA}::wsb"
REDUCTION = f"{CUDA}::reduction"
SUM_FOLD = f"{SPMM}::SumReducer<float, int32_t, 4, {SPMM}::Weighing::by_head, 4>"
BEST_FOLD = f"{REDUCTION}::BestReducer<float, int32_t, false, true>"
GATHER_FOLD = f"{REDUCTION}::GatherGradReducer<float, uint16_t, true, 4>"
MERGE = f"{CUDA}::merge_reduced_kernel"

KERNELS = [
    Kernel("attention/cuda/edge_product_tiles.cuh", f"{CUDA}::edge_tiles_kernel<float, 16, true>"),
    Kernel("attention/cuda/edge_products.cuh", f"{CUDA}::edge_products_kernel<double, 8, 4, true, true>"),
    Kernel("attention/cuda/edge_products.cuh", f"{CUDA}::edge_products_kernel<float, 16, 1, false, false>"),
    Kernel("attention/cuda/edge_products.cuh", f"{CUDA}::hidden_gradients_kernel<__half>"),
    Kernel("attention/cuda/edge_terms.cuh", f"{CUDA}::edge_dots_kernel<__nv_bfloat16, 16>"),
    Kernel("attention/cuda/edge_terms.cuh", f"{CUDA}::edge_drops_kernel<float>"),
    Kernel("attention/cuda/edge_terms.cuh", f"{CUDA}::edge_sums_kernel<float, 0>"),
    Kernel("attention/cuda/edge_terms.cuh", f"{CUDA}::ends_of_edges_kernel<int32_t>"),
    Kernel("attention/cuda/edges.cuh", f"{CUDA}::inverse_norms_kernel<float, {CUDA}::OfFour<__half>>"),
    Kernel("attention/cuda/edges.cuh", f"{CUDA}::row_delta_kernel<__nv_bfloat16, true>"),
    Kernel("attention/cuda/edges.cuh", f"{CUDA}::row_dot_kernel<double, int64_t>"),
    Kernel("attention/cuda/edges.cuh", f"{CUDA}::sum_rows_kernel<float, __half>"),
    Kernel("attention/cuda/merge.cuh", f"{CUDA}::merge_softmax_kernel<float, int32_t>"),
    Kernel("attention/cuda/merge.cuh", f"{CUDA}::merge_sum_kernel<__half, int64_t>"),
    Kernel("attention/cuda/weights.cuh", f"{CUDA}::normalize_weights_kernel<float, int32_t>"),
    Kernel("common/pad_rows.cuh", f"{CUDA}::pad_rows_kernel"),
    Kernel("gathers/cuda/dots.cuh", f"{CUDA}::gathers::dots_kernel<int32_t, float4, true>"),
    Kernel("graph/edge_sort.cuh", f"{CUDA}::check_kernel<int64_t>"),
    Kernel("graph/edge_sort.cuh", f"{CUDA}::expand_kernel<int32_t>"),
    Kernel("graph/edge_sort.cuh", f"{CUDA}::permute_kernel<int64_t, int32_t>"),
    Kernel("graph/edge_sort.cuh", f"{CUDA}::pointers_kernel<int64_t>"),
    Kernel("graph/few_edges.cuh", f"{CUDA}::few_coo_kernel<int64_t>"),
    Kernel("graph/few_edges.cuh", f"{CUDA}::few_transpose_kernel"),
    Kernel("graph/radix_sort.cuh", f"{CUDA}::sort_counts_kernel<int32_t>"),
    Kernel("graph/radix_sort.cuh", f"{CUDA}::sort_places_kernel"),
    Kernel("graph/radix_sort.cuh", f"{CUDA}::sort_pass_kernel<int32_t, uint32_t>"),
    Kernel("graph/radix_sort.cuh", f"{CUDA}::sort_pass_kernel<int64_t, uint64_t>"),
    Kernel("packed/gather.cuh", f"{CUDA}::gather_packed_kernel"),
    Kernel("pair_attention/cuda/by_src.cuh", f"{CUDA}::pair_by_src_kernel<__half, 8, 4, false>"),
    Kernel("pair_attention/cuda/forward.cuh", f"{CUDA}::pair_forward_kernel<float, 16, 8, true>"),
    Kernel("pair_attention/cuda/merge.cuh", f"{CUDA}::merge_by_src_kernel<__half>"),
    Kernel("pair_attention/cuda/merge.cuh", f"{CUDA}::merge_forward_kernel<float>"),
    Kernel("pair_attention/cuda/rows.cuh", f"{CUDA}::deltas_kernel<__nv_bfloat16, 16>"),
    Kernel("pair_attention/cuda/rows.cuh", f"{CUDA}::outer_rows_kernel<float, 8>"),
    Kernel("pair_attention/cuda/rows.cuh", f"{CUDA}::prepare_kernel"),
    Kernel("pair_attention/cuda/rows.cuh", f"{CUDA}::sum_shares_kernel<__half>"),
    Kernel("pair_attention/cuda/walks.cuh", f"{CUDA}::prepare_walks_kernel<int32_t>"),
    Kernel("pair_attention/cuda/walks.cuh", f"{CUDA}::walk_segments_kernel<int64_t>"),
    Kernel("reduction/cuda/extremum.cuh", f"{MERGE}<{BEST_FOLD}, int32_t, {REDUCTION}::ReduceArgs>"),
    Kernel("reduction/cuda/extremum.cuh", f"{REDUCTION}::reduce_kernel<__half, int32_t, true, true>"),
    Kernel("reduction/cuda/gather_grad.cuh", f"{MERGE}<{GATHER_FOLD}, int32_t, {REDUCTION}::GatherArgs>"),
    Kernel("reduction/cuda/gather_grad.cuh", f"{REDUCTION}::gather_grad_kernel<__half, uint8_t, true>"),
    Kernel("reduction/cuda/positions.cuh", f"{REDUCTION}::positions_kernel"),
    Kernel("reduction/cuda/scatter_grad.cuh", f"{REDUCTION}::finish_kernel<double>"),
    Kernel("reduction/cuda/scatter_grad.cuh", f"{REDUCTION}::measure_kernel<float>"),
    Kernel("reduction/cuda/scatter_grad.cuh", f"{REDUCTION}::send_kernel<__half, int32_t, false>"),
    Kernel("reduction/cuda/scatter_grad.cuh", f"{REDUCTION}::share_kernel<float, int64_t, true>"),
    Kernel("reduction/cuda/shared_scatter_grad.cuh", f"{REDUCTION}::shared_scatter_grad_kernel<float, int32_t, true>"),
    Kernel("spmm/cuda/edge_values.cuh", f"{SPMM}::fill_kernel<__half, float, int32_t>"),
    Kernel("spmm/cuda/edge_values.cuh", f"{SPMM}::place_kernel<double, int64_t>"),
    Kernel("spmm/cuda/product.cuh", f"{MERGE}<{SUM_FOLD}, int32_t, {SPMM}::SpmmArgs<float>>"),
    Kernel("spmm/cuda/product.cuh", f"{SPMM}::spmm_kernel<float, int32_t, 4, {SPMM}::Weighing::by_edge_ahead, 8>"),
    Kernel("spmm/cuda/sampled.cuh", f"{SPMM}::sddmm_few_kernel<float, int32_t>"),
    Kernel("spmm/cuda/sampled.cuh", f"{SPMM}::sddmm_kernel<__half, int64_t, true>"),
    Kernel("spmm/cuda/values.cuh", f"{SPMM}::values_kernel<float>"),
    Kernel("wsb/cuda/dot.cuh", f"{WSB}::dot_kernel<{WSB}::DotPass::by_src, __half, 64>"),
    Kernel("wsb/cuda/dot.cuh", f"{WSB}::dot_kernel<{WSB}::DotPass::forward, __nv_bfloat16, 128>"),
    Kernel("wsb/cuda/scale_rows.cuh", f"{WSB}::scale_kernel<__nv_bfloat16>"),
    Kernel("wsb/cuda/sum.cuh", f"{WSB}::sum_kernel<__half, 4>"),
]
