// SPDX-License-Identifier: BSD-3-Clause
// Takes the place of csrc/launch.cpp: runs a grid on the CPU, block after block, with a fiber for each thread.
//
// A thread runs until it waits (barrier, shuffle, vote) or ends. A wait of a warp is over when all lanes of its mask
// wait at the same place of the source; a wait of the block, when all its threads do. When nothing can go on, the
// launch throws and says where each thread stands. The order in which threads are resumed changes from block to block
// and launch to launch (forward, reverse, three shuffles) so that a result that depends on it does not stay the same.
// Shared memory is filled with 0xFF (NaN, -1) before each block.
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend.h"
#include "fiber.h"
// Last: its qualifiers are macros that the standard headers must not see.
#include "cuda_emulator.h"

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

char* dynamic_shared;

namespace {

constexpr unsigned WARP_LANES = 32;
constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned MAX_SHARED_BYTES = 96 * 1024;  // of sm_70, dynamic with opt-in
constexpr size_t CANARY_BYTES = 64;
constexpr unsigned char POISON = 0xFF, CANARY = 0xA5;
constexpr const char* WAIT_NAMES[] = {"__syncthreads",   "__syncthreads_count", "__syncthreads_and", "__syncthreads_or",
                                      "__syncwarp",      "__shfl_sync",         "__shfl_up_sync",    "__shfl_down_sync",
                                      "__shfl_xor_sync", "__ballot_sync",       "__any_sync",        "__all_sync",
                                      "__match_any_sync"};

enum State { READY, WAITS_WARP, WAITS_BLOCK, ENDED };

struct Thread {
    Fiber fiber;
    State state;
    bool fresh;  // not started in this block yet
    Wait kind;
    Place place;
    unsigned mask;
    int argument, width;
    uint64_t bits;    // given
    uint64_t result;  // got
};

// Static shared memory of one source file, as offsets in this library; set by the builder, which reads the symbols.
struct SharedVariable {
    uint64_t offset, bytes;
};

Fiber scheduler;
std::vector<std::unique_ptr<Thread>> pool;  // of fibers, grown as needed, kept between launches
unsigned num_threads;
Thread* running;
std::string failure;  // of the running launch
void (*kernel)(const void*);
const void* kernel_params;
std::string kernel_name;
uint64_t launches;
int forced_order = -1;  // -1: changes; else as in Order
std::mt19937 shuffler;
std::vector<SharedVariable> shared_variables;

enum Order { FORWARD, REVERSE, SHUFFLED };

unsigned index_of(const Thread* thread) {
    for (unsigned i = 0; i < num_threads; i++)
        if (pool[i].get() == thread) return i;
    return 0;
}

std::string where() {
    return kernel_name + ": block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
           std::to_string(blockIdx.z) + ")";
}

void stop(const std::string& message) {
    if (failure.empty()) failure = message;
}

bool same_place(const Place& a, const Place& b) {
    return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

std::string describe(const Thread& t) {
    if (t.state == ENDED) return "has ended";
    const char* slash = strrchr(t.place.file, '/');
    return std::string("waits at ") + WAIT_NAMES[t.kind] + " in " + (slash ? slash + 1 : t.place.file) + ":" +
           std::to_string(t.place.line);
}

void thread_entry() {
    running->fiber.arrived(scheduler);
    kernel(kernel_params);
    running->state = ENDED;
    Fiber::switch_to(running->fiber, scheduler, true);
}

void resume(unsigned index) {
    Thread& t = *pool[index];
    running = &t;
    threadIdx.x = index;
    if (t.fresh) {
        t.fresh = false;
        t.fiber.prepare(thread_entry);
    }
    Fiber::switch_to(scheduler, t.fiber);
    running = nullptr;
}

void suspend(State state) {
    Thread& t = *running;
    t.state = state;
    Fiber::switch_to(t.fiber, scheduler);
}

// Gives every lane of `mask` in the warp at `first` its result.
void finish_warp_wait(unsigned first, unsigned mask) {
    const Wait kind = pool[first + (unsigned)__builtin_ctz(mask)]->kind;
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < WARP_LANES; lane++)
        if (mask >> lane & 1u && pool[first + lane]->bits) ballot |= 1u << lane;
    for (unsigned lane = 0; lane < WARP_LANES; lane++) {
        if (!(mask >> lane & 1u)) continue;
        Thread& t = *pool[first + lane];
        t.state = READY;
        const int width = t.width, own = (int)lane, segment = own & ~(width - 1);
        int source = own;
        switch (kind) {
            case SHUFFLE:
                source = segment + (t.argument & (width - 1));
                break;
            case SHUFFLE_UP:
                source = own - t.argument < segment ? own : own - t.argument;
                break;
            case SHUFFLE_DOWN:
                source = own + t.argument >= segment + width ? own : own + t.argument;
                break;
            case SHUFFLE_XOR:
                source = (own ^ t.argument) >= segment + width ? own : own ^ t.argument;
                break;
            case BALLOT:
                t.result = ballot;
                continue;
            case ANY:
                t.result = ballot != 0;
                continue;
            case ALL:
                t.result = ballot == mask;
                continue;
            case MATCH_ANY:
                t.result = 0;
                for (unsigned other = 0; other < WARP_LANES; other++)
                    if (mask >> other & 1u && pool[first + other]->bits == t.bits) t.result |= 1u << other;
                continue;
            default:
                continue;
        }
        if (!(mask >> source & 1u)) {
            stop(where() + ", thread " + std::to_string(first + lane) + ": " + WAIT_NAMES[kind] + " reads lane " +
                 std::to_string(source) + ", which is not in its mask");
            return;
        }
        t.result = pool[first + (unsigned)source]->bits;
    }
}

// Ends the waits of the warp at `first` that are complete. Returns whether any was.
bool finish_warp_waits(unsigned first, unsigned lanes) {
    bool any = false;
    unsigned looked_at = 0;
    for (unsigned lane = 0; lane < lanes; lane++) {
        const Thread& t = *pool[first + lane];
        if (looked_at >> lane & 1u || t.state != WAITS_WARP) continue;
        bool complete = true;
        for (unsigned other = 0; other < WARP_LANES; other++) {
            if (!(t.mask >> other & 1u)) continue;
            looked_at |= 1u << other;
            const Thread* peer = other < lanes ? pool[first + other].get() : nullptr;
            complete = complete && peer && peer->state == WAITS_WARP && peer->kind == t.kind && peer->mask == t.mask &&
                       same_place(peer->place, t.place);
        }
        if (!complete) continue;
        finish_warp_wait(first, t.mask);
        any = true;
    }
    return any;
}

void order_of(Order order, std::vector<unsigned>& list) {
    std::iota(list.begin(), list.end(), 0u);
    if (order == REVERSE) std::reverse(list.begin(), list.end());
    if (order == SHUFFLED) std::shuffle(list.begin(), list.end(), shuffler);
}

// Runs a warp until all its threads have ended or wait for the block, or for lanes that do not come.
void run_warp(unsigned first, unsigned lanes, const std::vector<unsigned>& lane_order) {
    do {
        for (const unsigned lane : lane_order) {
            if (lane >= lanes) continue;
            if (pool[first + lane]->state == READY) resume(first + lane);
            if (!failure.empty()) return;
        }
    } while (finish_warp_waits(first, lanes) && failure.empty());
}

// Ends the block's wait, or stops the launch if not every thread is there.
void finish_block_wait() {
    const Thread* waiting = nullptr;
    for (unsigned i = 0; i < num_threads && !waiting; i++)
        if (pool[i]->state != ENDED) waiting = pool[i].get();
    for (unsigned i = 0; i < num_threads; i++) {
        const Thread& t = *pool[i];
        if (t.state == WAITS_BLOCK && t.kind == waiting->kind && same_place(t.place, waiting->place)) continue;
        if (t.state == WAITS_WARP && t.mask != 0) {  // the likelier culprit is the lane that is missing
            const unsigned first = i / WARP_LANES * WARP_LANES;
            for (unsigned lane = 0; lane < WARP_LANES; lane++) {
                const unsigned other = first + lane;
                if (!(t.mask >> lane & 1u) || (other < num_threads && pool[other]->state == WAITS_WARP &&
                                               pool[other]->kind == t.kind && same_place(pool[other]->place, t.place)))
                    continue;
                return stop(where() + ": thread " + std::to_string(i) + " " + describe(t) + ", thread " +
                            std::to_string(other) + " of its mask " +
                            (other < num_threads ? describe(*pool[other]) : "does not exist"));
            }
        }
        return stop(where() + ": thread " + std::to_string(index_of(waiting)) + " " + describe(*waiting) + ", thread " +
                    std::to_string(i) + " " + describe(t));
    }
    int count = 0;
    for (unsigned i = 0; i < num_threads; i++) count += pool[i]->bits != 0;
    for (unsigned i = 0; i < num_threads; i++) {
        Thread& t = *pool[i];
        t.state = READY;
        t.result = (uint64_t)(t.kind == SYNCTHREADS_COUNT ? count
                              : t.kind == SYNCTHREADS_AND ? count == (int)num_threads
                                                          : count > 0);
    }
}

__attribute__((no_sanitize("address"))) void poison_shared(size_t dynamic_bytes) {
    static const auto base = [] {
        Dl_info info;
        dladdr((void*)&poison_shared, &info);
        return (char*)info.dli_fbase;
    }();
    for (const SharedVariable& variable : shared_variables)
        for (uint64_t i = 0; i < variable.bytes; i++) ((volatile unsigned char*)(base + variable.offset))[i] = POISON;
    memset(dynamic_shared, POISON, dynamic_bytes);
}

void run_block(Order order) {
    for (unsigned i = 0; i < num_threads; i++) pool[i]->state = READY, pool[i]->fresh = true;
    const unsigned num_warps = (num_threads + WARP_LANES - 1) / WARP_LANES;
    std::vector<unsigned> warps(num_warps), lanes(WARP_LANES);
    order_of(order, lanes);
    for (;;) {
        order_of(order, warps);
        for (const unsigned warp : warps) {
            if (order == SHUFFLED) order_of(order, lanes);
            run_warp(warp * WARP_LANES, std::min(WARP_LANES, num_threads - warp * WARP_LANES), lanes);
            if (!failure.empty()) return;
        }
        bool all_ended = true;
        for (unsigned i = 0; i < num_threads; i++) all_ended = all_ended && pool[i]->state == ENDED;
        if (all_ended) return;
        finish_block_wait();
        if (!failure.empty()) return;
    }
}

void* symbol_address(const std::string& name) {
    static void* const self = [] {
        Dl_info info;
        dladdr((void*)&symbol_address, &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    return dlsym(self, name.c_str());
}

void check_limits(const char* what, uint64_t value, uint64_t limit) {
    if (value < 1 || value > limit)
        throw std::runtime_error(kernel_name + ": launch with " + what + " = " + std::to_string(value) +
                                 ", wanted 1 to " + std::to_string(limit));
}

}  // namespace

int wait_block(Wait kind, int predicate, Place place) {
    Thread& t = *running;
    t.kind = kind, t.place = place, t.bits = predicate != 0;
    suspend(WAITS_BLOCK);
    return (int)t.result;
}

uint64_t wait_warp(Wait kind, unsigned mask, uint64_t bits, int argument, int width, Place place) {
    Thread& t = *running;
    t.kind = kind, t.place = place;
    if (!(mask >> (threadIdx.x % WARP_LANES) & 1u))
        fail("%s with mask %08x, which leaves out this lane", WAIT_NAMES[kind], mask);
    if (width < 1 || width > 32 || (width & (width - 1)))
        fail("%s with width %d, no power of two up to 32", WAIT_NAMES[kind], width);
    t.mask = mask, t.bits = bits, t.argument = argument, t.width = width;
    suspend(WAITS_WARP);
    return t.result;
}

void fail(const char* format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    stop(where() + ", thread " + std::to_string(threadIdx.x) + ": " + message);
    Fiber::switch_to(running->fiber, scheduler, true);
    abort();  // a thread that failed is not resumed
}

}  // namespace emulator

void launch_raw(const std::string& symbol, Dim3 grid, unsigned threads, unsigned shared_bytes, uintptr_t,
                void* params) {
    using namespace emulator;
    kernel_name = symbol;
    kernel = (void (*)(const void*))symbol_address(symbol);
    if (!kernel) throw std::runtime_error("launch: there is no kernel " + symbol + " in this build");
    const auto* most = (const int*)symbol_address(symbol + "_max_threads");
    check_limits("threads a block", threads, most ? (unsigned)*most : MAX_THREADS);
    check_limits("bytes of shared memory + 1", shared_bytes + 1ull, MAX_SHARED_BYTES + 1ull);
    check_limits("grid.x", grid.x, 2147483647);
    check_limits("grid.y", grid.y, 65535);
    check_limits("grid.z", grid.z, 65535);

    kernel_params = params;
    num_threads = threads;
    while (pool.size() < threads) pool.push_back(std::make_unique<Thread>());
    // Exactly the bytes asked for, so that AddressSanitizer sees an overrun; without it a canary shows one.
    const size_t canary_bytes = FIBER_ASAN ? 0 : CANARY_BYTES;
    void* memory = nullptr;
    if (posix_memalign(&memory, 16, shared_bytes + canary_bytes)) throw std::bad_alloc();
    const std::unique_ptr<void, void (*)(void*)> owner(memory, free);
    dynamic_shared = (char*)memory;
    memset(dynamic_shared + shared_bytes, CANARY, canary_bytes);

    failure.clear();
    gridDim = {grid.x, grid.y, grid.z}, blockDim = {threads, 1, 1}, threadIdx = {0, 0, 0};
    uint64_t turn = launches++;
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
                poison_shared(shared_bytes);
                run_block(forced_order >= 0 ? (Order)forced_order : (Order)(turn++ % 3));
                for (size_t i = 0; i < canary_bytes && failure.empty(); i++)
                    if ((unsigned char)dynamic_shared[shared_bytes + i] != CANARY)
                        stop(where() + ": wrote beyond its " + std::to_string(shared_bytes) +
                             " bytes of dynamic shared memory");
                if (!failure.empty()) throw std::runtime_error(failure);
            }
}

// Called by the builder in Python through ctypes.
#define EXPORT extern "C" __attribute__((visibility("default")))

// order: -1 changes with every block, 0 forward, 1 reverse, 2 shuffled by `seed`. The count of launches starts anew.
EXPORT void emulator_set_order(int order, unsigned seed) {
    emulator::forced_order = order;
    emulator::launches = seed;
    emulator::shuffler.seed(seed);
}

// Launches a kernel that has no launcher. Returns null, or the error's text until the next call.
EXPORT const char* emulator_launch(const char* symbol, const unsigned* grid, unsigned threads, unsigned shared_bytes,
                                   void* params) {
    static std::string error;
    try {
        launch_raw(symbol, Dim3{grid[0], grid[1], grid[2]}, threads, shared_bytes, 0, params);
        return nullptr;
    } catch (const std::exception& raised) {
        error = raised.what();
        return error.c_str();
    }
}

EXPORT void emulator_set_shared(int count, const uint64_t* offsets, const uint64_t* bytes) {
    emulator::shared_variables.clear();
    for (int i = 0; i < count; i++) emulator::shared_variables.push_back({offsets[i], bytes[i]});
}

const char build_info_json[] = "{\"archs\": [\"emulator\"]}";
