#pragma once
// From torch tensors to the plain structs of the kernels. Python has checked what users may get
// wrong; what is checked again here keeps a direct call of an operator from reading outside its
// tensors.

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/text.h"
#include "../softmax/params.h"

namespace megasoftmax {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Torch's own macro would name a file of the machine that compiled this.
template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) return;
  std::string text;
  (append(text, parts), ...);
  throw std::runtime_error(text);
}

// An error is reported once, by the operator that met it: the runtime would keep it for whoever
// asks next.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) cudaGetLastError();
  check(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

// Not torch's own macro, whose name differs between the releases that this compiles against.
inline void check_torch(AOTITorchError error) {
  check(error == AOTI_TORCH_SUCCESS, "torch reported an error");
}

// The one symbol that a CPU build of torch lacks. Where it is weak, the library loads there too,
// for its plans.
#pragma weak aoti_torch_get_current_cuda_stream

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  check_torch(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline DType dtype_of(ScalarType type, const char* argument) {
  switch (type) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      check(type == ScalarType::Float, argument, " must be float16, bfloat16 or float32");
      return DType::kFloat32;
  }
}

// The type of a result that kernels compute of `source`.
inline DType result_dtype_of(ScalarType type, DType source) {
  const DType result = dtype_of(type, "dtype");
  check(result == source || result == DType::kFloat32 || source == DType::kFloat32,
        "dtype must be that of the input or float32");
  return result;
}

// Not torch::stable::empty, which looks its operator up by name at every call.
inline Tensor new_tensor(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                         ScalarType type, const Tensor& on_device_of) {
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), static_cast<int32_t>(type),
      aoti_torch_device_type_cuda(), on_device_of.get_device_index(), &handle);
  if (error != AOTI_TORCH_SUCCESS) {
    int64_t elements = 1;
    for (const int64_t size : sizes) elements *= size;
    check(false, "torch could not allocate a tensor of ", elements, " elements");
  }
  return Tensor(handle);
}

// A contiguous one.
inline Tensor new_tensor(const std::vector<int64_t>& sizes, ScalarType type,
                         const Tensor& on_device_of) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return new_tensor(sizes, strides, type, on_device_of);
}

inline Tensor new_workspace(int64_t bytes, const Tensor& on_device_of) {
  return new_tensor({divide_up<int64_t>(bytes, sizeof(float))}, ScalarType::Float, on_device_of);
}

// Gives a launch its workspace, unless it needs 0 bytes. The caller keeps it until the launch.
template <class Launch>
std::optional<Tensor> set_workspace(Launch& launch, const Tensor& on_device_of) {
  if (launch.plan.workspace_bytes == 0) return {};
  std::optional<Tensor> workspace = new_workspace(launch.plan.workspace_bytes, on_device_of);
  launch.set_workspace(workspace->data_ptr());
  return workspace;
}

// Without the last dimension, and all.
inline std::vector<int64_t> row_sizes(const Tensor& tensor) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) sizes.push_back(tensor.size(i));
  return sizes;
}
inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  std::vector<int64_t> sizes = row_sizes(tensor);
  sizes.push_back(tensor.size(tensor.dim() - 1));
  return sizes;
}

// The sizes of a tensor without its last dimension, seen as [batches, heads, queries].
using RowCounts = std::array<int64_t, 3>;

inline RowCounts row_counts(const Tensor& tensor) {
  RowCounts rows{1, 1, 1};
  const int64_t leading = tensor.dim() - 1;
  for (int64_t i = 0; i < leading; ++i) {
    const int64_t from_end = leading - 1 - i;  // 0: queries, 1: heads, 2 and above: batches
    rows[from_end < 2 ? 2 - from_end : 0] *= tensor.size(i);
  }
  return rows;
}

inline Shape shape_of(const Tensor& scores) {
  const RowCounts rows = row_counts(scores);
  return {rows[0], rows[1], rows[2], scores.size(scores.dim() - 1)};
}

inline const char* begin_of_storage(const Tensor& tensor) {
  return static_cast<const char*>(tensor.data_ptr()) -
         tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}
inline const char* end_of_storage(const Tensor& tensor) {
  int64_t bytes = 0;
  check_torch(aoti_torch_get_storage_size(tensor.get(), &bytes));
  return begin_of_storage(tensor) + bytes;
}

// The tensor, or a copy where its storage does not begin at a multiple of 16 bytes, as that of
// other libraries may: then the 16 bytes that hold its first element may not be there.
inline Tensor with_aligned_storage(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(begin_of_storage(tensor)) % 16 == 0
             ? tensor
             : torch::stable::clone(tensor);
}

// `tensor`, broadcast to the sizes of `scores`, as the kernels see it.
inline Strided strided(const Tensor& tensor, const Tensor& scores, const char* argument) {
  check(tensor.get_device_index() == scores.get_device_index() && tensor.is_cuda(), argument,
        " must be on the device of scores");
  const int64_t rank = scores.dim(), missing = rank - tensor.dim();
  check(missing >= 0, argument, " has more dimensions than scores");
  std::vector<int64_t> strides(rank, 0);
  for (int64_t i = missing; i < rank; ++i) {
    const int64_t size = tensor.size(i - missing);
    check(size == scores.size(i) || size == 1, argument,
          " does not broadcast to scores in dimension ", i);
    strides[i] = size == 1 ? 0 : tensor.stride(i - missing);
  }
  Strided result;
  result.data = tensor.data_ptr();
  if (rank >= 1) result.column_stride = strides[rank - 1];
  if (rank >= 2) result.query_stride = strides[rank - 2];
  if (rank >= 3) result.head_stride = strides[rank - 3];
  // Leading dimensions are one: each stride is that of its successor times the successor's size.
  int64_t inner = -1, extent = 1;
  for (int64_t i = rank - 4; i >= 0; --i) {
    const int64_t size = scores.size(i);
    if (size == 1 || scores.numel() == 0) continue;
    if (inner < 0) {
      inner = strides[i];
    } else {
      check(strides[i] == inner * extent, argument,
            ": leading dimensions do not form a view of one dimension");
    }
    extent *= size;
  }
  result.batch_stride = inner < 0 ? 0 : inner;
  if (scores.size(rank - 1) == 1)
    result.column_stride = 1;  // never stepped along, but tells whole vectors
  int64_t last = 0;            // where the last row begins
  for (int64_t i = 0; i + 1 < rank; ++i) last += (scores.size(i) - 1) * strides[i];
  const int64_t size = static_cast<int64_t>(tensor.element_size());
  const auto whole = reinterpret_cast<uintptr_t>(end_of_storage(tensor)) / 16 * 16;
  const uintptr_t last_whole_row = whole - scores.size(rank - 1) * size;
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) + last * size > last_whole_row)
    result.last_whole_row = last_whole_row;
  return result;
}

// The entries that a broadcast tensor has: dimensions of stride 0 have size 1.
inline Tensor entries_of(const Tensor& tensor) {
  Tensor entries = tensor;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.stride(i) == 0 && tensor.size(i) > 1)
      entries = torch::stable::narrow(entries, i, 0, 1);
  }
  return entries;
}

// A copy of entries_of(tensor) with contiguous rows that begin at multiples of `alignment` elements
// and are filled up with 0.
inline Tensor with_contiguous_rows(const Tensor& tensor, int64_t alignment) {
  const Tensor entries = entries_of(tensor);
  std::vector<int64_t> sizes = sizes_of(entries);
  const int64_t last = tensor.dim() - 1, columns = sizes[last];
  sizes[last] = divide_up(columns, alignment) * alignment;
  const Tensor rows = new_tensor(sizes, tensor.scalar_type(), tensor);
  const auto part = [&](int64_t first, int64_t length) {
    Tensor all = rows;  // narrow takes what it could change
    return torch::stable::narrow(all, last, first, length);
  };
  if (Tensor filling = part(columns, sizes[last] - columns); filling.numel() > 0)
    torch::stable::zero_(filling);
  Tensor copy = part(0, columns);
  return torch::stable::copy_(copy, entries);
}

// A mask as kernels see it. One that several queries share is copied where its storage ends within
// the last word of a row: each query would read the end of that row byte by byte.
inline Strided strided_mask(Tensor& mask, const Tensor& scores) {
  check(mask.scalar_type() == ScalarType::Bool, "mask must be bool");
  mask = with_aligned_storage(mask);
  const Strided result = strided(mask, scores, "mask");
  const bool is_shared =
      scores.dim() > 1 && result.query_stride == 0 && scores.size(scores.dim() - 2) > 1;
  if (!is_shared || mask.dim() == 0 || mask.numel() == 0 || result.column_stride != 1 ||
      result.last_whole_row == UINTPTR_MAX)
    return result;
  // One launch copies the mask twice, so that other bytes follow its last row. Both copies of less
  // than 8 bytes would still end within the word.
  const Tensor entries = entries_of(mask);
  if (entries.numel() < 8) return result;
  std::vector<int64_t> sizes = sizes_of(entries);
  sizes.insert(sizes.begin(), 2);
  Tensor copies = new_tensor(sizes, mask.scalar_type(), mask);
  torch::stable::copy_(copies, entries);
  mask = torch::stable::select(copies, 0, 0);
  return strided(mask, scores, "mask");
}

// Kernels hold a softcap in float32, where 0 is none.
inline LogitOptions logit_options(double scale, double softcap) {
  LogitOptions options;
  options.scale = static_cast<float>(scale);
  options.softcap = Softcap(softcap, scale);
  check(softcap == 0 || options.softcap.is_given(), "softcap must be 0 or a positive float32");
  return options;
}

inline LogitOptions logit_options(double scale, double softcap, const std::optional<Tensor>& sink,
                                  std::optional<double> sink_value, const Tensor& scores) {
  LogitOptions options = logit_options(scale, softcap);
  SinkLogit& logit = options.sink;
  logit.is_given = sink.has_value() || sink_value.has_value();
  if (sink_value) logit.value = static_cast<float>(*sink_value);
  if (!sink) return options;
  const int64_t count = sink->numel(),
                heads = scores.dim() >= 3 ? scores.size(scores.dim() - 3) : 1;
  check(sink->is_cuda() && sink->get_device_index() == scores.get_device_index(),
        "sink must be on the device of scores");
  check(count == 1 || (count == heads && sink->dim() == 1),
        "sink must hold one logit per head, or one");
  logit.data = sink->data_ptr();
  logit.type = dtype_of(sink->scalar_type(), "sink");
  logit.stride = count == 1 ? 0 : sink->stride(0);
  return options;
}

// One end of the ranges of rows, int32, broadcast to the sizes of `scores` without their last.
inline RowNumbers row_numbers(const Tensor& tensor, const Tensor& scores, const char* argument) {
  check(tensor.scalar_type() == ScalarType::Int, argument, " must be int32");
  const Strided rows = strided(torch::stable::unsqueeze(tensor, -1), scores, argument);
  return {static_cast<const int*>(rows.data), rows.batch_stride, rows.head_stride,
          rows.query_stride};
}

inline VisibleRanges visible_of(const std::optional<Tensor>& first,
                                const std::optional<Tensor>& end, const Tensor& scores) {
  VisibleRanges visible;
  if (first) visible.first = row_numbers(*first, scores, "first");
  if (end) visible.end = row_numbers(*end, scores, "end");
  return visible;
}

inline Dropout dropout_of(double probability, const std::optional<Tensor>& seed,
                          const Tensor& scores) {
  check(probability >= 0 && probability <= 1, "dropout must be from 0 to 1");
  check(seed.has_value() && seed->is_cuda() &&
            seed->get_device_index() == scores.get_device_index() &&
            seed->scalar_type() == ScalarType::Long && seed->numel() == 1,
        "seed must be an int64 tensor of one element on the device of scores");
  return {static_cast<const int64_t*>(seed->data_ptr()), probability};
}

inline Window window_of(bool causal, int64_t left, int64_t right) {
  return {left, causal ? 0 : right};
}

}  // namespace megasoftmax
