// SPDX-License-Identifier: BSD-3-Clause
// What stands behind the launchers: launch.cpp with CUDA, or the emulator of the tests.
#pragma once
#include <cstdint>
#include <string>

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// Launch kernel `symbol` with one parameter struct. `shared_bytes` is dynamic shared memory; above 48 KB the launch
// raises the kernel's limit itself. Asynchronous; throws std::runtime_error when the launch is refused.
void launch_raw(const std::string& symbol, Dim3 grid, unsigned threads, unsigned shared_bytes, uintptr_t stream,
                void* params);

// What build_info() tells, as JSON.
extern const char build_info_json[];
