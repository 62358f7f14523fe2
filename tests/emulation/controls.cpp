#include "controls.h"

#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "emulator.h"
#include "runtime.h"

namespace py = pybind11;

namespace dspark::emulation {

void bind_controls(py::module_& m) {
  py::register_local_exception<EmulationError>(m, "EmulationError", PyExc_RuntimeError);

  m.def("allow", &allow, py::arg("address"), py::arg("bytes"), py::arg("writable"),
        py::arg("name"));
  m.def("forget", &forget);
  m.def("set_seed", &set_seed, py::arg("seed"));
  const cuda::Device device = emulation::device();
  m.def("set_device", &set_device, py::arg("architecture") = device.architecture,
        py::arg("multiprocessors") = device.multiprocessors,
        py::arg("shared_bytes") = device.shared_bytes, py::arg("l2_bytes") = device.l2_bytes);
  m.def("set_max_clusters", &set_max_clusters, py::arg("clusters"));
  m.def("counters", [] {
    py::dict result;
    for (const auto& [kernel, counters] : all_counters()) {
      py::dict values;
      values["launches"] = counters.launches;
      values["bytes_read"] = counters.bytes_read;
      values["bytes_written"] = counters.bytes_written;
      values["exponentials"] = counters.exponentials;
      values["barriers"] = counters.barriers;
      values["cluster_barriers"] = counters.cluster_barriers;
      result[py::str(kernel)] = values;
    }
    return result;
  });
  m.def("reset_counters", &reset_counters);
  m.def("sites", [] {
    std::vector<std::tuple<std::string, int, std::string>> result;
    for (const Site& site : sites()) {
      result.emplace_back(site.file, site.line, name_of(site.primitive));
    }
    return result;
  });
  m.def("skip", &skip, py::arg("sites"));
}

}  // namespace dspark::emulation
