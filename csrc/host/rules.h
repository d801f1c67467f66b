#pragma once
// What the rules of autograd share.

#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "arguments.h"

namespace megasoftmax::host {

// An argument of an op: None for an undefined tensor.
inline c10::IValue as_argument(const Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

// The gradient of an output that nothing used.
inline Tensor zeros_like_expanded(const Tensor& output) {
  return at::zeros({}, output.options()).expand(output.sizes());
}

// The sum of rows [..., heads, queries] in the shape and type of `like`, which all rows share, or
// those of a head.
inline Tensor sum_over_rows(const Tensor& rows, const Tensor& like) {
  if (like.numel() == 1) return rows.sum().reshape(like.sizes()).to(like.scalar_type());
  std::vector<int64_t> others;
  for (int64_t dim = 0; dim < rows.dim(); ++dim)
    if (dim != rows.dim() - 2) others.push_back(dim);
  return rows.sum(others).to(like.scalar_type());
}

inline bool wants_gradient(const std::optional<Tensor>& tensor) {
  return tensor && tensor->requires_grad();
}

}  // namespace megasoftmax::host
