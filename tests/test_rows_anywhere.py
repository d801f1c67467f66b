"""Where tensor copies find rows of a bias that begin anywhere, by the header that kernels share."""

import os
import shlex
import subprocess

from megasoftmax.build.extension import CSRC

# Copies boxes as the hardware does, from random tensors, and reads them as kernels do.
PROGRAM = r"""
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "attention/sm90/plan.h"

using namespace megasoftmax;

int outside = 0, wrong = 0, boxes = 0, single = 0;

void check(int heads, int queries, int keys, int64_t pitch, int64_t head_stride, int offset) {
  constexpr int kRows = 64, kKeys = 128, kRowBytes = RowsAnywhere::row_bytes(kKeys);
  const int64_t size = offset + (heads - 1) * head_stride + (queries - 1) * pitch + keys;
  std::vector<uint16_t> memory(size + 128);
  auto* const storage = reinterpret_cast<uint16_t*>(
      round_up<uintptr_t>(reinterpret_cast<uintptr_t>(memory.data()), 64));
  for (int64_t i = 0; i < size; ++i) storage[i] = static_cast<uint16_t>(i * 40503u >> 3);
  const auto begin = reinterpret_cast<uintptr_t>(storage);
  AttentionParams params;
  params.batches = 1;
  params.batches_per_bias = params.heads_per_bias = Divider(1);
  params.heads = heads;
  params.queries = queries;
  params.keys = keys;
  Strided& rows = params.bias;
  rows.data = storage + offset;
  rows.query_stride = pitch;
  rows.head_stride = head_stride;
  // The last vector of 16 bytes is whole, or they need a copy.
  rows.last_whole_row = begin + 2 * size;
  wrong += takes_rows_anywhere(params) != (2 * size % 16 == 0);
  const auto end = rows.last_whole_row = round_up<uintptr_t>(begin + 2 * size, 16);
  wrong += !takes_rows_anywhere(params);
  const RowsAnywhere anywhere(rows);
  for (int i = 0; i < 4; ++i) wrong += anywhere.step(rows, i) % 16 != 0;
  std::vector<char> box(kRows * kRowBytes + 8);
  for (int head = 0; head < heads; ++head)
    for (int query = 0; query < queries; query += kRows)
      for (int key = 0; key < keys; key += kKeys) {
        const int64_t first = head * head_stride + key, column = anywhere.column(first);
        const int eight = query / 8, last = std::min(eight + kRows / 8, divide_up(queries, 8));
        const bool fits = last * anywhere.step(rows, 3) <= anywhere.room(rows, column, kRowBytes);
        ++boxes;
        single += !fits;
        for (int row = 0; row < kRows; ++row) {
          uintptr_t from = RowsAnywhere::begin(rows) + 2 * column + eight * anywhere.step(rows, 3);
          for (int i = 0; i < 4; ++i)
            from += (i < 3 ? row >> i & 1 : row / 8) * anywhere.step(rows, i);
          int place = 0, bytes = query / 8 * 8 + row < divide_up(queries, 8) * 8 ? kRowBytes : 0;
          if (!fits) {  // by themselves
            from = reinterpret_cast<uintptr_t>(rows.data) + 2 * (first + (query + row) * pitch);
            place = 2 * anywhere.shift(first, row % 8) - static_cast<int>(from % 16);
            const int of_row = static_cast<int>(from % 16) + 2 * std::min(kKeys, keys - key);
            bytes = query + row < queries ? round_up(of_row, 16) : 0;
            from = from / 16 * 16;
          }
          wrong += place < 0 || place + bytes > kRowBytes || place % 16 != 0;
          outside += bytes > 0 && (from < begin || from + bytes > end);
          if (outside + wrong > 0) return;
          if (bytes > 0)
            std::memcpy(&box[row * kRowBytes + place], reinterpret_cast<void*>(from), bytes);
        }
        for (int row = 0; row < kRows && query + row < queries; ++row)
          for (int i = 0; i < kKeys && key + i < keys; ++i) {
            uint16_t entry;
            const int shift = anywhere.shift(head * head_stride, row % 8);
            std::memcpy(&entry, &box[row * kRowBytes + 2 * (shift + i)], 2);
            wrong += entry != storage[offset + first + (query + row) * pitch + i];
          }
      }
}

int main() {
  std::mt19937 random;
  const auto up_to = [&](int most) { return static_cast<int>(random() % (most + 1)); };
  for (int i = 0; i < 1500; ++i) {
    const int heads = 1 + up_to(2), queries = 17 + up_to(150), keys = 1 + up_to(300);
    int64_t pitch = std::max(16, keys + up_to(19) - (i % 4 == 0 ? keys / 2 : 0));
    int64_t head_stride = queries * pitch + up_to(8);
    if (i % 5 == 0) {  // rows of heads side by side
      head_stride = keys + up_to(2);
      pitch = std::max<int64_t>(heads * head_stride, 16);
    }
    check(heads, queries, keys, pitch, head_stride, up_to(19));
  }
  std::printf("%d %d %d %d", outside, wrong, boxes, single);
}
"""


def test_boxes_have_the_rows_and_nothing_outside_of_the_storage(tmp_path):
    source, program = tmp_path / "boxes.cpp", tmp_path / "boxes"
    source.write_text(PROGRAM)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, "-std=c++20", "-O1", f"-I{CSRC}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    outside, wrong, boxes, single = map(int, text.split())
    assert (outside, wrong) == (0, 0)
    assert 0 < single < boxes / 2
