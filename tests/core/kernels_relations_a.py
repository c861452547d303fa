"""One instance of every kernel of typed products, of their gradients, of sums by type, and of scans."""

from edgeless.kernels import Kernel

CUDA = "edgeless::cuda"
RELATIONAL = f"{CUDA}::relational"
SCAN = f"{CUDA}::Scan"

KERNELS = [
    Kernel("common/scan.cuh", f"{CUDA}::scan_of_totals_kernel<int64_t, {SCAN}::maximum>"),
    Kernel("common/scan.cuh", f"{CUDA}::scan_tiles_kernel<int32_t, {SCAN}::sum, true>"),
    Kernel("common/scan.cuh", f"{CUDA}::scan_totals_kernel<int64_t, {SCAN}::sum>"),
    Kernel("relational/cuda/add_gradients.cuh", f"{RELATIONAL}::add_gradients::add_gradients_kernel<__half>"),
    Kernel("relational/cuda/any_product.cuh", f"{RELATIONAL}::any_product::add_chunks_kernel<double>"),
    Kernel("relational/cuda/any_product.cuh", f"{RELATIONAL}::any_product::outer_kernel<__nv_bfloat16>"),
    Kernel("relational/cuda/any_product.cuh", f"{RELATIONAL}::any_product::product_kernel<float>"),
    Kernel("relational/cuda/few_segments.cuh", f"{RELATIONAL}::few_segments_kernel<int64_t>"),
    Kernel("relational/cuda/hub_sums.cuh", f"{RELATIONAL}::hub_sums_kernel<__half>"),
    Kernel("relational/cuda/outer.cuh", f"{RELATIONAL}::outer::outer_kernel<float>"),
    Kernel("relational/cuda/own_gradients.cuh", f"{RELATIONAL}::own_gradients::own_gradients_kernel<__half, 128>"),
    Kernel("relational/cuda/own_gradients.cuh", f"{RELATIONAL}::own_gradients::own_squares_kernel"),
    Kernel("relational/cuda/pair_weights.cuh", f"{RELATIONAL}::pair_weights::pair_weight_gradients_kernel<float>"),
    Kernel("relational/cuda/pair_weights.cuh", f"{RELATIONAL}::pair_weights::pair_weights_kernel<__half, float>"),
    Kernel("relational/cuda/product.cuh", f"{RELATIONAL}::product::product_kernel<float, true, 8>"),
    Kernel("relational/cuda/typed_rows.cuh", f"{RELATIONAL}::typed_rows::add_partials_kernel<double>"),
    Kernel("relational/cuda/typed_rows.cuh", f"{RELATIONAL}::typed_rows::blend_kernel<__nv_bfloat16, 8>"),
    Kernel("relational/cuda/typed_rows.cuh", f"{RELATIONAL}::typed_rows::partial_sums_kernel<float, 4, true>"),
]
