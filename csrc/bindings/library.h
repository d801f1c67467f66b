#pragma once
// What each file adds to the library of operators.

#include <torch/csrc/stable/library.h>

#include <string>

namespace megasoftmax {

using Library = torch::stable::detail::StableLibrary;

// Implements an op, and the one of the same arguments without rules of autograd
// (define_differentiable of megasoftmax/ops/registration.py).
template <class Function>
void implement(Library& library, const char* name, Function* function) {
  library.impl(name, function);
  library.impl((std::string(name) + "_below_autograd").c_str(), function);
}

void register_attention(Library& library);
void register_columns(Library& library);
void register_softmax(Library& library);
void register_topk(Library& library);

}  // namespace megasoftmax
