// The CUDA kernels' part of the module, for every module that holds them.
#pragma once

#include "bindings_rows.h"
#include "cuda/kernels.h"

namespace dspark {

inline void bind_cuda(pybind11::module_& m) {
  namespace py = pybind11;
  using namespace cuda;
  using release = py::call_guard<py::gil_scoped_release>;

  m.def("cuda_scratch_bytes", &scratch_bytes, py::arg("draft"), py::arg("target").none(true),
        py::arg("device"), release());
  m.def(
      "cuda_log_softmax",
      [](const Rows& logits, const Rows& order, uintptr_t ids, uintptr_t active,
         uintptr_t statistics, uintptr_t log_prob, uintptr_t scratch, int device,
         uintptr_t stream) {
        log_softmax({&logits, &order, pointer<const int64_t>(ids), pointer<const uint8_t>(active),
                     pointer<float>(statistics), pointer<float>(log_prob), pointer<void>(scratch)},
                    device, pointer<void>(stream));
      },
      py::arg("logits"), py::arg("order"), py::arg("ids"), py::arg("active"), py::arg("statistics"),
      py::arg("log_prob"), py::arg("scratch"), py::arg("device"), py::arg("stream"), release());
  m.def(
      "cuda_l1_distance",
      [](const Rows& draft, const Rows& target, uintptr_t active, uintptr_t draft_statistics,
         uintptr_t target_statistics, uintptr_t l1, uintptr_t sides, uintptr_t scratch, int device,
         uintptr_t stream) {
        l1_distance(
            {&draft, &target, pointer<const uint8_t>(active),
             pointer<const float>(draft_statistics), pointer<const float>(target_statistics),
             pointer<float>(l1), pointer<float>(sides), pointer<void>(scratch)},
            device, pointer<void>(stream));
      },
      py::arg("draft"), py::arg("target"), py::arg("active"), py::arg("draft_statistics"),
      py::arg("target_statistics"), py::arg("l1"), py::arg("sides"), py::arg("scratch"),
      py::arg("device"), py::arg("stream"), release());
  m.def(
      "cuda_gradient",
      [](const Rows& draft, const Rows* target, uintptr_t ids, uintptr_t active,
         uintptr_t draft_statistics, uintptr_t target_statistics, uintptr_t sides,
         uintptr_t ce_coefficient, uintptr_t l1_coefficient, const Rows& out, int device,
         uintptr_t stream) {
        gradient({&draft, target, pointer<const int64_t>(ids), pointer<const uint8_t>(active),
                  pointer<const float>(draft_statistics), pointer<const float>(target_statistics),
                  pointer<const float>(sides), pointer<const float>(ce_coefficient),
                  pointer<const float>(l1_coefficient), &out},
                 device, pointer<void>(stream));
      },
      py::arg("draft"), py::arg("target").none(true), py::arg("ids"), py::arg("active"),
      py::arg("draft_statistics"), py::arg("target_statistics"), py::arg("sides"),
      py::arg("ce_coefficient"), py::arg("l1_coefficient"), py::arg("gradient"), py::arg("device"),
      py::arg("stream"), release());
  m.def(
      "cuda_weighted",
      [](const Rows& draft, const Rows* target, uintptr_t ids, uintptr_t active,
         uintptr_t ce_coefficient, uintptr_t l1_coefficient, uintptr_t ce, uintptr_t l1,
         uintptr_t draft_statistics, uintptr_t target_statistics, uintptr_t sides,
         const Rows* gradient, uintptr_t scratch, int device, uintptr_t stream) {
        weighted({&draft, target, pointer<const int64_t>(ids), pointer<const uint8_t>(active),
                  pointer<const float>(ce_coefficient), pointer<const float>(l1_coefficient),
                  pointer<float>(ce), pointer<float>(l1), pointer<float>(draft_statistics),
                  pointer<float>(target_statistics), pointer<float>(sides), gradient,
                  pointer<void>(scratch)},
                 device, pointer<void>(stream));
      },
      py::arg("draft"), py::arg("target").none(true), py::arg("ids"), py::arg("active"),
      py::arg("ce_coefficient"), py::arg("l1_coefficient"), py::arg("ce"), py::arg("l1"),
      py::arg("draft_statistics"), py::arg("target_statistics"), py::arg("sides"),
      py::arg("gradient").none(true), py::arg("scratch"), py::arg("device"), py::arg("stream"),
      release());
  m.def(
      "cuda_scale",
      [](uintptr_t source, uintptr_t destination, DType dtype, int64_t count, uintptr_t factor,
         int device, uintptr_t stream) {
        scale({pointer<const void>(source), pointer<void>(destination), dtype, count,
               pointer<const float>(factor)},
              device, pointer<void>(stream));
      },
      py::arg("source"), py::arg("destination"), py::arg("dtype"), py::arg("count"),
      py::arg("factor"), py::arg("device"), py::arg("stream"), release());
  m.def(
      "cuda_ordered_sum",
      [](uintptr_t values, uintptr_t sums, DType dtype, int64_t rows, int64_t columns, int device,
         uintptr_t stream) {
        ordered_sum({pointer<const void>(values), pointer<void>(sums), dtype, rows, columns},
                    device, pointer<void>(stream));
      },
      py::arg("values"), py::arg("sums"), py::arg("dtype"), py::arg("rows"), py::arg("columns"),
      py::arg("device"), py::arg("stream"), release());
  m.def(
      "cuda_resident_plan",
      [](const Rows& draft, const Rows* target, const Rows* gradient, int device) {
        const ResidentPlan plan = weighted_plan(draft, target, gradient, device);
        return std::make_tuple(plan.cluster, plan.units, plan.shared_bytes);
      },
      py::arg("draft"), py::arg("target").none(true), py::arg("gradient").none(true),
      py::arg("device"));
}

}  // namespace dspark
