// How the launchers of the staged kernels describe tensors and rows: raw pointers, strides
// and sizes, no torch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace htree::tree_attention {

// [B, rows, heads, D] with a unit last stride; strides in elements.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
};

// A launch works on the rows (b, i, list) with b < num_batches, i < num_queries and list < num_lists; list is
// fastest. Row (b, i) stands at token t0 + i * query_step and has row i / queries_per_list of the parents.
struct Geometry {
  int64_t num_batches = 0;
  int64_t num_queries = 0;
  int64_t num_lists = 0;          // S: kv heads, or query heads where each has a list of its own
  int64_t group = 1;              // G: query heads per list
  int64_t first_list = 0;         // of the launch, in the whole call
  int64_t lists_per_kv_head = 1;  // the kv head of a list is (first_list + list) / lists_per_kv_head
  int64_t rate = 16;              // r: children per parent
  int64_t list_width = 0;         // parents per list; a row has at most list_width * rate candidates
  int64_t num_nodes = 0;          // N: nodes of the layer
  int64_t node_span = 1;          // r^layer: tokens per node
  int64_t t0 = 0;
  int64_t query_step = 1;
  int64_t queries_per_list = 1;

  constexpr int64_t kv_head(int64_t list) const { return (first_list + list) / lists_per_kv_head; }
  constexpr int64_t num_rows() const { return num_batches * num_queries * num_lists; }
  constexpr int64_t capacity() const { return list_width * rate; }
};

// cos and sin [size, half], unit last stride; size is above the largest position. Null: nothing is rotated.
template <typename A>
struct RotaryTable {
  const A* cos = nullptr;
  const A* sin = nullptr;
  int64_t cos_row = 0;
  int64_t sin_row = 0;
};

// Whether every row starts at a multiple of 16 bytes.
template <typename T>
bool rows_aligned(const View<T>& view) {
  const int64_t size = sizeof(T);
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.batch * size % 16 == 0 &&
         view.row * size % 16 == 0 && view.head * size % 16 == 0;
}

template <typename A>
bool rows_aligned(const RotaryTable<A>& table) {
  return rows_aligned(View<const A>{table.cos, 0, table.cos_row, 0}) &&
         rows_aligned(View<const A>{table.sin, 0, table.sin_row, 0});
}

// ---- Launch shape of the elementwise kernels: a grid-stride loop over `num` items, with no more blocks than
// the x dimension of a grid holds, nor than fill any GPU many times over.

constexpr int kElementThreads = 256;

inline unsigned blocks_for(int64_t num, int threads = kElementThreads) {
  return static_cast<unsigned>(std::min<int64_t>((num + threads - 1) / threads, int64_t{1} << 20));
}

}  // namespace htree::tree_attention
