"""One instance of every kernel of linear maps, and of products with the sums of segments (``segments``) and rows."""

from edgeless.kernels import Kernel

CUDA = "edgeless::cuda"
PROJECTION = f"{CUDA}::projection"
WIDE_TILING = f"{PROJECTION}::WideTiling"
RELATIONAL = f"{CUDA}::relational"
WEIGHTS = f"{RELATIONAL}::Weights"

KERNELS = [
    Kernel("projection/cuda/cast.cuh", f"{PROJECTION}::cast_kernel<__half>"),
    Kernel("projection/cuda/column_sums.cuh", f"{PROJECTION}::add_chunks_kernel<__nv_bfloat16>"),
    Kernel("projection/cuda/column_sums.cuh", f"{PROJECTION}::few_rows_kernel<double>"),
    Kernel("projection/cuda/column_sums.cuh", f"{PROJECTION}::partial_sums_kernel<float>"),
    Kernel("projection/cuda/half_gemm.cuh", f"{PROJECTION}::half_gemm_kernel<__nv_bfloat16, true, true, false>"),
    Kernel("projection/cuda/node_logits.cuh", f"{PROJECTION}::gradients_kernel<float, true>"),
    Kernel("projection/cuda/node_logits.cuh", f"{PROJECTION}::logits_kernel<__half, true>"),
    Kernel("projection/cuda/product.cuh", f"{PROJECTION}::product_kernel<{WIDE_TILING}, false, false, true>"),
    Kernel("relational/cuda/segment_gradients.cuh", f"{RELATIONAL}::segment_gradients_kernel<__nv_bfloat16, 64, 64>"),
    Kernel("relational/cuda/segment_products.cuh", f"{RELATIONAL}::segment_products_kernel<float, 64, 32>"),
    Kernel("relational/cuda/segments.cuh", f"{RELATIONAL}::arrange_kernel<int32_t>"),
    Kernel("relational/cuda/segments.cuh", f"{RELATIONAL}::means_kernel<int32_t, float>"),
    Kernel("relational/cuda/segments.cuh", f"{RELATIONAL}::means_of_segments_kernel<int64_t, double>"),
    Kernel("relational/cuda/segments.cuh", f"{RELATIONAL}::pairs_kernel<int64_t>"),
    Kernel("relational/cuda/segments.cuh", f"{RELATIONAL}::segment_begins_kernel<int32_t>"),
    Kernel("relational/cuda/segments.cuh", f"{RELATIONAL}::segments_kernel<int64_t>"),
    Kernel("relational/cuda/segments.cuh", f"{RELATIONAL}::run_begins_kernel<int32_t>"),
    Kernel("relational/cuda/segments.cuh", f"{RELATIONAL}::type_segments_kernel<int64_t>"),
    Kernel("relational/cuda/row_sums.cuh", f"{RELATIONAL}::row_sums_kernel<__half, 64, 64, false, true>"),
    Kernel("relational/cuda/short_gradients.cuh", f"{RELATIONAL}::prepare_gradients_kernel"),
    Kernel("relational/cuda/short_gradients.cuh", f"{RELATIONAL}::short_gradients_kernel<{WEIGHTS}::in_order, true>"),
    Kernel("relational/cuda/short_segments.cuh", f"{RELATIONAL}::prepare_products_kernel<64>"),
    Kernel("relational/cuda/short_segments.cuh", f"{RELATIONAL}::short_products_kernel<32, {WEIGHTS}::by_id, false>"),
    Kernel("relational/cuda/short_rows.cuh", f"{RELATIONAL}::short_rows_kernel<float, true, false>"),
    Kernel("relational/cuda/tiling.cuh", f"{RELATIONAL}::added_kernel<int64_t>"),
    Kernel("relational/cuda/tiling.cuh", f"{RELATIONAL}::place_kernel<int32_t>"),
    Kernel("relational/cuda/tiling.cuh", f"{RELATIONAL}::row_tiles_kernel<int64_t>"),
    Kernel("relational/cuda/tiling.cuh", f"{RELATIONAL}::tiles_kernel<int32_t>"),
    Kernel("relational/cuda/tiling.cuh", f"{RELATIONAL}::type_tiles_kernel<int64_t>"),
]
