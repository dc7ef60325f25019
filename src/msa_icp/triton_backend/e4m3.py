"""e4m3 bytes as fp16, exactly, for all 256 of them (NaN stays NaN).

No kernel has an fp8 type in its signature: Triton has none before compute capability 8.9, and its
interpreter loses NaN. The bits of an e4m3 number, moved to where fp16 has its sign and below its
exponent's top bit, are the number times 2**-8, subnormals included. NaN is the one magnitude that
overflows into that top bit when one is added: there its exponent becomes all ones.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

# Two of four packed bytes: to the high halves, right by one, NaN's exponent, sign, times 2**8.
_PACKED_HALF = """
    prmt.b32 high, $2, 0, {bytes};
    shr.b32 low, high, 1;
    and.b32 low, low, 0x3F803F80;
    add.u32 nan, low, 0x00800080;
    lop3.b32 low, high, 0x80008000, low, 0xEA;
    lop3.b32 low, nan, 0x40004000, low, 0xEA;
    mul.rn.f16x2 {out}, low, scale;
"""
_PACKED = tl.constexpr(
    "{ .reg .b32 high, low, nan, scale; mov.b32 scale, 0x5C005C00;"
    + _PACKED_HALF.format(bytes="0x1404", out="$0")
    + _PACKED_HALF.format(bytes="0x3424", out="$1")
    + "}"
)


@triton.jit
def e4m3_to_fp16(bits, HOW: tl.constexpr):
    """uint8 e4m3 bits -> fp16. HOW: "hardware" (compute capability 8.9 on), "packed" (8.0), "integer"."""
    if HOW == "hardware":
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if HOW == "packed":
        return tl.inline_asm_elementwise(_PACKED, "=r,=r,r", [bits], dtype=tl.float16, is_pure=True, pack=4)
    word = bits.to(tl.uint16)
    magnitude = word & 0x7F
    nan = ((magnitude + 1) & 0x80) << 7
    scaled = ((word & 0x80) << 8) | (magnitude << 7) | nan
    return scaled.to(tl.float16, bitcast=True) * 256.0
