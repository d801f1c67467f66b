// megasoftmax::attention_forward, attention_backward, attention_backward_packed, attention_merge
// and tile_note for CUDA tensors. Schemas are defined in megasoftmax/ops/attention.py.

#include "../attention/attention.h"

#include <tuple>

#include "../common/device.h"
#include "checks.h"
#include "library.h"

namespace megasoftmax {
namespace {

constexpr int64_t kAlignment = 8;  // elements of 2 bytes in the 16 that kernels copy at a time

// Whether the current device has kernels, of which code for 7.5 is empty.
void check_capability() {
  const Device device = current_device();
  check(device.major >= kLeastMajor, "compute capability: expected at least ", kLeastMajor,
        ".0, got ", device.major, ".", device.minor);
}

int64_t padded(int64_t dim) {
  return std::max<int64_t>(divide_up(dim, kAlignment), 1) * kAlignment;
}

bool has_aligned_rows(const Tensor& tensor) {
  bool is_aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 &&
                    (tensor.stride(3) == 1 || tensor.size(3) == 1);
  for (int64_t i = 0; i < 3; ++i)
    is_aligned &= tensor.stride(i) % kAlignment == 0 || tensor.size(i) == 1;
  return is_aligned || tensor.numel() == 0;
}

// The rows that kernels read: the tensor itself, or a copy, padded by zeros to a multiple of 8
// columns.
Tensor aligned(const Tensor& tensor, int64_t columns) {
  check(tensor.dim() == 4, "query, key, value and gradients must have 4 dimensions");
  const int64_t missing = columns - tensor.size(3);
  if (missing == 0 && has_aligned_rows(tensor)) return tensor;
  const Tensor rows = torch::stable::contiguous(tensor);
  if (missing > 0) {
    // Of contiguous rows: what looks like channels last would be padded as that.
    const std::array<int64_t, 2> at_end{0, missing};
    return torch::stable::pad(rows, at_end);
  }
  // A misaligned view of a contiguous tensor is contiguous as it is.
  return rows.data_ptr() == tensor.data_ptr() ? torch::stable::clone(rows) : rows;
}

Strided rows_of(const Tensor& tensor) {
  Strided rows;
  rows.data = tensor.data_ptr();
  rows.type = dtype_of(tensor.scalar_type(), "query, key and value");
  rows.batch_stride = tensor.size(0) == 1 ? 0 : tensor.stride(0);
  rows.head_stride = tensor.size(1) == 1 ? 0 : tensor.stride(1);
  rows.query_stride = tensor.size(2) == 1 ? 0 : tensor.stride(2);
  rows.column_stride = 1;
  return rows;
}

// A bias as kernels of tiles read it, by 16 bytes of a row: itself, or a copy where rows are not
// dense, not aligned, or where the storage ends within their last 16 bytes.
Tensor with_fast_rows(const Tensor& bias, int64_t keys) {
  if (bias.size(3) != keys || bias.numel() == 0) return bias;
  const int64_t size = size_of(dtype_of(bias.scalar_type(), "bias")), in_vector = 16 / size;
  const auto* const first = static_cast<const char*>(bias.data_ptr());
  bool is_fast = reinterpret_cast<uintptr_t>(first) % 16 == 0 && (bias.stride(3) == 1 || keys == 1);
  int64_t end = divide_up(keys, in_vector) * in_vector;  // of the last row's vectors
  for (int64_t i = 0; i < 3; ++i) {
    is_fast &= bias.stride(i) % in_vector == 0 || bias.size(i) == 1;
    end += (bias.size(i) - 1) * bias.stride(i);
  }
  is_fast &= first + end * size <= end_of_storage(bias);
  if (is_fast) return bias;
  if (size != 2 || (bias.stride(3) != 1 && keys != 1)) return with_contiguous_rows(bias, in_vector);
  const Tensor entries = entries_of(bias);
  std::vector<int64_t> sizes = sizes_of(entries);
  sizes[3] = divide_up(keys, in_vector) * in_vector;
  Tensor rows = new_tensor(sizes, bias.scalar_type(), bias);
  check_cuda(attention_align_rows(rows_of(entries), sizes[0], sizes[1], sizes[2],
                                  static_cast<int>(keys), rows.data_ptr(), current_stream(bias)),
             "attention_align_rows");
  return rows;
}

// A relative bias of 4 dimensions, [batches, heads, queries, distances]: pair (i, j) has entry
// j - i + queries - 1 of row i. So the rows of pairs begin one entry earlier each.
struct ShiftedBias {
  // Whether rows of a table can begin one entry earlier: its rows are dense, and not one for all.
  static bool has_rows(const Tensor& table) { return table.stride(3) == 1 && table.stride(2) > 0; }

  Tensor table;
  int64_t queries, keys;

  ShiftedBias(const Tensor& table, int64_t queries, int64_t keys)
      : table(has_rows(table) ? table : torch::stable::contiguous(table)),
        queries(queries),
        keys(keys) {
    check(table.size(2) == queries && table.size(3) >= queries + keys - 1,
          "a relative bias of 4 dimensions must have a row of at least queries + keys - 1 entries "
          "for each query");
  }
  // A view [batches, heads, queries, keys] of such a table.
  Tensor pairs(const Tensor& table) const {
    const std::array<int64_t, 4> sizes{table.size(0), table.size(1), queries, keys},
        strides{table.stride(0), table.stride(1), table.stride(2) - 1, 1};
    AtenTensorHandle handle = nullptr;
    check_torch(aoti_torch__reinterpret_tensor(table.get(), 4, sizes.data(), strides.data(),
                                               std::max<int64_t>(queries - 1, 0), &handle));
    return Tensor(handle);
  }
  // Makes a relative bias of 4 dimensions one that is dense.
  static std::optional<ShiftedBias> replace(std::optional<Tensor>& bias, bool& relative,
                                            const Tensor& query, const Tensor& key) {
    if (!bias || !relative || bias->dim() != 4) return {};
    const ShiftedBias shifted(*bias, query.size(2), key.size(2));
    bias = shifted.pairs(shifted.table);
    relative = false;
    return shifted;
  }
  // The gradient of the table from that of pairs, in the layout of the table if the rows of a head
  // lie together there.
  Tensor gradient(const Tensor& of_pairs) const {
    Tensor result = torch::stable::empty_like(table);
    if (!has_rows(result) || result.stride(2) != result.size(3))
      result = new_tensor(sizes_of(table), table.scalar_type(), table);
    const bool has_kernel = of_pairs.scalar_type() != ScalarType::Float && queries > 1 &&
                            keys > 0 && has_aligned_rows(of_pairs);
    if (has_kernel) {
      check_cuda(
          attention_unshift_rows(rows_of(of_pairs), rows_of(result), result.size(0), result.size(1),
                                 queries, static_cast<int>(keys), current_stream(result)),
          "attention_unshift_rows");
      return result;
    }
    torch::stable::zero_(result);
    Tensor pairs_of_result = pairs(result);
    torch::stable::copy_(pairs_of_result, of_pairs);
    return result;
  }
};

// What forward and backward share; `query`, `key` and `value` are aligned.
struct Inputs {
  Tensor query, key, value;

  Inputs(const Tensor& q, const Tensor& k, const Tensor& v)
      : query(aligned(q, padded(q.size(3)))),
        key(aligned(k, padded(k.size(3)))),
        value(aligned(v, padded(v.size(3)))) {
    check(q.size(3) == k.size(3), "query and key must have the same head dimension");
  }
};

// Dimensions of stride 0 may have size 1 in `rows`.
void set_dense_bias(AttentionParams& params, const Tensor& rows) {
  params.bias.data = rows.data_ptr();
  params.bias.type = dtype_of(rows.scalar_type(), "bias");
  params.bias.batch_stride = rows.size(0) == 1 ? 0 : rows.stride(0);
  params.bias.head_stride = rows.size(1) == 1 ? 0 : rows.stride(1);
  params.bias.query_stride = rows.size(2) == 1 ? 0 : rows.stride(2);
  params.bias.column_stride = params.keys == 1 ? 1 : rows.size(3) == 1 ? 0 : rows.stride(3);
  params.bias.last_whole_row = reinterpret_cast<uintptr_t>(end_of_storage(rows));
}

// Plans a launch by plan(params). A bias that its kernel reads faster from other rows is copied to
// `rows`, which must stay until the launch, and the launch is planned again.
template <class Params, class Plan>
auto planned(Params& params, const std::optional<Tensor>& bias, Tensor& rows, Plan&& plan) {
  auto launch = plan(params);
  if (params.bias.data == nullptr || params.is_relative) return launch;
  if (launch.plan.reads_bias_in_place) return launch;
  rows = with_fast_rows(*bias, params.keys);
  if (rows.data_ptr() == bias->data_ptr()) return launch;
  set_dense_bias(params, rows);
  return plan(params);
}

// An entry for each block of queries and keys. Its batches may repeat.
void set_mask(AttentionParams& params, const Tensor& mask, int64_t block) {
  check(mask.scalar_type() == ScalarType::Bool && mask.dim() == 4,
        "mask must be bool, of 4 dimensions");
  check(block == 1 || (block > 0 && block <= INT32_MAX && block % kMaskTile == 0),
        "block must be 1 or a multiple of ", kMaskTile);
  const std::array<int64_t, 4> sizes{params.batches, params.heads,
                                     divide_up<int64_t>(params.queries, block),
                                     divide_up<int64_t>(params.keys, block)};
  std::array<int64_t, 4> strides{};
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t size = mask.size(i);
    check(size == sizes[i] || size == 1 || (i == 0 && size > 0 && sizes[i] % size == 0),
          "mask does not broadcast to the scores in dimension ", i);
    strides[i] = size == 1 ? 0 : mask.stride(i);
  }
  params.mask_batches = Divider(mask.size(0));
  params.mask = {mask.data_ptr(), DType::kFloat32, strides[0], strides[1], strides[2], strides[3]};
  params.mask_block = static_cast<int>(block);
  params.block_mask.layout =
      BlockMaskLayout(params.queries, params.keys, static_cast<int>(block > 1 ? 0 : mask.size(2)));
}

// Makes params.block_mask where there is a mask or a range: of `given`, which was made of the same
// mask, or anew, in a tensor that must stay. The forward needs less of it.
std::optional<Tensor> set_block_mask(AttentionParams& params, const std::optional<Tensor>& mask,
                                     const std::optional<Tensor>& first,
                                     const std::optional<Tensor>& end,
                                     const std::optional<Tensor>& given, const Tensor& beside,
                                     bool is_for_backward) {
  if (!mask && !first && !end) return {};
  const auto size = [](const std::optional<Tensor>& tensor, int64_t dim) {
    return tensor ? tensor->size(dim) : 1;
  };
  const auto ranges_have = [&](int64_t dim) {
    return size(first, dim) != 1 || size(end, dim) != 1;
  };
  const int64_t batches = ranges_have(0) ? params.batches : size(mask, 0);
  const int64_t heads = ranges_have(1) ? params.heads : size(mask, 1);
  if (!mask) params.block_mask.layout = BlockMaskLayout(params.queries, params.keys, 0);
  const int64_t words = params.block_mask.layout.words();
  if (given) {
    check(!first && !end, "a block mask of ranges is made anew");
    check(given->is_cuda() && given->get_device_index() == beside.get_device_index() &&
              given->scalar_type() == ScalarType::Int && given->dim() == 3 &&
              given->size(0) == batches && given->size(1) == heads && given->size(2) == words &&
              (words == 0 ||
               (given->stride(2) == 1 && (given->stride(0) | given->stride(1)) % 4 == 0 &&
                reinterpret_cast<uintptr_t>(given->data_ptr()) % 16 == 0)),
          "note must be what tile_note made of this mask");
  }
  const Tensor note = given ? *given : new_tensor({batches, heads, words}, ScalarType::Int, beside);
  params.block_mask.words = static_cast<uint32_t*>(note.data_ptr());
  params.block_mask.batches = Divider(batches);
  params.block_mask.batch_stride = note.stride(0);
  params.block_mask.head_stride = heads == 1 ? 0 : note.stride(1);
  if (!given)
    check_cuda(attention_block_mask(params, static_cast<int>(batches), static_cast<int>(heads),
                                    is_for_backward, current_stream(beside)),
               "attention_block_mask");
  return note;
}

Tensor tile_note(Tensor mask, int64_t block, int64_t queries, int64_t keys) {
  const torch::stable::accelerator::DeviceGuard guard(mask.get_device_index());
  check_capability();
  check(queries >= 0 && keys >= 0 && queries + keys <= kMaxPositions,
        "queries and keys together must be at most ", kMaxPositions);
  AttentionParams params;
  check(mask.dim() == 4, "mask must have 4 dimensions");
  params.batches = mask.size(0);
  params.heads = mask.size(1);
  params.queries = static_cast<int>(queries);
  params.keys = static_cast<int>(keys);
  set_mask(params, mask, block);
  return *set_block_mask(params, mask, {}, {}, {}, mask, true);
}

void set_params(AttentionParams& params, const Inputs& inputs, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& mask, double scale, double softcap, bool causal,
                int64_t window_left, int64_t window_right, const std::optional<Tensor>& sink,
                std::optional<double> sink_value, bool relative, const std::optional<Tensor>& first,
                const std::optional<Tensor>& end, int64_t block, double dropout,
                const std::optional<Tensor>& seed, bool tf32) {
  const auto& [query, key, value] = inputs;
  const int64_t batches = query.size(0), heads = query.size(1), queries = query.size(2);
  const int64_t key_heads = key.size(1), keys = key.size(2);
  const auto is_beside = [&](const Tensor& tensor) {
    return tensor.is_cuda() && tensor.get_device_index() == query.get_device_index();
  };
  const auto type = query.scalar_type();
  check(is_beside(key) && is_beside(value) && key.scalar_type() == type &&
            value.scalar_type() == type,
        "key and value must have the type and the device of query");
  check(key.size(0) == batches && value.size(0) == batches && value.size(1) == key_heads &&
            value.size(2) == keys && key.size(3) == query.size(3),
        "key and value do not fit query, or each other");
  check(key_heads > 0 ? heads % key_heads == 0 : heads == 0,
        "the heads of query must be a multiple of those of key");
  check(queries + keys <= kMaxPositions, "queries and keys together must be at most ",
        kMaxPositions);
  params.batches = batches;
  params.heads = heads;
  params.key_heads = key_heads;
  params.queries = static_cast<int>(queries);
  params.keys = static_cast<int>(keys);
  params.head_dim = static_cast<int>(query.size(3));
  params.value_dim = static_cast<int>(value.size(3));
  params.query = rows_of(query);
  params.key = rows_of(key);
  params.value = rows_of(value);
  params.heads_per_key_head = Divider(heads / std::max<int64_t>(key_heads, 1));
  if (mask) {
    check(is_beside(*mask), "mask must be on the device of query");
    set_mask(params, *mask, block);
  }
  for (const std::optional<Tensor>* bound : {&first, &end})
    check(!bound->has_value() || (*bound)->dim() == 3, "first and end must have 3 dimensions");
  params.visible = visible_of(first, end, query);
  if (dropout > 0) params.dropout = dropout_of(dropout, seed, query);
  const auto each = [](int64_t count, int64_t entries) {
    return Divider(std::max<int64_t>(count / std::max<int64_t>(entries, 1), 1));
  };
  params.batches_per_bias = each(batches, 1);
  params.heads_per_bias = each(heads, 1);
  if (bias) {
    check(is_beside(*bias) && bias->dim() == (relative ? 3 : 4),
          "bias must have 4 dimensions, a relative one 3 or 4, on the device of query");
    check(bias->scalar_type() == type || bias->scalar_type() == ScalarType::Float,
          "bias must have the type of query or be float32");
    const int64_t bias_batches = bias->size(0), bias_heads = bias->size(1);
    check(bias_heads == 1 || bias_heads == heads, "heads of bias must be 1 or those of query");
    check(bias_batches > 0 ? batches % bias_batches == 0 : batches == 0,
          "batches must be a multiple of those of bias");
    params.batches_per_bias = each(batches, bias_batches);
    params.heads_per_bias = each(heads, bias_heads);
    params.is_relative = relative;
    if (relative) {
      check(bias->size(2) == std::max<int64_t>(queries + keys - 1, 0),
            "a relative bias must have queries + keys - 1 entries");
      Strided& rows = params.bias;
      rows.type = dtype_of(bias->scalar_type(), "bias");
      rows.batch_stride = bias_batches == 1 ? 0 : bias->stride(0);
      rows.head_stride = bias_heads == 1 ? 0 : bias->stride(1);
      // The entry of query i and key j is number j - i + queries - 1.
      rows.column_stride = bias->stride(2);
      rows.query_stride = -rows.column_stride;
      rows.data = static_cast<const char*>(bias->data_ptr()) +
                  (queries - 1) * rows.column_stride * size_of(rows.type);
    } else {
      check((bias->size(2) == 1 || bias->size(2) == queries) &&
                (bias->size(3) == 1 || bias->size(3) == keys),
            "bias does not broadcast to the scores");
      set_dense_bias(params, *bias);
      if (bias->size(3) == 1 && keys != 1) std::swap(params.row_bias, params.bias);
    }
  }
  params.set_logits(logit_options(scale, softcap, sink, sink_value, query));
  // What no query meets is no limit: the last stands at the last key, the first queries - 1 before.
  const Window window = window_of(causal, window_left, window_right);
  params.window_left = window.left >= keys - 1 ? -1 : static_cast<int>(window.left);
  params.window_right = window.right >= queries - 1 ? -1 : static_cast<int>(window.right);
  params.can_exclude = mask || bias || window.is_limited() || params.visible.are_given() ||
                       params.sink.is_given || keys == 0;
  params.is_tf32 = tf32;
}

// [batches, heads, queries, columns], in memory [batches, queries, heads, columns]. Not a view,
// which autograd would not let users change in place.
Tensor new_output(const Tensor& query, int64_t columns) {
  const int64_t heads = query.size(1), queries = query.size(2);
  return new_tensor({query.size(0), heads, queries, columns},
                    {heads * queries * columns, columns, heads * columns, 1}, query.scalar_type(),
                    query);
}

std::tuple<Tensor, Tensor> forward(Tensor query, Tensor key, Tensor value,
                                   std::optional<Tensor> bias, std::optional<Tensor> mask,
                                   double scale, double softcap, bool causal, int64_t window_left,
                                   int64_t window_right, std::optional<Tensor> sink,
                                   std::optional<double> sink_value, bool relative,
                                   std::optional<Tensor> first, std::optional<Tensor> end,
                                   std::optional<Tensor> note, int64_t block, double dropout,
                                   std::optional<Tensor> seed, bool tf32) {
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  check_capability();
  const Inputs inputs(query, key, value);
  ShiftedBias::replace(bias, relative, query, key);
  AttentionForwardParams params;
  set_params(params, inputs, bias, mask, scale, softcap, causal, window_left, window_right, sink,
             sink_value, relative, first, end, block, dropout, seed, tf32);
  Tensor output = new_output(query, params.value_dim);
  Tensor statistics =
      new_tensor({3, params.batches, params.heads, params.queries}, ScalarType::Float, query);
  params.output = rows_of(output);
  params.statistics = static_cast<float*>(statistics.data_ptr());
  Tensor bias_rows;
  ForwardLaunch launch = planned(params, bias, bias_rows, [&](const auto& params) {
    return plan_attention_forward(params, current_stream(query));
  });
  const auto workspace = set_workspace(launch, query);
  // A block mask that is there tells tiles to skip, also where none would be made.
  if ((note && launch.plan.reads_mask) ||
      launch.plan.reads_block_mask(mask.has_value(), first || end))
    note = set_block_mask(launch.params, mask, first, end, note, query, false);
  check_cuda(attention_forward(launch, current_stream(query)), "attention_forward");
  if (params.value_dim != value.size(3)) {
    Tensor narrow = torch::stable::narrow(output, 3, 0, value.size(3));
    output = new_output(query, value.size(3));
    torch::stable::copy_(output, narrow);
  }
  return {std::move(output), std::move(statistics)};
}

// A new gradient, and the aligned rows that kernels write in its place.
class Gradient {
 public:
  // `taken`: what kernels take in place of the tensor whose gradient this is.
  Gradient(const Tensor& result, const Tensor& taken) : result_(result), rows_(result) {
    // empty_like of a tensor with strides of 0 may not put the columns last.
    if (taken.size(3) != result.size(3) || !has_aligned_rows(result))
      rows_ = new_tensor(sizes_of(taken), result.scalar_type(), result);
  }

  // What kernels write.
  Strided rows() const { return rows_of(rows_); }
  void set_to_zero() { torch::stable::zero_(rows_); }
  // What they wrote.
  Tensor result() {
    if (rows_.data_ptr() != result_.data_ptr())
      torch::stable::copy_(result_, torch::stable::narrow(rows_, 3, 0, result_.size(3)));
    return result_;
  }

 private:
  Tensor result_, rows_;
};

// Sums over batches and heads that share an entry of the bias: from [batches, heads, ...] to the
// sizes and the type of the bias.
Tensor sum_of_shared(const Tensor& of_heads, const Tensor& bias) {
  const int64_t batches = bias.size(0), heads = bias.size(1);
  const std::array<int64_t, 5> groups{batches, of_heads.size(0) / batches, heads,
                                      of_heads.size(1) / heads, -1};
  const Tensor grouped = torch::stable::reshape(
      of_heads, torch::headeronly::IntHeaderOnlyArrayRef(groups.data(), groups.size()));
  std::vector<int64_t> summed{1, 3};
  // A bias for all queries and all keys is summed over both.
  if (bias.size(2) == 1 && bias.size(3) == 1) summed.push_back(4);
  const Tensor sum = torch::stable::sum(
      grouped, torch::headeronly::IntHeaderOnlyArrayRef(summed.data(), summed.size()));
  const std::vector<int64_t> sizes = sizes_of(bias);
  return torch::stable::to(torch::stable::reshape(sum, torch::headeronly::IntHeaderOnlyArrayRef(
                                                           sizes.data(), sizes.size())),
                           bias.scalar_type());
}

// Query, key or value [batches, heads, tokens, columns], a view of a contiguous tensor
// [batches, tokens, 3, heads, columns].
Tensor part_of(const Tensor& packed, int64_t which) {
  const std::array<int64_t, 4> sizes{packed.size(0), packed.size(3), packed.size(1),
                                     packed.size(4)},
      strides{packed.stride(0), packed.stride(3), packed.stride(1), 1};
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch__reinterpret_tensor(packed.get(), 4, sizes.data(), strides.data(),
                                             which * packed.stride(2), &handle));
  return Tensor(handle);
}

// Gradients of query, key, value, bias and sink. If `kIsPacked`, those of query, key and value are
// one tensor [batches, tokens, 3, heads, columns]. Else each is laid out as empty_like gives it.
template <bool kIsPacked>
auto backward(Tensor output_gradient, std::optional<Tensor> lse_gradient, Tensor query, Tensor key,
              Tensor value, Tensor output, Tensor statistics, std::optional<Tensor> bias,
              std::optional<Tensor> mask, double scale, double softcap, bool causal,
              int64_t window_left, int64_t window_right, std::optional<Tensor> sink,
              std::optional<double> sink_value, bool relative, std::optional<Tensor> first,
              std::optional<Tensor> end, std::optional<Tensor> note, int64_t block, double dropout,
              std::optional<Tensor> seed, bool tf32, bool bias_gradient, bool sink_gradient,
              bool deterministic) {
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  check_capability();
  const Inputs inputs(query, key, value);
  const std::optional<ShiftedBias> shifted = ShiftedBias::replace(bias, relative, query, key);
  AttentionBackwardParams params;
  set_params(params, inputs, bias, mask, scale, softcap, causal, window_left, window_right, sink,
             sink_value, relative, first, end, block, dropout, seed, tf32);
  const auto check_rows = [&](const Tensor& tensor, int64_t count, const char* argument) {
    check(tensor.is_cuda() && tensor.get_device_index() == query.get_device_index() &&
              tensor.scalar_type() == ScalarType::Float && tensor.numel() == count,
          argument, " must be as attention_forward gives it");
    return torch::stable::contiguous(tensor);
  };
  const auto check_output = [&](const Tensor& tensor, const char* argument) {
    check(tensor.is_cuda() && tensor.get_device_index() == query.get_device_index() &&
              tensor.scalar_type() == query.scalar_type() && tensor.dim() == 4 &&
              tensor.size(0) == params.batches && tensor.size(1) == params.heads &&
              tensor.size(2) == params.queries && tensor.size(3) == value.size(3),
          argument, " must have the shape and the type of the output");
    return aligned(tensor, params.value_dim);
  };
  const Tensor rows = check_rows(statistics, 3 * params.rows(), "statistics");
  const Tensor results = check_output(output, "output");
  const Tensor gradients = check_output(output_gradient, "d_output");
  Tensor lse_gradients;
  if (lse_gradient) {
    lse_gradients = check_rows(*lse_gradient, params.rows(), "d_lse");
    params.lse_gradient = static_cast<const float*>(lse_gradients.data_ptr());
  }
  params.statistics = static_cast<float*>(rows.data_ptr());
  params.output = rows_of(results);
  params.output_gradient = rows_of(gradients);

  Tensor packed;
  if constexpr (kIsPacked) {
    for (const Tensor* each : {&key, &value})
      check(sizes_of(*each) == sizes_of(query), "query, key and value must have one shape");
    packed = new_tensor({params.batches, params.queries, 3, params.heads, query.size(3)},
                        query.scalar_type(), query);
  }
  const auto gradient_of = [&](const Tensor& tensor, const Tensor& taken, int64_t which) {
    return Gradient(kIsPacked ? part_of(packed, which) : torch::stable::empty_like(tensor), taken);
  };
  Gradient query_gradient = gradient_of(query, inputs.query, 0),
           key_gradient = gradient_of(key, inputs.key, 1),
           value_gradient = gradient_of(value, inputs.value, 2);
  const std::vector<int64_t> row_counts{params.batches, params.heads, params.queries};
  Tensor sink_rows =
      new_tensor(sink_gradient ? row_counts : std::vector<int64_t>{0}, ScalarType::Float, query);
  if (sink_gradient) params.sink_gradient = static_cast<float*>(sink_rows.data_ptr());
  params.query_gradient = query_gradient.rows();
  params.key_gradient = key_gradient.rows();
  params.value_gradient = value_gradient.rows();

  Tensor bias_sums = new_tensor({0}, ScalarType::Float, query);
  Tensor bias_result = bias_sums;
  check(!bias_gradient || bias.has_value(), "bias_gradient without a bias");
  // With an entry for each pair rows are padded, see bias_pitch. The result is a view without that.
  const bool is_padded = bias_gradient && !relative && bias->size(2) == params.queries &&
                         bias->size(3) == params.keys && params.bias_pitch() != params.keys;
  const auto sizes_in_memory = [&] {
    std::vector<int64_t> sizes = sizes_of(*bias);
    if (is_padded) sizes.back() = params.bias_pitch();
    return sizes;
  };
  const auto of_bias = [&] {
    const Tensor pairs =
        is_padded ? torch::stable::narrow(bias_result, 3, 0, params.keys) : bias_result;
    return shifted && bias_gradient ? shifted->gradient(pairs) : pairs;
  };
  const auto returned = [&] {
    Tensor of_query = query_gradient.result(), of_key = key_gradient.result(),
           of_value = value_gradient.result();
    if constexpr (kIsPacked)
      return std::tuple(packed, of_bias(), sink_rows);
    else
      return std::tuple(of_query, of_key, of_value, of_bias(), sink_rows);
  };
  // Without a query's head nothing is launched, but keys or a bias may be there.
  if (params.batches == 0 || params.heads == 0) {
    if (bias_gradient) bias_result = new_tensor(sizes_in_memory(), bias->scalar_type(), query);
    key_gradient.set_to_zero(), value_gradient.set_to_zero(), torch::stable::zero_(bias_result);
    return returned();
  }
  note = set_block_mask(params, mask, first, end, note, query, true);
  if (bias_gradient)
    params.bias_gradient_kind =
        bias_gradient_kind(params, bias->size(2), bias->size(bias->dim() - 1));
  Tensor bias_rows;
  BackwardLaunch launch = planned(params, bias, bias_rows, [&](const auto& params) {
    return plan_attention_backward(params, deterministic);
  });
  const auto workspace = set_workspace(launch, query);
  const auto write_bias_gradient = [&](const std::vector<int64_t>& sizes, ScalarType type) {
    bias_sums = new_tensor(sizes, type, query);
    launch.params.bias_gradient = bias_sums.data_ptr();
    launch.params.bias_gradient_bytes = bias_sums.numel() * size_of(dtype_of(type, "bias"));
    return bias_sums;
  };
  const BiasGradient kind = launch.plan.bias_gradient;
  switch (kind) {
    case BiasGradient::kNone:
      break;
    case BiasGradient::kShared:
      bias_result = write_bias_gradient(sizes_in_memory(), ScalarType::Float);
      break;
    case BiasGradient::kDense:
    case BiasGradient::kInClusters:
    case BiasGradient::kInOrder:
      bias_result = write_bias_gradient(sizes_in_memory(), bias->scalar_type());
      break;
    case BiasGradient::kKeys:
      write_bias_gradient({params.batches, params.heads, params.keys}, ScalarType::Float);
      break;
    case BiasGradient::kQueries:
      write_bias_gradient(row_counts, ScalarType::Float);
      break;
    case BiasGradient::kDiagonals:
      bias_result = new_tensor(sizes_of(*bias), ScalarType::Float, query);
      launch.params.table_gradient = static_cast<float*>(bias_result.data_ptr());
  }
  check_cuda(attention_backward(launch, current_stream(query)), "attention_backward");
  if (kind == BiasGradient::kKeys || kind == BiasGradient::kQueries) {
    bias_result = sum_of_shared(bias_sums, *bias);
  } else if (bias_gradient && bias_result.scalar_type() != bias->scalar_type()) {
    bias_result = torch::stable::to(bias_result, bias->scalar_type());
  }
  return returned();
}

// Statistics [3, batches, heads, queries] of rows.
Strided statistics_of(const Tensor& statistics, const Tensor& rows) {
  check(statistics.scalar_type() == ScalarType::Float && statistics.dim() == 4 &&
            statistics.size(0) == 3,
        "statistics must be float32, [3, batches, heads, queries]");
  for (int64_t i = 0; i < 3; ++i)
    check(statistics.size(i + 1) == rows.size(i), "statistics and output must have the same rows");
  return {statistics.data_ptr(), DType::kFloat32,      statistics.stride(1),
          statistics.stride(2),  statistics.stride(3), statistics.stride(0)};
}

void merge(Tensor output, Tensor statistics, Tensor other_output, Tensor other_statistics) {
  check(output.is_cuda(), "output must be on a GPU");
  const torch::stable::accelerator::DeviceGuard guard(output.get_device_index());
  for (const Tensor* each : {&statistics, &other_output, &other_statistics})
    check(each->is_cuda() && each->get_device_index() == output.get_device_index(),
          "all tensors must be on the device of the output");
  check(output.dim() == 4 && other_output.dim() == 4, "outputs must have 4 dimensions");
  for (int64_t i = 0; i < 4; ++i)
    check(output.size(i) == other_output.size(i), "outputs must have the same shape");
  check(output.size(3) <= 1 || (output.stride(3) == 1 && other_output.stride(3) == 1),
        "columns of outputs must be dense");
  check(output.scalar_type() == other_output.scalar_type() ||
            output.scalar_type() == ScalarType::Float,
        "output must have the type of the other output, or float32");
  MergeParams params;
  params.output = rows_of(output);
  params.other_output = rows_of(other_output);
  params.statistics = statistics_of(statistics, output);
  params.other_statistics = statistics_of(other_statistics, output);
  params.heads = Divider(output.size(1));
  params.queries = Divider(output.size(2));
  params.rows = output.size(0) * output.size(1) * output.size(2);
  params.columns = static_cast<int>(output.size(3));
  check_cuda(attention_merge(params, current_stream(output)), "attention_merge");
}

}  // namespace

void register_attention(Library& library) {
  implement(library, "attention_forward", TORCH_BOX(&forward));
  implement(library, "attention_backward", TORCH_BOX(&backward<false>));
  library.impl("attention_backward_packed", TORCH_BOX(&backward<true>));
  library.impl("attention_merge", TORCH_BOX(&merge));
  library.impl("tile_note", TORCH_BOX(&tile_note));
}

}  // namespace megasoftmax
