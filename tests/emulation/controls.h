// What Python sets and reads of the emulator.
#pragma once

#include <pybind11/pybind11.h>

namespace dspark::emulation {

void bind_controls(pybind11::module_& m);

}  // namespace dspark::emulation
