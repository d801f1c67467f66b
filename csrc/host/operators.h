#pragma once
// The ops that calls run, bound once to the namespace of the package.

#include <ATen/core/stack.h>
#include <Python.h>

#include <string>

namespace megasoftmax::host {

using torch::jit::Stack;

enum Operator {
  kSoftmaxForward,
  kSoftmaxForwardAlone,
  kSoftmaxBackward,
  kAttentionForward,
  kAttentionBackward,
  kAttentionBackwardPacked,
  kTopkForward,
  kTopkBackward,
  kTopkSample,
  kOperators,
};

struct Name {
  const char *name, *overload = "";
};

// Names of the ops, in the order of `Operator`.
inline constexpr Name kNames[kOperators] = {
    {"softmax_forward"},      {"softmax_forward", "alone"}, {"softmax_backward"},
    {"attention_forward"},    {"attention_backward"},       {"attention_backward_packed"},
    {"softmax_topk_forward"}, {"softmax_topk_backward"},    {"softmax_topk_sample"},
};

// Finds the ops. `backward` is a Python function (name, *arguments of that op), which also computes
// what is differentiated again or runs under transforms.
void bind(const std::string& name_space, PyObject* backward);

// The arguments of an op; c10::IValue() is None.
template <class... Arguments>
Stack stack_of(Arguments&&... arguments) {
  Stack stack;
  stack.reserve(sizeof...(arguments) + 2);  // of the results, more than one
  (stack.emplace_back(std::forward<Arguments>(arguments)), ...);
  return stack;
}

// The results of an op, below autograd.
Stack run(Operator which, Stack arguments);

// The results of a backward op that autograd calls. `type_at` is where the arguments have a type.
Stack run_backward(Operator which, Stack arguments, int type_at = -1);

}  // namespace megasoftmax::host
