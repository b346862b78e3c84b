"""Whole lines of the cache, normalised in registers and written at once: the inner loop of normalising a batch.

A loop that LLVM vectorises by itself holds neither the constants of three channels in registers nor writes past the caches, and an
ordinary store first reads the line that it overwrites. Only generic vector instructions are emitted, which LLVM lowers for x86 and
ARM alike; every machine gives the same bits.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from tasks.kernels.decorator import emitted

LINE_NBYTES = 64
"""A cache line."""

WIDTH = 16
"""Values that are computed at once."""

_INDEX, _BYTE, _LANE, _FLOAT = ir.IntType(64), ir.IntType(8), ir.IntType(32), ir.FloatType()
_FLOATS, _BITS = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(ir.IntType(32), WIDTH)

Lines = Callable[..., None]


def _pointer(builder: Any, data: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def _data(context: Any, builder: Any, signature: Any, args: Any, position: int) -> Any:
    proxy: Any = cgutils.create_struct_proxy  # type: ignore[no-untyped-call,unused-ignore]
    return proxy(signature.args[position])(context, builder, args[position]).data


def _shuffled(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_LANE, len(lanes)), lanes))


def _rounded(builder: Any, values: Any, dtype: str) -> Any:
    """Return float32 as the bits of ``dtype``, rounded to nearest even; ``bfloat16`` comes from numbers alone."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        halves = builder.fptrunc(values, ir.VectorType(ir.HalfType(), WIDTH))
        return builder.bitcast(halves, ir.VectorType(ir.IntType(16), WIDTH))
    bits = builder.bitcast(values, _BITS)
    sixteen, one, below_half = (ir.Constant(_BITS, [value] * WIDTH) for value in (16, 1, 0x7FFF))
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    bits = builder.lshr(builder.add(bits, builder.add(odd, below_half)), sixteen)
    return builder.trunc(bits, ir.VectorType(ir.IntType(16), WIDTH))


def _normalized(builder: Any, pixels: Any, terms: list[Any]) -> Any:
    center, scale, scale_rest, rest = terms
    distance = builder.fsub(builder.uitofp(builder.zext(pixels, _BITS), _FLOATS), center)
    kind, name = ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{WIDTH}f32"
    fma = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call,unused-ignore]
    return builder.call(fma, [distance, scale, builder.call(fma, [distance, scale_rest, rest])])


def _store_line(builder: Any, vectors: list[Any], data: Any, at: Any, zero: Any, past_caches: bool) -> None:
    """Store one vector of 4-byte or two of 2-byte values; ``zero`` is a vector of zeros that the compiler cannot know to be.

    Without it float16 would be stored as such, for which LLVM 20 knows no store past the caches and silently takes another.
    """
    line = vectors[0]
    if len(vectors) == 2:
        both = _shuffled(builder, vectors[0], vectors[1], list(range(2 * WIDTH)))
        line = builder.or_(builder.bitcast(both, _BITS), zero)
    align = LINE_NBYTES if past_caches else 2
    store = builder.store(line, _pointer(builder, data, at, line.type), align=align)
    if past_caches:
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


def _unknown_zero(builder: Any, data: Any) -> Any:
    """Return a vector of the highest bit of an address, which no program's has on x86-64 and ARM64."""
    bit = builder.trunc(builder.lshr(builder.ptrtoint(data, _INDEX), _INDEX(63)), _LANE)
    first = builder.insert_element(ir.Constant(_BITS, ir.Undefined), bit, _LANE(0))
    return _shuffled(builder, first, first, [0] * WIDTH)


def _loop(builder: Any, count: Any, body: Callable[[Any], None]) -> None:
    """Emit ``body(i)`` for ``i`` below ``count``, and a fence, since stores past the caches are in no order."""
    with cgutils.for_range(builder, count, intp=_INDEX) as loop:  # type: ignore[no-untyped-call,unused-ignore]
        body(loop.index)
    builder.fence("seq_cst")


def _define(emit_loop: Callable[..., None]) -> Lines:
    """Make an instruction of what emits its loop: ``(builder, source, tables, target, start, turn or plane, groups)``.

    ``source`` is the first byte of pixels, ``tables`` are the pointers of the terms, ``target`` is the first byte to write.
    """

    @emitted
    def lines(  # noqa: PLR0913
        context: Any, pixels: Any, start: Any, center: Any, scale: Any, scale_rest: Any, rest: Any, stride: Any, out: Any, at: Any, groups: Any
    ) -> tuple[Any, Any]:  # fmt: skip
        index = types.uintp
        signature = types.void(pixels, index, center, scale, scale_rest, rest, index, out, index, index)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, *tables, target = (
                _data(context, builder, signature, args, position) for position in (0, 2, 3, 4, 5, 7)
            )
            target = builder.gep(builder.bitcast(target, _BYTE.as_pointer()), [args[8]])
            emit_loop(builder, builder.gep(source, [args[1]]), tables, target, args[6], args[9])
            return context.get_dummy_value()

        return signature, emit

    return lines


def _num_vectors(dtype: str) -> int:
    """Return how many vectors of values fill a line."""
    return LINE_NBYTES // (4 if dtype == "float32" else 2) // WIDTH


def lines_last(dtype: str, past_caches: bool) -> Lines:
    """Define what fills whole lines, channels last: three lines, which begin with the same channel, at a time.

    ``(pixels, start, center, scale, scale_rest, rest, turn, out, at, groups)``: ``out[at + i] = (pixels[start + i] - center[turn + i])
    * scale[turn + i]``, ``i`` below ``groups`` times 3 lines of values; ``at`` counts bytes. Past the caches ``out[at]`` must be aligned to
    a line; nothing is checked.
    """
    parts = _num_vectors(dtype)
    kind = ir.VectorType(_BYTE, WIDTH)

    def emit_loop(builder: Any, source: Any, tables: list[Any], target: Any, turn: Any, groups: Any) -> None:
        zero, terms = _unknown_zero(builder, target), []
        for j in range(3):
            place = builder.add(turn, _INDEX(j * WIDTH))
            terms.append([builder.load(_pointer(builder, table, place, _FLOATS), align=4) for table in tables])

        def body(group: Any) -> None:
            first = builder.mul(group, _INDEX(3 * parts * WIDTH))
            for line in range(3):
                vectors = []
                for j in range(line * parts, (line + 1) * parts):
                    place = builder.add(first, _INDEX(j * WIDTH))
                    pixels = builder.load(_pointer(builder, source, place, kind), align=1)
                    vectors.append(_rounded(builder, _normalized(builder, pixels, terms[j % 3]), dtype))
                place = builder.add(builder.mul(group, _INDEX(3 * LINE_NBYTES)), _INDEX(line * LINE_NBYTES))
                _store_line(builder, vectors, target, place, zero, past_caches)

        _loop(builder, groups, body)

    return _define(emit_loop)


def lines_first(dtype: str, past_caches: bool) -> Lines:
    """Define what fills whole lines, channels first: one line of each of three planes at a time.

    ``(pixels, start, center, scale, scale_rest, rest, plane, out, at, groups)``: ``out[at + c * plane + i] = (pixels[start + 3 i + c] -
    center[c]) * scale[c]``, ``i`` below ``groups`` lines of values; ``at`` and ``plane`` count bytes. Past the caches each plane must be
    aligned to a line; nothing is checked.
    """
    parts = _num_vectors(dtype)
    kind = ir.VectorType(_BYTE, 3 * WIDTH)

    def emit_loop(builder: Any, source: Any, tables: list[Any], target: Any, plane: Any, groups: Any) -> None:
        blank = ir.Constant(_FLOATS, ir.Undefined)
        zero, terms = _unknown_zero(builder, target), []
        for channel in range(3):
            numbers = [builder.load(builder.gep(table, [_INDEX(channel)])) for table in tables]
            firsts = [builder.insert_element(blank, number, _LANE(0)) for number in numbers]
            terms.append([_shuffled(builder, first, blank, [0] * WIDTH) for first in firsts])
        planes = [builder.gep(target, [builder.mul(plane, _INDEX(channel))]) for channel in range(3)]

        def body(group: Any) -> None:
            first = builder.mul(group, _INDEX(3 * parts * WIDTH))
            vectors: list[list[Any]] = [[], [], []]
            for part in range(parts):
                place = builder.add(first, _INDEX(3 * part * WIDTH))
                mixed = builder.load(_pointer(builder, source, place, kind), align=1)
                for channel in range(3):
                    lanes = list(range(channel, 3 * WIDTH, 3))
                    pixels = _shuffled(builder, mixed, ir.Constant(kind, ir.Undefined), lanes)
                    vectors[channel].append(_rounded(builder, _normalized(builder, pixels, terms[channel]), dtype))
            for channel in range(3):
                place = builder.mul(group, _INDEX(LINE_NBYTES))
                _store_line(builder, vectors[channel], planes[channel], place, zero, past_caches)

        _loop(builder, groups, body)

    return _define(emit_loop)
