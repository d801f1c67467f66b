#pragma once
// Reads the arguments of a call from Python, and takes only what certainly runs fused.
//
// A `Reader` declines what it does not know or what is wrong, without a message. Python then takes
// the call: it runs it by another way, or words the error. So each rule here may be stricter than
// that of megasoftmax/arguments.py and megasoftmax/dispatch.py, and never looser.

#include <ATen/core/Tensor.h>
#include <Python.h>

#include <optional>

namespace megasoftmax::host {

using at::ScalarType;
using at::Tensor;

// Whether calls on a device run fused, and whether those of attention do.
struct Admission {
  bool is_given = false, has_attention = false;
};
void admit(at::Device device, Admission admission);
Admission admission_of(at::Device device);

// Whether calls of this thread are traced or transformed: by a dispatch or function mode,
// torch.func, torch.jit.trace or forward-mode differentiation.
bool is_transformed();

// A strided tensor of no subclass and no transform.
bool is_plain(const Tensor& tensor);

// Whether a shape broadcasts to `target`.
bool broadcasts(at::IntArrayRef shape, at::IntArrayRef target);

struct WindowLimits {
  int64_t left = -1, right = -1;
  bool is_given = false;
};

struct Bounds {
  std::optional<Tensor> first, end;
};

// A number of all rows, or one for each in a tensor.
struct RowNumber {
  double value = 0;
  std::optional<Tensor> tensor;
};

struct Sink {
  std::optional<Tensor> tensor;
  std::optional<double> value;
};

// What Python says of calls, once.
struct Package {
  PyObject *relative_bias = nullptr, *shifted_bias = nullptr;  // the classes
  // Magnitudes of the scales that kernels take.
  double tiniest_scale = 0, largest_scale = 0;
};

void set_package(Package package);
const Package& package();

// The dimensions from the heads on of the table of a RelativeBias or ShiftedBias. 0: it is neither.
int64_t trailing_of_table(PyObject* bias);

class Reader {
 public:
  bool has_declined() const { return has_declined_; }
  void decline_unless(bool is_served) { has_declined_ |= !is_served; }

  // The first tensor of a call, which fixes the device; it has elements.
  Tensor first_tensor(PyObject* object);
  // A tensor on that device. None: empty.
  std::optional<Tensor> tensor(PyObject* object);
  // One of the floating types that kernels read, or that becomes float32.
  std::optional<Tensor> floating(PyObject* object);
  // Bool, which broadcasts to `target`. If it `may_repeat`, its first dimension need only divide.
  std::optional<Tensor> mask(PyObject* object, at::IntArrayRef target, bool may_repeat = false);
  // The table of a RelativeBias or ShiftedBias.
  std::optional<Tensor> table(PyObject* relative_bias);
  // A bias of rows: it broadcasts to the scores.
  std::optional<Tensor> bias_of_rows(PyObject* object, const Tensor& scores);
  double number(PyObject* object);
  // A number, or what broadcasts to the rows in float32, or int32 if they are integers. `none`: the
  // number for None.
  RowNumber of_rows(PyObject* object, at::IntArrayRef rows, double none, bool is_integer);
  // None or 0: 0. Else a number up to `most` whose quotient of the scale kernels take too.
  double softcap(PyObject* object, double scale, double most);
  // An integer from 0 on.
  int64_t count(PyObject* object);
  bool flag(PyObject* object);
  // `fused`: None or True.
  void may_be_fused(PyObject* object);
  // Python takes limits beyond int32, which limit nothing.
  WindowLimits window(PyObject* object);
  // int32, which broadcast to `target`.
  Bounds visible(PyObject* object, at::IntArrayRef target);
  // A number that is infinite or a float32, one element, or one for each head.
  Sink sink(PyObject* object, int64_t heads);
  // The type asked for, or else that of torch.softmax.
  ScalarType type_of_probabilities(PyObject* object, const Tensor& scores);
  // Whether kernels of rows take the scores; `is_limited` by causality or a window.
  void check_rows(const Tensor& scores, double scale, bool is_limited);

 private:
  std::optional<at::Device> device_;
  bool has_declined_ = false;
};

// A new reference to a tensor, or to a tuple of several.
PyObject* to_python(at::ArrayRef<Tensor> tensors);

// The type that autocast gives tensors on a device; none where it is off.
std::optional<ScalarType> autocast_type(at::Device device);

// In the type of the scores, or float32, as kernels read it; a gradient passes.
Tensor cast_for_kernel(const Tensor& bias, ScalarType type);

// A view with leading dimensions of size 1.
Tensor with_rank(Tensor tensor, int64_t rank);

}  // namespace megasoftmax::host
