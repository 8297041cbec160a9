// A row-local objective between a row's statistics and its gradient. See row_forward_gradient in
// fastrl/backend/contract.py.
#pragma once

#include <cstdint>

#include "fastrl_formulas.h"
#include "rows.h"

namespace fastrl {

inline float or_else(const float* values, int64_t row, float otherwise) {
  return values == nullptr ? otherwise : values[row];
}

// Mirrors LossArguments of fastrl/backend/cpp/objective.py, field by field.
struct LossArguments {
  double gate_parameters[4], rollout_parameters[4], max_log_ratio, entropy_threshold;
  const float *advantages, *policy_weights;
  const float *old, *ref, *rollout, *kl_weights, *entropy_weights;  // or null
  float *logprobs, *entropy, *terms;
  void* out;           // the gradient; or null: in place of the logits
  int64_t out_stride;  // from a row of it to the next, in elements
  int32_t gate, kl;
  int32_t element;  // of out, unless that is null: 0 float32, 1 bfloat16, 2 float16

  using Terms = formulas::Numbers<formulas::TOKEN_TERMS>;
  static constexpr int TERMS = formulas::TOKEN_TERMS - 2;  // the last two are c and h

  Terms run(int64_t row, const RowStatistics& found) const {
    const float row_old = or_else(old, row, found.logprob);
    return formulas::token_terms(
        formulas::GATE_VALUE[gate], formulas::GATE_WEIGHT[gate], formulas::GATE_SIDE[gate],
        formulas::GATE_BASELINE[gate], formulas::KL_VALUE[kl], formulas::KL_GRADIENT[kl],
        found.logprob, found.entropy, row_old, or_else(ref, row, found.logprob), or_else(rollout, row, row_old),
        advantages[row], policy_weights[row], or_else(kl_weights, row, 0.0f), or_else(entropy_weights, row, 0.0f),
        entropy_threshold, gate_parameters[0], gate_parameters[1], gate_parameters[2], gate_parameters[3],
        rollout_parameters[0], rollout_parameters[1], rollout_parameters[2], rollout_parameters[3], max_log_ratio);
  }
  void write(int64_t row, int64_t rows, const RowStatistics& found, const Terms& values) const {
    logprobs[row] = found.logprob;
    entropy[row] = found.entropy;
    for (int i = 0; i < TERMS; ++i) terms[i * rows + row] = float(values[i]);
  }
};

}  // namespace fastrl
