// Parameters of the general decode kernel. Torch-free.
#pragma once

#include "ops/compressed_kv/decode_params.h"

namespace htree::compressed_kv {

enum class RowKind { kFloat, kHalf, kBfloat16, kPackedHalf, kPackedBfloat16, kBytes, kNibbles };

struct GeneralParams {
  DecodeParams base;    // the tokens of a block are those of the compressed part or of the window
  const void* k_dense;  // [B, H_kv, window, D] for the dense kinds
  const void* v_dense;
  RowKind k_kind;
  RowKind v_kind;
};

}  // namespace htree::compressed_kv
