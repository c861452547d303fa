// Conversions from Python's names to the planner's types, and from a kernel to its name in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "common/score.h"
#include "common/storage.h"
#include "jit/expression.h"

namespace edgeless {

inline cuda::Storage storage_named(const std::string& dtype) {
  using cuda::Storage;
  if (dtype == "float32") return Storage::f32;
  if (dtype == "float16") return Storage::f16;
  if (dtype == "bfloat16") return Storage::bf16;
  if (dtype == "float64") return Storage::f64;
  throw pybind11::value_error("plan: dtype must be 'float32', 'float64', 'bfloat16' or 'float16', got '" + dtype + "'");
}

inline cuda::Pass pass_named(const std::string& pass) {
  if (pass == "forward") return cuda::Pass::forward;
  if (pass == "by_dst") return cuda::Pass::by_dst;
  if (pass == "by_src") return cuda::Pass::by_src;
  throw pybind11::value_error("plan: pass must be 'forward', 'by_dst' or 'by_src', got '" + pass + "'");
}

// Adds the kernel's file and its C++ expression to a plan.
inline void add_name(pybind11::dict& plan, const jit::Expression& kernel) {
  const jit::KernelName name = kernel.name();
  plan["header"] = name.header, plan["expression"] = name.expression;
}

}  // namespace edgeless
