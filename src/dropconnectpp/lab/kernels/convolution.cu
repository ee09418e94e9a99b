// Convolutions of a stack of replicas on tensor cores: forward with bias, ReLU and pool, and both gradients.
//
// One file, compiled once for each layer and purpose. `convolution_launch.py` sets these names:
//   SIDE INPUTS OUTPUTS FILTER   the convolution: maps in, maps out, side of both maps, side of the filter
//   POOL STRIDE POOLED           the pool: size, stride, side after it; POOL 0 is none, and POOLED is SIDE then
//   BAND                         rows of the result that one block makes
//   IMAGES WARPS RESIDENT        images and warps of a block, blocks that should fit a multiprocessor
//   HEIGHT                       tile rows of a warp
//   TURNS GROUP                  images that a block takes one after the other, forward and for the filters
// and one of the purposes
//   FORWARD INPUT_GRADIENT FILTER_GRADIENT FIRST_FORWARD FIRST_GRADIENT ARRANGE REDUCE.
//
// Maps are bf16, (R, B, side, side, maps). A tile is 16 neighbouring pixels: the rows of a product's left matrix, 16
// of a line, or 8 of two lines where a line is short. Products are m16n8k16 with float32 sums. A fragment of pixels
// that was loaded for one row of the filter serves the others too, for the tiles above it.
//
// No result depends on how many replicas there are or which block came first: sums have a fixed order.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define CEIL(a, b) (((a) + (b) - 1) / (b))
#define LINE (CEIL(SIDE, 8) * 8 % 16 == 0 ? 16 : 8)      // pixels of a tile along a line
#define LINES (16 / LINE)                                 // lines of a tile
#define STRIPS CEIL(SIDE, LINE)                           // tiles side by side
#define ACROSS (STRIPS * LINE)                            // pixels of a line of tiles
#define MARGIN (FILTER / 2)                               // zeros around the map
#define WIDE (ACROSS + FILTER - 1)
#define NONE 15                                           // the place in a window that says: ReLU let nothing through
#define THREADS (WARPS * 32)
#define OUTPUT_PARTS (OUTPUTS / 32)

// ------------------------------------------------------------------------------------------ instructions

#ifndef EMULATED
#define DEVICE __device__ __forceinline__

DEVICE u32 address_of(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

DEVICE void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void copy_16(void* to, const void* from, bool inside) {  // zeros where not inside
    int bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address_of(to)), "l"(from), "r"(bytes));
}

DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

DEVICE u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

DEVICE float relu(float x) {  // NaN stays
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE u32 larger(u32 a, u32 b) {
    u32 c;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

DEVICE u32 add(u32 a, u32 b) {  // a 1 + b: older cards have no plain sum of bf16
    u32 c;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return c;
}

DEVICE u32 permute(u32 a, u32 selector) {  // bytes 4 to 7 are zero; 8 and more is the sign of byte n - 8
    u32 b;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(b) : "r"(a), "r"(selector));
    return b;
}

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }

#define SHARED(name) extern __shared__ uint4 name[]

DEVICE uint4 load_constant(const uint4* from) { return __ldg(from); }
#endif

// Which halves differ, as masks; both are bf16 and not negative.
DEVICE u32 differing_halves(u32 a, u32 b) { return permute((a ^ b) + 0x7fff7fffu, 0xbb99); }

// Four places against one: the channels' values where they agree, added to the sums.
DEVICE void add_chosen(u32 (&sums)[2], u32 places, u32 place, u32 low, u32 high) {
    u32 differs = (places ^ (place * 0x01010101u)) + 0x7f7f7f7fu;
    sums[0] = add(sums[0], low & ~permute(differs, 0x9988));
    sums[1] = add(sums[1], high & ~permute(differs, 0xbbaa));
}

// ------------------------------------------------------------------------- the gradient of the maps that come out

#define REACH CEIL(POOL, STRIDE)  // windows a side that can hold a pixel

#if POOLED * POOLED % 8 == 0
#define TOGETHER 8  // pixels of a planar map that are read or written at once
#else
#define TOGETHER 1
#endif
#define PLANAR_STAGED (TOGETHER == 8 && SIDE * SIDE <= 128)

DEVICE void copy_some(u16 (&to)[TOGETHER], const u16* from) {
#if TOGETHER == 8
    uint4 all = *(const uint4*)from;
    u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int n = 0; n < 8; ++n) to[n] = (u16)(words[n / 2] >> (n % 2 * 16));
#else
    to[0] = from[0];
#endif
}

// What a tile of `tall` lines from line `top` on needs of one image's gradient, copied to shared memory as it is:
// `channels` of `all`, from channel `skipped` on. With a pool that is lines of the pooled gradient and the places in
// their windows; without one the gradient and what came out, both planar, (maps, side, side). Planar maps that are large
// or do not come in pieces of 16 bytes are not copied: `spread_gradient` reads them where they are.
template <int tall>
constexpr int lines_staged = (tall - 1) / STRIDE + REACH + 1 < POOLED ? (tall - 1) / STRIDE + REACH + 1 : POOLED;
template <int tall, int channels>
constexpr int numbers_staged = POOL ? lines_staged<tall> * POOLED * channels / 2 * 3 : PLANAR_STAGED ? channels * SIDE * SIDE * 2 : 0;

DEVICE int first_line(int top) {
    int line = (top > 0 ? top : 0) / STRIDE - (REACH - 1);
    return line > 0 ? line : 0;
}

template <int tall, int channels>
DEVICE void stage_gradient(u16* staged, const u16* gradient, const void* side_input, i64 image, int all, int skipped,
                           int top, bool inside) {
#if POOL
    const int line0 = first_line(top);
    const i64 begin = (image * POOLED + line0) * POOLED * all + skipped;
    const int pixels = lines_staged<tall> * POOLED;
    for (int at = threadIdx.x; at < pixels * (channels / 8); at += THREADS) {
        int chunk = at % (channels / 8) * 8, pixel = at / (channels / 8);
        bool within = inside && line0 + pixel / POOLED < POOLED;
        copy_16(staged + pixel * channels + chunk, gradient + (within ? begin + (i64)pixel * all + chunk : 0), within);
    }
    u8* places = (u8*)(staged + pixels * channels);
    for (int at = threadIdx.x; at < pixels * (channels / 16); at += THREADS) {
        int chunk = at % (channels / 16) * 16, pixel = at / (channels / 16);
        bool within = inside && line0 + pixel / POOLED < POOLED;
        copy_16(places + pixel * channels + chunk, (const u8*)side_input + (within ? begin + (i64)pixel * all + chunk : 0), within);
    }
#elif PLANAR_STAGED
    const i64 begin = inside ? (image * all + skipped) * (SIDE * SIDE) : 0;
    for (int at = threadIdx.x; at < channels * SIDE * SIDE / 8; at += THREADS) {
        copy_16(staged + at * 8, gradient + begin + at * 8, inside);
        copy_16(staged + channels * SIDE * SIDE + at * 8, (const u16*)side_input + begin + at * 8, inside);
    }
#endif
}

// The gradient before pool and ReLU, from what `stage_gradient` copied, into a tile [tall][wide][spacing] that begins at
// (top, left) of the map; zeros outside the map.
template <int tall, int wide, int spacing, int channels>
DEVICE void spread_gradient(u16* tile, const u16* staged, const u16* gradient, const void* side_input, i64 image,
                            int all, int skipped, int top, int left, bool inside) {
#if POOL
    // STRIDE x STRIDE pixels share their windows: each window is read once for all of them.
    const int line0 = first_line(top), blocks = CEIL(wide, STRIDE) + 1;
    const u8* places = (const u8*)(staged + lines_staged<tall> * POOLED * channels);
    const int row0 = (top + 4 * STRIDE) / STRIDE - 4, column0 = (left + 4 * STRIDE) / STRIDE - 4;  // rounded down
    for (int at = threadIdx.x; at < (CEIL(tall, STRIDE) + 1) * blocks * (channels / 8); at += THREADS) {
        int chunk = at % (channels / 8) * 8, block = at / (channels / 8);
        int row = row0 + block / blocks, column = column0 + block % blocks;
        u32 sums[STRIDE][STRIDE][2][2] = {};
#pragma unroll
        for (int a = 0; a < REACH; ++a)
#pragma unroll
            for (int b = 0; b < REACH; ++b) {
                bool within = inside && row >= a && row - a < POOLED && column >= b && column - b < POOLED;
                within = within && row - a >= line0 && row - a < line0 + lines_staged<tall>;
                int offset = within ? ((row - a - line0) * POOLED + column - b) * channels + chunk : 0;
                uint4 value = *(const uint4*)(staged + offset);
                uint2 chosen = *(const uint2*)(places + offset);
                if (!within) value = make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int y = 0; y < STRIDE; ++y)
#pragma unroll
                    for (int x = 0; x < STRIDE; ++x) {
                        if (y + a * STRIDE >= POOL || x + b * STRIDE >= POOL) continue;
                        int place = (y + a * STRIDE) * POOL + x + b * STRIDE;
                        add_chosen(sums[y][x][0], chosen.x, place, value.x, value.y);
                        add_chosen(sums[y][x][1], chosen.y, place, value.z, value.w);
                    }
            }
#pragma unroll
        for (int y = 0; y < STRIDE; ++y)
#pragma unroll
            for (int x = 0; x < STRIDE; ++x) {
                int line = row * STRIDE + y - top, pixel = column * STRIDE + x - left;
                if (line < 0 || line >= tall || pixel < 0 || pixel >= wide) continue;
                u32(&sum)[2][2] = sums[y][x];
                *(uint4*)(tile + (line * wide + pixel) * spacing + chunk) = make_uint4(sum[0][0], sum[0][1], sum[1][0], sum[1][1]);
            }
    }
#else
    for (int at = threadIdx.x; at < tall * wide * (channels / 8); at += THREADS) {
        int chunk = at % (channels / 8) * 8, pixel = at / (channels / 8), y = top + pixel / wide, x = left + pixel % wide;
        if (!inside || y < 0 || y >= SIDE || x < 0 || x >= SIDE) *(uint4*)(tile + pixel * spacing + chunk) = make_uint4(0, 0, 0, 0);
    }
    if (!inside) return;
    const i64 planes = (image * all + skipped) * (SIDE * SIDE);
    const u16* values = PLANAR_STAGED ? staged : gradient + planes;
    const u16* outputs = PLANAR_STAGED ? staged + channels * SIDE * SIDE : (const u16*)side_input + planes;
    for (int at = threadIdx.x; at < channels * (SIDE * SIDE / TOGETHER); at += THREADS) {
        int first = at % (SIDE * SIDE / TOGETHER) * TOGETHER, channel = at / (SIDE * SIDE / TOGETHER);
        u16 value[TOGETHER], output[TOGETHER];
        copy_some(value, values + channel * (SIDE * SIDE) + first);
        copy_some(output, outputs + channel * (SIDE * SIDE) + first);
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
            int y = (first + n) / SIDE - top, x = (first + n) % SIDE - left;
            if (y >= 0 && y < tall && x >= 0 && x < wide)
                tile[(y * wide + x) * spacing + channel] = output[n] ? value[n] : (u16)0;
        }
    }
#endif
}

// -------------------------------------------------------------------------------- from a tile of results to memory

#define SPACED 40  // of 32 channels: eight neighbours of a tile then lie in different banks
#ifdef INPUT_GRADIENT
#define RESULT_ROWS BAND
#define BANDS CEIL(SIDE, BAND)
#else
#define WANTED (POOL ? (BAND - 1) * STRIDE + POOL : BAND)
#define RESULT_ROWS (WANTED < SIDE ? WANTED : SIDE)  // a window may reach over the edge
#define BANDS CEIL(POOLED, BAND)
#endif
#define GROUPS CEIL(CEIL(RESULT_ROWS, LINES), HEIGHT)
#define TALL (GROUPS * HEIGHT * LINES)                     // lines of results that the tiles of a block make
#define JOBS (STRIPS * GROUPS * IMAGES)

// The accumulators of a warp's tiles, for 32 channels, into [line][pixel][SPACED].
DEVICE void store_tile(u16* results, const float (&sums)[HEIGHT][4][4], int lane) {
#pragma unroll
    for (int v = 0; v < HEIGHT; ++v)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int m = lane / 4 + half * 8;
            u16* pixel = results + ((v * LINES + m / LINE) * ACROSS + m % LINE) * SPACED + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 4; ++n) *(u32*)(pixel + n * 8) = pack(sums[v][n][half * 2], sums[v][n][half * 2 + 1]);
        }
}

DEVICE void add_bias_and_relu(float (&sums)[HEIGHT][4][4], const float* bias, int lane) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            float b = bias[n * 8 + lane % 4 * 2 + odd];
#pragma unroll
            for (int v = 0; v < HEIGHT; ++v)
#pragma unroll
                for (int half = 0; half < 2; ++half) sums[v][n][half * 2 + odd] = relu(sums[v][n][half * 2 + odd] + b);
        }
}

#if POOL
// The maximum over each window and its place: the first of equal ones, as in torch.
DEVICE void pool(const u16* results, u16* result, u8* places, int band, int image0, int batch, i64 replica, int part) {
    for (int at = threadIdx.x; at < IMAGES * BAND * POOLED * 4; at += THREADS) {
        int chunk = at % 4, column = at / 4 % POOLED, line = at / (4 * POOLED) % BAND, image = at / (4 * POOLED * BAND);
        int row = band * BAND + line;
        if (image0 + image >= batch || row >= POOLED) continue;
        const u16* corner = results + ((image * TALL + line * STRIDE) * ACROSS + column * STRIDE) * SPACED + chunk * 8;
        u32 values[POOL * POOL][4], best[4] = {0, 0, 0, 0}, where[4];
#pragma unroll
        for (int i = 0; i < POOL; ++i)
#pragma unroll
            for (int j = 0; j < POOL; ++j) {
                bool within = row * STRIDE + i < SIDE && column * STRIDE + j < SIDE;
                uint4 v = within ? *(const uint4*)(corner + (i * ACROSS + j) * SPACED) : make_uint4(0, 0, 0, 0);
                u32* to = values[i * POOL + j];
                to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
#pragma unroll
                for (int n = 0; n < 4; ++n) best[n] = larger(best[n], to[n]);
            }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            where[n] = NONE * 0x00010001u;
#pragma unroll
            for (int p = POOL * POOL - 1; p >= 0; --p) {
                u32 differs = differing_halves(values[p][n], best[n]);
                where[n] = (where[n] & differs) | (p * 0x00010001u & ~differs);
            }
            u32 something = differing_halves(best[n], 0);
            where[n] = (where[n] & something) | (NONE * 0x00010001u & ~something);
        }
        i64 target = (((replica * batch + image0 + image) * POOLED + row) * POOLED + column) * OUTPUTS + part * 32 + chunk * 8;
        *(uint4*)(result + target) = make_uint4(best[0], best[1], best[2], best[3]);
        // Two halves with a byte each become two bytes.
        uint2 bytes = make_uint2((permute(where[0], 0x4420) | permute(where[1], 0x2044)),
                                 (permute(where[2], 0x4420) | permute(where[3], 0x2044)));
        *(uint2*)(places + target) = bytes;
    }
}
#endif

#define PLANAR_AT_ONCE (BAND >= SIDE)  // a block has whole maps

// Planar, (maps, side, side), as the dense layer's weights are ordered.
DEVICE void write_planar(const u16* results, u16* result, int band, int image0, int batch, i64 replica, int part) {
#if PLANAR_AT_ONCE
    for (int at = threadIdx.x; at < IMAGES * 32 * (SIDE * SIDE / TOGETHER); at += THREADS) {
        int first = at % (SIDE * SIDE / TOGETHER) * TOGETHER, channel = at / (SIDE * SIDE / TOGETHER) % 32;
        int image = at / (32 * (SIDE * SIDE / TOGETHER));
        if (image0 + image >= batch) continue;
        u16 values[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
            int y = (first + n) / SIDE, x = (first + n) % SIDE;
            values[n] = results[((image * TALL + y) * ACROSS + x) * SPACED + channel];
        }
        u16* target = result + ((replica * batch + image0 + image) * OUTPUTS + part * 32 + channel) * SIDE * SIDE + first;
#if TOGETHER == 8
        *(uint4*)target = make_uint4(values[0] | (u32)values[1] << 16, values[2] | (u32)values[3] << 16,
                                     values[4] | (u32)values[5] << 16, values[6] | (u32)values[7] << 16);
#else
        target[0] = values[0];
#endif
    }
#else
    for (int at = threadIdx.x; at < IMAGES * 32 * BAND * SIDE; at += THREADS) {
        int x = at % SIDE, line = at / SIDE % BAND, channel = at / (SIDE * BAND) % 32, image = at / (SIDE * BAND * 32);
        int y = band * BAND + line;
        if (image0 + image >= batch || y >= SIDE) continue;
        result[((replica * batch + image0 + image) * OUTPUTS + part * 32 + channel) * SIDE * SIDE + y * SIDE + x] =
            results[((image * TALL + line) * ACROSS + x) * SPACED + channel];
    }
#endif
}

DEVICE void write_maps(const u16* results, u16* result, int band, int image0, int batch, i64 replica, int part) {
    for (int at = threadIdx.x; at < IMAGES * BAND * SIDE * 4; at += THREADS) {
        int chunk = at % 4, x = at / 4 % SIDE, line = at / (4 * SIDE) % BAND, image = at / (4 * SIDE * BAND);
        int y = band * BAND + line;
        if (image0 + image >= batch || y >= SIDE) continue;
        i64 target = (((replica * batch + image0 + image) * SIDE + y) * SIDE + x) * OUTPUTS + part * 32 + chunk * 8;
        *(uint4*)(result + target) = *(const uint4*)(results + ((image * TALL + line) * ACROSS + x) * SPACED + chunk * 8);
    }
}

// ------------------------------------------------------------------------------------ many maps: forward, input gradient

#define STEPS (INPUTS / 16)
#define SPACING (INPUTS + 8)
#define TILE_TALL (TALL + FILTER - 1)
#define SPAN ((HEIGHT - 1) * LINES + FILTER)  // fragments of pixels that a warp's tiles share

#if defined(FORWARD) || defined(INPUT_GRADIENT)
// A warp's tiles: every fragment of pixels is loaded once for each column of the filter and serves all its rows.
DEVICE void convolve(float (&sums)[HEIGHT][4][4], const u16* tile, const uint4* filters, int lane) {
    u32 corner = address_of(tile + ((lane % 16 / LINE) * WIDE + lane % 16 % LINE) * SPACING + lane / 16 * 8);
#pragma unroll 1
    for (int jk = 0; jk < FILTER * STEPS; ++jk) {
        u32 pixels[SPAN][4], from = corner + (jk / STEPS * SPACING + jk % STEPS * 16) * 2;
#pragma unroll
        for (int r = 0; r < SPAN; ++r) load_matrices(pixels[r], from + r * (WIDE * SPACING * 2));
#pragma unroll
        for (int i = 0; i < FILTER; ++i) {
            uint4 b = load_constant(filters + (jk * FILTER + i) * 64 + lane);
            uint4 c = load_constant(filters + (jk * FILTER + i) * 64 + 32 + lane);
#pragma unroll
            for (int v = 0; v < HEIGHT; ++v) {
                multiply(sums[v][0], pixels[v * LINES + i], b.x, b.y);
                multiply(sums[v][1], pixels[v * LINES + i], b.z, b.w);
                multiply(sums[v][2], pixels[v * LINES + i], c.x, c.y);
                multiply(sums[v][3], pixels[v * LINES + i], c.z, c.w);
            }
        }
    }
}

#ifdef FORWARD
#define NAME forward
#else
#define NAME input_gradient
#endif

// FORWARD: relu(pool(x * filters) + bias), with places where there is a pool, planar where there is none.
// INPUT_GRADIENT: x is the result's gradient (POOL: of the pooled maps, and `side_input` has places; else planar, and
// `side_input` is what came out), the filters are turned around, and the result has no activation.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
NAME(const u16* x, const void* side_input, const uint4* filters, const float* bias, u16* result, u8* places, int batch) {
    SHARED(memory);
    u16* tile = (u16*)memory;
    u16* results = tile + IMAGES * TILE_TALL * WIDE * SPACING;
    const int band = blockIdx.x % BANDS, image0 = blockIdx.x / BANDS * IMAGES, part = blockIdx.z;
    const i64 replica = blockIdx.y;
#ifdef FORWARD
    const int top = band * BAND * (POOL ? STRIDE : 1) - MARGIN;
    for (int at = threadIdx.x; at < IMAGES * TILE_TALL * WIDE * (INPUTS / 8); at += THREADS) {
        int chunk = at % (INPUTS / 8), pixel = at / (INPUTS / 8), image = pixel / (TILE_TALL * WIDE);
        int y = top + pixel / WIDE % TILE_TALL, x0 = pixel % WIDE - MARGIN;
        bool inside = image0 + image < batch && y >= 0 && y < SIDE && x0 >= 0 && x0 < SIDE;
        i64 offset = inside ? (((replica * batch + image0 + image) * SIDE + y) * SIDE + x0) * INPUTS + chunk * 8 : 0;
        copy_16(tile + pixel * SPACING + chunk * 8, x + offset, inside);
    }
    copies_done();
#else
    const int top = band * BAND - MARGIN;
    const int numbers = numbers_staged<TILE_TALL, INPUTS>;
    for (int image = 0; image < IMAGES; ++image)
        stage_gradient<TILE_TALL, INPUTS>(results + image * numbers, x, side_input, replica * batch + image0 + image,
                                          INPUTS, 0, top, image0 + image < batch);
    copies_done();
    __syncthreads();
    for (int image = 0; image < IMAGES; ++image)
        spread_gradient<TILE_TALL, WIDE, SPACING, INPUTS>(tile + image * TILE_TALL * WIDE * SPACING, results + image * numbers,
                                                          x, side_input, replica * batch + image0 + image, INPUTS, 0, top,
                                                          -MARGIN, image0 + image < batch);
#endif
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const uint4* own = filters + (replica * OUTPUT_PARTS + part) * (FILTER * FILTER * STEPS * 64);
    for (int job = threadIdx.x / 32; job < JOBS; job += WARPS) {
        int strip = job % STRIPS, line = job / STRIPS % GROUPS * HEIGHT * LINES, image = job / (STRIPS * GROUPS);
        float sums[HEIGHT][4][4] = {};
        convolve(sums, tile + ((image * TILE_TALL + line) * WIDE + strip * LINE) * SPACING, own, lane);
#ifdef FORWARD
        add_bias_and_relu(sums, bias + replica * OUTPUTS + part * 32, lane);
#endif
        store_tile(results + ((image * TALL + line) * ACROSS + strip * LINE) * SPACED, sums, lane);
    }
    __syncthreads();
#ifdef FORWARD
#if POOL
    pool(results, result, places, band, image0, batch, replica, part);
#else
    write_planar(results, result, band, image0, batch, replica, part);
#endif
#else
    write_maps(results, result, band, image0, batch, replica, part);
#endif
}
#endif

// -------------------------------------------------------------------------------------------- few maps: forward

#if defined(FIRST_FORWARD) || defined(FIRST_GRADIENT)
#define IMAGE_NUMBERS (SIDE * SIDE * INPUTS)
#define IMAGE_STAGED (IMAGE_NUMBERS % 8 == 0 && IMAGE_NUMBERS <= 4096)

// Images as they are, to shared memory, where they come in pieces of 16 bytes and are not too large.
DEVICE void stage_images(u16* staged, const u16* x, i64 replica, int image0, int batch) {
    if (!IMAGE_STAGED) return;
    for (int at = threadIdx.x; at < IMAGES * (IMAGE_NUMBERS / 8); at += THREADS) {
        bool inside = image0 + at / (IMAGE_NUMBERS / 8) < batch;
        copy_16(staged + at * 8, x + (inside ? (replica * batch + image0) * IMAGE_NUMBERS + at * 8 : 0), inside);
    }
}
#endif

#ifdef FIRST_FORWARD
#define ROW_LENGTH (CEIL(WIDE * INPUTS + 16, 2) * 2)
#define COPY_LENGTH (CEIL(TILE_TALL * ROW_LENGTH + 16, 64) * 64 + 32)  // the second copy is half the banks away

// A window's row, FILTER * INPUTS < 16 numbers, lies in one piece and is one step of the product. A pair of numbers
// must begin at an even place, so there is a second copy of the image one place further on. A block takes TURNS times
// IMAGES images; the next ones are on their way while it works.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
first_forward(const u16* x, const uint4* filters, const float* bias, u16* result, u8* places, int batch) {
    SHARED(memory);
    u16* copies = (u16*)memory;
    u16* results = copies + 2 * IMAGES * COPY_LENGTH;
    u16* staged = results + IMAGES * TALL * ACROSS * SPACED;
    const int band = blockIdx.x % BANDS, first_image = blockIdx.x / BANDS * IMAGES * TURNS, part = blockIdx.z;
    const i64 replica = blockIdx.y;
    const int top = band * BAND * (POOL ? STRIDE : 1) - MARGIN;
    stage_images(staged, x, replica, first_image, batch);
    const int lane = threadIdx.x % 32;
    const uint4* own = filters + (replica * OUTPUT_PARTS + part) * (FILTER * 64);
    uint4 rows[FILTER][2];
#pragma unroll
    for (int i = 0; i < FILTER; ++i) {
        rows[i][0] = load_constant(own + i * 64 + lane);
        rows[i][1] = load_constant(own + i * 64 + 32 + lane);
    }
    for (int image0 = first_image; image0 < first_image + IMAGES * TURNS && image0 < batch; image0 += IMAGES) {
        copies_done();
        __syncthreads();
        for (int at = threadIdx.x; at < IMAGES * COPY_LENGTH; at += THREADS) {
            int place = at % COPY_LENGTH, image = at / COPY_LENGTH, row = place / ROW_LENGTH, within = place % ROW_LENGTH;
            int y = top + row, x0 = within - MARGIN * INPUTS;
            bool inside = image0 + image < batch && y >= 0 && y < SIDE && x0 >= 0 && x0 < SIDE * INPUTS;
            const u16* from_image = IMAGE_STAGED ? staged + image * IMAGE_NUMBERS : x + (replica * batch + image0 + image) * IMAGE_NUMBERS;
            u16 value = inside ? from_image[y * (SIDE * INPUTS) + x0] : (u16)0;
            u16* even = copies + 2 * image * COPY_LENGTH;
            even[place] = value;
            if (place > 0) even[COPY_LENGTH + place - 1] = value;
            if (place == COPY_LENGTH - 1) even[COPY_LENGTH + place] = 0;
        }
        __syncthreads();
        if (image0 + IMAGES < first_image + IMAGES * TURNS && image0 + IMAGES < batch) stage_images(staged, x, replica, image0 + IMAGES, batch);
        for (int job = threadIdx.x / 32; job < JOBS; job += WARPS) {
            int strip = job % STRIPS, line = job / STRIPS % GROUPS * HEIGHT * LINES, image = job / (STRIPS * GROUPS);
            int g = lane / 4, begin = (strip * LINE + g) * INPUTS, odd = begin & 1;
            const u16* from = copies + (2 * image + odd) * COPY_LENGTH + line * ROW_LENGTH + begin - odd + lane % 4 * 2;
            const int below = LINE == 16 ? 8 * INPUTS : ROW_LENGTH;
            float sums[HEIGHT][4][4] = {};
#pragma unroll
            for (int r = 0; r < SPAN; ++r) {
                const u16* at = from + r * ROW_LENGTH;
                u32 pixels[4] = {*(const u32*)at, *(const u32*)(at + below), *(const u32*)(at + 8), *(const u32*)(at + below + 8)};
#pragma unroll
                for (int i = 0; i < FILTER; ++i) {
                    if (r - i < 0 || (r - i) % LINES || (r - i) / LINES >= HEIGHT) continue;
                    multiply(sums[(r - i) / LINES][0], pixels, rows[i][0].x, rows[i][0].y);
                    multiply(sums[(r - i) / LINES][1], pixels, rows[i][0].z, rows[i][0].w);
                    multiply(sums[(r - i) / LINES][2], pixels, rows[i][1].x, rows[i][1].y);
                    multiply(sums[(r - i) / LINES][3], pixels, rows[i][1].z, rows[i][1].w);
                }
            }
            add_bias_and_relu(sums, bias + replica * OUTPUTS + part * 32, lane);
            store_tile(results + ((image * TALL + line) * ACROSS + strip * LINE) * SPACED, sums, lane);
        }
        __syncthreads();
#if POOL
        pool(results, result, places, band, image0, batch, replica, part);
#else
        write_planar(results, result, band, image0, batch, replica, part);
#endif
    }
}
#endif

// ------------------------------------------------------------------------------------------ gradients of the filters

// BAND is lines of the full maps here, a multiple of a warp's. Blocks take GROUP images one after the other
// and keep their sums in registers; `reduce` adds up the blocks.

#define LIVE (LINES == 1 ? FILTER : CEIL(FILTER, 2) + 1)  // fragments of the gradient in use at a time

#define MAP_BANDS CEIL(SIDE, BAND)
#define MAP_GROUPS (BAND / (LINES * HEIGHT))

#ifdef FILTER_GRADIENT
#define X_SPACING 24
#define X_TALL (BAND + FILTER - 1)
#define MAPS (IMAGES * X_TALL * WIDE * X_SPACING)

DEVICE void stage_turn(u16* maps, u16* staged, const u16* x, const u16* gradient, const void* side_input, i64 replica,
                       int image0, int top, int part_in, int part_out, int batch) {
    for (int at = threadIdx.x; at < IMAGES * X_TALL * WIDE * 2; at += THREADS) {
        int chunk = at % 2, pixel = at / 2, image = pixel / (X_TALL * WIDE);
        int y = top - MARGIN + pixel / WIDE % X_TALL, x0 = pixel % WIDE - MARGIN;
        bool inside = image0 + image < batch && y >= 0 && y < SIDE && x0 >= 0 && x0 < SIDE;
        i64 offset = inside ? (((replica * batch + image0 + image) * SIDE + y) * SIDE + x0) * INPUTS + part_in * 16 + chunk * 8 : 0;
        copy_16(maps + pixel * X_SPACING + chunk * 8, x + offset, inside);
    }
    for (int image = 0; image < IMAGES; ++image)
        stage_gradient<BAND, 32>(staged + image * numbers_staged<BAND, 32>, gradient, side_input,
                                 replica * batch + image0 + image, OUTPUTS, part_out * 32, top, image0 + image < batch);
}

// Sixteen maps in, 32 maps out; a warp for each column of the filter. Partial sums are
// (R, groups, parts in, parts out, FILTER, FILTER, 16, 32), and (R, groups, OUTPUTS) for the bias.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
filter_gradient(const u16* x, const u16* gradient, const void* side_input, float* partial, float* bias_partial, int batch) {
    SHARED(memory);
    u16* both = (u16*)memory;        // two of [IMAGES][X_TALL][WIDE][X_SPACING], in turn
    u16* back = both + 2 * MAPS;     // [IMAGES][BAND][ACROSS][SPACED]
    u16* staged = back + IMAGES * BAND * ACROSS * SPACED;
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32, turns = GROUP / IMAGES * MAP_BANDS;
    const int part_in = blockIdx.z % STEPS, part_out = blockIdx.z / STEPS, first_image = blockIdx.x * GROUP;
    const i64 replica = blockIdx.y;
    float sums[FILTER][4][4] = {};
    float bias_sums[2] = {0, 0};
    stage_turn(both, staged, x, gradient, side_input, replica, first_image, 0, part_in, part_out, batch);
    for (int turn = 0; turn < turns; ++turn) {
        u16* maps = both + turn % 2 * MAPS;
        const int image0 = first_image + turn / MAP_BANDS * IMAGES, top = turn % MAP_BANDS * BAND;
        if (image0 >= batch) break;
        copies_done();
        __syncthreads();
        for (int image = 0; image < IMAGES; ++image)
            spread_gradient<BAND, ACROSS, SPACED, 32>(back + image * BAND * ACROSS * SPACED, staged + image * numbers_staged<BAND, 32>,
                                                      gradient, side_input, replica * batch + image0 + image, OUTPUTS,
                                                      part_out * 32, top, 0, image0 + image < batch);
        __syncthreads();
        // Not beyond the batch: a copy that nobody waits for would land in memory that is used otherwise by then.
        const int next = first_image + (turn + 1) / MAP_BANDS * IMAGES;
        if (turn + 1 < turns && next < batch)
            stage_turn(both + (turn + 1) % 2 * MAPS, staged, x, gradient, side_input, replica, next,
                       (turn + 1) % MAP_BANDS * BAND, part_in, part_out, batch);
        if (part_in == 0)
            for (int pixel = threadIdx.x / 16; pixel < IMAGES * BAND * ACROSS; pixel += THREADS / 16) {
                u32 both = *(const u32*)(back + pixel * SPACED + threadIdx.x % 16 * 2);
                bias_sums[0] += as_float(both << 16);
                bias_sums[1] += as_float(both & 0xffff0000u);
            }
#pragma unroll 1
        for (int job = 0; job < IMAGES * STRIPS * MAP_GROUPS; ++job) {
            const int strip = job % STRIPS, line = job / STRIPS % MAP_GROUPS * LINES * HEIGHT;
            const int image = job / (STRIPS * MAP_GROUPS);
            const int in8 = lane % 8, first = lane / 8 % 2, second = lane / 16;
            // Left matrix: maps in by pixels. Right matrix: pixels by maps out. Both are stored pixel by pixel.
            const int p = second * 8 + in8, q = first * 8 + in8;
            u32 left = address_of(maps + ((image * X_TALL + line + p / LINE) * WIDE + strip * LINE + p % LINE + column) * X_SPACING + first * 8);
            u32 right = address_of(back + ((image * BAND + line + q / LINE) * ACROSS + strip * LINE + q % LINE) * SPACED + second * 8);
            u32 gradients[LIVE][2][4];
#pragma unroll
            for (int r = 0; r < SPAN; ++r) {
                u32 pixels[4];
                load_transposed(pixels, left + r * (WIDE * X_SPACING * 2));
                if (r % LINES == 0 && r / LINES < HEIGHT) {
                    load_transposed(gradients[r / LINES % LIVE][0], right + r * (ACROSS * SPACED * 2));
                    load_transposed(gradients[r / LINES % LIVE][1], right + r * (ACROSS * SPACED * 2) + 32);
                }
#pragma unroll
                for (int i = 0; i < FILTER; ++i) {
                    if (r - i < 0 || (r - i) % LINES || (r - i) / LINES >= HEIGHT) continue;
                    const u32(&g)[2][4] = gradients[(r - i) / LINES % LIVE];
                    multiply(sums[i][0], pixels, g[0][0], g[0][1]);
                    multiply(sums[i][1], pixels, g[0][2], g[0][3]);
                    multiply(sums[i][2], pixels, g[1][0], g[1][1]);
                    multiply(sums[i][3], pixels, g[1][2], g[1][3]);
                }
            }
        }
    }
    const i64 block = ((replica * gridDim.x + blockIdx.x) * STEPS + part_in) * OUTPUT_PARTS + part_out;
#pragma unroll
    for (int i = 0; i < FILTER; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                i64 at = (((block * FILTER + i) * FILTER + column) * 16 + lane / 4 + half * 8) * 32 + n * 8 + lane % 4 * 2;
                *(float2*)(partial + at) = make_float2(sums[i][n][half * 2], sums[i][n][half * 2 + 1]);
            }
    if (part_in) return;
    __syncthreads();
    float* all = (float*)memory;
    all[threadIdx.x * 2] = bias_sums[0], all[threadIdx.x * 2 + 1] = bias_sums[1];
    __syncthreads();
    if (threadIdx.x < 32) {
        float total = 0;
        for (int n = 0; n < THREADS / 16; ++n) total += all[n * 32 + threadIdx.x];
        bias_partial[(replica * gridDim.x + blockIdx.x) * OUTPUTS + part_out * 32 + threadIdx.x] = total;
    }
}
#endif

#ifdef FIRST_GRADIENT
#define TALL_X (BAND + FILTER - 1)
#define PLANE (CEIL(TALL_X * WIDE + 8, 64) * 64 + 10)  // planes start five banks apart
#define OTHER_PLANE (INPUTS * PLANE + (32 - INPUTS * PLANE % 64 + 64) % 64)  // and copies half the banks apart

// Maps out by (column of the filter, map in), for every row of the filter; number 15 of the latter is one, for the bias.
// Partial sums are (R, groups, parts out, FILTER, 32, 16). Each warp has tiles of its own and all the sums.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
first_gradient(const u16* x, const u16* gradient, const void* side_input, float* partial, int batch) {
    SHARED(memory);
    u16* planes = (u16*)memory;  // [2 copies][INPUTS][TALL_X][WIDE], the second one place further on
    u16* back = planes + CEIL(2 * OTHER_PLANE, 8) * 8;
    u16* staged = back + BAND * ACROSS * SPACED;
    u16* staged_image = staged + numbers_staged<BAND, 32>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part_out = blockIdx.z, first_image = blockIdx.x * GROUP;
    const i64 replica = blockIdx.y;
    float sums[FILTER][2][2][4] = {};
    for (int at = threadIdx.x; at < CEIL(2 * OTHER_PLANE, 8); at += THREADS) ((uint4*)planes)[at] = make_uint4(0, 0, 0, 0);
    stage_images(staged_image, x, replica, first_image, batch);
    stage_gradient<BAND, 32>(staged, gradient, side_input, replica * batch + first_image, OUTPUTS, part_out * 32, 0, true);
    for (int turn = 0; turn < GROUP * MAP_BANDS; ++turn) {
        const int image = first_image + turn / MAP_BANDS, top = turn % MAP_BANDS * BAND;
        if (image >= batch) break;
        copies_done();
        __syncthreads();
        const u16* from_image = IMAGE_STAGED ? staged_image : x + (replica * batch + image) * IMAGE_NUMBERS;
        for (int at = threadIdx.x; at < TALL_X * WIDE * INPUTS; at += THREADS) {
            int channel = at % INPUTS, pixel = at / INPUTS, y = top - MARGIN + pixel / WIDE, x0 = pixel % WIDE - MARGIN;
            bool inside = y >= 0 && y < SIDE && x0 >= 0 && x0 < SIDE;
            u16 value = inside ? from_image[(y * SIDE + x0) * INPUTS + channel] : (u16)0;
            planes[channel * PLANE + pixel] = value;
            if (pixel) planes[OTHER_PLANE + channel * PLANE + pixel - 1] = value;
        }
        spread_gradient<BAND, ACROSS, SPACED, 32>(back, staged, gradient, side_input, replica * batch + image, OUTPUTS,
                                                  part_out * 32, top, 0, true);
        __syncthreads();
        const int next = first_image + (turn + 1) / MAP_BANDS, next_top = (turn + 1) % MAP_BANDS * BAND;
        if (turn + 1 < GROUP * MAP_BANDS && next < batch) {
            if (next != image) stage_images(staged_image, x, replica, next, batch);
            stage_gradient<BAND, 32>(staged, gradient, side_input, replica * batch + next, OUTPUTS, part_out * 32, next_top,
                                     true);
        }
        for (int job = warp; job < STRIPS * MAP_GROUPS; job += WARPS) {
            const int strip = job % STRIPS, line = job / STRIPS * LINES * HEIGHT;
            const int in8 = lane % 8, first = lane / 8 % 2, second = lane / 16, p = second * 8 + in8;
            u32 left = address_of(back + ((line + p / LINE) * ACROSS + strip * LINE + p % LINE) * SPACED + first * 8);
            const u16* right[2];
            bool real[2];
            u32 otherwise[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                int number = n * 8 + lane / 4, column = number / INPUTS, channel = number % INPUTS;
                real[n] = number < FILTER * INPUTS;
                otherwise[n] = number == 15 ? 0x3f803f80u : 0;
                right[n] = planes + (real[n] ? column % 2 * OTHER_PLANE + channel * PLANE + column / 2 * 2 : 0) + line * WIDE +
                           strip * LINE + lane % 4 * 2;
            }
            u32 gradients[LIVE][2][4];
#pragma unroll
            for (int r = 0; r < SPAN; ++r) {
                u32 windows[2][2];
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        u32 pair = *(const u32*)(right[n] + r * WIDE + half * (LINE == 16 ? 8 : WIDE));
                        windows[n][half] = real[n] ? pair : otherwise[n];
                    }
                if (r % LINES == 0 && r / LINES < HEIGHT) {
                    load_transposed(gradients[r / LINES % LIVE][0], left + r * (ACROSS * SPACED * 2));
                    load_transposed(gradients[r / LINES % LIVE][1], left + r * (ACROSS * SPACED * 2) + 32);
                }
#pragma unroll
                for (int i = 0; i < FILTER; ++i) {
                    if (r - i < 0 || (r - i) % LINES || (r - i) / LINES >= HEIGHT) continue;
                    const u32(&g)[2][4] = gradients[(r - i) / LINES % LIVE];
#pragma unroll
                    for (int m = 0; m < 2; ++m)
#pragma unroll
                        for (int n = 0; n < 2; ++n) multiply(sums[i][m][n], g[m], windows[n][0], windows[n][1]);
                }
            }
        }
    }
    float* all = (float*)memory;  // [FILTER][32][16], one warp after the other
    for (int turn = 0; turn < WARPS; ++turn) {
        __syncthreads();
        if (warp != turn) continue;
#pragma unroll
        for (int i = 0; i < FILTER; ++i)
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        int at = (i * 32 + m * 16 + lane / 4 + k / 2 * 8) * 16 + n * 8 + lane % 4 * 2 + k % 2;
                        all[at] = turn ? all[at] + sums[i][m][n][k] : sums[i][m][n][k];
                    }
    }
    __syncthreads();
    const i64 block = (replica * gridDim.x + blockIdx.x) * OUTPUT_PARTS + part_out;
    for (int at = threadIdx.x; at < FILTER * 32 * 16; at += THREADS) partial[block * (FILTER * 32 * 16) + at] = all[at];
}
#endif

// --------------------------------------------------------------------------------- filters, there and back

#ifdef ARRANGE
// float32 filters (R, O, C, FILTER, FILTER) into fragments of the right matrix. FIRST: a row of the window is one step.
// TURNED: maps in and out change places and the filter is turned around, for the gradient of what came in; INPUTS and
// OUTPUTS are then those of that product.
extern "C" __global__ void arrange(const float* filters, u32* fragments, int count) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const i64 replica = blockIdx.y;
    int q = at % 4, lane = at / 4 % 32, h = at / 128 % 2, i = at / 256 % FILTER, rest = at / (256 * FILTER);
    int output = (h * 2 + q / 2) * 8 + lane / 4, k = lane % 4 * 2 + q % 2 * 8;
    float pair[2];
#ifdef FIRST
    output += rest * 32;
    for (int n = 0; n < 2; ++n) {
        int j = (k + n) / INPUTS, input = (k + n) % INPUTS;
        pair[n] = j < FILTER ? filters[(((replica * OUTPUTS + output) * INPUTS + input) * FILTER + i) * FILTER + j] : 0.0f;
    }
#else
    int jk = rest % (FILTER * STEPS), j = jk / STEPS;
    output += rest / (FILTER * STEPS) * 32;
    for (int n = 0; n < 2; ++n) {
        int input = jk % STEPS * 16 + k + n;
#ifdef TURNED
        pair[n] = filters[(((replica * INPUTS + input) * OUTPUTS + output) * FILTER + FILTER - 1 - i) * FILTER + FILTER - 1 - j];
#else
        pair[n] = filters[(((replica * OUTPUTS + output) * INPUTS + input) * FILTER + i) * FILTER + j];
#endif
    }
#endif
    fragments[replica * count + at] = pack(pair[0], pair[1]);
}
#endif

#ifdef REDUCE
// Adds up the blocks' partial sums in their order and puts them where the filters are.
extern "C" __global__ void reduce(const float* partial, float* grad_filters, float* grad_bias, int groups, int count) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const i64 replica = blockIdx.y;
    float total = 0;
    for (int group = 0; group < groups; ++group) total += partial[(replica * groups + group) * count + at];
#ifdef FIRST
    int number = at % 16, output = at / (16 * 32 * FILTER) * 32 + at / 16 % 32, i = at / (16 * 32) % FILTER;
    if (number == 15) {
        if (i == MARGIN) grad_bias[replica * OUTPUTS + output] = total;
        return;
    }
    int j = number / INPUTS, input = number % INPUTS;
    if (j >= FILTER) return;
#else
    int output = at % 32, input = at / 32 % 16, j = at / 512 % FILTER, i = at / (512 * FILTER) % FILTER;
    int block = at / (512 * FILTER * FILTER);
    input += block / OUTPUT_PARTS * 16, output += block % OUTPUT_PARTS * 32;
#endif
    grad_filters[(((replica * OUTPUTS + output) * INPUTS + input) * FILTER + i) * FILTER + j] = total;
}
#endif
