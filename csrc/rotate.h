// What: the arithmetic of re-rotation for one pair of key dims, shared word for word by the CUDA build and the host build:
//   un-rotate from the old position, rotate to the new one. The specification is lmcache_ref.rope.rerotate.
// Mapping: none here; rotate.cu and host.cpp say who takes which pair. Pairing is two strides: pair j is the dims
//   x = j * pair_stride and y = x + partner_stride (half-split: 1 and rotary_dim/2; interleaved: 2 and 1).
// Why it is fast: angles are loaded once for all heads of a token; keys are converted in registers.
// Bytes moved: none here. Bits: each operation is rounded by itself, in the order written; no fused multiply-add (on the
//   host that needs -ffp-contract=off), IEEE division, subnormals kept; one rounding to the key's type at the end.
#pragma once

#include "address.h"

// On the way of a scatter the keys are where the Move says, `token` is the request's, and head_stride_bytes is a head's
// length in a chunk; keys_address, token_stride_bytes and num_tokens are 0.
struct Rotation {
    u64 keys_address;  // [num_tokens, num_heads, dims]
    i64 token_stride_bytes;
    i64 head_stride_bytes;
    i64 dim_stride_bytes;
    const i64* old_positions;  // [num_tokens]
    const i64* new_positions;
    u64 table_address;  // [max_position, cosines then sines]
    i64 table_row_stride_bytes;
    i64 max_position;
    i64 num_tokens;
    i64 num_heads;
    i64 num_pairs;  // rotary_dim / 2
    i64 pair_stride_dims;
    i64 partner_stride_dims;
    u64* bad_token;  // smallest token whose position is outside the table or cannot be undone; all ones while there is none
};

// ---------------------------------------------------------------------------------------------- number formats

typedef unsigned int u32;
typedef unsigned short u16;

struct BFloat16 { u16 bits; };
struct Float16 { u16 bits; };

LMC_SHARED u32 bits_of(float value) { union { float number; u32 bits; } u; u.number = value; return u.bits; }
LMC_SHARED float float_of(u32 value) { union { u32 bits; float number; } u; u.bits = value; return u.number; }

#if defined(__CUDA_ARCH__)
// In PTX, because whoever compiles may flush subnormals of float arithmetic (cupy passes -ftz=true); these never do.
#define LMC_FLOAT_OPERATION(name, instruction)                                        \
    LMC_SHARED float name(float a, float b) {                                         \
        float result;                                                                 \
        asm(instruction " %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));              \
        return result;                                                                \
    }
LMC_FLOAT_OPERATION(times, "mul.rn.f32")
LMC_FLOAT_OPERATION(plus, "add.rn.f32")
LMC_FLOAT_OPERATION(minus, "sub.rn.f32")
LMC_FLOAT_OPERATION(over, "div.rn.f32")
LMC_SHARED double times(double a, double b) { return __dmul_rn(a, b); }
LMC_SHARED double plus(double a, double b) { return __dadd_rn(a, b); }
LMC_SHARED double minus(double a, double b) { return __dsub_rn(a, b); }
LMC_SHARED double over(double a, double b) { return __ddiv_rn(a, b); }
#else
template <typename Real> LMC_SHARED Real times(Real a, Real b) { return a * b; }
template <typename Real> LMC_SHARED Real plus(Real a, Real b) { return a + b; }
template <typename Real> LMC_SHARED Real minus(Real a, Real b) { return a - b; }
template <typename Real> LMC_SHARED Real over(Real a, Real b) { return a / b; }
#endif

// Exact: every value of the narrow formats is a float.
LMC_SHARED float widened(BFloat16 value) { return float_of((u32)value.bits << 16); }
LMC_SHARED float widened(Float16 value) {
    const u32 magnitude = (u32)(value.bits & 0x7fff) << 13, sign = (u32)(value.bits & 0x8000) << 16;
    const bool is_finite = (value.bits & 0x7c00) != 0x7c00;
    const float number = times(float_of(magnitude), float_of(0x77800000));  // 2^112, the distance of the exponent biases
    return float_of(sign | (is_finite ? bits_of(number) : magnitude | 0x7f800000));
}
LMC_SHARED float widened(float value) { return value; }
LMC_SHARED double widened(double value) { return value; }

// To nearest, ties to even; a NaN becomes one quiet NaN.
LMC_SHARED void round_to(float value, BFloat16* result) {
    const u32 bits = bits_of(value);
    result->bits = value != value ? 0x7fc0 : (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
LMC_SHARED void round_to(float value, Float16* result) {
    const u32 sign = (bits_of(value) >> 16) & 0x8000, bits = bits_of(value) & 0x7fffffff;
    const u32 large = bits > 0x7f800000 ? 0x7e00 : 0x7c00;  // NaN, or 2^16 and more
    const u32 normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    const u32 small = bits_of(plus(float_of(bits), 0.5f)) - 0x3f000000;  // below 2^-14: the addition rounds at 2^-24
    result->bits = (u16)(sign | (bits >= 0x47800000 ? large : bits < 0x38800000 ? small : normal));
}
LMC_SHARED void round_to(float value, float* result) { *result = value; }
LMC_SHARED void round_to(double value, double* result) { *result = value; }

template <typename Key> struct RealOf { typedef float type; };  // what keys of a type are rotated in
template <> struct RealOf<double> { typedef double type; };

// ---------------------------------------------------------------------------------------------- the rotation

template <typename Real> struct Angle { Real old_cos, old_sin, new_cos, new_sin, norm; };

// Positions must be inside the table. norm = cos*cos + sin*sin of the old position.
template <typename Real, typename Table>
LMC_SHARED Angle<Real> angle_at(const Rotation& rotation, i64 old_position, i64 new_position, i64 pair) {
    const Table* old_row = (const Table*)(rotation.table_address + old_position * rotation.table_row_stride_bytes);
    const Table* new_row = (const Table*)(rotation.table_address + new_position * rotation.table_row_stride_bytes);
    Angle<Real> angle;
    angle.old_cos = (Real)widened(old_row[pair]);
    angle.old_sin = (Real)widened(old_row[pair + rotation.num_pairs]);
    angle.new_cos = (Real)widened(new_row[pair]);
    angle.new_sin = (Real)widened(new_row[pair + rotation.num_pairs]);
    angle.norm = plus(times(angle.old_cos, angle.old_cos), times(angle.old_sin, angle.old_sin));
    return angle;
}

// Whether the old rotation can be undone: the norm is neither zero nor infinite nor NaN. (By its bits: a comparison of
// floats may flush a subnormal too.)
LMC_SHARED bool can_undo(float norm) { return bits_of(norm) - 1 < 0x7f800000 - 1; }
LMC_SHARED bool can_undo(double norm) { return norm > 0 && minus(norm, norm) == 0; }

template <typename Real> LMC_SHARED void rerotate_pair(const Angle<Real>& angle, Real* x, Real* y) {
    const Real x0 = over(plus(times(*x, angle.old_cos), times(*y, angle.old_sin)), angle.norm);
    const Real y0 = over(minus(times(*y, angle.old_cos), times(*x, angle.old_sin)), angle.norm);
    *x = minus(times(x0, angle.new_cos), times(y0, angle.new_sin));
    *y = plus(times(y0, angle.new_cos), times(x0, angle.new_sin));
}

LMC_SHARED bool is_in_table(const Rotation& rotation, i64 position) {
    return 0 <= position && position < rotation.max_position;
}
