// The choices of plan/ in words, for one call and as a table over group sizes and selection strides. This is
// what `python -m htree_ops info` prints. No torch.
#pragma once

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "device/sizes.h"
#include "ops/tree_attention/plan/backward.h"

namespace htree::tree_attention {

inline std::string describe(const TreeConfig& config) {
  std::ostringstream text;
  text << (config.path == AttentionPath::kTensorCore ? "tensor_core" : "general")
       << " batch_chunk=" << config.batch_chunk << " query_chunk=" << config.query_chunk
       << " selection_chunk=" << config.selection_chunk
       << " top=" << (config.dense_top ? "dense" : "gathered") << " top_chunk=" << config.top_chunk
       << " dense_rows=" << config.dense_rows << " masked_rows=" << config.masked_rows;
  return text.str();
}

// The kernels of dQ and of dK and dV below the top, then at the top, and where some rows multiply masked tiles at the
// tokens, those of the tokens: behind a bar stand the kernels of the other rows. Names are those of the folders of
// sparse_attention/cuda; halves: those of a group of half as many heads.
inline std::string describe_gradients(const AttentionProblem& p, const BackwardConfig& config) {
  const bool general = config.path == AttentionPath::kGeneral;
  const std::string queries = general                        ? "general"
                              : config.halves                ? "halves"
                              : config.per_list              ? "per_list"
                              : config.shared_gather_queries ? "shared_gather"
                                                             : "per_query";
  const std::string keys = general               ? "general"
                           : config.halves       ? "halves"
                           : config.per_list     ? "per_list"
                           : config.parent_warps ? "parent_gradient"
                                                 : "key_gradient";
  const bool top_alone = config.per_list_top && !config.halves;
  const std::string top_queries = top_alone ? "per_list" : queries;
  const std::string top_keys = top_alone ? "per_list" : keys;
  std::string text = "dQ=" + queries + " dK_dV=" + keys + " top_dQ=" + top_queries + " top_dK_dV=" + top_keys;
  if (masks_tiles(p, config)) {
    const bool gathers = gathers_tokens(p, config), top = p.layers() == 1;
    text += " token_dQ=masked_rows" + (gathers ? "|" + (top ? top_queries : queries) : "");
    text += " token_dK_dV=masked_rows" + (gathers ? "|" + (top ? top_keys : keys) : "");
  }
  return text;
}

// The layer_kernel() of every layer of the forward, the top first, for the rows that walk the tree. Where some of them
// multiply masked tiles at the tokens and others gather, both kernels stand there, with a bar between.
inline std::string describe_layers(const AttentionProblem& p, const ForwardConfig& config) {
  constexpr const char* kNames[] = {"general",  "per_query", "shared_gather",
                                    "per_list", "dense",     "masked_rows"};
  if (!walks(p, config)) {
    return "dense_rows";
  }
  std::string text;
  for (int64_t layer = p.layers(); layer-- > 0;) {
    const bool masks = layer == 0 && masks_tiles(p, config);
    if (masks) {
      text += kNames[static_cast<int>(layer_kernel(config, layer, p.layers(), /*masked=*/true))];
    }
    if (!masks || gathers_tokens(p, config)) {
      text += masks ? "|" : "";
      text += kNames[static_cast<int>(layer_kernel(config, layer, p.layers(), /*masked=*/false))];
    }
    text += layer > 0 ? "," : "";
  }
  return text;
}

// One line per choice of kernels for a tree of two layers, with the G = H / H_kv, the strides and the rotation
// that lead to it.
inline std::vector<std::string> tensor_core_kernels(bool hopper) {
  struct Line {
    std::string kernels;
    std::vector<std::pair<std::string, std::string>> takers;  // strides, groups with just these
  };
  const DeviceFacts device{hopper ? 9 : 8, hopper ? device::kHopperSharedBytes : 163 << 10, hopper};
  AttentionProblem p;
  p.batch = p.num_kv_heads = 1;
  p.num_keys = p.num_queries = 131072;
  p.key_dim = p.value_dim = 128;
  p.half_dtype = true;
  std::vector<Line> lines;
  for (int i = 0; i < 2 * 16; ++i) {
    p.num_heads = i % 16 + 1;
    p.args.rotate = i < 16;
    std::vector<std::pair<std::string, std::string>> choices;  // kernels, strides of this group
    for (p.args.selection_stride = 1; p.args.selection_stride <= 16; p.args.selection_stride *= 2) {
      const ForwardConfig forward = choose_forward_config(p, device);
      if (!p.args.rotate && !masks_tiles(p, forward)) {
        continue;  // as with rotations
      }
      const std::string kernels = "layers=" + describe_layers(p, forward) + " " +
                                  describe_gradients(p, choose_backward_config(p, device));
      const std::string stride = std::to_string(p.args.selection_stride);
      if (choices.empty() || choices.back().first != kernels) {
        choices.emplace_back(kernels, stride);
      } else {
        choices.back().second += "," + stride;
      }
    }
    for (auto& [kernels, strides] : choices) {
      strides += p.args.rotate ? "" : " rope_base=None";
      size_t at = 0;
      while (at < lines.size() && lines[at].kernels != kernels) {
        ++at;
      }
      if (at == lines.size()) {
        lines.push_back({kernels, {}});
      }
      auto& takers = lines[at].takers;
      const std::string group = std::to_string(p.num_heads);
      if (takers.empty() || takers.back().first != strides) {
        takers.emplace_back(strides, group);
      } else {
        takers.back().second += "," + group;
      }
    }
  }
  std::vector<std::string> texts;
  for (const Line& line : lines) {
    std::string text = std::string(hopper ? "sm_90a" : "sm_80") + " " + line.kernels;
    const char* separator = ": ";
    for (const auto& [strides, groups] : line.takers) {
      text += separator + ("H/H_kv=" + groups) + " stride=" + strides;
      separator = "; ";
    }
    texts.push_back(text);
  }
  return texts;
}

}  // namespace htree::tree_attention
