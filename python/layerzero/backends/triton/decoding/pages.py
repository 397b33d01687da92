# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Where the tokens of a sequence lie in a paged cache, for the kernels that read one."""

import triton
import triton.language as tl


@triton.jit
def known(tables_ptr, start, end, num_blocks, t_page, PAGE: tl.constexpr):
    """Whether the pages of a part are pages of the cache. What was looked at is near when tiles look it up again."""
    last = tl.cdiv(end, PAGE)
    lost = tl.zeros([1024], tl.int1)
    for begin in range(start // PAGE, last, 1024):
        entry = begin + tl.arange(0, 1024)
        page = tl.load(tables_ptr + entry.to(tl.int64) * t_page, mask=entry < last, other=0)
        lost = lost | (page < 0) | (page >= num_blocks)
    return tl.max(lost.to(tl.int32), 0) == 0


@triton.jit
def look_up(tables_ptr, begin, tile, end, num_blocks, t_page, TOKENS: tl.constexpr, PAGE: tl.constexpr):
    """The pages of a tile's tokens: one, where no tile lies in two. One that cannot be is taken for another."""
    page, _ = look_at(tables_ptr, begin, tile, end, num_blocks, t_page, TOKENS, PAGE)
    return page


@triton.jit
def look_at(tables_ptr, begin, tile, end, num_blocks, t_page, TOKENS: tl.constexpr, PAGE: tl.constexpr):
    """The same, and which of them cannot be."""
    token = begin if PAGE % TOKENS == 0 else begin + tile
    page = tl.load(tables_ptr + (token // PAGE).to(tl.int64) * t_page, mask=token < end, other=0)
    return tl.minimum(tl.maximum(page, 0), num_blocks - 1).to(tl.int64), (page < 0) | (page >= num_blocks)


@triton.jit
def slots_of(begin, tile, TOKENS: tl.constexpr, PAGE: tl.constexpr):
    """Where in their pages the tokens of a tile lie."""
    if PAGE % TOKENS == 0:
        return begin % PAGE + tile
    elif TOKENS % PAGE == 0:
        return tile % PAGE
    else:
        return (begin + tile) % PAGE
