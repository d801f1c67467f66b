#pragma once
// The largest of a lane's logits in tile.cuh, without keys of all of them.
// The larger of every two logits stays, without its position: halves two to an operation. The
// k-th largest of those is a threshold that at least k logits reach, and few more than k. A second
// look marks the logits that reach it, a bit for each, and only of them keys are made.

#include "../common/vector.cuh"
#include "network.cuh"

namespace megasoftmax {

// A word of a pack, to be sorted: halves for themselves. Not for NaN.
template <class T>
struct TileWord {
  static constexpr bool kIsPair = sizeof(T) == 2;
  uint32_t bits;

  TileWord() = default;
  __device__ explicit TileWord(uint32_t bits) : bits(bits) {}
  __device__ explicit TileWord(float number) { bits = __float_as_uint(number); }
  __device__ float number() const { return __uint_as_float(bits); }

  __device__ friend TileWord max(TileWord a, TileWord b) {
    if constexpr (kIsPair) return TileWord(Halves<T>::larger(a.bits, b.bits));
    if constexpr (!kIsPair) return TileWord(fmaxf(a.number(), b.number()));
  }
  __device__ friend TileWord min(TileWord a, TileWord b) {
    if constexpr (kIsPair) return TileWord(Halves<T>::smaller(a.bits, b.bits));
    if constexpr (!kIsPair) return TileWord(fminf(a.number(), b.number()));
  }
  __device__ TileWord swapped() const {
    return kIsPair ? TileWord(__byte_perm(bits, bits, 0x1032)) : *this;
  }
  // All bits of the lanes that reach those of `least`.
  __device__ uint32_t reaches(TileWord least) const {
    if constexpr (kIsPair) return Halves<T>::reaching(bits, least.bits);
    if constexpr (!kIsPair) return number() >= least.number() ? ~0u : 0u;
  }
  __device__ float first() const { return Pack<T, 4 / sizeof(T)>{{bits}}[0]; }
};

// So many keys are made where so few are kept.
constexpr int most_candidates(int longest) { return 3 * longest; }

template <class T, int kLongest, int kVectors>
struct TileCandidates {
  using Word = TileWord<T>;
  static constexpr int kElements = kPackElements<T>, kWords = Pack<T>::kWords;
  // Bits of a word's lanes, and words whose bits fill 32.
  static constexpr uint32_t kBits = sizeof(T) == 2 ? 0x10001u : 1u;
  static constexpr int kWordsOfMask = 16 * sizeof(T) / 2;
  static constexpr int kMasks = (kVectors * kWords + kWordsOfMask - 1) / kWordsOfMask;
  // Whether there are enough of every two logits for the list, and for a lane that sorts keys also
  // more logits than candidates: otherwise it sorts keys of all.
  static constexpr bool kCanRank = kVectors >= 4 && 2 * kVectors >= kLongest && kMasks <= 2;
  static constexpr bool kCanSort = kCanRank && most_candidates(kLongest) < kVectors * kElements;
  static constexpr int kElementsOfMask = kWordsOfMask * 4 / sizeof(T);
  static constexpr int kLastBit = kVectors * kElements < 32 ? kVectors * kElements - 1 : 31;
  static_assert(!kCanRank || sizeof(T) == 4 || kVectors * kWords % kWordsOfMask == 0);

  Word tops[kLongest];  // of every two the larger, in order
  Word threshold;
  uint32_t marks[kMasks] = {};

  // Sets `threshold` to a number that at least k of the row's logits reach, in all its lanes. By
  // whole warps. read(i): the lane's i-th vector.
  template <class Read>
  __device__ __forceinline__ void find_threshold(int k, int lanes, Read&& read) {
    constexpr int kStep = kLongest / 2;  // vectors whose pairs are sorted together
    static_assert(kVectors % kStep == 0);
#pragma unroll
    for (int i = 0; i < kVectors; i += kStep) {
      Word some[kLongest];
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        const Pack<T> pack = read(i + j);
        some[2 * j] = max(Word(pack.words[0]), Word(pack.words[1]));
        some[2 * j + 1] = max(Word(pack.words[2]), Word(pack.words[3]));
      }
      sort(some);
      if (i == 0) {
#pragma unroll
        for (int j = 0; j < kLongest; ++j) tops[j] = some[j];
      } else {
        merge_sorted(tops, some);
      }
    }
    for (int distance = 1; distance < lanes; distance *= 2) {
      Word others[kLongest];
#pragma unroll
      for (int i = 0; i < kLongest; ++i)
        others[i] = Word(__shfl_xor_sync(~0u, tops[i].bits, distance));
      merge_sorted(tops, others);
    }
    threshold = largest_reached<kLongest>(k);
  }
  __device__ float max_of_all() const {
    return max(tops[0], tops[0].swapped()).first() + 0.f;  // -0 + 0 = 0
  }

  __device__ bool is_finite() const { return fabsf(threshold.first()) < INFINITY; }
  // Makes candidates of what lies below the threshold by at most relative * |threshold| + absolute.
  // Where the threshold is not finite, nothing is marked, or all.
  __device__ void lower_threshold(float relative, float absolute) {
    const float least = threshold.first() - fmaf(fabsf(threshold.first()), relative, absolute);
    const float both[4 / sizeof(T)] = {least, least};
    threshold = Word(Pack<T, 4 / sizeof(T)>::round(both).words[0]);
  }

  __device__ __forceinline__ void mark(int vector, const Pack<T>& pack) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int word = vector * kWords + i;
      marks[word / kWordsOfMask] |=
          Word(pack.words[i]).reaches(threshold) & kBits << word % kWordsOfMask;
    }
  }
  __device__ int count() const {
    return __popc(marks[0]) + (kMasks == 2 ? __popc(marks[kMasks - 1]) : 0);
  }

  // Candidates that have not been taken.
  struct Left {
    uint32_t marks, later;
    int begin = 0;

    __device__ explicit Left(const TileCandidates& all)
        : marks(all.marks[0]), later(kMasks == 2 ? all.marks[kMasks - 1] : 0) {}
    __device__ bool any() const { return (marks | later) != 0; }
    // Takes one, and returns its position. Without a branch: any position where none is left.
    __device__ __forceinline__ int next(bool& is_there) {
      if (kMasks == 2 && marks == 0) {
        marks = later;
        later = 0;
        begin = kElementsOfMask;
      }
      is_there = marks != 0;
      const int bit = (31 - __clz(marks)) & kLastBit;
      marks &= ~(1u << bit);
      return begin + (sizeof(T) == 2 ? (bit << 1 | bit >> 4) & 31 : bit);
    }
  };

  // The best keys, in order; key(i) is that of the lane's i-th logit. By whole warps.
  template <class Key, class KeyAt>
  __device__ __forceinline__ void select(Key (&best)[kLongest], KeyAt&& key_at) const {
    Left left(*this);
    const auto next = [&]() -> Key {
      bool is_there;
      const Key key = key_at(left.next(is_there));
      return is_there ? key : Key{0};
    };
#pragma unroll
    for (int i = 0; i < kLongest; ++i) best[i] = next();
    sort(best);
    while (__any_sync(~0u, left.any())) {
      const Key key = next();
#pragma unroll
      for (int i = kLongest - 1; i > 0; --i) best[i] = min(best[i - 1], max(best[i], key));
      best[0] = max(best[0], key);
    }
  }

 private:
  // The k-th largest of all halves of `tops`, for k = kK, or a lower number where k is below that.
  // The kK largest of two halves are i of one and kK - i of the other.
  template <int kK>
  __device__ __forceinline__ Word largest_reached(int k) const {
    if constexpr (kK > 1 && 2 * kK > kLongest) {
      if (k < kK) return largest_reached<kK - 1>(k);
    }
    Word found = tops[kK - 1];
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 1; i <= kK / 2; ++i)
        found = max(found, min(tops[i - 1], tops[kK - i - 1].swapped()));
      found = max(found, found.swapped());
    }
    return found;
  }
};

}  // namespace megasoftmax
