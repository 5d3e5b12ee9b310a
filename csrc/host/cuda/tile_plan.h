// How many persistent blocks take the tiles of a matrix product, and which tiles
// are split along K. Torch-free.
#pragma once

#include <algorithm>

#include "device/sm90/tile_order.cuh"
#include "host/cuda/kernel_launch.h"

namespace htree {

struct TilePlan {
  int blocks = 0;
  device::SplitTiles split{};
};

// Takes blocks in clusters of `cluster`, at most one per multiprocessor and at most `most_clusters` clusters.
// A place of `order` holds `tiles_per_place` tiles, each with a sum over `num_blocks` k-blocks.
inline cudaError_t plan_tiles(const device::TileOrder& order, int tiles_per_place, int cluster,
                              int most_clusters, int num_blocks, TilePlan& plan) {
  int processors = 0;
  const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, processors);
  if (error == cudaSuccess) {
    plan.blocks = std::min(processors / cluster, most_clusters) * cluster;
    plan.split = device::split_last_tiles(order.count() * tiles_per_place, plan.blocks, num_blocks);
  }
  return error;
}

}  // namespace htree
