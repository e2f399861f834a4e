// The two products of attention for a few rows, as in the decoding of one request: keys and values go from memory
// through registers, and the sums are those of attention_tile.h to the bit.
#pragma once

#include "attention_tile.h"

namespace transfuse::attention {

// Where sixteen keys do not fit in the registers, what is transposed goes through memory anyway.
#if defined(__AVX512F__)
constexpr int kNarrowRows = 8;
#else
constexpr int kNarrowRows = 1;
#endif

// out[word][row] of rows of queries, `width` words from one to the next.
template <class Word>
void turn(const Word* query, int num_rows, int64_t num_words, Word* out, int width) {
  for (int r = 0; r < num_rows; r++)
    for (int64_t i = 0; i < num_words; i++) out[i * width + r] = query[r * num_words + i];
}

// Columns at a time: as many as leave registers for the words of sixteen keys, or of a step of values.
template <int M>
constexpr int kKeyColumns = M <= 4 && kBlockColumns > 1 ? 2 : 1;
template <class Word, int M>
constexpr int kValueColumns = kBlockColumns == 1 ? kWidth<Word> : M <= 4 ? 4 : 2;

// Scaled products of M rows, given word by word, with the keys of C columns from `column` on. The columns take turns,
// since each sum waits for its own last addition.
template <class Word, class T, int M, int C>
void score_columns(const Word* query, const T* const* keys, int64_t size, int column, float scale,
                   Fetcher<T>& fetcher, float* scores) {
  constexpr int64_t step = kLanes * kWidth<Word>;
  const int64_t all_words = (size + kWidth<Word> - 1) / kWidth<Word>;
  f32x16 sum[C][M];
#pragma GCC unroll 2
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sum[c][m] = f32x16{};
  for (int64_t i = 0; i < size; i += step) {
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) {
      fetcher.at_keys();
      f32x16 words[kLanes];
      load_keys<Word>(keys + (column + c) * kLanes, i, size, words);
      const Word* left = query + i / kWidth<Word> * M;
      const int64_t num_words = all_words - i / kWidth<Word>;
      if (num_words >= kLanes) {
#pragma GCC unroll 16
        for (int k = 0; k < kLanes; k++)
#pragma GCC unroll 8
          for (int m = 0; m < M; m++)
            sum[c][m] = multiply_add(Word{}, broadcast_word(left[k * M + m]), words[k], sum[c][m]);
      } else {
        for (int k = 0; k < num_words; k++)
#pragma GCC unroll 8
          for (int m = 0; m < M; m++)
            sum[c][m] = multiply_add(Word{}, broadcast_word(left[k * M + m]), words[k], sum[c][m]);
      }
    }
  }
#pragma GCC unroll 2
  for (int c = 0; c < C; c++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) store(scores + m * kTileKeys + (column + c) * kLanes, sum[c][m] * broadcast(scale));
}

// As `score`, of keys where they lie.
template <class Word, class T>
void score_narrow(int num_rows, const Word* query, const T* const* keys, int64_t size, int begin, int end,
                  float scale, Fetcher<T>& fetcher, float* scores) {
  with_constant<1, kNarrowRows>(num_rows, [&](auto rows) {
    constexpr int columns = kKeyColumns<rows()>;
    int column = begin;
    for (; column + columns <= end; column += columns)
      score_columns<Word, T, rows(), columns>(query, keys, size, column, scale, fetcher, scores);
    if (column < end) score_columns<Word, T, rows(), 1>(query, keys, size, column, scale, fetcher, scores);
  });
}

// acc = acc * alpha + weights * values for M rows and N times 16 numbers from `i` on.
template <class Word, class T, int M, int N>
void add_value_columns(const Word* weights, const T* const* values, int64_t i, int64_t size, int64_t stride, int begin,
                       int end, const float* alpha, Fetcher<T>& fetcher, float* acc) {
  constexpr int width = kWidth<Word>;
  f32x16 sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sum[m][n] = load(acc + m * stride + n * kLanes) * broadcast(alpha[m]);
  for (int k = begin * kLanes; k < end * kLanes; k += width) {
    if (i == 0 && k % 2 == 0) fetcher.at_values();
#pragma GCC unroll 4
    for (int n = 0; n < N; n += width) {
      f32x16 words[width];
      load_values<Word>(values + k, i + n * kLanes, size, words);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const f32x16 weight = broadcast_word(weights[(m * kTileKeys + k) / width]);
#pragma GCC unroll 2
        for (int w = 0; w < width; w++) sum[m][n + w] = multiply_add(Word{}, weight, words[w], sum[m][n + w]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(acc + m * stride + n * kLanes, sum[m][n]);
}

// As `add_values`, of values where they lie.
template <class Word, class T>
void add_values_narrow(int num_rows, const Word* weights, const T* const* values, int64_t size, int64_t stride,
                       int begin, int end, const float* alpha, Fetcher<T>& fetcher, float* acc) {
  with_constant<1, kNarrowRows>(num_rows, [&](auto rows) {
    constexpr int columns = kValueColumns<Word, rows()>;
    int64_t i = 0;
    for (; i + columns * kLanes <= stride; i += columns * kLanes)
      add_value_columns<Word, T, rows(), columns>(weights, values, i, size, stride, begin, end, alpha, fetcher,
                                                  acc + i);
    for (; i < stride; i += kLanes * kWidth<Word>)
      add_value_columns<Word, T, rows(), kWidth<Word>>(weights, values, i, size, stride, begin, end, alpha, fetcher,
                                                       acc + i);
  });
}

}  // namespace transfuse::attention
