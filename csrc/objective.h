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

// Mirrors LossArguments of fastrl/backend/cpp/library.py, field by field.
struct LossArguments {
  double numbers[formulas::NUMBERS], entropy_threshold;
  const float* inputs[formulas::ENTROPY_THRESHOLD];  // of each row; or null, but for the first two
  float *logprobs, *entropy, *terms;
  void* out;           // the gradient; or null: in place of the logits
  int64_t out_stride;  // from a row of it to the next, in elements
  int32_t gate, kl;
  int32_t element;  // of out, unless that is null: 0 float32, 1 bfloat16, 2 float16

  using Terms = formulas::Results<formulas::TOKEN_TERMS>;
  static constexpr int TERMS = formulas::TOKEN_TERMS - 2;  // the last two are c and h

  Terms run(int64_t row, const RowStatistics& found) const {
    const float old = or_else(inputs[formulas::OLD], row, found.logprob);
    const float absent[] = {0, 0, old, found.logprob, old, 0, 0};
    double x[formulas::INPUTS];
    for (int i = 0; i < formulas::ENTROPY_THRESHOLD; ++i) x[i] = or_else(inputs[i], row, absent[i]);
    x[formulas::ENTROPY_THRESHOLD] = entropy_threshold;
    return formulas::token_terms(
        formulas::GATE_VALUE[gate], formulas::GATE_WEIGHT[gate], formulas::GATE_SIDE[gate],
        formulas::GATE_BASELINE[gate], formulas::KL_VALUE[kl], formulas::KL_GRADIENT[kl],
        found.logprob, found.entropy, x, numbers);
  }
  void write(int64_t row, int64_t rows, const RowStatistics& found, const Terms& values) const {
    logprobs[row] = found.logprob;
    entropy[row] = found.entropy;
    for (int i = 0; i < TERMS; ++i) terms[i * rows + row] = float(values[i]);
  }
};

}  // namespace fastrl
