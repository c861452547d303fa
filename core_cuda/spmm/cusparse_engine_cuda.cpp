#include "cusparse_engine.h"

#include <ATen/ATen.h>

#include "../common/launch.h"
#include "../common/storage_of.h"
#include "cuda/edge_values.h"
#include "cusparse_library.h"
#include "cusparse_plans.h"
#include "cusparse_refusal.h"

namespace edgeless {
namespace {

bool is_capturing(const jit::Queue& queue) {
  const jit::Driver& driver = jit::Driver::get();
  driver.enter(queue.device);
  return driver.is_capturing(queue.stream);
}

}  // namespace

const char* cusparse_library_refusal() {
  const std::string& refusal = cusparse::library().refusal;
  return refusal.empty() ? nullptr : refusal.c_str();
}

const char* cusparse_capture_refusal(Engine engine, const at::Tensor& x) {
  if (!cusparse_waits(engine, x.element_size())) return nullptr;
  const OnDevice on_device(x.device());
  return is_capturing(on_device.queue())
             ? "a CUDA graph is captured, and the library may wait for the GPU in a product of float32 or "
               "float64 by CSR_ALG3"
             : nullptr;
}

namespace cuda {
namespace {

using at::Tensor;
using cusparse::check;
using cusparse::kAsIs;
using cusparse::kTransposed;
using cusparse::library;

int data_type(at::ScalarType t) {
  switch (t) {
    case at::kDouble: return cusparse::kDouble;
    case at::kHalf: return cusparse::kHalf;
    case at::kBFloat16: return cusparse::kBfloat16;
    default: return cusparse::kFloat;
  }
}

struct CsrPlan : CusparsePlan {
  cusparse::Sparse matrix = nullptr;
  cusparse::Dense gathered = nullptr, rows = nullptr;  // one row per column and per row of the matrix
  bool known = true;                                   // false: the library has no kernel for the call

  ~CsrPlan() override {
    if (matrix) library().destroy_sparse(matrix);
    if (gathered) library().destroy_dense(gathered);
    if (rows) library().destroy_dense(rows);
  }
};

// The operands of one SpMM or SDDMM.
struct Call {
  at::TensorList csr;
  Tensor values;          // the matrix values; for SDDMM the output
  Tensor gathered, rows;  // [columns, F], [rows, F]
  bool sampled;
  int algorithm;  // of SpMM

  int compute() const { return values.scalar_type() == at::kDouble ? cusparse::kDouble : cusparse::kFloat; }
};

int64_t row_stride(const Tensor& t) { return t.is_contiguous() ? t.size(1) : t.stride(0); }

cusparse::Dense dense(const Tensor& t) {
  cusparse::Dense found = nullptr;
  check(library().create_dense(&found, t.size(0), t.size(1), row_stride(t), t.data_ptr(), data_type(t.scalar_type()),
                               cusparse::kByRows),
        "cusparseCreateDnMat");
  return found;
}

// alpha and beta, which the library reads from host memory.
struct Factors {
  float one = 1, zero = 0;
  double wide_one = 1, wide_zero = 0;

  const void* alpha(const Call& call) const {
    return call.compute() == cusparse::kDouble ? (const void*)&wide_one : &one;
  }
  const void* beta(const Call& call) const {
    return call.compute() == cusparse::kDouble ? (const void*)&wide_zero : &zero;
  }
};

// Creates descriptors and a workspace and, with `prepared`, preprocesses the matrix. Only SDDMM is preprocessed: after
// cusparseSpMM_preprocess, CSR_ALG3 of CUDA 13.0 gives wrong sums.
std::shared_ptr<CsrPlan> make_plan(cusparse::Handle handle, const Call& call, bool prepared) {
  auto plan = std::make_shared<CsrPlan>();
  const Tensor &indptr = call.csr[0], &indices = call.csr[1];
  const int index = indptr.scalar_type() == at::kLong ? cusparse::kInt64 : cusparse::kInt32;
  check(library().create_csr(&plan->matrix, call.rows.size(0), call.gathered.size(0), indices.size(0),
                             indptr.data_ptr(), indices.data_ptr(), call.values.data_ptr(), index, index,
                             cusparse::kFromZero, data_type(call.values.scalar_type())),
        "cusparseCreateCsr");
  plan->gathered = dense(call.gathered), plan->rows = dense(call.rows);
  const Factors factors;
  const void *alpha = factors.alpha(call), *beta = factors.beta(call);
  size_t bytes = 0;
  const int status =
      call.sampled ? library().sddmm_buffer_size(handle, kAsIs, kTransposed, alpha, plan->rows, plan->gathered, beta,
                                                 plan->matrix, call.compute(), cusparse::kUsualSampled, &bytes)
                   : library().spmm_buffer_size(handle, kAsIs, kAsIs, alpha, plan->matrix, plan->gathered, beta,
                                                plan->rows, call.compute(), call.algorithm, &bytes);
  if (status == cusparse::kNotSupported) {
    plan->known = false;
    return plan;
  }
  check(status, call.sampled ? "cusparseSDDMM_bufferSize" : "cusparseSpMM_bufferSize");
  plan->workspace = at::empty({static_cast<int64_t>(std::max<size_t>(bytes, 16))}, indptr.options().dtype(at::kByte));
  if (prepared && call.sampled) {
    check(library().sddmm_preprocess(handle, kAsIs, kTransposed, alpha, plan->rows, plan->gathered, beta, plan->matrix,
                                     call.compute(), cusparse::kUsualSampled, plan->workspace.data_ptr()),
          "cusparseSDDMM_preprocess");
  }
  return plan;
}

void run_plan(cusparse::Handle handle, const CsrPlan& plan, const Call& call) {
  check(library().set_sparse_values(plan.matrix, call.values.data_ptr()), "cusparseSpMatSetValues");
  check(library().set_dense_values(plan.gathered, call.gathered.data_ptr()), "cusparseDnMatSetValues");
  check(library().set_dense_values(plan.rows, call.rows.data_ptr()), "cusparseDnMatSetValues");
  const Factors factors;
  const void *alpha = factors.alpha(call), *beta = factors.beta(call);
  void* const room = plan.workspace.data_ptr();
  if (call.sampled) {
    check(library().sddmm(handle, kAsIs, kTransposed, alpha, plan.rows, plan.gathered, beta, plan.matrix,
                          call.compute(), cusparse::kUsualSampled, room),
          "cusparseSDDMM");
  } else {
    check(library().spmm(handle, kAsIs, kAsIs, alpha, plan.matrix, plan.gathered, beta, plan.rows, call.compute(),
                         call.algorithm, room),
          "cusparseSpMM");
  }
}

// The context of one call: the graph's locked cache, the stream, and whether the cache may be used.
class Session {
 public:
  explicit Session(at::TensorList csr)
      : on_device_(csr[0].device()), plans_(plans_of(csr)), csr_(csr), handle_(cusparse::handle_for(queue())) {
    keeps_ = plans_ && !is_capturing(queue());
    if (plans_) lock_ = std::unique_lock(plans_->mutex);
    side_ = {csr[0].data_ptr(), csr[1].data_ptr(), version_of(csr[0]) + version_of(csr[1])};
  }

  const jit::Queue& queue() const { return on_device_.queue(); }

  // The matrix values as `dtype`, cached if they do not depend on edge weights.
  template <class A>
  Tensor values(at::ScalarType dtype, const OptTensor& weight, const OptTensor& row_scale,
                const OptTensor& column_scale) {
    const auto kept = [&](const OptTensor& scale) { return !scale || plans_->keeps(*scale); };
    const bool keeps = keeps_ && !weight && kept(row_scale) && kept(column_scale);
    if (!keeps) return make_values<A>(dtype, weight, row_scale, column_scale);
    int64_t version = 0;
    for (const OptTensor& scale : {row_scale, column_scale}) version += scale ? version_of(*scale) : 0;
    const auto address = [](const OptTensor& t) { return t ? t->unsafeGetTensorImpl() : nullptr; };
    const ValuesKey key{side_, address(row_scale), address(column_scale), version, dtype, queue().stream};
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
                      call.algorithm,
                      call.gathered.scalar_type(),
                      out.scalar_type(),
                      call.gathered.size(1),
                      row_stride(call.gathered),
                      row_stride(call.rows),
                      queue().stream};
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
    spmm::fill_edge_values(args, storage_of(dtype), csr_[0].scalar_type() == at::kLong, values.data_ptr(), queue());
    return values;
  }

  OnDevice on_device_;
  std::shared_ptr<CusparsePlans> plans_;
  std::unique_lock<std::mutex> lock_;  // declared after plans_, so that it is released before them
  at::TensorList csr_;
  cusparse::Handle handle_;
  bool keeps_;
  SideKey side_;
};

// [N, H, F] as [N, H * F] with the layout that the library supports: contiguous rows that do not overlap, the first one
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
  const int algorithm = engine == Engine::cusparse_alg2 ? cusparse::kCsrAlgorithm2 : cusparse::kCsrAlgorithm3;
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
    const A* const sampled = by_position.data_ptr<A>();
    spmm::place_products(args, csr[0].scalar_type() == at::kLong, sampled, products.data_ptr<A>(), session.queue());
    return true;
  });
}

}  // namespace cuda
}  // namespace edgeless
