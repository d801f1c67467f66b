#include "arguments.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "../softmax/limits.h"

namespace megasoftmax::host {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr int kMaxGpus = 64;
std::array<Admission, 1 + kMaxGpus> admissions;
Package bound;

// Where the admission of a device is: the CPU, which only tests admit, then each GPU. -1 for
// others.
int place_of(at::Device device) {
  if (device.is_cpu()) return 0;
  const bool is_counted = device.is_cuda() && device.index() >= 0 && device.index() < kMaxGpus;
  return is_counted ? 1 + device.index() : -1;
}

uint64_t keys_of(DispatchKey backend, DispatchKey autograd, DispatchKey autocast) {
  return (DispatchKeySet(backend) | DispatchKeySet(autograd) | DispatchKeySet(autocast) |
          DispatchKeySet(DispatchKey::ADInplaceOrView))
      .raw_repr();
}

const Tensor* exact_tensor(PyObject* object) {
  return THPVariable_CheckExact(object) ? &THPVariable_Unpack(object) : nullptr;
}

// What kernels of rows read and write.
bool is_of_rows(ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat;
}

}  // namespace

void admit(at::Device device, Admission admission) {
  if (const int place = place_of(device); place >= 0) admissions[place] = admission;
}

Admission admission_of(at::Device device) {
  const int place = place_of(device);
  return place >= 0 ? admissions[place] : Admission{};
}

void set_package(Package package) {
  for (PyObject* each : {package.relative_bias, package.shifted_bias}) Py_XINCREF(each);
  for (PyObject* each : {bound.relative_bias, bound.shifted_bias}) Py_XDECREF(each);
  bound = package;
}

const Package& package() { return bound; }

int64_t trailing_of_table(PyObject* bias) {
  const auto* const kind = reinterpret_cast<PyObject*>(Py_TYPE(bias));
  return kind == bound.relative_bias ? 2 : kind == bound.shifted_bias ? 3 : 0;
}

bool is_transformed() {
  const auto& included = c10::impl::tls_local_dispatch_key_set().included_;
  return !c10::default_included_set.has_all(included) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr ||
         at::impl::torch_function_mode_enabled();
}

bool is_plain(const Tensor& tensor) {
  static const uint64_t of_gpu =
      keys_of(DispatchKey::CUDA, DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA);
  static const uint64_t of_cpu =
      keys_of(DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU);
  const uint64_t keys = tensor.key_set().raw_repr();
  return (keys & ~of_gpu) == 0 || (keys & ~of_cpu) == 0;
}

bool broadcasts(at::IntArrayRef shape, at::IntArrayRef target) {
  if (shape.size() > target.size()) return false;
  const size_t missing = target.size() - shape.size();
  for (size_t i = 0; i < shape.size(); ++i)
    if (shape[i] != 1 && shape[i] != target[missing + i]) return false;
  return true;
}

Tensor Reader::first_tensor(PyObject* object) {
  const Tensor* const tensor = exact_tensor(object);
  decline_unless(tensor != nullptr && is_plain(*tensor) && tensor->numel() > 0);
  if (has_declined()) return {};
  device_ = tensor->device();
  return *tensor;
}

std::optional<Tensor> Reader::tensor(PyObject* object) {
  if (object == Py_None) return {};
  const Tensor* const tensor = exact_tensor(object);
  decline_unless(tensor != nullptr && is_plain(*tensor) && tensor->device() == device_);
  if (has_declined()) return {};
  return *tensor;
}

std::optional<Tensor> Reader::floating(PyObject* object) {
  std::optional<Tensor> found = tensor(object);
  if (found)
    decline_unless(is_of_rows(found->scalar_type()) || found->scalar_type() == at::kDouble);
  return found;
}

std::optional<Tensor> Reader::mask(PyObject* object, at::IntArrayRef target, bool may_repeat) {
  std::optional<Tensor> found = tensor(object);
  if (!found) return found;
  at::IntArrayRef sizes = found->sizes();
  if (may_repeat && sizes.size() == target.size() && sizes[0] > 0 && target[0] % sizes[0] == 0)
    sizes = sizes.slice(1);
  decline_unless(found->scalar_type() == at::kBool && broadcasts(sizes, target));
  return found;
}

std::optional<Tensor> Reader::table(PyObject* relative_bias) {
  PyObject* const found = PyObject_GetAttrString(relative_bias, "table");
  if (found == nullptr) throw python_error();
  std::optional<Tensor> table = floating(found);
  Py_DECREF(found);
  decline_unless(table.has_value());
  return table;
}

std::optional<Tensor> Reader::bias_of_rows(PyObject* object, const Tensor& scores) {
  std::optional<Tensor> found = floating(object);
  if (found) decline_unless(found->dim() > 0 && broadcasts(found->sizes(), scores.sizes()));
  return found;
}

int64_t Reader::count(PyObject* object) {
  int overflow = 0;
  const int64_t value =
      PyLong_CheckExact(object) ? PyLong_AsLongLongAndOverflow(object, &overflow) : -1;
  decline_unless(overflow == 0 && value >= 0);
  return value;
}

double Reader::number(PyObject* object) {
  if (PyFloat_CheckExact(object)) return PyFloat_AS_DOUBLE(object);
  double value = PyLong_CheckExact(object) ? PyLong_AsDouble(object) : NAN;
  if (value == -1 && PyErr_Occurred()) {  // too large
    PyErr_Clear();
    value = NAN;
  }
  decline_unless(!std::isnan(value));
  return value;
}

RowNumber Reader::of_rows(PyObject* object, at::IntArrayRef rows, double none, bool is_integer) {
  if (object == Py_None) return {none, {}};
  if (!THPVariable_Check(object)) {
    if (is_integer) return {static_cast<double>(count(object)), {}};
    return {number(object), {}};
  }
  std::optional<Tensor> found = tensor(object);
  // Python takes numbers from tensors without dimensions.
  if (found)
    decline_unless(found->scalar_type() == (is_integer ? at::kInt : at::kFloat) &&
                   !found->requires_grad() && found->dim() > 0 && broadcasts(found->sizes(), rows));
  return {none, found};
}

double Reader::softcap(PyObject* object, double scale, double most) {
  const double value = object == Py_None ? 0 : number(object), inner = std::abs(scale) / value;
  decline_unless(value == 0 || (value >= bound.tiniest_scale && value <= most &&
                                inner >= bound.tiniest_scale && inner <= bound.largest_scale / 4));
  return value;
}

bool Reader::flag(PyObject* object) {
  decline_unless(object == Py_True || object == Py_False);
  return object == Py_True;
}

void Reader::may_be_fused(PyObject* object) {
  decline_unless(object == Py_None || object == Py_True);
}

WindowLimits Reader::window(PyObject* object) {
  if (object == Py_None) return {};
  decline_unless(PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 2);
  if (has_declined()) return {};
  const auto limit = [this](PyObject* one) -> int64_t {
    int overflow = 0;
    const int64_t value =
        PyLong_CheckExact(one) ? PyLong_AsLongLongAndOverflow(one, &overflow) : -2;
    decline_unless(overflow == 0 && value >= -1 && value < INT32_MAX);
    return value;
  };
  return {limit(PyTuple_GET_ITEM(object, 0)), limit(PyTuple_GET_ITEM(object, 1)), true};
}

Bounds Reader::visible(PyObject* object, at::IntArrayRef target) {
  if (object == Py_None) return {};
  decline_unless(PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 2);
  if (has_declined()) return {};
  const auto bound = [&](PyObject* one) {
    std::optional<Tensor> found = tensor(one);
    if (found)
      decline_unless(found->scalar_type() == at::kInt && broadcasts(found->sizes(), target));
    return found;
  };
  return {bound(PyTuple_GET_ITEM(object, 0)), bound(PyTuple_GET_ITEM(object, 1))};
}

Sink Reader::sink(PyObject* object, int64_t heads) {
  if (object == Py_None) return {};
  if (!THPVariable_Check(object)) {
    const double value = number(object);
    decline_unless(std::isinf(value) || std::abs(value) <= FLT_MAX);
    return {{}, value};
  }
  std::optional<Tensor> found = floating(object);
  if (found) {
    const bool has_heads = found->dim() == 1 && found->size(0) == heads;
    decline_unless(found->scalar_type() != at::kDouble && (found->numel() == 1 || has_heads));
  }
  return {found, {}};
}

ScalarType Reader::type_of_probabilities(PyObject* object, const Tensor& scores) {
  decline_unless(object == Py_None || THPDtype_Check(object));
  if (has_declined()) return at::kFloat;
  ScalarType type = scores.scalar_type();
  if (object != Py_None)
    type = reinterpret_cast<THPDtype*>(object)->scalar_type;
  else if (scores.is_cuda() && autocast_type(scores.device()))
    type = at::kFloat;
  const ScalarType of_scores = scores.scalar_type();
  decline_unless(is_of_rows(type) &&
                 (type == of_scores || type == at::kFloat || of_scores == at::kFloat));
  return type;
}

void Reader::check_rows(const Tensor& scores, double scale, bool is_limited) {
  const int64_t rank = has_declined() ? 0 : scores.dim();
  decline_unless(rank >= (is_limited ? 2 : 1) && rank <= 4);  // more may not merge into 4
  if (has_declined()) return;
  const int64_t columns = scores.size(-1), queries = rank > 1 ? scores.size(-2) : 1;
  int64_t batches = 1;
  for (int64_t i = 0; i < rank - 2; ++i) batches *= scores.size(i);
  decline_unless(is_of_rows(scores.scalar_type()) && std::abs(scale) >= bound.tiniest_scale &&
                 std::abs(scale) <= bound.largest_scale &&
                 std::max(batches, queries) <= kMaxIndex &&
                 columns + (is_limited ? columns + queries : 0) <= kMaxIndex);
}

PyObject* to_python(at::ArrayRef<Tensor> tensors) {
  if (tensors.size() == 1) return THPVariable_Wrap(tensors[0]);
  PyObject* const tuple = PyTuple_New(static_cast<Py_ssize_t>(tensors.size()));
  if (tuple == nullptr) return nullptr;
  for (size_t i = 0; i < tensors.size(); ++i)
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), THPVariable_Wrap(tensors[i]));
  return tuple;
}

std::optional<ScalarType> autocast_type(at::Device device) {
  if (!at::autocast::is_autocast_enabled(device.type())) return {};
  return at::autocast::get_autocast_dtype(device.type());
}

Tensor cast_for_kernel(const Tensor& bias, ScalarType type) {
  return bias.scalar_type() == type ? bias : bias.to(at::kFloat);
}

Tensor with_rank(Tensor tensor, int64_t rank) {
  while (tensor.dim() < rank) tensor = tensor.unsqueeze(0);
  return tensor;
}

}  // namespace megasoftmax::host
