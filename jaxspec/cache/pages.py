"""Pages: a pool a layer, and tables that give each row its pages.

State is addressed by position. Position p of row b lies in page `page_table[b, p // page_size]`,
slot `p % page_size`; how many positions are valid is one integer a row, held by the decoding loop.
What a rejected token wrote lies past that length and is overwritten before it can be read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import CapacityError, RequestError


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """How the cache of a decoding call is laid out.

    Attributes:
        page_size: positions a page.
        num_pages: pages of a pool. None gives each row pages of its own and allocates nothing at
            run time, so that it works under a user's `jit`.
        prefill_chunk: prompt tokens a prefill step takes.
        dtype: of the cached rows; None is the compute dtype.
    """

    page_size: int = 64
    num_pages: int | None = None
    prefill_chunk: int = 512
    dtype: jnp.dtype | None = None

    def __post_init__(self):
        for name in ("page_size", "num_pages", "prefill_chunk"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not is_whole and not (name == "num_pages" and value is None):
                raise RequestError(
                    f"CacheOptions: {name}={value!r}; a whole number of at least 1 is needed"
                )
        if self.dtype is not None:
            names = ("float32", "bfloat16", "float16")
            if self.dtype not in [jnp.dtype(name) for name in names]:
                raise RequestError(f"CacheOptions: dtype={self.dtype!r}; one of {names} is needed")
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype))


def pages_needed(num_positions: int, page_size: int) -> int:
    """Pages that hold so many positions."""
    return -(-num_positions // page_size)


def _of_shard(num_shards: int) -> str:
    return " of a data shard" if num_shards > 1 else ""


def own_pages(num_rows: int, pages_per_row: int, num_data_shards: int) -> np.ndarray:
    """A page table `[num_rows, pages_per_row]` in which each row owns consecutive pages."""
    table = np.arange(num_rows // num_data_shards * pages_per_row, dtype=np.int32)
    return np.tile(table.reshape(-1, pages_per_row), (num_data_shards, 1))


class PageAllocator:
    """Hands out the free pages of a pool; refuses, before any write, what does not fit.

    Args:
        num_pages: pages of the pool, cut evenly over the data shards.
    """

    def __init__(self, num_pages: int, num_data_shards: int = 1):
        if num_pages < 1 or num_pages % num_data_shards:
            raise CapacityError(
                f"page pool: num_pages={num_pages}; a positive multiple of the {num_data_shards} "
                "data shards is needed"
            )
        pages = num_pages // num_data_shards
        self._free = [list(range(pages - 1, -1, -1)) for _ in range(num_data_shards)]

    def allocate(self, pages_of_row: list[int], pages_per_row: int) -> np.ndarray:
        """A page table `[len(pages_of_row), pages_per_row]` int32, -1 past each row's pages.

        Raises:
            CapacityError: the rows of a shard need more pages than are free; none is taken then.
        """
        num_shards = len(self._free)
        rows_per_shard = len(pages_of_row) // num_shards
        for shard, free in enumerate(self._free):
            needed = sum(pages_of_row[shard * rows_per_shard : (shard + 1) * rows_per_shard])
            if needed > len(free):
                raise CapacityError(
                    f"page pool: the rows{_of_shard(num_shards)} need {needed} pages and "
                    f"{len(free)} are free; raise CacheOptions.num_pages, "
                    "or lower max_new_tokens or the batch"
                )
        table = np.full((len(pages_of_row), pages_per_row), -1, np.int32)
        for row, count in enumerate(pages_of_row):
            free = self._free[row // rows_per_shard]
            table[row, :count] = [free.pop() for _ in range(count)]
        return table

    def release(self, page_table: np.ndarray) -> None:
        """Takes back every page of the rows of a table."""
        rows_per_shard = len(page_table) // len(self._free)
        for row, pages in enumerate(page_table):
            self._free[row // rows_per_shard].extend(int(page) for page in pages[pages >= 0])


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tables"], meta_fields=["ratios", "pool_sizes"]
)
@dataclasses.dataclass(frozen=True)
class PageTables:
    """Which pages each row has, for each kind of pool.

    Attributes:
        tables: int32 `[b, pages_per_row]` for each ratio; -1 is no page. On a mesh a pool is cut
            over `data`, and a table names pages of its own device's part.
        ratios: positions that a cached row of the pool stands for.
        pool_sizes: pages of the pool.
    """

    tables: tuple[jax.Array, ...]
    ratios: tuple[int, ...]
    pool_sizes: tuple[int, ...]

    def table(self, ratio: int) -> jax.Array:
        return self.tables[self.ratios.index(ratio)]

    def num_pages(self, ratio: int) -> int:
        return self.pool_sizes[self.ratios.index(ratio)]


def make_page_tables(
    ratios: tuple[int, ...],
    num_rows: int,
    num_positions: int,
    options: CacheOptions,
    num_data_shards: int,
    ends: np.ndarray | None = None,
) -> PageTables:
    """Tables for rows of up to `num_positions`.

    Args:
        ends: positions that each row will use, needed where `options.num_pages` limits the pools; a
            pool is never larger than its rows could fill.

    Raises:
        CapacityError: the rows do not fit in `options.num_pages`.
    """
    tables, pool_sizes = [], []
    for ratio in ratios:
        pages_per_row = pages_needed(max(num_positions // ratio, 1), options.page_size)
        size = num_rows * pages_per_row
        if options.num_pages is None or ends is None:
            table = own_pages(num_rows, pages_per_row, num_data_shards)
        else:
            size = min(size, options.num_pages)
            needed = [pages_needed(max(int(end) // ratio, 1), options.page_size) for end in ends]
            table = PageAllocator(size, num_data_shards).allocate(needed, pages_per_row)
        tables.append(jnp.asarray(table))
        pool_sizes.append(size)
    return PageTables(tuple(tables), ratios, tuple(pool_sizes))
