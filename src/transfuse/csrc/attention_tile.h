// Keys and values of one tile as words, and the two products with them.
#pragma once

#include <type_traits>

#include "attention_cache.h"
#include "attention_math.h"

namespace transfuse::attention {

// Calls f with `value` as a constant of the compiler.
template <int kFirst, int kLast, class F>
TF_INLINE void with_constant(int value, F&& f) {
  if constexpr (kFirst == kLast) {
    f(std::integral_constant<int, kLast>{});
  } else {
    if (value == kFirst) {
      f(std::integral_constant<int, kFirst>{});
    } else {
      with_constant<kFirst + 1, kLast>(value, f);
    }
  }
}

// Sixteen words of a row, or the first of them that hold its last n < 16 * kWidth numbers; beyond these, 0.
template <class Word, class T>
TF_INLINE f32x16 load_row(const T* p, int64_t n) {
  if constexpr (kWidth<Word> == 1) {
    return n >= kLanes ? load(p) : load_part(p, n);
  } else {
#if defined(__AVX512BF16__)
    if (n >= 2 * kLanes) return (f32x16)_mm512_loadu_si512(p);
    return (f32x16)_mm512_maskz_loadu_epi16((1u << n) - 1, p);
#endif
  }
}

// Sixteen words each of `kLanes` keys, from their number `i` on: words[j] holds word j of all of them.
template <class Word, class T>
TF_INLINE void load_keys(const T* const* rows, int64_t i, int64_t size, f32x16 (&words)[kLanes]) {
#pragma GCC unroll 16
  for (int k = 0; k < kLanes; k++) words[k] = load_row<Word>(rows[k] + i, size - i);
  transpose(words);
}

// Numbers of the values of kWidth positions from number `i` on, as words that hold a number of each.
template <class Word, class T>
TF_INLINE void load_values(const T* const* rows, int64_t i, int64_t size, f32x16 (&words)[kWidth<Word>]) {
  if constexpr (kWidth<Word> == 1) {
    words[0] = load_row<Word>(rows[0] + i, size - i);
  } else {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr uint16_t kOrder[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i even = (__m512i)load_row<Word>(rows[0] + i, size - i);
    const __m512i odd = (__m512i)load_row<Word>(rows[1] + i, size - i);
    words[0] = (f32x16)_mm512_permutex2var_epi16(even, _mm512_load_si512(kOrder), odd);
    words[1] = (f32x16)_mm512_permutex2var_epi16(even, _mm512_load_si512(kOrder + 32), odd);
#endif
  }
}

// out[word][key] of 64 keys, `all_words` words of their first `size` numbers, zeros behind these; keys of columns
// [begin, end) only. `word_stride` and `column_stride` are the words from one to the next.
template <class Word, class T>
void pack_keys(const T* const* rows, int64_t size, int64_t all_words, int begin, int end, Fetcher<T>& fetcher,
               Word* out, int64_t word_stride, int64_t column_stride) {
  constexpr int64_t step = kLanes * kWidth<Word>;
  for (int column = begin; column < end; column++) {
    for (int64_t i = 0; i < size; i += step) {
      fetcher.at_keys();
      f32x16 words[kLanes];
      load_keys<Word>(rows + column * kLanes, i, size, words);
      Word* to = out + i / kWidth<Word> * word_stride + column * column_stride;
      const int64_t num_words = all_words - i / kWidth<Word>;
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; k++)
        if (k < num_words) std::memcpy(to + k * word_stride, &words[k], sizeof words[k]);
    }
  }
}

// out[position words][number] of `all` numbers; those from `size` on are 0. `word_stride` and `column_stride` are the
// words from one position, and from sixteen numbers, to the next.
template <class Word, class T>
void pack_values(const T* const* rows, int64_t size, int begin, int end, Fetcher<T>& fetcher, Word* out, int64_t all,
                 int64_t word_stride, int64_t column_stride) {
  for (int k = begin * kLanes; k < end * kLanes; k += kWidth<Word>) {
    if (k % 2 == 0) fetcher.at_values();
    for (int64_t i = 0; i < all; i += kLanes * kWidth<Word>) {
      f32x16 words[kWidth<Word>];
      load_values<Word>(rows + k, i, size, words);
      Word* to = out + k / kWidth<Word> * word_stride + i / kLanes * column_stride;
#pragma GCC unroll 2
      for (int n = 0; n < kWidth<Word>; n++) std::memcpy(to + n * column_stride, &words[n], sizeof words[n]);
    }
  }
}

// sum[m][n] += a[m][step] * b[step][n]: each number over the steps in ascending order, in one accumulator, whatever the
// size of the block. All that is promised about equal bits rests on this.
template <class Word, int M, int N>
TF_INLINE void multiply(const Word* a, int64_t a_stride, const Word* b, int64_t b_stride, int64_t num_steps,
                        f32x16 (&sum)[M][N]) {
  for (int64_t step = 0; step < num_steps; step++) {
    f32x16 right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) right[n] = load_words(b + step * b_stride + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const f32x16 left = broadcast_word(a[m * a_stride + step]);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sum[m][n] = multiply_add(Word{}, left, right[n], sum[m][n]);
    }
  }
}

// Products of M query rows with 16 N keys, scaled, into rows of kTileKeys.
template <class Word, int M, int N>
__attribute__((noinline)) void score_block(const Word* query, int64_t num_words, const Word* keys, float scale,
                                           float* scores) {
  f32x16 sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[m][n] = f32x16{};
  multiply<Word, M, N>(query, num_words, keys, kTileKeys, num_words, sum);
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(scores + m * kTileKeys + n * kLanes, sum[m][n] * broadcast(scale));
}

// acc = acc * alpha + weights * values for M rows and 16 N numbers of the values.
template <class Word, int M, int N>
__attribute__((noinline)) void value_block(const Word* weights, const Word* values, int64_t stride, int64_t num_steps,
                                           const float* alpha, float* acc) {
  f32x16 sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[m][n] = load(acc + m * stride + n * kLanes) * broadcast(alpha[m]);
  multiply<Word, M, N>(weights, kTileKeys / kWidth<Word>, values, stride, num_steps, sum);
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(acc + m * stride + n * kLanes, sum[m][n]);
}

// Scaled products of `num_rows` query rows with the keys of columns [begin, end).
template <class Word>
void score(int num_rows, const Word* query, int64_t num_words, const Word* keys, int begin, int end, float scale,
           float* scores) {
  with_constant<1, kBlockRows>(num_rows, [&](auto rows) {
    for (int column = begin; column < end;) {
      const int columns = end - column < kBlockColumns ? end - column : kBlockColumns;
      with_constant<1, kBlockColumns>(columns, [&](auto count) {
        score_block<Word, rows(), count()>(query, num_words, keys + column * kLanes, scale, scores + column * kLanes);
      });
      column += columns;
    }
  });
}

// Adds the values of the keys of columns [begin, end), each by its weight.
template <class Word>
void add_values(int num_rows, const Word* weights, const Word* values, int64_t stride, int begin, int end,
                const float* alpha, float* acc) {
  const int64_t first = begin * kLanes / kWidth<Word>, num_steps = (end - begin) * kLanes / kWidth<Word>;
  with_constant<1, kBlockRows>(num_rows, [&](auto rows) {
    for (int64_t i = 0; i < stride;) {
      const int64_t left = (stride - i) / kLanes;
      const int columns = left < kBlockColumns ? static_cast<int>(left) : kBlockColumns;
      with_constant<1, kBlockColumns>(columns, [&](auto count) {
        value_block<Word, rows(), count()>(weights + first, values + first * stride + i, stride, num_steps, alpha,
                                           acc + i);
      });
      i += columns * kLanes;
    }
  });
}

}  // namespace transfuse::attention
