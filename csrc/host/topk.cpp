// softmax_topk of whole rows. Its rules of autograd are those of megasoftmax/autograd/topk.py. A
// bias that needs a gradient is left to them.

#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "../softmax/limits.h"
#include "../topk/limits.h"
#include "arguments.h"
#include "calls.h"
#include "operators.h"
#include "rules.h"

namespace megasoftmax::host {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A scale, and limits of the k entries.
struct RowOptions {
  RowNumber scale, top_k, top_p, min_p;

  RowOptions(Reader& reader, const Tensor& logits, PyObject* scale_, PyObject* top_k_,
             PyObject* top_p_, PyObject* min_p_) {
    reader.decline_unless(logits.dim() > 0);
    if (reader.has_declined()) return;
    const at::IntArrayRef rows = logits.sizes().slice(0, logits.dim() - 1);
    scale = reader.of_rows(scale_, rows, 1, false);
    reader.decline_unless(scale_ != Py_None);
    top_k = reader.of_rows(top_k_, rows, 0, true);
    reader.decline_unless(top_k_ == Py_None || top_k.tensor || top_k.value >= 1);
    const auto part = [&](PyObject* object, double none) {
      const RowNumber found = reader.of_rows(object, rows, none, false);
      reader.decline_unless(found.value >= 0 && found.value <= 1);
      return found;
    };
    top_p = part(top_p_, 1);
    min_p = part(min_p_, 0);
  }
  // top_k of all rows, as ops take it.
  int64_t most() const { return static_cast<int64_t>(std::min(top_k.value, 0x1p62)); }
};

// What is not differentiated.
struct TopkOptions {
  int64_t k;
  double softcap;
  std::optional<Tensor> mask, bias;
  bool renormalize;
  ScalarType dtype;
  RowOptions of_rows;
};

// Probabilities, indices and statistics.
variable_list forward(const Tensor& logits, const TopkOptions& options) {
  const auto& [k, softcap, mask, bias, renormalize, dtype, of_rows] = options;
  const auto& [scale, top_k, top_p, min_p] = of_rows;
  const bool candidates = false, sigmoid = false;
  const Stack results = run(
      kTopkForward, stack_of(logits, k, scale.value, softcap, mask, bias, renormalize, dtype,
                             candidates, scale.tensor, of_rows.most(), top_k.tensor, top_p.value,
                             top_p.tensor, min_p.value, min_p.tensor, sigmoid, c10::IValue()));
  return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
}

struct Topk : torch::autograd::Function<Topk> {
  static variable_list forward(AutogradContext* context, const Tensor& logits,
                               const TopkOptions& options) {
    variable_list results = host::forward(logits, options);
    context->set_materialize_grads(false);
    context->save_for_backward({results[0], results[1], results[2], logits,
                                options.mask.value_or(Tensor()), options.bias.value_or(Tensor()),
                                options.of_rows.scale.tensor.value_or(Tensor())});
    context->saved_data["options"] = c10::ivalue::Tuple::create(
        {options.of_rows.scale.value, options.softcap, options.renormalize, logits.scalar_type()});
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& given = context->saved_data["options"].toTupleRef().elements();
    const Tensor gradient = gradients[0].defined() ? gradients[0] : zeros_like_expanded(saved[0]);
    const c10::IValue d_lse = gradients[2].defined() ? gradients[2].select(0, 2) : c10::IValue();
    const Stack results =
        run_backward(kTopkBackward,
                     stack_of(gradient, saved[0], saved[1], d_lse, saved[3], saved[2], given[0],
                              given[1], as_argument(saved[4]), as_argument(saved[5]), given[2],
                              false, given[3], as_argument(saved[6]), false),
                     12);
    return {results[0].toTensor(), {}};
  }
};

bool is_softmax(PyObject* score) {
  return PyUnicode_CheckExact(score) && PyUnicode_CompareWithASCIIString(score, "softmax") == 0;
}

}  // namespace

PyObject* softmax_topk(PyObject* const* arguments) {
  const auto [logits_, k_, scale_, softcap_, mask_, bias_, score_, selection_bias_, top_k_, top_p_,
              min_p_, renormalize_, dtype_, return_lse_, group_, fused_] =
      *reinterpret_cast<PyObject* const(*)[kTopkArguments]>(arguments);
  Reader reader;
  const Tensor logits = reader.first_tensor(logits_);
  if (reader.has_declined() || !admission_of(logits.device()).is_given || is_transformed())
    Py_RETURN_NONE;
  TopkOptions options{.of_rows{reader, logits, scale_, top_k_, top_p_, min_p_}};
  const RowNumber& scale = options.of_rows.scale;
  options.k = reader.count(k_);
  options.softcap = reader.softcap(softcap_, scale.value, package().largest_scale);
  options.mask = reader.mask(mask_, logits.sizes());
  options.bias = reader.bias_of_rows(bias_, logits);
  options.renormalize = reader.flag(renormalize_);
  const bool return_lse = reader.flag(return_lse_);
  reader.may_be_fused(fused_);
  options.dtype = reader.type_of_probabilities(dtype_, logits);
  reader.check_rows(logits, scale.value, false);
  reader.decline_unless(group_ == Py_None && selection_bias_ == Py_None && is_softmax(score_));
  reader.decline_unless(!scale.tensor || (!options.bias && options.softcap == 0));
  if (reader.has_declined() || options.k > std::min<int64_t>(logits.size(-1), kMaxK))
    Py_RETURN_NONE;
  const bool records = at::GradMode::is_enabled();
  if (records && wants_gradient(options.bias)) Py_RETURN_NONE;

  variable_list results;
  Tensor lse;
  {
    const pybind11::gil_scoped_release no_gil;
    if (options.bias) options.bias = cast_for_kernel(*options.bias, logits.scalar_type());
    results =
        records && logits.requires_grad() ? Topk::apply(logits, options) : forward(logits, options);
    if (return_lse) lse = results[2].select(0, 2);
  }
  return return_lse ? to_python({results[0], results[1], lse})
                    : to_python({results[0], results[1]});
}

PyObject* sample(PyObject* const* arguments) {
  const auto [logits_, k_, scale_, mask_, top_k_, top_p_, min_p_, seed_, return_probabilities_,
              fused_] = *reinterpret_cast<PyObject* const(*)[kSampleArguments]>(arguments);
  Reader reader;
  const Tensor logits = reader.first_tensor(logits_);
  if (reader.has_declined() || !admission_of(logits.device()).is_given || is_transformed())
    Py_RETURN_NONE;
  const RowOptions of_rows(reader, logits, scale_, top_k_, top_p_, min_p_);
  const int64_t k = reader.count(k_);
  const std::optional<Tensor> mask = reader.mask(mask_, logits.sizes());
  const std::optional<Tensor> seed = reader.tensor(seed_);
  reader.decline_unless(seed && seed->scalar_type() == at::kLong && seed->numel() == 1);
  const bool return_probabilities = reader.flag(return_probabilities_);
  reader.may_be_fused(fused_);
  reader.check_rows(logits, of_rows.scale.value, false);
  if (reader.has_declined() || k < 1 || k > std::min<int64_t>(logits.size(-1), kMaxK))
    Py_RETURN_NONE;
  Stack results;
  {
    const pybind11::gil_scoped_release no_gil;
    const auto& [scale, top_k, top_p, min_p] = of_rows;
    results = run(kTopkSample,
                  stack_of(logits, k, scale.value, scale.tensor, mask, of_rows.most(), top_k.tensor,
                           top_p.value, top_p.tensor, min_p.value, min_p.tensor, *seed));
  }
  if (!return_probabilities) return to_python({results[0].toTensor()});
  return to_python({results[0].toTensor(), results[1].toTensor(), results[2].toTensor()});
}

}  // namespace megasoftmax::host
