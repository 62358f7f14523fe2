// The path that reads each logit once: a cluster of blocks holds both rows on chip.
#pragma once

#include <runtime.h>

#include "kernels.h"

namespace dspark::cuda {

// The smallest cluster of which two blocks fit on a multiprocessor. Rows qualify that have both
// operands, of one dtype, on 16-byte boundaries throughout; docs/cuda.md states the rule.
ResidentPlan resident_plan(const Rows& draft, const Rows* target, const Rows* gradient,
                           const Device& device);

// Bytes of scratch: the rows' order.
int64_t resident_scratch_bytes(int64_t rows);

// False where the device cannot hold a cluster of the plan; nothing was launched then.
bool weighted_resident(const WeightedArgs& args, const ResidentPlan& plan, const Device& device,
                       Stream stream);

}  // namespace dspark::cuda
