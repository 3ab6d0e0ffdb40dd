"""Many bytes at a time: what LLVM can do and plain numba cannot say."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_BYTE, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BLOCK = ir.VectorType(_BYTE, 32)


def _address(context: Any, builder: Any, type_: Any, value: Any, index: Any) -> Any:
    """Address of a byte: of a pointer, or of a numpy array."""
    data = context.make_array(type_)(context, builder, value=value).data if isinstance(type_, types.Array) else value
    return builder.gep(data, [index])


def _first_of(*wanted: int) -> Any:
    """An intrinsic: how far from b[i] the first of these bytes is, 32 when it is not among the next 32."""

    def codegen(context, builder, signature, arguments):
        at = _address(context, builder, signature.args[0], *arguments)
        block = builder.load(builder.bitcast(at, _BLOCK.as_pointer()), align=1)
        hits = None
        for byte in wanted:
            same = builder.icmp_unsigned("==", block, ir.Constant(_BLOCK, [byte] * 32))
            hits = same if hits is None else builder.or_(hits, same)
        first = builder.cttz(builder.bitcast(hits, _INT32), ir.Constant(ir.IntType(1), 0))
        return builder.zext(first, _INT64)

    def typed(typing, b, i):
        return types.int64(b, types.int64), codegen

    return typed


to_quote: Any = intrinsic(_first_of(0x22, 0x5C))
"""Distance to the next quotation mark or backslash."""

to_structure: Any = intrinsic(_first_of(0x22, 0x7B, 0x7D, 0x5B, 0x5D))
"""Distance to the next quotation mark, brace or bracket."""


def _load_word(typing, b, i):

    def codegen(context, builder, signature, arguments):
        at = _address(context, builder, signature.args[0], *arguments)
        return builder.load(builder.bitcast(at, _INT64.as_pointer()), align=1)

    return types.uint64(b, types.int64), codegen


load_word: Any = intrinsic(_load_word)
"""Eight bytes from b[i] on, the first one lowest (little endian)."""


def pointer_to(type_: Any) -> Any:
    """An intrinsic: an address as a pointer to values of a numba type."""

    @intrinsic
    def pointer(typing, address):
        signature = types.CPointer(type_)(types.int64)

        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return signature, codegen

    return pointer
