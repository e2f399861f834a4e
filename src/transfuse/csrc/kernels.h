// The kernels of this build, by name.
#pragma once

#include "op.h"

namespace transfuse {

void linear(const Op& op, Team& team);
void norm(const Op& op, Team& team);
void rotary_cache(const Op& op, Team& team);
void paged_attention(const Op& op, Team& team);
void gather_rows(const Op& op, Team& team);
void elementwise(const Op& op, Team& team);
void sum_products(const Op& op, Team& team);
void argmax(const Op& op, Team& team);
void draw(const Op& op, Team& team);
void ranked_logprobs(const Op& op, Team& team);

extern const KernelEntry kernels[];
extern const int num_kernels;

}  // namespace transfuse
