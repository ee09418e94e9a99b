// Runs the CUDA source of the convolutions on a CPU: every thread of a block is a fiber, blocks come one after the other.
//
// Collective instructions wait for the whole warp, __syncthreads for the whole block; a thread that waits gives the
// turn to the next. Shared memory is exactly as large as asked for, with a guard behind it.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define EMULATED
#define DEVICE static inline
#define __global__
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct dim3 { int x, y, z; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }

struct Gate {
    int members = 0, arrived = 0, generation = 0;
};

struct Copy {
    void* to;
    const void* from;
    bool inside;
};

struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<Copy> copies;  // on their way
    bool done = false;
};

enum { FINE, OUTSIDE, MISALIGNED, NOT_WAITED_FOR };
static int problem = FINE;
static std::vector<Thread> threads;
static std::vector<Gate> warps;
static std::vector<uint32_t> given;  // eight words of every thread, for the others of its warp
static Gate block;
static ucontext_t scheduler;
static int current;
static std::function<void()> body;
static char* shared_memory;
static dim3 threadIdx, blockIdx, gridDim, blockDim;

static void give_turn() {
    swapcontext(&threads[current].context, &scheduler);
    threadIdx = {current, 0, 0};
}

static void pass(Gate& gate) {
    int generation = gate.generation;
    if (++gate.arrived == gate.members) {
        gate.arrived = 0, ++gate.generation;
        return;
    }
    while (gate.generation == generation) give_turn();
}

static void __syncthreads() { pass(block); }
static Gate& own_warp() { return warps[current / 32]; }
#define SHARED(name) uint4* name = (uint4*)shared_memory

static void start_thread() {
    body();
    if (!threads[current].copies.empty()) problem = NOT_WAITED_FOR;
    threads[current].done = true;
    swapcontext(&threads[current].context, &scheduler);
}

static int emulate(int gx, int gy, int gz, int count, int bytes, const std::function<void()>& kernel) {
    const int guard = 4096;
    std::vector<uint4> room((bytes + guard) / 16 + 1);
    problem = FINE, body = kernel, gridDim = {gx, gy, gz}, blockDim = {count, 1, 1};
    for (int z = 0; z < gz; ++z)
        for (int y = 0; y < gy; ++y)
            for (int x = 0; x < gx; ++x) {
                std::memset(room.data(), 0xff, bytes + guard);  // NaN wherever nothing was written
                shared_memory = (char*)room.data(), blockIdx = {x, y, z};
                threads.assign(count, Thread()), warps.assign((count + 31) / 32, Gate()), given.assign(count * 8, 0);
                block = Gate(), block.members = count;
                for (auto& warp : warps) warp.members = 32;
                for (int t = 0; t < count; ++t) {
                    threads[t].stack.resize(1 << 17);
                    getcontext(&threads[t].context);
                    threads[t].context.uc_stack.ss_sp = threads[t].stack.data();
                    threads[t].context.uc_stack.ss_size = threads[t].stack.size();
                    makecontext(&threads[t].context, start_thread, 0);
                }
                for (int left = count; left;)
                    for (current = 0; current < count; ++current)
                        if (!threads[current].done) {
                            threadIdx = {current, 0, 0};
                            swapcontext(&scheduler, &threads[current].context);
                            left -= threads[current].done;
                        }
                for (int at = bytes; at < bytes + guard; ++at)
                    if ((unsigned char)shared_memory[at] != 0xff) problem = OUTSIDE;
            }
    return problem;
}

// ---------------------------------------------------------------------------------------------- instructions

typedef uint32_t u32;

static float as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_bf16(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static float low(u32 both) { return as_float(both << 16); }
static float high(u32 both) { return as_float(both & 0xffff0000u); }
static u32 pack(float l, float h) { return to_bf16(l) | (u32)to_bf16(h) << 16; }
static float relu(float x) { return std::isnan(x) ? x : x > 0 ? x : 0.0f; }
static float largest(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : a > b ? a : b; }
static u32 larger(u32 a, u32 b) { return pack(largest(low(a), low(b)), largest(high(a), high(b))); }
static u32 add(u32 a, u32 b) { return pack(low(a) + low(b), high(a) + high(b)); }
static uint4 load_constant(const uint4* from) { return *from; }
static u32 address_of(const void* pointer) { return (u32)((const char*)pointer - shared_memory); }

// A copy lands as late as it may: when its thread waits for it, or at the end. Until then a reader finds NaN.
static void copy_16(void* to, const void* from, bool inside) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) problem = MISALIGNED;
    std::memset(to, 0xff, 16);
    threads[current].copies.push_back({to, from, inside});
}

static void copies_done() {
    for (const Copy& copy : threads[current].copies) {
        if (copy.inside) std::memcpy(copy.to, copy.from, 16);
        else std::memset(copy.to, 0, 16);
    }
    threads[current].copies.clear();
}

static u32 permute(u32 a, u32 selector) {
    u32 result = 0;
    for (int n = 0; n < 4; ++n) {
        int chosen = selector >> (4 * n) & 15, at = chosen & 7;
        u32 byte = at < 4 ? a >> (8 * at) & 255 : 0;
        if (chosen & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * n);
    }
    return result;
}

static void exchange(const u32* mine, int count) {
    pass(own_warp());
    std::memcpy(&given[current * 8], mine, 4 * count);
    pass(own_warp());
}

static uint16_t element(int lane, int row) {
    uint16_t value;
    u32 address = given[(current / 32 * 32 + lane) * 8];
    if (address % 16) problem = MISALIGNED;
    std::memcpy(&value, shared_memory + address + row * 2, 2);
    return value;
}

static void load_matrices(u32 (&r)[4], u32 address) {
    exchange(&address, 1);
    int lane = current % 32;
    for (int m = 0; m < 4; ++m)
        r[m] = element(m * 8 + lane / 4, lane % 4 * 2) | (u32)element(m * 8 + lane / 4, lane % 4 * 2 + 1) << 16;
}

static void load_transposed(u32 (&r)[4], u32 address) {
    exchange(&address, 1);
    int lane = current % 32;
    for (int m = 0; m < 4; ++m)
        r[m] = element(m * 8 + lane % 4 * 2, lane / 4) | (u32)element(m * 8 + lane % 4 * 2 + 1, lane / 4) << 16;
}

static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    exchange(mine, 6);
    int lane = current % 32;
    const u32* warp = &given[current / 32 * 32 * 8];
    for (int n = 0; n < 4; ++n) {
        int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
        for (int k = 0; k < 16; ++k) {
            u32 left = warp[(row % 8 * 4 + k % 8 / 2) * 8 + row / 8 + k / 8 * 2];
            u32 right = warp[(column * 4 + k % 8 / 2) * 8 + 4 + k / 8];
            d[n] += (k % 2 ? high(left) : low(left)) * (k % 2 ? high(right) : low(right));
        }
    }
}
