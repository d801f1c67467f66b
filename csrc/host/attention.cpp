// attention, but for masks of tiles. Its rules of autograd are those of
// megasoftmax/autograd/attention.py.

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/randint.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cmath>
#include <tuple>

#include "../attention/limits.h"
#include "../common/tensors.h"
#include "arguments.h"
#include "calls.h"
#include "operators.h"
#include "rules.h"

namespace megasoftmax::host {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What is not differentiated.
struct AttentionOptions {
  std::optional<Tensor> mask;
  double scale, softcap;
  bool is_causal;
  WindowLimits window;
  std::optional<double> sink_value;
  bool is_relative;
  Bounds visible;
  double dropout;
  std::optional<Tensor> seed;
  bool is_transposed;  // the output: [batch, queries, heads, dim]
};

// Exchanges heads and queries of a tensor that nothing else refers to: a view would be another
// tensor, which autograd would not let users change in place.
void transpose(Tensor& tensor) {
  std::vector<int64_t> sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
  std::swap(sizes[1], sizes[2]);
  std::swap(strides[1], strides[2]);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

std::pair<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const std::optional<Tensor>& bias,
                                  const std::optional<Tensor>& sink,
                                  const AttentionOptions& options) {
  const auto& [mask, scale, softcap, is_causal, window, sink_value, is_relative, visible, dropout,
               seed, is_transposed] = options;
  const bool tf32 = false;  // of 16 bits alone, see fit
  const Stack results =
      run(kAttentionForward,
          stack_of(query, key, value, bias, mask, scale, softcap, is_causal, window.left,
                   window.right, sink, sink_value, is_relative, visible.first, visible.end,
                   c10::IValue(), 1, dropout, seed, tf32));
  Tensor output = results[0].toTensor();
  if (is_transposed) transpose(output);
  return {output, results[1].toTensor()};
}

using Parts = std::array<Tensor, 3>;  // query, key and value

// Views of a packed tensor [batch, tokens, 3, heads, dim].
Parts parts_of(const Tensor& packed) {
  const at::IntArrayRef sizes = packed.sizes(), strides = packed.strides();
  const auto part = [&](int64_t which) {
    return packed.as_strided({sizes[0], sizes[3], sizes[1], sizes[4]},
                             {strides[0], strides[3], strides[1], strides[4]},
                             packed.storage_offset() + which * strides[2]);
  };
  return {part(0), part(1), part(2)};
}

// What is saved, in this order. Key and value are undefined if the query is packed.
enum Saved { kOutput, kStatistics, kQuery, kKey, kValue, kBias, kMask, kSink, kFirst, kEnd, kSeed };

// Differentiable in query, key and value, or in a packed query. `parts` are its views.
struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(AutogradContext* context, const Tensor& query,
                               const std::optional<Tensor>& key, const std::optional<Tensor>& value,
                               const std::optional<Tensor>& bias, const std::optional<Tensor>& sink,
                               const Parts& parts, const AttentionOptions& options) {
    const auto or_undefined = [](const std::optional<Tensor>& tensor) {
      return tensor.value_or(Tensor());
    };
    auto [output, statistics] = host::forward(parts[0], parts[1], parts[2], bias, sink, options);
    context->set_materialize_grads(false);
    context->save_for_backward({output, statistics, query, or_undefined(key), or_undefined(value),
                                or_undefined(bias), or_undefined(options.mask), or_undefined(sink),
                                or_undefined(options.visible.first),
                                or_undefined(options.visible.end), or_undefined(options.seed)});
    context->saved_data["options"] = c10::ivalue::Tuple::create(
        {options.scale, options.is_causal, options.window.left, options.window.right,
         options.sink_value, options.is_relative, options.dropout, query.requires_grad(),
         wants_gradient(key), wants_gradient(value), wants_gradient(bias), wants_gradient(sink),
         options.is_transposed, options.softcap});
    return {output, statistics};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& given = context->saved_data["options"].toTupleRef().elements();
    const auto [scale, is_causal, left, right, sink_value, is_relative, dropout] =
        std::tie(given[0], given[1], given[2], given[3], given[4], given[5], given[6]);
    const bool wants_bias = given[10].toBool(), wants_sink = given[11].toBool();
    const auto argument = [&](Saved which) { return as_argument(saved[which]); };
    Tensor output = saved[kOutput];
    Tensor d_output = gradients[0].defined() ? gradients[0] : zeros_like_expanded(output);
    if (given[12].toBool()) output = output.transpose(1, 2), d_output = d_output.transpose(1, 2);
    const c10::IValue d_lse = gradients[1].defined() ? gradients[1].select(0, 2) : c10::IValue();
    const bool is_packed = !saved[kKey].defined();
    const auto [query, key, value] =
        is_packed ? parts_of(saved[kQuery]) : Parts{saved[kQuery], saved[kKey], saved[kValue]};
    const Stack results = run_backward(
        is_packed ? kAttentionBackwardPacked : kAttentionBackward,
        stack_of(d_output, d_lse, query, key, value, output, saved[kStatistics], argument(kBias),
                 argument(kMask), scale, given[13], is_causal, left, right, argument(kSink),
                 sink_value, is_relative, argument(kFirst), argument(kEnd), c10::IValue(), 1,
                 dropout, argument(kSeed), false, wants_bias, wants_sink,
                 at::globalContext().deterministicAlgorithms()));
    const size_t of_bias = is_packed ? 1 : 3;
    const auto result = [&](size_t which) {  // query, key, value
      const bool is_wanted = which < of_bias && given[7 + which].toBool();
      return is_wanted ? results[which].toTensor() : Tensor();
    };
    return {result(0),
            result(1),
            result(2),
            wants_bias ? results[of_bias].toTensor() : Tensor(),
            wants_sink ? sum_over_rows(results[of_bias + 1].toTensor(), saved[kSink]) : Tensor(),
            {},
            {}};
  }
};

// Whether key and value fit the query, and all are as kernels take them. Python takes float32, with
// torch's setting of its products.
bool fit(const Tensor& query, const Tensor& key, const Tensor& value) {
  const ScalarType type = query.scalar_type();
  if (type != at::kHalf && type != at::kBFloat16) return false;
  for (const Tensor* tensor : {&query, &key, &value})
    if (tensor->dim() != 4 || tensor->scalar_type() != type || tensor->numel() == 0) return false;
  const int64_t dims = std::max(query.size(3), value.size(3));
  return key.size(0) == query.size(0) && value.size(0) == query.size(0) &&
         value.size(1) == key.size(1) && query.size(1) % key.size(1) == 0 &&
         value.size(2) == key.size(2) && key.size(3) == query.size(3) && dims <= kMaxHeadDim &&
         query.size(0) * query.size(1) <= INT32_MAX && query.size(2) + key.size(2) <= kMaxPositions;
}

// How entries of a merged tensor may be fewer than the examples: examples that follow each other
// share one, so that the last leading dimensions may be missing, or entries repeat, so that the
// first may.
enum class Sharing { kNone, kShared, kRepeated };

// A tensor that broadcasts to [..., heads, ...], with one dimension in place of the leading ones,
// as megasoftmax/functions/leading.py merges them; none where that is no view. `trailing`:
// dimensions from the heads on.
std::optional<Tensor> merged(const Tensor& tensor, at::IntArrayRef leading, int64_t trailing,
                             Sharing sharing) {
  const int64_t own = tensor.dim() - trailing;
  if (own <= 0) return tensor;
  const auto missing = static_cast<int64_t>(leading.size()) - own;
  const auto size = [&](int64_t dim) { return dim < missing ? 1 : tensor.size(dim - missing); };
  int64_t begin = 0, end = static_cast<int64_t>(leading.size());
  const auto may_lack = [&](int64_t dim, Sharing kind) {
    return size(dim) == 1 && (sharing == kind || leading[dim] == 1);
  };
  while (end > begin && may_lack(end - 1, Sharing::kShared)) --end;
  while (begin < end && may_lack(begin, Sharing::kRepeated)) ++begin;
  int64_t entries = 1, stride = 0, varying = 0;
  for (int64_t dim = 0; dim < own; ++dim) varying += tensor.size(dim) != 1;
  for (int64_t dim = begin; varying > 0 && dim < end; ++dim) {
    if (size(dim) != leading[dim]) return {};
    if (size(dim) == 1) continue;
    const int64_t of_dim = tensor.stride(dim - missing);
    if (entries > 1 && stride != of_dim * size(dim)) return {};
    entries *= size(dim);
    stride = of_dim;
  }
  c10::SmallVector<int64_t, 4> sizes{entries};
  sizes.append(tensor.sizes().end() - trailing, tensor.sizes().end());
  return tensor.view(sizes);
}

// A result [batch, ...] with the leading dimensions of the query.
Tensor unmerged(const Tensor& result, at::IntArrayRef leading) {
  if (leading.size() == 1) return result;
  c10::SmallVector<int64_t, 8> sizes(leading.begin(), leading.end());
  sizes.append(result.sizes().begin() + 1, result.sizes().end());
  return result.view(sizes);
}

// A call that runs fused.
struct AttentionCall {
  Tensor packed, query, key, value;  // packed: if defined, query, key and value are views of it
  std::optional<Tensor> bias, sink;
  AttentionOptions options;
  bool return_lse;
  c10::SmallVector<int64_t, 4> leading;  // sizes before the heads, which are merged in the tensors
  int64_t bias_rank;                     // that the op takes
};

// `repeats_mask`: the batches of a mask may be fewer than those of the query, see AttentionParams.
std::optional<AttentionCall> read(PyObject* const* arguments, bool is_transposed,
                                  bool repeats_mask = false) {
  const auto [query_, key_, value_, bias_, mask_, scale_, softcap_, causal_, window_, visible_,
              sink_, dropout_, seed_, return_lse_, fused_] =
      *reinterpret_cast<PyObject* const(*)[kAttentionArguments]>(arguments);
  Reader reader;
  Tensor query = reader.first_tensor(query_);
  if (reader.has_declined() || !admission_of(query.device()).has_attention || is_transformed())
    return {};
  std::optional<Tensor> key = reader.tensor(key_), value = reader.tensor(value_);
  Tensor packed;
  if (is_transposed && !key && !value && query.dim() == 5 && query.size(2) == 3) {
    const at::AutoDispatchBelowADInplaceOrView guard;  // autograd sees the packed tensor alone
    packed = query;
    const Parts parts = parts_of(packed);
    query = parts[0], key = parts[1], value = parts[2];
  }
  if (!key || !value || query.dim() < 3) return {};
  const at::IntArrayRef sizes = query.sizes();
  const c10::SmallVector<int64_t, 4> leading(sizes.begin(), sizes.end() - 3);
  const bool has_one_batch = leading.size() == 1;
  if (!has_one_batch) {
    for (std::optional<Tensor>* tensor : {&key, &value})
      if ((*tensor)->dim() != query.dim() ||
          (*tensor)->sizes().slice(0, leading.size()) != at::IntArrayRef(leading))
        return {};
    const auto merge = [&](const Tensor& tensor) {
      return merged(tensor, leading, 3, Sharing::kNone);
    };
    const std::optional<Tensor> one_batch = merge(query);
    key = merge(*key), value = merge(*value);
    if (!one_batch || !key || !value) return {};
    query = with_rank(*one_batch, 4), key = with_rank(*key, 4), value = with_rank(*value, 4);
  }
  if (!fit(query, *key, *value)) return {};
  if (const auto type = autocast_type(query.device()); type && type != query.scalar_type())
    return {};
  c10::SmallVector<int64_t, 8> shape(leading.begin(), leading.end());
  shape.append({query.size(1), query.size(2), key->size(2)});
  const at::IntArrayRef target(shape);

  AttentionOptions options;
  options.is_transposed = is_transposed;
  const int64_t trailing = trailing_of_table(bias_);
  options.is_relative = trailing != 0;
  std::optional<Tensor> bias = options.is_relative ? reader.table(bias_) : reader.floating(bias_);
  options.mask = reader.mask(mask_, target, repeats_mask && has_one_batch);
  options.scale = scale_ == Py_None ? std::pow(query.size(3), -0.5) : reader.number(scale_);
  options.softcap = reader.softcap(softcap_, options.scale, kMaxScale);
  options.is_causal = reader.flag(causal_);
  options.window = reader.window(window_);
  options.visible = reader.visible(visible_, target.slice(0, target.size() - 1));
  const Sink sink = reader.sink(sink_, query.size(1));
  options.sink_value = sink.value;
  options.dropout = reader.number(dropout_);
  options.seed = reader.tensor(seed_);
  const bool return_lse = reader.flag(return_lse_);
  reader.may_be_fused(fused_);
  if (bias) {
    const int64_t dim = bias->dim(), distances = query.size(2) + key->size(2) - 1;
    reader.decline_unless(dim > 0 && dim >= trailing - 1);
    if (reader.has_declined()) return {};
    c10::SmallVector<int64_t, 8> entries(shape);
    if (trailing == 2) entries.pop_back();
    if (trailing != 0) entries.back() = bias->size(-1);
    reader.decline_unless(
        broadcasts(bias->sizes(), entries) && (trailing != 2 || bias->size(-1) == distances) &&
        (trailing != 3 || (bias->size(-1) >= distances && bias->size(-2) == query.size(2))));
  }
  if (options.seed)
    reader.decline_unless(options.seed->scalar_type() == at::kLong && options.seed->numel() == 1);
  reader.decline_unless(options.dropout >= 0 &&
                        options.dropout <= static_cast<double>(kMaxDropped) / kDropoutSteps);
  reader.decline_unless(options.scale >= package().tiniest_scale && options.scale <= kMaxScale);
  if (reader.has_declined()) return {};
  if (!has_one_batch) {
    const auto merge = [&](std::optional<Tensor>& tensor, int64_t trailing, Sharing sharing) {
      if (!tensor) return;
      tensor = merged(*tensor, leading, trailing, sharing);
      reader.decline_unless(tensor.has_value());
    };
    merge(bias, options.is_relative ? trailing : 3, Sharing::kShared);
    merge(options.mask, 3, Sharing::kRepeated);
    merge(options.visible.first, 2, Sharing::kNone), merge(options.visible.end, 2, Sharing::kNone);
    if (reader.has_declined()) return {};
  }
  return AttentionCall{packed,      query,   *key,       *value,  bias,
                       sink.tensor, options, return_lse, leading, trailing == 2 ? 3 : 4};
}

PyObject* attend(PyObject* const* arguments, bool is_transposed, bool repeats_mask = false) {
  std::optional<AttentionCall> call = read(arguments, is_transposed, repeats_mask);
  if (!call) Py_RETURN_NONE;
  Tensor output, lse;
  {
    const pybind11::gil_scoped_release no_gil;
    auto& [packed, query, key, value, bias, sink, options, return_lse, leading, bias_rank] = *call;
    if (bias) bias = with_rank(cast_for_kernel(*bias, query.scalar_type()), bias_rank);
    if (options.mask) options.mask = with_rank(*options.mask, 4);
    for (std::optional<Tensor>* bound : {&options.visible.first, &options.visible.end})
      if (*bound) *bound = with_rank(**bound, 3);
    if (options.dropout == 0)
      options.seed.reset();
    else if (!options.seed)
      options.seed = at::randint(INT64_MIN, INT64_MAX, {1}, query.options().dtype(at::kLong));
    const Tensor& first = packed.defined() ? packed : query;
    const bool records = at::GradMode::is_enabled() &&
                         (first.requires_grad() || key.requires_grad() || value.requires_grad() ||
                          wants_gradient(bias) || wants_gradient(sink));
    Tensor statistics;
    if (records) {
      const auto unless_packed = [&](const Tensor& tensor) {
        return packed.defined() ? std::optional<Tensor>() : tensor;
      };
      const variable_list recorded =
          Attention::apply(first, unless_packed(key), unless_packed(value), bias, sink,
                           Parts{query, key, value}, options);
      output = recorded[0], statistics = recorded[1];
    } else {
      std::tie(output, statistics) = forward(query, key, value, bias, sink, options);
    }
    output = unmerged(output, leading);
    if (return_lse) lse = unmerged(statistics.select(0, 2), leading);
  }
  return call->return_lse ? to_python({output, lse}) : to_python(output);
}

}  // namespace

PyObject* serves_attention(PyObject* const* arguments) {
  return PyBool_FromLong(read(arguments, false).has_value());
}

PyObject* attention(PyObject* const* arguments) { return attend(arguments, false); }

PyObject* attention_transposed(PyObject* const* arguments) { return attend(arguments, true); }

PyObject* attention_of_windows(PyObject* const* arguments) { return attend(arguments, true, true); }

}  // namespace megasoftmax::host
