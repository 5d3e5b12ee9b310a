// The divergence of a row so far, from blocks in any order.
#pragma once

#include "device/numeric.cuh"

namespace htree::index_loss {

// Over the masses p and scores x of some blocks: the largest x and the sum of e^(x - max); the sum of
// p (log p - (x - reference)), whose reference is max, which keeps it small whatever the scores; the sum of p. A trivial
// type, so that it can stand in shared memory.
struct LossState {
  float max;
  float sum;
  float cross;
  float mass;

  __device__ __forceinline__ static LossState empty() {
    return {device::negative_infinity<float>(), 0.0f, 0.0f, 0.0f};
  }

  // No difference of infinities is formed.
  __device__ __forceinline__ float reference() const {
    return max == device::negative_infinity<float>() ? 0.0f : max;
  }

  __device__ __forceinline__ void raise(float largest) {
    const float before = reference();
    sum *= expf(max - largest);
    max = largest;
    cross += mass == 0.0f ? 0.0f : mass * (reference() - before);
  }

  __device__ __forceinline__ void add(float p, float x) {
    if (x > max) {
      raise(x);
      sum += 1.0f;
    } else {
      sum += x == max ? 1.0f : expf(x - max);  // a NaN stays in the sum
    }
    mass += p;
    cross += p == 0.0f ? 0.0f : p * (logf(p) - (x - reference()));
  }

  __device__ __forceinline__ void merge(LossState other) {
    if (other.max > max) {
      raise(other.max);
    } else if (max > other.max) {
      other.raise(max);
    }
    sum += other.sum;
    cross += other.cross;
    mass += other.mass;
  }

  // Of the log-sum-exp of the scores over reference().
  __device__ __forceinline__ float above() const { return (max - reference()) + logf(sum); }
  __device__ __forceinline__ float log_sum() const { return reference() + above(); }
  __device__ __forceinline__ float divergence() const { return cross + mass * above(); }
};

}  // namespace htree::index_loss
