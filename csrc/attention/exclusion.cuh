#pragma once
// Which keys a query does not see: by length, window, range and mask. They are found before the
// product, while registers are free, and applied after it. So the score of an excluded entry never
// matters, even if it is NaN.

#include "fragments.cuh"
#include "params.h"

namespace megasoftmax {

// A bit for each of the 32 keys from `first_key` on that is outside of a range.
__device__ inline uint32_t bits_outside(const KeyRange& range, int first_key) {
  // A shift by 32 or more leaves nothing.
  const auto bits_from = [&](int key) {
    return __funnelshift_lc(0, ~0u, static_cast<uint32_t>(max(key, first_key) - first_key));
  };
  return bits_from(range.end) | ~bits_from(range.begin);
}

// The keys that a query sees, by length, window and range.
__device__ inline KeyRange visible_keys(const AttentionParams& params, int batch, int head,
                                        int query) {
  KeyRange range = visible_keys(params, query);
  const auto& [first, end] = params.visible;
  if (first.data != nullptr) range.begin = max(range.begin, first.at(batch, head, query));
  if (end.data != nullptr) range.end = min(range.end, end.at(batch, head, query));
  return range;
}
// Finds what this lane's queries see: one query of each 32 of a tile.
template <int kCount>
__device__ __forceinline__ void find_ranges(KeyRange (&ranges)[kCount],
                                            const AttentionParams& params, int batch, int head,
                                            int first_query) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int query = first_query + 32 * i + thread_index_anew() % 32;
    ranges[i] = query < params.queries ? visible_keys(params, batch, head, query) : KeyRange{0, 0};
  }
}
// The range of queries that see a key, by length and window.
__device__ inline KeyRange visible_from(const AttentionParams& params, int key) {
  const int diagonal = key + params.queries - params.keys;
  return {params.window_right < 0 ? 0 : max(diagonal - params.window_right, 0),
          params.window_left < 0 ? params.queries
                                 : min(diagonal + params.window_left + 1, params.queries)};
}

// The queries that see all of kKeys keys, by length and window.
template <int kKeys>
__device__ inline KeyRange visible_from_all(const AttentionParams& params, int first_key) {
  const int last_key = first_key + kKeys - 1;
  if (last_key >= params.keys) return {0, 0};
  return {visible_from(params, last_key).begin, visible_from(params, first_key).end};
}

// The first tile from `tile` on that has a visible pair, by one or two lines of the block mask, and
// the `bits` of the 32 tiles around it. None: a tile from `count` on.
__device__ inline int next_seen(const uint32_t* line, const uint32_t* other, int tile, int count,
                                uint32_t& bits) {
  bits = ~0u << tile % 32;
  for (int word = tile / 32; word * 32 < count; ++word) {
    bits &= __ldg(line + word) | __ldg(other + word);
    if (bits != 0) return word * 32 + __ffs(static_cast<int>(bits)) - 1;
    bits = ~0u;
  }
  return count;
}
// The first query of the first tile from `query` on that sees some of the kKeys keys from
// `first_key` on, by the block mask, and the `bits` of the tiles around it.
template <int kKeys>
__device__ inline int next_query_tile(const AttentionParams& params, int batch, int head,
                                      int first_key, int query, uint32_t& bits) {
  const BlockMaskLayout& layout = params.block_mask.layout;
  const uint32_t* const lines = params.block_mask.of(batch, head) + layout.seen_by_key();
  const int tile = first_key / kMaskTile;
  const int last = min(tile + divide_up(kKeys, kMaskTile), layout.key_tiles) - 1;
  return next_seen(lines + int64_t{tile} * layout.words_of_queries(),
                   lines + int64_t{last} * layout.words_of_queries(), query / kMaskTile,
                   layout.query_tiles, bits) *
         kMaskTile;
}

// The tiles of queries that see some of a block's keys, of all heads that share the keys: head by
// head, from the first tile on. If there is a block mask, a word of it serves 32 tiles. If
// kMayTakeAll and params.takes_all_queries, these are all tiles. kMayAlternate: params may ask for
// OrderOfTurns::kFirstKeysFirst.
template <int kKeys, int kQueries, bool kIsUnmasked, bool kMayTakeAll = false,
          bool kMayAlternate = false>
class QueryTiles {
  static_assert(!kMayAlternate || kIsUnmasked);

 public:
  int head, query;  // the first query of the tile at hand

  __device__ QueryTiles(const AttentionParams& params, int batch, int key_head, int first_key) {
    const int group = static_cast<int>(params.heads_per_key_head.divisor);
    const int last_key = min(first_key + kKeys, params.keys) - 1;
    const bool takes_all = kMayTakeAll && params.takes_all_queries;
    begin_ = takes_all ? 0 : visible_from(params, first_key).begin / kQueries * kQueries;
    end_ = takes_all ? params.queries : visible_from(params, last_key).end;
    last_head_ = (key_head + 1) * group;
    head = key_head * group;
    query = begin_;
    find(params, batch, first_key);
    if (alternates(params) && are_left()) query = end() - kQueries;
  }
  __device__ bool are_left() const { return head < last_head_; }
  __device__ void skip_all() { head = last_head_; }
  // The queries of the tiles of each head, if there is no block mask.
  __device__ int begin() const { return begin_; }
  __device__ int end() const {
    return begin_ + divide_up(max(end_ - begin_, 0), kQueries) * kQueries;
  }
  __device__ void advance(const AttentionParams& params, int batch, int first_key) {
    if (alternates(params)) {  // after the first tile of the last head no head is left
      if (++head < last_head_) return;
      query -= kQueries;
      if (query >= begin_) head -= static_cast<int>(params.heads_per_key_head.divisor);
      return;
    }
    query += kQueries;
    if constexpr (kIsUnmasked) {  // as find() does, with fewer instructions: all heads have tiles
      if (query < end_) return;
      ++head;
      query = begin_;
      return;
    }
    if (has_block_mask(params)) {
      const int tile = query / kMaskTile;
      const uint32_t rest = tile % 32 == 0 ? 0 : seen_ >> tile % 32;
      const int seen = (tile + __ffs(static_cast<int>(rest)) - 1) * kMaskTile;
      if (rest != 0 && seen < end_) {
        query = tile_of(seen);
        return;
      }
    }
    find(params, batch, first_key);
  }

 private:
  __device__ static bool alternates(const AttentionParams& params) {
    return kMayAlternate && params.order_of_turns == OrderOfTurns::kFirstKeysFirst;
  }
  __device__ static bool has_block_mask(const AttentionParams& params) {
    return !kIsUnmasked && params.block_mask.words != nullptr &&
           !(kMayTakeAll && params.takes_all_queries);
  }
  // Of a tile of the block mask that begins at query `seen`: it may begin before `query`, which is
  // a part of it.
  __device__ int tile_of(int seen) const {
    return kQueries < kMaskTile ? max(query, seen) : seen / kQueries * kQueries;
  }
  __device__ void find(const AttentionParams& params, int batch, int first_key) {
    for (; head < last_head_; ++head, query = begin_) {
      if (has_block_mask(params)) {
        const int seen = next_query_tile<kKeys>(params, batch, head, first_key, query, seen_);
        query = seen < end_ ? tile_of(seen) : end_;
      }
      if (query < end_) break;
    }
  }

  int begin_, end_, last_head_;
  [[maybe_unused]] uint32_t seen_ = 0;  // of the 32 tiles around the last one that was found
};

// The tiles of keys that a block of kQueries queries sees, one after the other. With a block mask
// it keeps two words for the 32 tiles around the one found last: which have a visible pair, and
// which an excluded one. A step may take fewer keys than a tile of the block mask has.
template <int kQueries, int kKeys = kMaskTile>
class KeyTiles {
  static_assert(kMaskTile % kKeys == 0);

 public:
  // The first key of the first tile from `key` on that has a visible pair.
  __device__ int from(const AttentionParams& params, int batch, int head, int first_query,
                      int key) {
    if (params.block_mask.words == nullptr) return key;
    const int count = params.block_mask.layout.key_tiles;
    for (int tile = key / kMaskTile; tile < count; tile = (tile / 32 + 1) * 32) {
      load(params, batch, head, first_query, tile / 32);
      const uint32_t rest = seen_ >> tile % 32;
      if (rest != 0) return (tile + __ffs(static_cast<int>(rest)) - 1) * kMaskTile;
    }
    return count * kMaskTile;
  }
  // The first key of the step after the step of `key`, which is in the tile found last. `block`
  // returns the arguments of `from`, and is called only if they are needed.
  template <class Block>
  __device__ int after(const AttentionParams& params, int key, Block&& block) {
    if (kKeys < kMaskTile && (key + kKeys) % kMaskTile != 0) return key + kKeys;
    const int tile = key / kMaskTile + 1;
    const uint32_t rest = tile % 32 == 0 ? 0 : seen_ >> tile % 32;
    if (rest != 0) return (tile + __ffs(static_cast<int>(rest)) - 1) * kMaskTile;
    const auto queries = block();
    return from(params, queries.batch, queries.head, queries.first_query,
                divide_up(tile, 32) * 32 * kMaskTile);
  }
  // Whether the tile found last has an excluded pair.
  __device__ bool may_exclude(int key) const { return (mixed_ >> key / kMaskTile % 32 & 1) != 0; }

 private:
  __device__ void load(const AttentionParams& params, int batch, int head, int first_query,
                       int word) {
    const BlockMaskLayout& layout = params.block_mask.layout;
    const uint32_t* const words_of_head = params.block_mask.of(batch, head) + word;
    seen_ = mixed_ = 0;
#pragma unroll
    for (int i = 0; i < kQueries / kMaskTile; ++i) {
      const int line = first_query / kMaskTile + i;
      if (line >= layout.query_tiles) continue;
      const uint32_t* const words = words_of_head + int64_t{line} * layout.words_of_keys();
      const uint32_t seen = __ldg(words + layout.seen_by_query());
      seen_ |= seen;
      mixed_ |= __ldg(words + layout.mixed_by_query()) | ~seen;
    }
  }

  uint32_t seen_ = ~0u, mixed_ = 0;
};

// Whether a tile has a visible pair, by the block mask.
__device__ inline bool is_seen(const AttentionParams& params, int batch, int head, int query_tile,
                               int key_tile) {
  const BlockMaskLayout& layout = params.block_mask.layout;
  if (query_tile >= layout.query_tiles || key_tile >= layout.key_tiles) return false;
  const uint32_t* const words = params.block_mask.of(batch, head) + layout.seen_by_query() +
                                int64_t{query_tile} * layout.words_of_keys();
  return (__ldg(words + key_tile / 32) >> key_tile % 32 & 1) != 0;
}

// A bit for each of a lane's elements. Element i of tile (m, n) is bit 4 * m + i of byte n.
template <int kM, int kN>
struct Excluded {
  static_assert(kM <= 2);
  static constexpr int kWords = divide_up(kN, 4);
  uint32_t words[kWords] = {};

  __device__ void add(int m, int n, int i) { words[n / 4] |= bit_of(m, n, i); }
  __device__ bool has(int m, int n, int i) const { return (words[n / 4] & bit_of(m, n, i)) != 0; }
  __device__ bool any() const {
    uint32_t all = 0;
#pragma unroll
    for (const uint32_t word : words) all |= word;
    return all != 0;
  }

  // Adds the elements whose bit is set in bits_of(half, word): of the row of elements 2 * half, 32
  // columns from number 32 * word on.
  template <class BitsOf>
  __device__ __forceinline__ void add_words(BitsOf&& bits_of) {
    static_assert(kM == 1);
    const FirstElement mine;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) add_word(0, half, word, bits_of(half, word), mine);
    }
  }

  __device__ void add_all() {
#pragma unroll
    for (uint32_t& word : words) word = ~0u;
  }
  __device__ bool are_all() const {
    constexpr uint32_t kOfEight = (1u << 4 * kM) - 1, kOfFour = kOfEight * 0x01010101u;
    uint32_t both = ~0u;
#pragma unroll
    for (int word = 0; word < kWords; ++word)
      both &= words[word] | ~(kN - 4 * word >= 4 ? kOfFour : kOfFour >> 8 * (4 * word + 4 - kN));
    return both == ~0u;
  }
  // Keys in rows: adds all queries of the keys whose bits are set, from the first key on.
  __device__ __forceinline__ void add_keys(uint32_t bits) {
    const uint32_t keys = of_keys(bits >> FirstElement().row);
#pragma unroll
    for (uint32_t& word : words) word |= (keys | keys << 1) * 0x01010101u;
  }
  // Keys in rows: adds the keys from `first_key` on outside of keys_of(offset), the range that the
  // query in this lane's column `offset` sees.
  template <class KeysOf>
  __device__ __forceinline__ void add_others(int first_key, KeysOf&& keys_of) {
    const FirstElement mine;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const KeyRange visible = keys_of(column_offset(n, right));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int i = right; i < 4; i += 2) {
            if (!visible.contains(first_key + mine.row + row_offset(m, i))) add(m, n, i);
          }
        }
      }
    }
  }

  // Adds pairs of the queries from `first_query` on and the keys from `first_key` on that lie
  // beyond the tensor, outside of the window or range, or are masked. Queries are in rows, or in
  // columns. `is_cut`: length or window may exclude some.
  template <bool kKeysInRows, bool kIsUnmasked = false>
  __device__ __forceinline__ void find(const AttentionParams& params, int batch, int head,
                                       int first_query, int first_key, bool is_cut) {
    const FirstElement mine;
    bool is_mixed = false;
    if (!kIsUnmasked && params.block_mask.words != nullptr) {
      const BlockMaskLayout& layout = params.block_mask.layout;
      const uint32_t* const words_of_head = params.block_mask.of(batch, head);
      const int key_tile = first_key / kMaskTile, query_tile = first_query / kMaskTile;
      if (!is_seen(params, batch, head, query_tile, key_tile)) {
        add_all();
        return;
      }
      const int64_t word = int64_t{query_tile} * layout.words_of_keys() + key_tile / 32;
      is_mixed = (__ldg(words_of_head + layout.mixed_by_query() + word) >> key_tile % 32 & 1) != 0;
      if (is_mixed && layout.bit_rows > 0) {
        add_masked<kKeysInRows>(params, words_of_head + layout.bits(), first_query, first_key,
                                mine);
      }
      is_mixed = is_mixed && params.visible.are_given();
    }
    if (!is_cut && !is_mixed) return;
    const auto range_of = [&](int lane_query, int offset) {
      const int query = first_query + lane_query + offset;
      if (query >= params.queries) return KeyRange{0, 0};
      return is_mixed ? visible_keys(params, batch, head, query) : visible_keys(params, query);
    };
    if constexpr (kKeysInRows) {
      add_others(first_key, [&](int offset) { return range_of(mine.column, offset); });
    } else {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const KeyRange visible = range_of(mine.row, row_offset(m, 2 * half));
#pragma unroll
          for (int word = 0; word < kWords; ++word)
            add_word(m, half, word, bits_outside(visible, first_key + word * 32), mine);
        }
      }
    }
  }

  __device__ __forceinline__ void apply(Accumulators<kM, kN>& elements, float value) const {
    if (any()) apply_all(elements, value);
  }
  // apply for callers that know that some element is excluded.
  __device__ __forceinline__ void apply_all(Accumulators<kM, kN>& elements, float value) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (has(m, n, i)) elements[m][n][i] = value;
        }
      }
    }
  }
  // Clears excluded elements that are rounded to pairs of 16 bits.
  __device__ __forceinline__ void clear_pairs(uint32_t (&pairs)[kN / 2][4]) const {
    static_assert(kM == 1);
    if (!any()) return;
#pragma unroll
    for (int i = 0; i < 2 * kN; ++i) {
      uint32_t& pair = pairs[i / 4][i % 4];
      if (has(0, i / 2, i % 2 * 2)) pair &= 0xffff0000u;
      if (has(0, i / 2, i % 2 * 2 + 1)) pair &= 0xffffu;
    }
  }

 private:
  __device__ static constexpr uint32_t bit_of(int m, int n, int i) {
    return 1u << (n % 4 * 8 + m * 4 + i);
  }
  // Adds keys of the query in column `right` of n: those whose bits are set, from this lane's first
  // key on.
  __device__ __forceinline__ void add_column(int n, int right, uint32_t bits) {
    words[n / 4] |= of_keys(bits) << (n % 4 * 8 + right);
  }
  // Moves bits 0, 8, 16 and 24, or the first two of them, to bits 0, 2, 4 and 6.
  __device__ static uint32_t of_keys(uint32_t bits) {
    uint32_t keys = bits & (kM == 2 ? 0x01010101u : 0x0101u);
    keys |= keys >> 6;
    return (keys | keys >> 12) & 0x55u;
  }
  // Adds elements of the row of elements 2 * half: those whose bits of 32 columns are set.
  __device__ __forceinline__ void add_word(int m, int half, int word, uint32_t bits,
                                           const FirstElement& mine) {
    words[word] |= (bits >> mine.column & 0x03030303u) << (m * 4 + half * 2);
  }
  // Adds what the bitmask excludes.
  template <bool kKeysInRows>
  __device__ __forceinline__ void add_masked(const AttentionParams& params, const uint32_t* bits,
                                             int first_query, int first_key,
                                             const FirstElement& mine) {
    const int pitch =
        params.block_mask.layout.bit_rows == 1 ? 0 : params.block_mask.layout.words_of_bits();
    const uint32_t* const first = bits + first_key / 32;
    const auto row_of = [&](int query) {
      return first + int64_t{min(query, params.queries - 1)} * pitch;
    };
    if constexpr (kKeysInRows) {
      const int shift = first_key % 32 + mine.row;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const int query = first_query + mine.column + column_offset(n, right);
          add_column(n, right, __ldg(row_of(query)) >> shift);
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t* const row = row_of(first_query + mine.row + row_offset(m, 2 * half));
#pragma unroll
          for (int word = 0; word < kWords; ++word)
            add_word(m, half, word, __ldg(row + word), mine);
        }
      }
    }
  }
};

// Which pairs of a warp's 16 keys, in rows, and of the queries of a tile are excluded.
template <int kQueries, bool kIsUnmasked>
class ExcludedOfTile {
 public:
  static constexpr int kPanels = kQueries / kMaskTile;
  using Panels = Excluded<1, kMaskTile / 8>[kPanels];

  // `group_key`: the first of the 64 keys of a warpgroup.
  __device__ ExcludedOfTile(const AttentionParams& params, int batch, int group_key, int warp_key)
      : params_(params),
        batch_(batch),
        warp_key_(warp_key),
        all_visible_(visible_from_all<64>(params, group_key)),
        has_ranges_(!kIsUnmasked && params.visible.are_given()),
        has_bits_(!kIsUnmasked && params.block_mask.words != nullptr &&
                  params.block_mask.layout.bit_rows > 0),
        has_blocks_(!kIsUnmasked && params.mask.data != nullptr && !has_bits_) {}

  // The bits of 64 queries that the mask excludes, for this lane's keys 0 and 8.
  using Masked = uint2[2];
  __device__ bool has_bits() const { return has_bits_; }
  // Loads them from the bitmask. If all queries share the bits of a key, each tile has the same.
  __device__ __forceinline__ void load_masked(Masked& masked, int head, int query) const {
    if (!has_bits_) return;
    const BlockMaskLayout& layout = params_.block_mask.layout;
    const uint32_t* const words_of_head = params_.block_mask.of(batch_, head);
    const int key = warp_key_ + FirstElement().row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (layout.has_bits_by_key()) {
        masked[half] =
            __ldg(reinterpret_cast<const uint2*>(
                      words_of_head + layout.bits_by_key(key / kMaskTile, query / kMaskTile)) +
                  key % kMaskTile + 8 * half);
      } else {
        const uint32_t bits = __ldg(words_of_head + layout.bits() + warp_key_ / 32);
        masked[half].x = masked[half].y = -(bits >> (key % 32 + 8 * half) & 1);
      }
    }
  }

  __device__ bool has_ranges() const { return has_ranges_; }
  // masked_of(panel, half): the bits of a key, as in Masked. sees_all(panel): whether all queries
  // of a panel see all keys of the warp, by range. range_of(column): what a query sees.
  template <class MaskedOf, class SeesAll, class RangeOf>
  __device__ __forceinline__ void find(Panels& excluded, int head, int query, MaskedOf&& masked_of,
                                       SeesAll&& sees_all, RangeOf&& range_of) const {
    const bool is_cut = query < all_visible_.begin || query + kQueries > all_visible_.end;
    if (has_ranges_) {
      const int column = FirstElement().column;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        if (!sees_all(panel))
          excluded[panel].add_others(
              warp_key_, [&](int offset) { return range_of(panel * kMaskTile + offset, column); });
      }
    } else if (is_cut) {
      const int key = warp_key_ + FirstElement().row;
      const auto queries_of = [&](int key) {
        return key < params_.keys ? visible_from(params_, key) : KeyRange{0, 0};
      };
      const KeyRange seen_from[2] = {queries_of(key), queries_of(key + 8)};
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
        excluded[panel].add_words([&](int half, int word) {
          return bits_outside(seen_from[half], query + 64 * panel + 32 * word);
        });
    }
    if (kIsUnmasked || (!has_bits_ && !has_blocks_)) return;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (has_bits_) {
        const Masked masked = {masked_of(panel, 0), masked_of(panel, 1)};
        excluded[panel].add_words(
            [&](int half, int word) { return word == 0 ? masked[half].x : masked[half].y; });
      } else if (!is_seen(params_, batch_, head, query / kMaskTile + panel,
                          warp_key_ / kMaskTile)) {
        excluded[panel].add_all();
      }
    }
  }

 private:
  const AttentionParams& params_;
  int batch_, warp_key_;
  KeyRange all_visible_;  // queries that see all of the 64 keys
  bool has_ranges_, has_bits_, has_blocks_;
};

}  // namespace megasoftmax
