#pragma once
// Calls of public functions, in the order of arguments that megasoftmax/functions gives.

#include <Python.h>

namespace megasoftmax::host {

// softmax(scores, scale, softcap, mask, bias, causal, window, visible, sink, dropout, seed, dtype,
// return_lse, dim, fused); None where Python must take the call.
PyObject* softmax(PyObject* const* arguments);
inline constexpr int kSoftmaxArguments = 15;

// softmax_of_module(scores, mask, (scale, causal, window, dtype)): softmax of scores of 4
// dimensions; None also under autocast.
PyObject* softmax_of_module(PyObject* const* arguments);
inline constexpr int kModuleArguments = 3;

// attention(query, key, value, bias, mask, scale, softcap, causal, window, visible, sink, dropout,
// seed, return_lse, fused).
PyObject* attention(PyObject* const* arguments);
inline constexpr int kAttentionArguments = 15;

// Attention with a contiguous output [batch, queries, heads, dim], as layers go on with it.
PyObject* attention_transposed(PyObject* const* arguments);

// Whether attention of the same arguments would be served.
PyObject* serves_attention(PyObject* const* arguments);

// softmax_topk(logits, k, scale, softcap, mask, bias, score, selection_bias, top_k, top_p, min_p,
// renormalize, dtype, return_lse, group, fused).
PyObject* softmax_topk(PyObject* const* arguments);
inline constexpr int kTopkArguments = 16;

// sample(logits, k, scale, mask, top_k, top_p, min_p, seed, return_probabilities, fused); a seed is
// given.
PyObject* sample(PyObject* const* arguments);
inline constexpr int kSampleArguments = 10;

}  // namespace megasoftmax::host
