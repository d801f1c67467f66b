#pragma once
// How tensor copies find rows: host code.

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "rows_anywhere.h"

namespace megasoftmax {

// The driver's function, by its address, so that nothing links to the driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
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
  return encode;
}

// Boxes of box_rows rows and row_bytes bytes of columns, 64 or 128, swizzled, of [batches, heads,
// rows, columns], whose elements have 16 bits or are float32. The driver asks for a context of this
// thread, which the runtime gives it with its first launch or question about a kernel.
inline cudaError_t make_tensor_map(CUtensorMap& map, const Strided& tensor, int64_t batches,
                                   int64_t heads, int64_t rows, int64_t columns, int box_rows,
                                   int row_bytes = 128) {
  const auto encode = tensor_map_encoder();
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

// Boxes of rows that begin anywhere, see RowsAnywhere, and box_keys keys, not swizzled. Dimensions:
// columns in entries of 8 bytes; 1, 2 and 4 rows; 8 rows. Heads differ by their first column.
inline cudaError_t make_map_of_rows_anywhere(CUtensorMap& map, const Strided& tensor,
                                             int64_t batches, int64_t heads, int64_t rows,
                                             int64_t keys, int box_rows, int box_keys) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const RowsAnywhere anywhere(tensor);
  const auto entries = [](int64_t columns) {
    return static_cast<cuuint64_t>(columns / RowsAnywhere::kInMapEntry);
  };
  const int64_t last = (batches - 1) * tensor.batch_stride + (heads - 1) * tensor.head_stride +
                       (keys - 1) / box_keys * box_keys;
  const int box_columns = box_keys + RowsAnywhere::kMoreColumns;
  const cuuint64_t sizes[] = {entries(anywhere.column(last) + box_columns), 2, 2, 2,
                              static_cast<cuuint64_t>(divide_up<int64_t>(rows, 8))};
  cuuint64_t strides[4];
  for (int i = 0; i < 4; ++i) strides[i] = static_cast<cuuint64_t>(anywhere.step(tensor, i));
  const cuuint32_t box[] = {static_cast<cuuint32_t>(entries(box_columns)), 2, 2, 2,
                            static_cast<cuuint32_t>(box_rows / 8)};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  const CUresult result = encode(
      &map, CU_TENSOR_MAP_DATA_TYPE_INT64, 5, reinterpret_cast<void*>(RowsAnywhere::begin(tensor)),
      sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<cudaError_t>(result);
}

// Maps of boxes of 32 or 64 columns, of queries and of 128 keys. The bias has boxes of 64 queries
// and 64 keys.
struct NarrowTensorMaps {
  CUtensorMap query, key, value, output_gradient, bias;
};

}  // namespace megasoftmax
