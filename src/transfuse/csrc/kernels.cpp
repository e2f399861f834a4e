#include "kernels.h"

namespace transfuse {

const KernelEntry kernels[] = {
    {"linear", linear},
    {"norm", norm},
    {"rotary_cache", rotary_cache},
    {"paged_attention", paged_attention},
    {"gather_rows", gather_rows},
    {"elementwise", elementwise},
    {"sum_products", sum_products},
    {"argmax", argmax},
    {"draw", draw},
    {"ranked_logprobs", ranked_logprobs},
};
const int num_kernels = sizeof kernels / sizeof kernels[0];

}  // namespace transfuse
