#include "operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

#include "arguments.h"

namespace megasoftmax::host {
namespace {

namespace py = pybind11;

std::vector<c10::OperatorHandle> operators;
PyObject* backward_in_python = nullptr;

py::object to_python(const c10::IValue& value, bool is_type) {
  if (is_type) {
    auto* type = torch::getTHPDtype(static_cast<at::ScalarType>(value.toInt()));
    return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
  }
  if (value.isTensor())
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  TORCH_INTERNAL_ASSERT(value.isNone());
  return py::none();
}

}  // namespace

void bind(const std::string& name_space, PyObject* backward) {
  operators.clear();
  for (const auto& [name, overload] : kNames)
    operators.push_back(c10::Dispatcher::singleton().findSchemaOrThrow(
        (name_space + "::" + name).c_str(), overload));
  Py_INCREF(backward);
  Py_XSETREF(backward_in_python, backward);
}

Stack run(Operator which, Stack arguments) {
  const at::AutoDispatchBelowAutograd guard;
  operators[which].callBoxed(&arguments);
  return arguments;
}

Stack run_backward(Operator which, Stack arguments, int type_at) {
  if (!c10::GradMode::is_enabled() && !is_transformed() && is_plain(arguments[0].toTensor()))
    return run(which, std::move(arguments));
  const py::gil_scoped_acquire gil;
  py::tuple all(1 + arguments.size());
  all[0] = py::str(kNames[which].name);
  for (size_t i = 0; i < arguments.size(); ++i)
    all[1 + i] = to_python(arguments[i], static_cast<int>(i) == type_at);
  const py::object result =
      py::reinterpret_steal<py::object>(PyObject_Call(backward_in_python, all.ptr(), nullptr));
  if (!result) throw py::error_already_set();
  Stack found;
  for (const py::handle each : py::tuple(result))
    found.emplace_back(THPVariable_Unpack(each.ptr()));
  return found;
}

}  // namespace megasoftmax::host
