"""The paged latent cache: a pool of pages a layer, and one table that gives each row its pages.

State is addressed by position. Position p of row b lies in page `page_table[b, p // page_size]`,
slot `p % page_size`; how many positions are valid is one integer a row, held by the decoding loop.
What a rejected token wrote lies past that length and is overwritten before it can be read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.errors import CapacityError
from jaxspec.execution import Execution


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["pages", "page_table"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class LatentCache:
    """Cached rows of every layer.

    Attributes:
        pages: a layer's pool each, `[num_pages, page_size, c + r]`. On a mesh the pool is cut over
            `data`, and a table names pages of its own device's part.
        page_table: int32 `[b, pages_per_row]`; -1 is no page. One table serves every layer.
    """

    pages: tuple[jax.Array, ...]
    page_table: jax.Array

    def with_layer(self, layer: int, pages: jax.Array) -> "LatentCache":
        """The cache after a layer has written its rows."""
        return dataclasses.replace(
            self, pages=(*self.pages[:layer], pages, *self.pages[layer + 1 :])
        )


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
        for name in ("page_size", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise CapacityError(
                    f"CacheOptions: {name}={getattr(self, name)}; at least 1 is needed"
                )


def pages_needed(num_positions: int, page_size: int) -> int:
    """Pages that hold so many positions."""
    return -(-num_positions // page_size)


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
                    f"page pool: the rows need {needed} pages and {len(free)} are free; "
                    "raise CacheOptions.num_pages, or lower max_new_tokens or the batch"
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


def empty_cache(
    num_layers: int,
    num_pages: int,
    page_table: jax.Array,
    options: CacheOptions,
    width: int,
    execution: Execution,
) -> LatentCache:
    """A cache of zeros."""

    def pool():
        shape = (num_pages, options.page_size, width)
        zeros = jnp.zeros(shape, options.dtype or execution.dtype)
        if execution.mesh is None:
            return zeros
        return jax.lax.with_sharding_constraint(
            zeros, NamedSharding(execution.mesh, PartitionSpec("data"))
        )

    return LatentCache(tuple(pool() for _ in range(num_layers)), page_table)
