// SPDX-License-Identifier: BSD-3-Clause
// Finds a kernel in the embedded images, loads its image on first use, launches it.
// The CUDA runtime is linked statically and opens the driver itself, so this imports on a machine without one.
#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "backend.h"
#include "embedded.h"

namespace {

constexpr int MAX_DEVICES = 64;
constexpr unsigned FREE_SHARED_BYTES = 48 * 1024;  // dynamic shared memory that needs no opt-in

struct Kernel {
    int image = 0;
    std::atomic<cudaKernel_t> handle{nullptr};
    std::atomic<unsigned> shared_limit[MAX_DEVICES] = {};  // what the opt-in stands at, per device; 0: not asked yet
};

[[noreturn]] void fail(const std::string& symbol, const char* doing, cudaError_t error, const std::string& with = "") {
    std::string message = symbol + ": " + doing + with + ": " + cudaGetErrorString(error) + " (CUDA error " +
                          std::to_string((int)error) + ")";
    if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice)
        message += ". There is no NVIDIA GPU with a driver for CUDA 12 here; superl8 doctor says more";
    if (error == cudaErrorNoKernelImageForDevice)
        message += ". The package was built for other cards; rebuild it with this one in SUPERL8_ARCHS";
    throw std::runtime_error(message);
}

void check(const std::string& symbol, const char* doing, cudaError_t error) {
    if (error != cudaSuccess) fail(symbol, doing, error);
}

// Loading and attributes are allowed while this thread captures a CUDA graph as long as the mode is relaxed.
class RelaxedCapture {
public:
    RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Filled once; its entries change through atomics only, so that look-ups need no lock.
std::unordered_map<std::string, Kernel>& kernels() {
    static auto* const table = [] {
        auto* made = new std::unordered_map<std::string, Kernel>();
        for (int i = 0; i < num_embedded_kernels; i++)
            (*made)[embedded_kernels[i].symbol].image = embedded_kernels[i].image;
        return made;
    }();
    return *table;
}

std::mutex& slow_path() {
    static std::mutex mutex;
    return mutex;
}

cudaKernel_t load(const std::string& symbol, Kernel& kernel) {
    static auto* const libraries = new std::unordered_map<int, cudaLibrary_t>();
    const std::lock_guard<std::mutex> lock(slow_path());
    if (cudaKernel_t handle = kernel.handle.load()) return handle;
    const RelaxedCapture relaxed;
    cudaLibrary_t& library = (*libraries)[kernel.image];
    if (!library)
        check(symbol, "loading its image",
              cudaLibraryLoadData(&library, embedded_images[kernel.image].data, nullptr, nullptr, 0, nullptr, nullptr,
                                  0));
    cudaKernel_t handle;
    check(symbol, "looking it up", cudaLibraryGetKernel(&handle, library, symbol.c_str()));
    cudaFuncAttributes attributes;  // asking for them makes the driver load the code now
    check(symbol, "loading its code", cudaFuncGetAttributes(&attributes, (const void*)handle));
    kernel.handle.store(handle);
    return handle;
}

void allow_shared_bytes(const std::string& symbol, Kernel& kernel, cudaKernel_t handle, unsigned shared_bytes) {
    int device;
    check(symbol, "asking for the device", cudaGetDevice(&device));
    if (device < MAX_DEVICES && kernel.shared_limit[device].load() >= shared_bytes) return;
    const std::lock_guard<std::mutex> lock(slow_path());
    const RelaxedCapture relaxed;
    const cudaError_t error =
        cudaKernelSetAttributeForDevice(handle, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes, device);
    if (error != cudaSuccess)
        fail(symbol, "asking for ", error, std::to_string(shared_bytes) + " bytes of shared memory");
    if (device < MAX_DEVICES) kernel.shared_limit[device].store(shared_bytes);
}

}  // namespace

void launch_raw(const std::string& symbol, Dim3 grid, unsigned threads, unsigned shared_bytes, uintptr_t stream,
                void* params) {
    const auto found = kernels().find(symbol);
    if (found == kernels().end()) throw std::runtime_error("launch: there is no kernel " + symbol + " in this build");
    Kernel& kernel = found->second;
    cudaKernel_t handle = kernel.handle.load(std::memory_order_acquire);
    if (!handle) handle = load(symbol, kernel);
    if (shared_bytes > FREE_SHARED_BYTES) allow_shared_bytes(symbol, kernel, handle, shared_bytes);
    void* arguments[] = {params};
    const cudaError_t error = cudaLaunchKernel((const void*)handle, dim3(grid.x, grid.y, grid.z), dim3(threads),
                                               arguments, shared_bytes, (cudaStream_t)stream);
    if (error != cudaSuccess)
        fail(symbol, "launch of ", error,
             std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " + std::to_string(grid.z) + " blocks, " +
                 std::to_string(threads) + " threads, " + std::to_string(shared_bytes) + " bytes of shared memory");
}
