#pragma once
// How tensor copies find rows: host code.

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "../params.h"

namespace megasoftmax {

// Boxes of box_rows rows and row_bytes bytes of columns, 64 or 128, swizzled, of [batches, heads,
// rows, columns], whose elements have 16 bits or are float32. The driver asks for a context of this
// thread, which the runtime gives it with its first launch or question about a kernel.
inline cudaError_t make_tensor_map(CUtensorMap& map, const Strided& tensor, int64_t batches,
                                   int64_t heads, int64_t rows, int64_t columns, int box_rows,
                                   int row_bytes = 128) {
  // By the driver's address, so that nothing links to the driver.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  // The stride of a single entry is not used, but may not be 0.
  const auto bytes = [&](int64_t stride) {
    return size(stride == 0 ? 16 : stride * size_of(tensor.type));
  };
  const cuuint64_t sizes[] = {size(columns), size(rows), size(heads), size(batches)};
  const cuuint64_t strides[] = {bytes(tensor.query_stride), bytes(tensor.head_stride),
                                bytes(tensor.batch_stride)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(row_bytes / size_of(tensor.type)),
                            static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUtensorMapDataType type = tensor.type == DType::kFloat32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : tensor.type == DType::kFloat16
                                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(&map, type, 4, const_cast<void*>(tensor.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<cudaError_t>(result);  // the runtime's errors have the driver's numbers
}

// Maps for head dimensions up to 32: boxes of 32 columns, of queries and of 128 keys. The bias has
// boxes of 64 queries and 64 keys.
struct NarrowTensorMaps {
  CUtensorMap query, key, value, output_gradient, bias;
};

}  // namespace megasoftmax
