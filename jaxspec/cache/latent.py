"""The latent cache of DeepSeek-V3: a pool of pages a layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import CacheOptions, PageTables
from jaxspec.execution import Execution
from jaxspec.sharding import constrain


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


def empty_cache(
    num_layers: int, width: int, pages: PageTables, options: CacheOptions, execution: Execution
) -> LatentCache:
    """A cache of zeros, rows of `width` columns."""

    def pool() -> jax.Array:
        shape = (pages.num_pages(1), options.page_size, width)
        zeros = jnp.zeros(shape, options.dtype or execution.dtype)
        return constrain(zeros, ("rows", None, None), execution.mesh)

    return LatentCache(tuple(pool() for _ in range(num_layers)), pages.table(1))
