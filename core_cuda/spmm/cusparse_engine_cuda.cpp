#include "cusparse_engine.h"

#include "cusparse_plans.h"
#include "cusparse_refusal.h"

#if __has_include(<cusparse.h>)
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cusparse.h>

#include "../common/launch.h"
#include "../common/storage_of.h"
#include "cuda/edge_values.h"

// libtorch_cuda, which this extension is linked to, loads cuSPARSE; the linker need not find it. Weak symbols are null
// where it is missing at run time, and the extension can still be imported.
#pragma weak cusparseCreateCsr
#pragma weak cusparseCreateDnMat
#pragma weak cusparseDestroyDnMat
#pragma weak cusparseDestroySpMat
#pragma weak cusparseDnMatSetValues
#pragma weak cusparseGetErrorString
#pragma weak cusparseSDDMM
#pragma weak cusparseSDDMM_bufferSize
#pragma weak cusparseSDDMM_preprocess
#pragma weak cusparseSpMatSetValues
#pragma weak cusparseSpMM
#pragma weak cusparseSpMM_bufferSize

// Declared here because ATen/cuda/CUDAContext.h includes the headers of cuBLAS and cuSOLVER.
namespace at::cuda {
cusparseHandle_t getCurrentCUDASparseHandle();
}

namespace edgeless {
namespace {

bool is_capturing() { return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None; }

}  // namespace

const char* cusparse_library_refusal() {
  return &cusparseSpMM == nullptr ? "torch has not loaded the library" : nullptr;
}

const char* cusparse_capture_refusal(Engine engine, const at::Tensor& x) {
  if (!cusparse_waits(engine, x.element_size())) return nullptr;
  const OnDevice on_device(x.device());
  return is_capturing() ? "a CUDA graph is captured, and the library may wait for the GPU in a product of float32 or "
                          "float64 by CSR_ALG3"
                        : nullptr;
}

namespace cuda {
namespace {

using at::Tensor;

#define CUSPARSE_CHECK(call)                                                                               \
  do {                                                                                                     \
    const cusparseStatus_t status = call;                                                                  \
    TORCH_CHECK(status == CUSPARSE_STATUS_SUCCESS, "edgeless: cuSPARSE: ", cusparseGetErrorString(status), \
                " in " #call);                                                                             \
  } while (false)

cudaDataType data_type(at::ScalarType t) {
  switch (t) {
    case at::kDouble: return CUDA_R_64F;
    case at::kHalf: return CUDA_R_16F;
    case at::kBFloat16: return CUDA_R_16BF;
    default: return CUDA_R_32F;
  }
}

struct CsrPlan : CusparsePlan {
  cusparseSpMatDescr_t matrix = nullptr;
  cusparseDnMatDescr_t gathered = nullptr, rows = nullptr;  // one row per column and per row of the matrix
  bool known = true;                                        // whether the library has a kernel for the call

  ~CsrPlan() override {
    if (matrix) cusparseDestroySpMat(matrix);
    if (gathered) cusparseDestroyDnMat(gathered);
    if (rows) cusparseDestroyDnMat(rows);
  }
};

// The operands of one SpMM or SDDMM.
struct Call {
  at::TensorList csr;
  Tensor values;          // the matrix values; for SDDMM the output
  Tensor gathered, rows;  // [columns, F], [rows, F]
  bool sampled;
  cusparseSpMMAlg_t algorithm;

  cudaDataType compute() const { return values.scalar_type() == at::kDouble ? CUDA_R_64F : CUDA_R_32F; }
};

int64_t row_stride(const Tensor& t) { return t.is_contiguous() ? t.size(1) : t.stride(0); }

cusparseDnMatDescr_t dense(const Tensor& t) {
  cusparseDnMatDescr_t found = nullptr;
  CUSPARSE_CHECK(cusparseCreateDnMat(&found, t.size(0), t.size(1), row_stride(t), t.data_ptr(),
                                     data_type(t.scalar_type()), CUSPARSE_ORDER_ROW));
  return found;
}

// alpha and beta, which the library reads from host memory.
struct Factors {
  float one = 1, zero = 0;
  double wide_one = 1, wide_zero = 0;

  const void* alpha(const Call& call) const { return call.compute() == CUDA_R_64F ? (const void*)&wide_one : &one; }
  const void* beta(const Call& call) const { return call.compute() == CUDA_R_64F ? (const void*)&wide_zero : &zero; }
};

constexpr auto kAsIs = CUSPARSE_OPERATION_NON_TRANSPOSE, kTransposed = CUSPARSE_OPERATION_TRANSPOSE;
constexpr auto kSampled = CUSPARSE_SDDMM_ALG_DEFAULT;

// Makes descriptors and a workspace and, with `prepared`, preprocesses the matrix. Only SDDMM is preprocessed: after
// cusparseSpMM_preprocess, CUSPARSE_SPMM_CSR_ALG3 of CUDA 13.0 gives wrong sums.
std::shared_ptr<CsrPlan> make_plan(cusparseHandle_t handle, const Call& call, bool prepared) {
  auto plan = std::make_shared<CsrPlan>();
  const Tensor &indptr = call.csr[0], &indices = call.csr[1];
  const auto index = indptr.scalar_type() == at::kLong ? CUSPARSE_INDEX_64I : CUSPARSE_INDEX_32I;
  CUSPARSE_CHECK(cusparseCreateCsr(&plan->matrix, call.rows.size(0), call.gathered.size(0), indices.size(0),
                                   indptr.data_ptr(), indices.data_ptr(), call.values.data_ptr(), index, index,
                                   CUSPARSE_INDEX_BASE_ZERO, data_type(call.values.scalar_type())));
  plan->gathered = dense(call.gathered), plan->rows = dense(call.rows);
  const Factors factors;
  const void *alpha = factors.alpha(call), *beta = factors.beta(call);
  size_t bytes = 0;
  const cusparseStatus_t status =
      call.sampled ? cusparseSDDMM_bufferSize(handle, kAsIs, kTransposed, alpha, plan->rows, plan->gathered, beta,
                                              plan->matrix, call.compute(), kSampled, &bytes)
                   : cusparseSpMM_bufferSize(handle, kAsIs, kAsIs, alpha, plan->matrix, plan->gathered, beta,
                                             plan->rows, call.compute(), call.algorithm, &bytes);
  if (status == CUSPARSE_STATUS_NOT_SUPPORTED) {
    plan->known = false;
    return plan;
  }
  CUSPARSE_CHECK(status);
  plan->workspace = at::empty({static_cast<int64_t>(std::max<size_t>(bytes, 16))}, indptr.options().dtype(at::kByte));
  if (prepared && call.sampled) {
    CUSPARSE_CHECK(cusparseSDDMM_preprocess(handle, kAsIs, kTransposed, alpha, plan->rows, plan->gathered, beta,
                                            plan->matrix, call.compute(), kSampled, plan->workspace.data_ptr()));
  }
  return plan;
}

void run_plan(cusparseHandle_t handle, const CsrPlan& plan, const Call& call) {
  CUSPARSE_CHECK(cusparseSpMatSetValues(plan.matrix, call.values.data_ptr()));
  CUSPARSE_CHECK(cusparseDnMatSetValues(plan.gathered, call.gathered.data_ptr()));
  CUSPARSE_CHECK(cusparseDnMatSetValues(plan.rows, call.rows.data_ptr()));
  const Factors factors;
  const void *alpha = factors.alpha(call), *beta = factors.beta(call);
  void* const room = plan.workspace.data_ptr();
  if (call.sampled) {
    CUSPARSE_CHECK(cusparseSDDMM(handle, kAsIs, kTransposed, alpha, plan.rows, plan.gathered, beta, plan.matrix,
                                 call.compute(), kSampled, room));
  } else {
    CUSPARSE_CHECK(cusparseSpMM(handle, kAsIs, kAsIs, alpha, plan.matrix, plan.gathered, beta, plan.rows,
                                call.compute(), call.algorithm, room));
  }
}

// The context of one call: the graph's locked cache, the stream, and whether the cache may be used.
class Session {
 public:
  explicit Session(at::TensorList csr)
      : on_device_(csr[0].device()), plans_(plans_of(csr)), csr_(csr), handle_(at::cuda::getCurrentCUDASparseHandle()) {
    keeps_ = plans_ && !is_capturing();
    if (plans_) lock_ = std::unique_lock(plans_->mutex);
    side_ = {csr[0].data_ptr(), csr[1].data_ptr(), version_of(csr[0]) + version_of(csr[1])};
  }

  cudaStream_t stream() const { return on_device_.stream(); }

  // The matrix values as `dtype`, cached where they do not depend on edge weights.
  template <class A>
  Tensor values(at::ScalarType dtype, const OptTensor& weight, const OptTensor& row_scale,
                const OptTensor& column_scale) {
    const auto kept = [&](const OptTensor& scale) { return !scale || plans_->keeps(*scale); };
    const bool keeps = keeps_ && !weight && kept(row_scale) && kept(column_scale);
    if (!keeps) return make_values<A>(dtype, weight, row_scale, column_scale);
    int64_t version = 0;
    for (const OptTensor& scale : {row_scale, column_scale}) version += scale ? version_of(*scale) : 0;
    const auto address = [](const OptTensor& t) { return t ? t->unsafeGetTensorImpl() : nullptr; };
    const ValuesKey key{side_, address(row_scale), address(column_scale), version, dtype, stream()};
    if (const Tensor* found = plans_->values.find(key)) return *found;
    ++plans_->misses;
    return plans_->values.keep(key, make_values<A>(dtype, weight, row_scale, column_scale));
  }

  bool run(const Call& call) {
    if (!keeps_) {
      const auto plan = make_plan(handle_, call, false);
      if (plan->known) run_plan(handle_, *plan, call);
      return plan->known;
    }
    const Tensor& out = call.sampled ? call.values : call.rows;
    const PlanKey key{side_,
                      call.sampled,
                      static_cast<int>(call.algorithm),
                      call.gathered.scalar_type(),
                      out.scalar_type(),
                      call.gathered.size(1),
                      row_stride(call.gathered),
                      row_stride(call.rows),
                      stream()};
    const auto* found = plans_->plans.find(key);
    ++(found ? plans_->hits : plans_->misses);
    if (!found) found = &plans_->plans.keep(key, make_plan(handle_, call, true));
    const auto& plan = static_cast<const CsrPlan&>(**found);
    if (plan.known) run_plan(handle_, plan, call);
    return plan.known;
  }

  // The arguments of the kernels in cuda/edge_values.h; `hold` owns contiguous copies of the scales.
  template <class A>
  spmm::EdgeValues<A> edges(const OptTensor& weight, const OptTensor& row_scale, const OptTensor& column_scale,
                            std::vector<Tensor>& hold) const {
    spmm::EdgeValues<A> args;
    args.graph = compressed_graph(csr_);
    const auto pointer = [&](const OptTensor& scale) -> const A* {
      if (!scale) return nullptr;
      hold.push_back(scale->contiguous());
      return hold.back().template data_ptr<A>();
    };
    args.row_scale = pointer(row_scale), args.column_scale = pointer(column_scale);
    if (weight) args.weight = weight->template data_ptr<A>(), args.weight_edge = weight->stride(0);
    return args;
  }

 private:
  template <class A>
  Tensor make_values(at::ScalarType dtype, const OptTensor& weight, const OptTensor& row_scale,
                     const OptTensor& column_scale) {
    const auto options = csr_[1].options().dtype(dtype);
    if (!weight && !row_scale && !column_scale) return at::ones({csr_[1].size(0)}, options);
    Tensor values = at::empty({csr_[1].size(0)}, options);
    std::vector<Tensor> hold;
    const auto args = edges<A>(weight, row_scale, column_scale, hold);
    C10_CUDA_CHECK(spmm::fill_edge_values(args, storage_of(dtype), csr_[0].scalar_type() == at::kLong,
                                          values.data_ptr(), stream()));
    return values;
  }

  OnDevice on_device_;
  std::shared_ptr<CusparsePlans> plans_;
  std::unique_lock<std::mutex> lock_;  // declared after plans_, so that it is released before them
  at::TensorList csr_;
  cusparseHandle_t handle_;
  bool keeps_;
  SideKey side_;
};

// [N, H, F] as [N, H * F] with the layout that the library takes: contiguous rows that do not overlap, the first one
// 16-byte aligned.
Tensor dense_rows(const Tensor& t) {
  const Tensor rows = t.dim() == 3 ? t.reshape({t.size(0), t.size(1) * t.size(2)}) : t;
  const bool aligned = reinterpret_cast<uintptr_t>(rows.data_ptr()) % 16 == 0;
  const bool dense = rows.is_contiguous() || (rows.stride(1) == 1 && rows.stride(0) >= rows.size(1));
  return aligned && dense ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

}  // namespace

bool cusparse_spmm(Engine engine, const Tensor& x, const OptTensor& weight, const OptTensor& src_scale,
                   const OptTensor& dst_scale, at::TensorList csr, const Tensor& out) {
  const Tensor gathered = dense_rows(x);
  // ALG3 is the only CSR algorithm that the library documents as bitwise reproducible.
  const auto algorithm = engine == Engine::cusparse_alg2 ? CUSPARSE_SPMM_CSR_ALG2 : CUSPARSE_SPMM_CSR_ALG3;
  return with_arithmetic(x.scalar_type(), [&](auto zero) {
    Session session(csr);
    const Tensor values = session.values<decltype(zero)>(x.scalar_type(), weight, dst_scale, src_scale);
    return session.run({csr, values, gathered, out.view({out.size(0), gathered.size(1)}), false, algorithm});
  });
}

bool cusparse_sddmm(const Tensor& dst, const Tensor& src, const OptTensor& src_scale, const OptTensor& dst_scale,
                    at::TensorList csr, const Tensor& products) {
  const Tensor rows = dense_rows(dst), gathered = dense_rows(src);
  const bool in_place = csr.size() == 2 && !src_scale && !dst_scale;
  // The output starts as zeros: the library may multiply old contents by beta = 0, and 0 * NaN is NaN.
  const Tensor by_position = in_place ? products.zero_().view(-1) : at::zeros({csr[1].size(0)}, products.options());
  return with_arithmetic(src.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    Session session(csr);
    if (!session.run({csr, by_position, gathered, rows, true, {}})) return false;
    if (in_place) return true;
    std::vector<Tensor> hold;
    const auto args = session.edges<A>({}, dst_scale, src_scale, hold);
    C10_CUDA_CHECK(spmm::place_products(args, csr[0].scalar_type() == at::kLong, by_position.data_ptr<A>(),
                                        products.data_ptr<A>(), session.stream()));
    return true;
  });
}

}  // namespace cuda
}  // namespace edgeless

#else

namespace edgeless {

const char* cusparse_library_refusal() { return "this build of edgeless was made without the header cusparse.h"; }
const char* cusparse_capture_refusal(Engine, const at::Tensor&) { return nullptr; }

namespace cuda {

bool cusparse_spmm(Engine, const at::Tensor&, const OptTensor&, const OptTensor&, const OptTensor&, at::TensorList,
                   const at::Tensor&) {
  return false;
}

bool cusparse_sddmm(const at::Tensor&, const at::Tensor&, const OptTensor&, const OptTensor&, at::TensorList,
                    const at::Tensor&) {
  return false;
}

}  // namespace cuda
}  // namespace edgeless

#endif
