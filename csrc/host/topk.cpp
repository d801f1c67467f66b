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

// What is not differentiated.
struct TopkOptions {
  int64_t k;
  double scale, softcap;
  std::optional<Tensor> mask, bias;
  bool renormalize;
  ScalarType dtype;
};

// Probabilities, indices and statistics.
variable_list forward(const Tensor& logits, const TopkOptions& options) {
  const auto& [k, scale, softcap, mask, bias, renormalize, dtype] = options;
  const Stack results =
      run(kTopkForward, stack_of(logits, k, scale, softcap, mask, bias, renormalize, dtype, false));
  return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
}

struct Topk : torch::autograd::Function<Topk> {
  static variable_list forward(AutogradContext* context, const Tensor& logits,
                               const TopkOptions& options) {
    variable_list results = host::forward(logits, options);
    context->set_materialize_grads(false);
    context->save_for_backward({results[0], results[1], results[2], logits,
                                options.mask.value_or(Tensor()), options.bias.value_or(Tensor())});
    context->saved_data["options"] = c10::ivalue::Tuple::create(
        {options.scale, options.softcap, options.renormalize, logits.scalar_type()});
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& given = context->saved_data["options"].toTupleRef().elements();
    const Tensor gradient = gradients[0].defined() ? gradients[0] : zeros_like_expanded(saved[0]);
    const c10::IValue d_lse = gradients[2].defined() ? gradients[2].select(0, 2) : c10::IValue();
    const Stack results = run_backward(
        kTopkBackward,
        stack_of(gradient, saved[0], saved[1], d_lse, saved[3], saved[2], given[0], given[1],
                 as_argument(saved[4]), as_argument(saved[5]), given[2], false, given[3]),
        12);
    return {results[0].toTensor(), {}};
  }
};

}  // namespace

PyObject* softmax_topk(PyObject* const* arguments) {
  const auto [logits_, k_, scale_, softcap_, mask_, bias_, renormalize_, dtype_, return_lse_,
              group_, fused_] = *reinterpret_cast<PyObject* const(*)[kTopkArguments]>(arguments);
  Reader reader;
  const Tensor logits = reader.first_tensor(logits_);
  if (reader.has_declined() || !admission_of(logits.device()).is_given || is_transformed())
    Py_RETURN_NONE;
  TopkOptions options;
  options.k = reader.count(k_);
  options.scale = reader.number(scale_);
  options.softcap = reader.softcap(softcap_, options.scale, package().largest_scale);
  options.mask = reader.mask(mask_, logits.sizes());
  options.bias = reader.bias_of_rows(bias_, logits);
  options.renormalize = reader.flag(renormalize_);
  const bool return_lse = reader.flag(return_lse_);
  reader.may_be_fused(fused_);
  options.dtype = reader.type_of_probabilities(dtype_, logits);
  reader.check_rows(logits, options.scale, false);
  reader.decline_unless(group_ == Py_None);
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

}  // namespace megasoftmax::host
