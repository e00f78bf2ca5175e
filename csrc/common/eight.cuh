// SPDX-License-Identifier: BSD-3-Clause
// Eight neighbouring elements of a row as floats: one 16-byte access for 16-bit types where the row allows it.
// `wide` says so: rows start on 16 bytes and hold a multiple of eight elements. Else elements go one by one, and those
// beyond the row's `n` are read as zeros and not written.
#pragma once
#include "common/device.cuh"

constexpr int EIGHT = 8;

#ifdef DEVICE_HALF
struct Eight {
    float v[EIGHT];
};

template <class T>
struct alignas(16) Chunk {
    static constexpr int SIZE = 16 / sizeof(T);
    T v[SIZE];
};

// Elements `column` (a multiple of eight) on.
template <class T>
__device__ __forceinline__ Eight load_eight(const T* row, int column, int n, bool wide) {
    Eight x;
    if (wide) {
        constexpr int SIZE = Chunk<T>::SIZE;
#pragma unroll
        for (int c = 0; c < EIGHT / SIZE; c++) {
            const Chunk<T> chunk = ((const Chunk<T>*)(row + column))[c];
#pragma unroll
            for (int i = 0; i < SIZE; i++) x.v[c * SIZE + i] = to_float(chunk.v[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < EIGHT; i++) x.v[i] = column + i < n ? to_float(row[column + i]) : 0.f;
    }
    return x;
}

template <class T>
__device__ __forceinline__ void store_eight(T* row, int column, int n, bool wide, const Eight& x) {
    if (wide) {
        constexpr int SIZE = Chunk<T>::SIZE;
#pragma unroll
        for (int c = 0; c < EIGHT / SIZE; c++) {
            Chunk<T> chunk;
#pragma unroll
            for (int i = 0; i < SIZE; i++) chunk.v[i] = from_float<T>(x.v[c * SIZE + i]);
            ((Chunk<T>*)(row + column))[c] = chunk;
        }
    } else {
#pragma unroll
        for (int i = 0; i < EIGHT; i++)
            if (column + i < n) row[column + i] = from_float<T>(x.v[i]);
    }
}
#endif
