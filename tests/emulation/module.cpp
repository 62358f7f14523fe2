// The Python module emulated_cuda: the CUDA part of _C over the emulator, and its controls.
#include <pybind11/pybind11.h>

#include "bindings_cuda.h"
#include "bindings_rows.h"
#include "controls.h"

PYBIND11_MODULE(emulated_cuda, m) {
  dspark::bind_rows(m);
  dspark::bind_cuda(m);
  dspark::emulation::bind_controls(m);
}
