// Measures a machine's peak rates with some threads: bytes read from memory, in order and in blocks of the size of KV,
// and the arithmetic that kernels use.
// Prints a JSON object. Build with the flags of a set of kernels, -O2 and -pthread.
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

static constexpr int64_t kBytes = int64_t{256} << 20;
static constexpr int64_t kBlockBytes = 4096;  // 16 tokens' keys and values of a KV head of 64 numbers in bf16
static constexpr int64_t kLoops = 4'000'000;
static constexpr int kRepeats = 9;
static constexpr int kSums = 12;  // enough to hide the latency of each, and all in registers

// `amount` per second, in the best of kRepeats runs in which all threads do `work(thread)`.
template <class F>
static double rate(int threads, double amount, F&& work) {
    double best = 1e9;
    for (int i = 0; i < kRepeats; i++) {
        const auto start = std::chrono::steady_clock::now();
        std::vector<std::thread> others;
        for (int t = 1; t < threads; t++) others.emplace_back([&work, t] { work(t); });
        work(0);
        for (auto& other : others) other.join();
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return amount / best;
}

// Computes kLoops steps of kSums independent sums. The asm hides from the compiler the sums' initial values, and that
// nothing uses the results.
template <class V, class Step>
static void chain(V sum, Step&& step) {
    V sums[kSums];
#pragma GCC unroll 12
    for (auto& each : sums) {
        each = sum;
        __asm__ volatile("" : "+v"(each));
    }
    for (int64_t i = 0; i < kLoops; i++) {
#pragma GCC unroll 12
        for (auto& each : sums) each = step(each);
    }
#pragma GCC unroll 12
    for (auto& each : sums) __asm__ volatile("" : : "v"(each));
}

// Reads `bytes` from `start` on.
static void read_all(const char* start, int64_t bytes) {
    __m256 sum = _mm256_setzero_ps();
    for (int64_t i = 0; i < bytes; i += 64) {
        sum = _mm256_or_ps(sum, _mm256_loadu_ps(reinterpret_cast<const float*>(start + i)));
        sum = _mm256_or_ps(sum, _mm256_loadu_ps(reinterpret_cast<const float*>(start + i + 32)));
    }
    __asm__ volatile("" : : "x"(sum));
}

#ifdef __AMX_BF16__
#include "kernels/native/cpp/amx.h"

// Computes kLoops / 16 times four products of tiles, which takes about as long as a chain's kLoops steps. Registers 0 to
// 3 are sums of 16 x 16; 4 and 5 are rows, and 6 and 7 columns, of `input_bytes`.
template <class Multiply>
static void tiles(int input_bytes, Multiply&& multiply) {
    octavo::TileShapes shapes;
    shapes.row_bytes[4] = shapes.row_bytes[5] = static_cast<uint16_t>(input_bytes);
    shapes.rows[6] = shapes.rows[7] = static_cast<uint8_t>(input_bytes / 4);
    const octavo::TilesInUse in_use(shapes);
    for (int64_t i = 0; i < kLoops / 16; i++) multiply();
}
#endif

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
    // Operations of all threads, if one step of one sum does `of_step`.
    auto operations = [&](int of_step) { return double(kLoops) * kSums * of_step * threads; };
    void* start = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return 1;
    madvise(start, kBytes, MADV_HUGEPAGE);
    auto* memory = static_cast<char*>(start);
    std::fill(memory, memory + kBytes, 1);
    const double read = rate(threads, kBytes, [&](int t) {
        const int64_t first = kBytes / 64 * t / threads * 64, end = kBytes / 64 * (t + 1) / threads * 64;
        read_all(memory + first, end - first);
    });
    // As attention does: in an order that no prefetcher knows.
    constexpr int64_t kNumBlocks = kBytes / kBlockBytes, kStep = 40503;  // odd: visits each block once
    const double read_blocks = rate(threads, kBytes, [&](int t) {
        for (int64_t i = kNumBlocks * t / threads; i < kNumBlocks * (t + 1) / threads; i++) {
            read_all(memory + i * kStep % kNumBlocks * kBlockBytes, kBlockBytes);
        }
    });
    std::printf("{\"read\": %.4g, \"read_blocks\": %.4g", read, read_blocks);
#ifdef __AVX512F__
    const __m512 one = _mm512_set1_ps(1.0f);
    std::printf(", \"float32\": %.4g", rate(threads, operations(32), [&](int) {
        chain(one, [&](__m512 sum) { return _mm512_fmadd_ps(one, one, sum); });
    }));
#else
    const __m256 one = _mm256_set1_ps(1.0f);
    std::printf(", \"float32\": %.4g", rate(threads, operations(16), [&](int) {
        chain(one, [&](__m256 sum) { return _mm256_fmadd_ps(one, one, sum); });
    }));
    const __m256i ones = _mm256_set1_epi8(1);
    std::printf(", \"int16\": %.4g", rate(threads, operations(32), [&](int) {
        chain(ones, [&](__m256i sum) {
            __m256i product = _mm256_madd_epi16(ones, sum);
            return _mm256_add_epi32(sum, product);
        });
    }));
    std::printf(", \"int8_pairs\": %.4g", rate(threads, operations(64), [&](int) {
        chain(ones, [&](__m256i sum) {
            __m256i product = _mm256_maddubs_epi16(ones, sum);
            return _mm256_add_epi16(sum, product);
        });
    }));
#endif
#ifdef __AVX512BF16__
    const __m512bh halves = (__m512bh)_mm512_set1_epi16(0x3f80);
    std::printf(", \"bfloat16\": %.4g", rate(threads, operations(64), [&](int) {
        chain(one, [&](__m512 sum) { return _mm512_dpbf16_ps(sum, halves, halves); });
    }));
#endif
#ifdef __AVX512VNNI__
    const __m512i bytes = _mm512_set1_epi8(1);
    std::printf(", \"int8\": %.4g", rate(threads, operations(128), [&](int) {
        chain(bytes, [&](__m512i sum) { return _mm512_dpbusd_epi32(sum, bytes, bytes); });
    }));
#endif
#ifdef __AMX_BF16__
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return 1;
    // Multiplies 16 rows x 32 inputs x 16 columns.
    const double products = double(kLoops / 16) * 4 * 16 * 32 * 16 * threads;
    std::printf(", \"bfloat16_tiles\": %.4g", rate(threads, 2 * products, [&](int) {
        tiles(64, [] {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        });
    }));
    // 32 inputs share a scale: tiles of bytes are half as long as they might be.
    std::printf(", \"int8_tiles\": %.4g", rate(threads, 2 * products, [&](int) {
        tiles(32, [] {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        });
    }));
#endif
    std::printf("}\n");
}
