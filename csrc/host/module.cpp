// The Python module: see megasoftmax/host.py.

#include <Python.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>

#include "arguments.h"
#include "calls.h"
#include "operators.h"

namespace megasoftmax::host {
namespace {

template <PyObject* (*call)(PyObject* const*), int count>
PyObject* checked(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(given == count, "expected ", count, " arguments, got ", given);
  return call(arguments);
  END_HANDLE_TH_ERRORS
}

// bind(name space, backward, RelativeBias, ShiftedBias, tiniest scale, largest scale): see
// operators.h and Package.
PyObject* bind_to_package(PyObject* const* arguments) {
  const char* const name_space = PyUnicode_AsUTF8(arguments[0]);
  if (name_space == nullptr) return nullptr;
  bind(name_space, arguments[1]);
  set_package(
      {arguments[2], arguments[3], PyFloat_AsDouble(arguments[4]), PyFloat_AsDouble(arguments[5])});
  Py_RETURN_NONE;
}

// admit(device, is_given, has_attention): whether calls there run fused from now on, and whether
// those of attention do.
PyObject* admit_device(PyObject* const* arguments) {
  TORCH_CHECK_TYPE(THPDevice_Check(arguments[0]), "device: expected a torch.device");
  admit(reinterpret_cast<THPDevice*>(arguments[0])->device,
        {arguments[1] == Py_True, arguments[2] == Py_True});
  Py_RETURN_NONE;
}

template <PyObject* (*call)(PyObject* const*), int count>
constexpr PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&checked<call, count>)),
          METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    method<bind_to_package, 6>("bind"),
    method<admit_device, 3>("admit"),
    method<softmax, kSoftmaxArguments>("softmax"),
    method<softmax_of_module, kModuleArguments>("softmax_of_module"),
    method<attention, kAttentionArguments>("attention"),
    method<attention_transposed, kAttentionArguments>("attention_transposed"),
    method<attention_of_windows, kAttentionArguments>("attention_of_windows"),
    method<serves_attention, kAttentionArguments>("serves_attention"),
    method<softmax_topk, kTopkArguments>("softmax_topk"),
    method<sample, kSampleArguments>("sample"),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "megasoftmax_host",
    nullptr,
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace
}  // namespace megasoftmax::host

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_megasoftmax_host() {
  return PyModule_Create(&megasoftmax::host::definition);
}
