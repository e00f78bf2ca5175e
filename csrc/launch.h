// SPDX-License-Identifier: BSD-3-Clause
// Host side of every kernel: argument checks, launch by name. No torch header, no CUDA header (see launch.cpp).
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "backend.h"

namespace py = pybind11;

// Raise ValueError with a printf-style message unless the condition holds.
#define CHECK(condition, ...)                                 \
    do {                                                      \
        if (!(condition)) {                                   \
            char message_[512];                               \
            snprintf(message_, sizeof message_, __VA_ARGS__); \
            throw py::value_error(message_);                  \
        }                                                     \
    } while (0)

using Binder = void (*)(py::module_&);
inline std::vector<Binder>& binders() {
    static std::vector<Binder> list;
    return list;
}

// Make a launcher callable from Python under its own name.
#define REGISTER(launcher)                                                        \
    static const bool registered_##launcher = [] {                                \
        binders().push_back([](py::module_& m) { m.def(#launcher, &launcher); }); \
        return true;                                                              \
    }();

template <class Params>
void launch(const std::string& symbol, Dim3 grid, unsigned threads, unsigned shared_bytes, uintptr_t stream,
            Params params) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;  // nothing to do: CUDA refuses empty grids
    launch_raw(symbol, grid, threads, shared_bytes, stream, &params);
}
