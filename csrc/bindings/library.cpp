// Registers the CUDA implementations under the namespace that Python names, and not when the
// library is loaded: each copy of the package has operators of its own, and two copies may share a
// library.

#include "library.h"

// For ctypes. What is registered stays until the process ends.
extern "C" __attribute__((visibility("default"))) void megasoftmax_register(const char* name) {
  using megasoftmax::Library;
  auto* library = new Library(Library::Kind::IMPL, name, "CUDA", __FILE__, __LINE__);
  megasoftmax::register_attention(*library);
  megasoftmax::register_columns(*library);
  megasoftmax::register_softmax(*library);
  megasoftmax::register_topk(*library);
}
