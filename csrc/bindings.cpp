// The Python module _C: casts from integers to pointers, and the GIL released around each call.
// dspark_ext/_backend.py is its only caller and checks every argument before it comes here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings_rows.h"
#include "cpu/kernels.h"
#ifdef DSPARK_HAVE_CUDA
#include "bindings_cuda.h"
#endif

namespace py = pybind11;
using namespace dspark;

namespace {

void bind_cpu(py::module_& m) {
  using namespace cpu;
  using release = py::call_guard<py::gil_scoped_release>;

  m.def("cpu_level", [] { return kernels().name; });
  m.def("cpu_available_levels", [] { return available_levels(); });
  m.def(
      "cpu_chunk_scratch_bytes",
      [](int64_t columns) { return kernels().chunk_scratch_bytes(columns); }, py::arg("columns"));
  m.def(
      "cpu_weighted_scratch_bytes",
      [](int64_t columns, bool wide) { return kernels().weighted_scratch_bytes(columns, wide); },
      py::arg("columns"), py::arg("wide"));
  m.def(
      "cpu_log_softmax",
      [](const Rows& logits, uintptr_t ids, uintptr_t active, uintptr_t statistics,
         uintptr_t log_prob, uintptr_t scratch, int threads) {
        kernels().log_softmax({&logits, pointer<const int64_t>(ids), pointer<const uint8_t>(active),
                               pointer<void>(statistics), pointer<void>(log_prob),
                               pointer<void>(scratch), threads});
      },
      py::arg("logits"), py::arg("ids"), py::arg("active"), py::arg("statistics"),
      py::arg("log_prob"), py::arg("scratch"), py::arg("threads"), release());
  m.def(
      "cpu_l1_distance",
      [](const Rows& draft, const Rows& target, uintptr_t active, uintptr_t draft_statistics,
         uintptr_t target_statistics, uintptr_t l1, uintptr_t sides, uintptr_t scratch,
         int threads) {
        kernels().l1_distance({&draft, &target, pointer<const uint8_t>(active),
                               pointer<const void>(draft_statistics),
                               pointer<const void>(target_statistics), pointer<void>(l1),
                               pointer<void>(sides), pointer<void>(scratch), threads});
      },
      py::arg("draft"), py::arg("target"), py::arg("active"), py::arg("draft_statistics"),
      py::arg("target_statistics"), py::arg("l1"), py::arg("sides"), py::arg("scratch"),
      py::arg("threads"), release());
  m.def(
      "cpu_gradient",
      [](const Rows& draft, const Rows* target, uintptr_t ids, uintptr_t active,
         uintptr_t draft_statistics, uintptr_t target_statistics, uintptr_t sides,
         uintptr_t ce_coefficient, uintptr_t l1_coefficient, const Rows& gradient, int threads) {
        kernels().gradient({&draft, target, pointer<const int64_t>(ids),
                            pointer<const uint8_t>(active), pointer<const void>(draft_statistics),
                            pointer<const void>(target_statistics), pointer<const void>(sides),
                            pointer<const void>(ce_coefficient),
                            pointer<const void>(l1_coefficient), &gradient, threads});
      },
      py::arg("draft"), py::arg("target").none(true), py::arg("ids"), py::arg("active"),
      py::arg("draft_statistics"), py::arg("target_statistics"), py::arg("sides"),
      py::arg("ce_coefficient"), py::arg("l1_coefficient"), py::arg("gradient"), py::arg("threads"),
      release());
  m.def(
      "cpu_weighted",
      [](const Rows& draft, const Rows* target, uintptr_t ids, uintptr_t active,
         uintptr_t ce_coefficient, uintptr_t l1_coefficient, uintptr_t ce, uintptr_t l1,
         uintptr_t draft_statistics, uintptr_t target_statistics, uintptr_t sides,
         const Rows* gradient, uintptr_t scratch, int threads) {
        kernels().weighted({&draft, target, pointer<const int64_t>(ids),
                            pointer<const uint8_t>(active), pointer<const void>(ce_coefficient),
                            pointer<const void>(l1_coefficient), pointer<void>(ce),
                            pointer<void>(l1), pointer<void>(draft_statistics),
                            pointer<void>(target_statistics), pointer<void>(sides), gradient,
                            pointer<void>(scratch), threads});
      },
      py::arg("draft"), py::arg("target").none(true), py::arg("ids"), py::arg("active"),
      py::arg("ce_coefficient"), py::arg("l1_coefficient"), py::arg("ce"), py::arg("l1"),
      py::arg("draft_statistics"), py::arg("target_statistics"), py::arg("sides"),
      py::arg("gradient").none(true), py::arg("scratch"), py::arg("threads"), release());
  m.def(
      "cpu_scale",
      [](uintptr_t source, uintptr_t destination, DType dtype, int64_t count, uintptr_t factor,
         DType factor_dtype, int threads) {
        kernels().scale({pointer<const void>(source), pointer<void>(destination), dtype, count,
                         pointer<const void>(factor), factor_dtype, threads});
      },
      py::arg("source"), py::arg("destination"), py::arg("dtype"), py::arg("count"),
      py::arg("factor"), py::arg("factor_dtype"), py::arg("threads"), release());
  m.def(
      "cpu_ordered_sum",
      [](uintptr_t values, uintptr_t sums, DType dtype, int64_t rows, int64_t columns) {
        ordered_sum({pointer<const void>(values), pointer<void>(sums), dtype, rows, columns});
      },
      py::arg("values"), py::arg("sums"), py::arg("dtype"), py::arg("rows"), py::arg("columns"),
      release());
  m.def(
      "cpu_exponential",
      [](uintptr_t x, uintptr_t y, int64_t count) {
        kernels().exponential(pointer<const float>(x), pointer<float>(y), count);
      },
      py::arg("x"), py::arg("y"), py::arg("count"), release());
  m.def(
      "cpu_advise_huge_pages",
      [](uintptr_t data, int64_t bytes) { advise_huge_pages(pointer<void>(data), bytes); },
      py::arg("data"), py::arg("bytes"), release());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of dspark_ext; called by dspark_ext._backend alone.";

  bind_rows(m);
  bind_cpu(m);
#ifdef DSPARK_HAVE_CUDA
  bind_cuda(m);
  m.attr("cuda_architectures") = DSPARK_CUDA_ARCHITECTURES;
  m.attr("cuda_toolkit") = DSPARK_CUDA_TOOLKIT;
#else
  m.attr("cuda_architectures") = py::none();
  m.attr("cuda_toolkit") = py::none();
#endif
  m.attr("compiler") = DSPARK_COMPILER;
#if defined(_OPENMP)
  m.attr("openmp") = true;
#else
  m.attr("openmp") = false;
#endif
}
