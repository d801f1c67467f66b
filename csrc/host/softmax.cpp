// softmax over the last dimension, without dropout and softcap. Its rules of autograd are those of
// megasoftmax/autograd/softmax.py.

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/custom_function.h>

#include "arguments.h"
#include "calls.h"
#include "operators.h"
#include "rules.h"

namespace megasoftmax::host {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What is not differentiated.
struct SoftmaxOptions {
  double scale;
  std::optional<Tensor> mask;
  bool is_causal;
  WindowLimits window;
  Bounds visible;
  std::optional<double> sink_value;
  ScalarType dtype;
  bool return_lse;
};

// The probabilities, and the log-sum-exp if it is wanted.
variable_list forward(const Tensor& scores, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& sink, const SoftmaxOptions& options) {
  const auto& [scale, mask, is_causal, window, visible, sink_value, dtype, return_lse] = options;
  if (!return_lse && !bias && !window.is_given && !visible.first && !visible.end && !sink &&
      !sink_value)
    return {
        run(kSoftmaxForwardAlone, stack_of(scores, scale, mask, is_causal, dtype))[0].toTensor()};
  const Stack results =
      run(kSoftmaxForward, stack_of(scores, scale, 0.0, mask, bias, is_causal, window.left,
                                    window.right, visible.first, visible.end, sink, sink_value,
                                    dtype, return_lse, 0.0, c10::IValue()));
  variable_list wanted{results[0].toTensor()};
  if (return_lse) wanted.push_back(results[1].toTensor());
  return wanted;
}

struct Softmax : torch::autograd::Function<Softmax> {
  static variable_list forward(AutogradContext* context, const Tensor& scores,
                               const std::optional<Tensor>& bias, const std::optional<Tensor>& sink,
                               const SoftmaxOptions& options) {
    variable_list results = host::forward(scores, bias, sink, options);
    const bool wants_bias = wants_gradient(bias), wants_sink = wants_gradient(sink);
    context->set_materialize_grads(false);
    context->save_for_backward(
        {results[0], wants_sink ? results[1] : Tensor(), wants_sink ? *sink : Tensor(),
         options.visible.first.value_or(Tensor()), options.visible.end.value_or(Tensor())});
    // Only shape and type of the bias matter. It is not kept, and may change before the backward.
    // The sizes are a tuple, because compiled autograd takes no list within one.
    c10::IValue bias_type, bias_sizes;
    if (wants_bias) {
      const at::IntArrayRef sizes = bias->sizes();
      bias_type = bias->scalar_type();
      bias_sizes = c10::ivalue::Tuple::create(std::vector<c10::IValue>(sizes.begin(), sizes.end()));
    }
    context->saved_data["options"] = c10::ivalue::Tuple::create(
        {options.scale, options.is_causal, options.window.left, options.window.right,
         scores.scalar_type(), options.return_lse, bias_type, bias_sizes});
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &probabilities = saved[0], &lse = saved[1], &sink = saved[2];
    const auto& given = context->saved_data["options"].toTupleRef().elements();
    const Tensor gradient =
        gradients[0].defined() ? gradients[0] : zeros_like_expanded(probabilities);
    const bool has_lse = given[5].toBool();
    const bool wants_bias = !given[6].isNone(), wants_sink = sink.defined();
    c10::IValue bias;
    if (wants_bias) {
      std::vector<int64_t> sizes;
      for (const c10::IValue& size : given[7].toTupleRef().elements())
        sizes.push_back(size.toInt());
      bias = at::empty({}, probabilities.options().dtype(given[6].toScalarType())).expand(sizes);
    }
    const c10::IValue d_lse = has_lse ? as_argument(gradients[1]) : c10::IValue();
    const Stack results = run_backward(
        kSoftmaxBackward,
        stack_of(gradient, probabilities, d_lse, as_argument(lse), given[0], bias, given[1],
                 given[2], given[3], as_argument(saved[3]), as_argument(saved[4]),
                 as_argument(sink), c10::IValue(), given[4], wants_bias, wants_sink),
        13);
    return {results[0].toTensor(),
            wants_bias ? results[1].toTensor() : Tensor(),
            wants_sink ? sum_over_rows(results[2].toTensor(), sink) : Tensor(),
            {}};
  }
};

}  // namespace

PyObject* softmax(PyObject* const* arguments) {
  const auto [scores_, scale_, softcap_, mask_, bias_, causal_, window_, visible_, sink_, dropout_,
              seed_, dtype_, return_lse_, dim_, fused_] =
      *reinterpret_cast<PyObject* const(*)[kSoftmaxArguments]>(arguments);
  Reader reader;
  const Tensor scores = reader.first_tensor(scores_);
  if (reader.has_declined() || !admission_of(scores.device()).is_given || is_transformed())
    Py_RETURN_NONE;
  const int64_t rank = scores.dim();
  SoftmaxOptions options;
  options.scale = reader.number(scale_);
  options.mask = reader.mask(mask_, scores.sizes());
  std::optional<Tensor> bias = reader.bias_of_rows(bias_, scores);
  options.is_causal = reader.flag(causal_);
  options.window = reader.window(window_);
  options.visible =
      reader.visible(visible_, scores.sizes().slice(0, std::max<int64_t>(rank - 1, 0)));
  const Sink sink = reader.sink(sink_, rank > 2 ? scores.size(-3) : -1);
  options.sink_value = sink.value;
  const bool return_lse = options.return_lse = reader.flag(return_lse_);
  options.dtype = reader.type_of_probabilities(dtype_, scores);
  reader.may_be_fused(fused_);
  reader.check_rows(scores, options.scale, options.is_causal || options.window.is_given);
  reader.decline_unless(softcap_ == Py_None && reader.number(dropout_) == 0 && seed_ == Py_None);
  const double dim = reader.number(dim_);
  reader.decline_unless(PyLong_CheckExact(dim_) && (dim == -1 || dim == rank - 1));
  const bool records = at::GradMode::is_enabled();
  const bool wants_bias = records && wants_gradient(bias);
  if (reader.has_declined()) Py_RETURN_NONE;
  if (wants_bias && bias->size(-1) != scores.size(-1)) Py_RETURN_NONE;  // nothing sums along a row

  variable_list results;
  {
    const pybind11::gil_scoped_release no_gil;
    if (bias) bias = cast_for_kernel(*bias, scores.scalar_type());
    if (wants_bias || (records && (scores.requires_grad() || wants_gradient(sink.tensor)))) {
      options.return_lse |= sink.tensor.has_value();
      results = Softmax::apply(scores, bias, sink.tensor, options);
    } else {
      results = forward(scores, bias, sink.tensor, options);
    }
  }
  return to_python(return_lse ? results : variable_list{results[0]});
}

PyObject* softmax_of_module(PyObject* const* arguments) {
  const auto [scores, mask, options] =
      *reinterpret_cast<PyObject* const(*)[kModuleArguments]>(arguments);
  const bool has_autocast =
      at::autocast::is_autocast_enabled(at::kCUDA) || at::autocast::is_autocast_enabled(at::kCPU);
  if (has_autocast || !PyTuple_CheckExact(options) || PyTuple_GET_SIZE(options) != 4)
    Py_RETURN_NONE;
  static PyObject* const no_dropout = PyFloat_FromDouble(0);
  static PyObject* const last_of_four = PyLong_FromLong(3);  // declined where it is not the last
  PyObject *const scale = PyTuple_GET_ITEM(options, 0),
                  *const causal = PyTuple_GET_ITEM(options, 1),
                  *const window = PyTuple_GET_ITEM(options, 2),
                  *const dtype = PyTuple_GET_ITEM(options, 3);
  PyObject* const all[kSoftmaxArguments] = {scores,  scale,  Py_None,  mask,         Py_None,
                                            causal,  window, Py_None,  Py_None,      no_dropout,
                                            Py_None, dtype,  Py_False, last_of_four, Py_None};
  return softmax(all);
}

}  // namespace megasoftmax::host
