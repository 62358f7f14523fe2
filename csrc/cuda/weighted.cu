// weighted: the objective's rows at one visit - ce, l1, and the gradient of the sum of
// ce_coefficient * ce + l1_coefficient * l1 - by the row-resident kernel where the rows qualify
// and the device holds its clusters, else by the three portable ops in turn.
#include <algorithm>

#include "columns.h"
#include "portable.h"
#include "statistics.h"
#ifdef DSPARK_HAVE_RESIDENT
#include "resident.h"
#endif

namespace dspark::cuda {
namespace {

void weighted_by_groups(const WeightedArgs& args, Stream stream) {
  const Rows* target = args.target;
  for_each_group(*args.draft, target, [&](int64_t first, int64_t count) {
    statistics_of_group({args.draft, args.draft, first, count, args.ids, args.active,
                         args.draft_statistics, 1.f, args.ce, args.scratch},
                        stream);
    if (target != nullptr) {
      statistics_of_group({target, args.draft, first, count, nullptr, args.active,
                           args.target_statistics, 1.f, nullptr, args.scratch},
                          stream);
      distance_of_group({args.draft, target, args.active, args.draft_statistics,
                         args.target_statistics, args.l1, args.sides, args.scratch},
                        first, count, stream);
    }
    if (args.gradient != nullptr) {
      gradient_of_group(
          {args.draft, target, args.ids, args.active, args.draft_statistics, args.target_statistics,
           args.sides, args.ce_coefficient, args.l1_coefficient, args.gradient},
          first, count, stream);
    }
  });
}

}  // namespace

void weighted(const WeightedArgs& args, int device, void* cuda_stream) {
  const DeviceGuard guard(device);
  const auto stream = static_cast<Stream>(cuda_stream);
  if (args.draft->count() == 0) return;
#ifdef DSPARK_HAVE_RESIDENT
  const Device current = current_device();
  const ResidentPlan plan = resident_plan(*args.draft, args.target, args.gradient, current);
  if (plan.cluster > 0 && weighted_resident(args, plan, current, stream)) return;
#endif
  weighted_by_groups(args, stream);
}

ResidentPlan weighted_plan(const Rows& draft, const Rows* target, const Rows* gradient,
                           int device) {
  const DeviceGuard guard(device);
#ifdef DSPARK_HAVE_RESIDENT
  return resident_plan(draft, target, gradient, current_device());
#else
  return {};
#endif
}

int64_t scratch_bytes(const Rows& draft, const Rows* target, int device) {
  const DeviceGuard guard(device);
  const int64_t parts = group_rows(draft, target) * split_count(draft.columns()) *
                        static_cast<int64_t>(std::max(sizeof(Statistics), sizeof(Distance)));
#ifdef DSPARK_HAVE_RESIDENT
  return std::max(parts, resident_scratch_bytes(draft.count()));
#else
  return parts;
#endif
}

}  // namespace dspark::cuda
