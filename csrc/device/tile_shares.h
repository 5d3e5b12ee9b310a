// Which tiles of a product two blocks of a cluster share.
#pragma once

namespace htree::device {

// How a launch shares out the tiles; divided on the host, because a loop bound that the device divided would
// not stay in uniform registers.
struct TileShares {
  int num_blocks;    // of k
  int first_shared;  // the tiles from here on are shared by the two blocks of a cluster
};

// Shared are the tiles of the last turn of `blocks` blocks, if there are no more of them than clusters, and
// each block has a k-block.
inline TileShares share_tiles(int tiles, int blocks, int num_blocks) {
  const int whole = tiles / blocks * blocks;
  return {num_blocks, tiles - whole <= blocks / 2 && num_blocks >= 2 ? whole : tiles};
}

}  // namespace htree::device
