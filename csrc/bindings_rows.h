// What every compiled module takes logits as. Local to the module, so that one with the CUDA
// kernels on a host (tests/emulation) can be loaded beside the package's own.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "rows.h"

namespace dspark {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline void bind_rows(pybind11::module_& m) {
  namespace py = pybind11;
  py::enum_<DType>(m, "DType", py::module_local())
      .value("float32", DType::kFloat32)
      .value("bfloat16", DType::kBFloat16)
      .value("float16", DType::kFloat16)
      .value("float64", DType::kFloat64);
  py::class_<Rows>(m, "Rows", py::module_local())
      .def(py::init<uintptr_t, DType, const std::vector<int64_t>&, const std::vector<int64_t>&,
                    int64_t>(),
           py::arg("data"), py::arg("dtype"), py::arg("sizes"), py::arg("strides"),
           py::arg("columns"));
}

}  // namespace dspark
