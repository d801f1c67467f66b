#pragma once
// Calls of public functions: tensors, then every field of the record of megasoftmax/options.py in
// its order. None where Python must take the call.

#include <Python.h>

namespace megasoftmax::host {

PyObject* softmax(PyObject* const* arguments);
inline constexpr int kSoftmaxArguments = 15;

// softmax_of_module(scores, mask, (scale, causal, window, dtype)): softmax of scores of 4
// dimensions; None also under autocast.
PyObject* softmax_of_module(PyObject* const* arguments);
inline constexpr int kModuleArguments = 3;

PyObject* attention(PyObject* const* arguments);
inline constexpr int kAttentionArguments = 15;

// Attention with a contiguous output [batch, queries, heads, dim], as layers go on with it. If key
// and value are None, the query is [batch, tokens, 3, heads, dim], query, key and value in one. Its
// gradient has the same shape.
PyObject* attention_transposed(PyObject* const* arguments);

// Likewise, with a mask [windows, 1 or heads, queries, keys] of a batch of images * windows.
PyObject* attention_of_windows(PyObject* const* arguments);

// Whether attention of the same arguments would be served.
PyObject* serves_attention(PyObject* const* arguments);

PyObject* softmax_topk(PyObject* const* arguments);
inline constexpr int kTopkArguments = 16;

// sample(logits, k, scale, mask, top_k, top_p, min_p, seed, return_probabilities, fused), with a
// seed.
PyObject* sample(PyObject* const* arguments);
inline constexpr int kSampleArguments = 10;

}  // namespace megasoftmax::host
