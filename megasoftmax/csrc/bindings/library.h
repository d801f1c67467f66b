#pragma once
// What each file adds to the library of operators.

#include <torch/csrc/stable/library.h>

namespace megasoftmax {

using Library = torch::stable::detail::StableLibrary;

void register_attention(Library& library);
void register_columns(Library& library);
void register_softmax(Library& library);
void register_topk(Library& library);

}  // namespace megasoftmax
