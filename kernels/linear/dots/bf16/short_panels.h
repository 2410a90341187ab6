// Panels of bf16 weights that take 12 bits each, without loss, since reading weights limits a linear of few rows.
//
// The weights of a panel are all of similar size: of the upper bytes of their numbers, a sign and 7 bits of exponent,
// eight exponents, each with both signs, are nearly all that occur. So 4 bits say which of the panel's sixteen upper
// bytes a weight has, and the lower byte is kept as it is. The few weights with another upper byte are exceptions,
// listed in order.
// Exponents of weights need few bits: T. Zhang et al., "70% Size, 100% Accuracy: Lossless LLM Compression for Efficient
// GPU Inference via Dynamic-Length Float", arXiv 2504.11651, 2025.
#pragma once

#include <algorithm>
#include <cstring>

#include "../../../native/cpp/unroll.h"
#include "../../../native/cpp/vec16.h"
#include "../../panels.h"

namespace octavo {

// In memory: the 16 upper bytes, padded to a line; exceptions; then for each four inputs a line of codes, the first
// two inputs' in the low 4 bits of each byte, and two lines of lower bytes. In a line, each 16 bytes are for 4 of the
// first 16 columns, then for 4 of the other 16: each column's two inputs in turn.
class ShortPanel {
   public:
    static constexpr int64_t kInputs = 4, kLine = 64, kStepBytes = 3 * kLine;

    // `step`: the four inputs it belongs to; `place`: its byte in two lines of lower bytes; `upper`: its upper byte.
    struct Exception {
        uint16_t step;
        uint8_t place, upper;
    };
    static constexpr uint16_t kNoStep = 65535;
    static constexpr int64_t kMostInputs = kInputs * kNoStep;

    ShortPanel(const char* panel, int64_t inputs) : panel_(panel), data_(panel + kLine + exceptions_bytes(inputs)) {
        table_ = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel)));
    }

    static int64_t bytes(int64_t inputs) { return kLine + exceptions_bytes(inputs) + steps(inputs) * kStepBytes; }

    const Exception* exceptions() const { return reinterpret_cast<const Exception*>(panel_ + kLine); }

    // Sets columns[half][v] to the weights of the step's first or last two inputs, as pairs of bf16, for 16 columns.
    // exception: the first of this step or a later one; moved on to that of a later step.
    OCTAVO_INLINED void open(int64_t step, const Exception*& exception, V16 (&columns)[2][2]) const {
        const char* data = data_ + step * kStepBytes;
        const __m512i codes = load(data), first = load(data + kLine), second = load(data + 2 * kLine);
        const __m512i low_bits = _mm512_set1_epi8(15);
        __m512i upper[2] = {
            _mm512_shuffle_epi8(table_, _mm512_and_si512(codes, low_bits)),
            _mm512_shuffle_epi8(table_, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_bits)),
        };
        while (__builtin_expect(exception->step == step, false)) {
            const __mmask64 place = __mmask64{1} << exception->place % kLine;
            const bool is_second = exception->place >= kLine;
            upper[0] = _mm512_mask_set1_epi8(upper[0], is_second ? 0 : place, exception->upper);
            upper[1] = _mm512_mask_set1_epi8(upper[1], is_second ? place : 0, exception->upper);
            exception++;
        }
        columns[0][0] = {_mm512_castsi512_ps(_mm512_unpacklo_epi8(first, upper[0]))};
        columns[0][1] = {_mm512_castsi512_ps(_mm512_unpackhi_epi8(first, upper[0]))};
        columns[1][0] = {_mm512_castsi512_ps(_mm512_unpacklo_epi8(second, upper[1]))};
        columns[1][1] = {_mm512_castsi512_ps(_mm512_unpackhi_epi8(second, upper[1]))};
    }

    // Packs a panel as [pair of inputs][32 columns][2], with an even number of pairs. Returns false if it has too many
    // exceptions.
    static bool pack(const bf16* pairs, int64_t inputs, char* panel) {
        uint8_t exponents[kExponents];
        likeliest_exponents(pairs, steps(inputs) * kInputs * kColumns, exponents);
        for (int code = 0; code < 2 * kExponents; code++) {
            panel[code] = static_cast<char>(exponents[code % kExponents] | code / kExponents << 7);
        }
        auto* exception = reinterpret_cast<Exception*>(panel + kLine);
        const Exception* last = exception + room(inputs);
        char* data = panel + kLine + exceptions_bytes(inputs);
        for (int64_t step = 0; step < steps(inputs); step++, data += kStepBytes) {
            __m512i codes[2];
            for (int half = 0; half < 2; half++, pairs += 2 * kColumns) {
                const __m512i columns[2] = {_mm512_loadu_si512(pairs), _mm512_loadu_si512(pairs + kColumns)};
                // The reverse of `open`.
                const __m512i low_byte = _mm512_set1_epi16(255);
                _mm512_storeu_si512(data + (1 + half) * kLine,
                                    _mm512_packus_epi16(_mm512_and_si512(columns[0], low_byte),
                                                        _mm512_and_si512(columns[1], low_byte)));
                const __m512i upper = _mm512_packus_epi16(_mm512_srli_epi16(columns[0], 8),
                                                          _mm512_srli_epi16(columns[1], 8));
                const __m512i exponent = _mm512_and_si512(upper, _mm512_set1_epi8(127));
                __mmask64 unknown = ~__mmask64{0};
                codes[half] = _mm512_setzero_si512();
                for (int code = 0; code < kExponents; code++) {
                    const __mmask64 has = _mm512_cmpeq_epi8_mask(exponent, _mm512_set1_epi8(exponents[code]));
                    codes[half] = _mm512_mask_set1_epi8(codes[half], has, code);
                    unknown &= ~has;
                }
                const __mmask64 is_negative = _mm512_movepi8_mask(upper);
                codes[half] = _mm512_or_si512(codes[half], _mm512_maskz_set1_epi8(is_negative, kExponents));
                uint8_t bytes[kLine];
                _mm512_storeu_si512(bytes, upper);
                for (; unknown; unknown &= unknown - 1, exception++) {
                    if (exception == last) return false;
                    const int place = __builtin_ctzll(unknown);
                    *exception = {static_cast<uint16_t>(step), static_cast<uint8_t>(half * kLine + place), bytes[place]};
                }
            }
            _mm512_storeu_si512(data, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
        }
        *exception = {kNoStep, 0, 0};
        return true;
    }

    static int64_t steps(int64_t inputs) { return (inputs + kInputs - 1) / kInputs; }

   private:
    static constexpr int64_t kColumns = kPanel<V16>;
    static constexpr int kExponents = 8;

    // One of 256 weights may be an exception: of SmolLM2's, one of 4,400 is, and of 900 in the worst panel.
    static int64_t room(int64_t inputs) { return steps(inputs) * kInputs * kColumns / 256; }

    static int64_t exceptions_bytes(int64_t inputs) {
        const int64_t bytes = (room(inputs) + 1) * static_cast<int64_t>(sizeof(Exception));
        return (bytes + kLine - 1) / kLine * kLine;
    }

    // The 7 upper bits of exponents that most weights have.
    static void likeliest_exponents(const bf16* weights, int64_t count, uint8_t (&exponents)[kExponents]) {
        // Neighbours count in different tables: they are often equal, and an addition to one number waits for the last.
        int32_t found[4][128] = {};
        for (int64_t i = 0; i < count; i++) found[i % 4][weights[i] >> 8 & 127]++;
        for (int i = 0; i < 128; i++) found[0][i] += found[1][i] + found[2][i] + found[3][i];
        uint8_t order[128];
        for (int i = 0; i < 128; i++) order[i] = static_cast<uint8_t>(i);
        std::partial_sort(order, order + kExponents, order + 128, [&](uint8_t a, uint8_t b) {
            return found[0][a] != found[0][b] ? found[0][a] > found[0][b] : a < b;
        });
        std::copy(order, order + kExponents, exponents);
    }

    static __m512i load(const char* line) { return _mm512_loadu_si512(line); }

    const char* panel_;
    const char* data_;
    __m512i table_;
};

}  // namespace octavo
